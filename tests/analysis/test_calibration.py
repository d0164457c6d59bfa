"""Laws of the expected calibration error and of its null band."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve

from rewardlab.analysis import calibration, stats
from rewardlab.analysis.calibration import calibrate, ece, ece_estimate, null_band

Pairs = list[tuple[float, float]]

hundredths = st.integers(0, 100).map(lambda number: number / 100)
pair_lists = st.lists(st.tuples(hundredths, st.sampled_from([0.0, 0.3, 0.5, 1.0])), min_size=1, max_size=60)


def simulate(n: int, *, sharpness: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels with P(1) = σ(d) and the probabilities σ(sharpness · d) of a model; 1 is calibrated."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(0, 1.5, size=n)
    labels = (generator.random(n) < 1 / (1 + np.exp(-logits))).astype(float)
    return 1 / (1 + np.exp(-sharpness * logits)), labels


def naive_ece(pairs: Pairs, bins: int) -> float:
    """The definition, pair by pair, over both orders with weight one half; edges belong to the bin nearer to ½."""
    gaps, total = dict.fromkeys(range(bins), 0.0), 0.0
    for p, y in pairs:
        for probability, label in ((p, y), (1 - p, 1 - y)):
            rounded = round(probability * bins, 9)  # 0.3 * 10 is not 3
            index = math.floor(rounded) if probability >= 0.5 else math.ceil(rounded) - 1
            gaps[min(max(index, 0), bins - 1)] += (probability - label) / 2
            total += 0.5
    return sum(map(abs, gaps.values())) / total


@given(pairs=pair_lists, bins=st.sampled_from([2, 4, 10, 20]))
def test_ece_is_the_definition_over_symmetrised_pairs(pairs: Pairs, bins: int) -> None:
    p, y = zip(*pairs, strict=True)
    assert ece(p, y, bins=bins) == pytest.approx(naive_ece(pairs, bins), abs=1e-9)


@pytest.mark.slow
@given(pairs=pair_lists, swaps=st.randoms(use_true_random=False))
def test_swapping_the_order_of_any_comparison_changes_nothing(pairs: Pairs, swaps: object) -> None:
    p, y = (np.array(column) for column in zip(*pairs, strict=True))
    swapped = np.array([swaps.random() < 0.5 for _ in pairs])
    other_p, other_y = np.where(swapped, 1 - p, p), np.where(swapped, 1 - y, y)
    first, second = calibrate(p, y, draws=50), calibrate(other_p, other_y, draws=50)
    assert second.ece == pytest.approx(first.ece, abs=1e-12)
    assert (second.null_low, second.null_high) == (first.null_low, first.null_high)
    for bar, other_bar in zip(first.bins, second.bins, strict=True):
        assert other_bar.weight == bar.weight
        assert other_bar.mean_label == pytest.approx(bar.mean_label, nan_ok=True, abs=1e-12)


def test_a_calibrated_simulator_is_near_zero_and_an_overconfident_one_above_a_tenth() -> None:
    assert ece(*simulate(100_000)) < 0.01
    assert ece(*simulate(100_000, sharpness=2.0)) > 0.1


@pytest.mark.slow
@given(pairs=pair_lists)
def test_bins_sum_to_the_number_of_comparisons_and_mirror_each_other(pairs: Pairs) -> None:
    p, y = zip(*pairs, strict=True)
    result = calibrate(p, y, draws=10)
    assert sum(bar.weight for bar in result.bins) == result.n == len(pairs)
    assert [bar.low for bar in result.bins] == pytest.approx(np.arange(10) / 10)
    for bar, mirror in zip(result.bins, reversed(result.bins), strict=True):
        assert bar.weight == mirror.weight
        if bar.weight:
            assert bar.mean_probability + mirror.mean_probability == pytest.approx(1)
            assert bar.mean_label + mirror.mean_label == pytest.approx(1)
            assert bar.low - 1e-12 <= bar.mean_probability <= bar.high + 1e-12
        else:
            assert math.isnan(bar.mean_probability)


def test_the_diagram_is_the_curve_of_scikit_learn_over_both_orders() -> None:
    p, y = simulate(2000, sharpness=1.5)
    shares, probabilities = calibration_curve(np.concatenate([y, 1 - y]), np.concatenate([p, 1 - p]), n_bins=10)
    bins = calibrate(p, y, draws=10).bins
    assert [bar.mean_label for bar in bins] == pytest.approx(shares)
    assert [bar.mean_probability for bar in bins] == pytest.approx(probabilities)


@pytest.mark.slow
@given(pairs=pair_lists)
def test_ece_follows_from_the_bins(pairs: Pairs) -> None:
    p, y = zip(*pairs, strict=True)
    result = calibrate(p, y, draws=10)
    gaps = [bar.weight * abs(bar.mean_probability - bar.mean_label) for bar in result.bins if bar.weight]
    assert result.ece == pytest.approx(sum(gaps) / result.n, abs=1e-12)


def test_tied_scores_have_no_calibration_error_and_no_null_band() -> None:
    result = calibrate([0.5] * 30, [1.0] * 20 + [0.0] * 10)
    assert (result.ece, result.null_low, result.null_high) == (0, 0, 0)


def test_the_null_band_holds_nineteen_in_twenty_calibrated_models_and_no_overconfident_one() -> None:
    def inside(sharpness: float, seed: int) -> bool:
        p, y = simulate(500, sharpness=sharpness, seed=seed)
        low, high = null_band(p, draws=300, seed=seed)
        return low <= ece(p, y) <= high

    assert 0.90 <= np.mean([inside(1.0, seed) for seed in range(200)]) <= 0.99
    assert not any(inside(2.0, seed) for seed in range(20))


def test_a_calibrated_model_shows_two_hundredths_at_a_thousand_comparisons() -> None:
    low, high = null_band(simulate(1000)[0])
    assert low < 0.02 < high


def test_chunks_of_null_draws_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    p, _ = simulate(50)
    whole = null_band(p, draws=101)
    monkeypatch.setattr(calibration, "_CHUNK_VALUES", 300)
    assert null_band(p, draws=101) == pytest.approx(whole, abs=1e-12)


def known_noise(gap_H: np.ndarray, noise_H: np.ndarray) -> calibration._Candidates:
    """Gaps whose noise does not depend on them."""
    most_H = np.full(gap_H.shape, np.inf)
    return calibration._Candidates(
        seen=gap_H, noise=lambda gaps_H: noise_H, most=most_H, half_step=0.0, discreteness=0.0
    )


def test_the_limits_of_an_ece_are_where_the_one_seen_becomes_extreme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redrawn around the likeliest gaps with the sum at a limit, one in forty is as far off as the ECE seen."""
    monkeypatch.setattr(calibration, "NUM_NOISE_DRAWS", 100_000)
    gap_H, noise_H = np.array([0.02, 0.05, 0.01]), np.array([1e-4, 4e-4, 1e-4])
    low, high = calibration._ece_limits(known_noise(gap_H, noise_H), tail=0.025, seed=0)
    noise_RH = np.random.default_rng(1).normal(size=(200_000, 3)) * np.sqrt(noise_H)

    def beyond(move: float, limit: float) -> float:
        return float(np.maximum(gap_H + move * noise_H, 0).sum()) - limit

    for limit, above in ((low, True), (high, False)):
        move = scipy.optimize.brentq(beyond, -500, 500, args=(limit,))
        drawn = np.abs(np.maximum(gap_H + move * noise_H, 0) + noise_RH).sum(axis=1)
        assert np.mean(drawn >= gap_H.sum() if above else drawn <= gap_H.sum()) == pytest.approx(0.025, abs=0.002)
    assert 0 < low < gap_H.sum() < high


def test_the_interval_of_a_small_ece_reaches_up_to_what_calibrated_models_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one bin with gaps of standard deviation 0.1, a quarter is within 0.0319."""
    monkeypatch.setattr(calibration, "NUM_NOISE_DRAWS", 100_000)
    for gap, floor in ((1e-4, 0.0319), (0.003, 0.0319), (0.3, 0.45)):
        low, high = calibration._ece_limits(known_noise(np.array([gap]), np.array([0.01])), tail=0.025, seed=0)
        assert high >= 0.99 * floor
        assert (low == 0) == (gap < 0.2)
    y = np.repeat([1.0, 0.0], [101, 99])
    assert ece_estimate(np.full(200, 0.505), y).high > 0.01


def test_an_overconfident_model_is_told_from_a_calibrated_one() -> None:
    assert ece_estimate(*simulate(1000)).low == 0
    assert ece_estimate(*simulate(1000, sharpness=2.0)).low > 0.05


def test_repeated_prompts_widen_the_interval_of_ece() -> None:
    p, y = simulate(300, sharpness=2.0)
    copies = 4
    clusters = [f"{number % 300}" for number in range(300 * copies)]
    alone, repeated = ece_estimate(p, y), ece_estimate(np.tile(p, copies), np.tile(y, copies), clusters)
    independent = ece_estimate(np.tile(p, copies), np.tile(y, copies))
    assert repeated.value == pytest.approx(alone.value)
    assert (repeated.n, alone.n, independent.n) == (300, 300, 1200)
    assert repeated.high - repeated.low == pytest.approx(alone.high - alone.low, rel=0.1)
    assert repeated.high - repeated.low > 1.5 * (independent.high - independent.low)
    assert "by prompt" in repeated.method
    assert "by prompt" not in alone.method


@pytest.mark.parametrize(("said", "right", "prompts"), [(None, 0.7, 100), (0.8, 0.98, 40)])
def test_an_ece_is_held_where_rows_of_a_prompt_are_right_or_wrong_together(
    said: float | None, right: float, prompts: int
) -> None:
    """Twenty rows a prompt. By bins as if they were independent, and the variance seen, 82 and 84 % were held."""
    generator, held = np.random.default_rng(0), []
    names, truth = [f"{prompt}" for prompt in range(prompts) for _ in range(20)], math.nan
    for number in range(201):
        rows = 200_000 if not number else 20 * prompts
        logit_N = 1.5 * np.abs(generator.normal(size=rows)) + 0.3
        truth_N = 1 / (1 + np.exp(-logit_N)) if said is None else np.full(rows, right)
        p_N = 1 / (1 + np.exp(-2 * logit_N)) if said is None else np.full(rows, said)
        if not number:
            truth = ece(p_N, truth_N)
            continue
        of_prompt_N = np.repeat(generator.normal(size=prompts), 20)
        latent_N = math.sqrt(0.8) * of_prompt_N + math.sqrt(0.2) * generator.normal(size=rows)
        found = ece_estimate(p_N, (scipy.stats.norm.cdf(latent_N) < truth_N).astype(float), names)
        held.append(found.low <= truth <= found.high)
    assert np.mean(held) >= 0.92, "0.93, and draws"


def test_too_few_prompts_or_comparisons_get_no_interval() -> None:
    p, y = simulate(36)
    few = ece_estimate(p, y, [f"{number // 4}" for number in range(36)])
    assert (few.n, few.method, few.value) == (9, stats.too_few(9), ece(p, y))
    assert math.isnan(few.low)
    assert ece_estimate(p[:19], y[:19]).method == "too few comparisons (19)"
    assert ece_estimate(p[:20], y[:20]).high > 0


def test_a_model_that_is_sure_and_always_right_may_still_err() -> None:
    """All gaps are the same, so the data alone would show no noise at all."""
    estimate = ece_estimate([0.9] * 25, [1.0] * 25)
    assert estimate.value == pytest.approx(0.1)
    assert estimate.low < 0.08
    assert estimate.high > 0.1


@pytest.mark.parametrize(
    ("said", "right", "count"),
    [(0.95, 0.97, 20), (0.95, 0.97, 40), (0.95, 0.9, 20), (0.98, 0.99, 100), (1.0, 0.97, 40)],
)
def test_nineteen_in_twenty_intervals_hold_the_ece_of_a_model_that_is_always_as_sure(said, right, count) -> None:
    """Summed over every number of wins. By the noise that was seen these were 14, 52, 74, 48 and 30 %."""
    wins = np.arange(count + 1)
    chance = scipy.stats.binom.pmf(wins, count, right)
    held = 0.0
    for number in wins[chance > 1e-4].tolist():
        found = ece_estimate([said] * count, [1.0] * number + [0.0] * (count - number))
        held += chance[number] * (found.low - 1e-9 <= abs(said - right) <= found.high + 1e-9)
    assert held > 0.93


def test_no_data_says_so() -> None:
    estimate = ece_estimate([], [])
    assert (estimate.n, estimate.method) == (0, "no data")
    assert math.isnan(estimate.value)
    result = calibrate([], [])
    assert (result.n, sum(bar.weight for bar in result.bins)) == (0, 0)
    assert math.isnan(result.ece)
    assert math.isnan(result.null_high)


@settings(max_examples=20)
@given(order=st.permutations(range(40)))
def test_the_order_of_rows_does_not_change_the_clustered_interval(order: list[int]) -> None:
    p, y = simulate(40)
    clusters = [f"{number % 20}" for number in range(40)]
    expected = ece_estimate(p, y, clusters)
    shuffled = ece_estimate(p[order], y[order], [clusters[index] for index in order])
    assert shuffled.value == pytest.approx(expected.value)
    assert shuffled.high == pytest.approx(expected.high)


@pytest.mark.parametrize(("p", "y", "bins"), [([1.5], [1.0], 10), ([0.5], [math.nan], 10), ([0.5], [1.0], 5)])
def test_impossible_input_is_refused(p: list[float], y: list[float], bins: int) -> None:
    with pytest.raises(AssertionError):
        ece(p, y, bins=bins)
