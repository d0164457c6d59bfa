"""Laws of the intervals, with scipy as oracle and simulations for what they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.analysis import stats
from rewardlab.core.types import Estimate


def keys(num_prompts: int, per_prompt: int) -> list[str]:
    return [f"prompt-{number}" for number in range(num_prompts) for _ in range(per_prompt)]


def limits(estimate: Estimate) -> list[float]:
    return [estimate.value, estimate.low, estimate.high]


@given(n=st.integers(1, 3000), share=st.floats(0, 1), level=st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_wilson_is_the_interval_of_scipy(n: int, share: float, level: float) -> None:
    wins = round(share * n)
    expected = scipy.stats.binomtest(wins, n).proportion_ci(level, "wilson")
    estimate = stats.wilson(wins, n, level=level)
    assert limits(estimate) == pytest.approx([wins / n, expected.low, expected.high], abs=1e-12)
    assert (estimate.n, estimate.level) == (n, level)


def test_wilson_ends_exactly_at_zero_and_one() -> None:
    for n in range(1, 200):
        assert stats.wilson(n, n).high == 1.0
        assert stats.wilson(0, n).low == 0.0
        assert 0 < stats.wilson(n, n).low < 1


@given(outcomes=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60))
def test_a_share_of_plain_wins_has_wilsons_interval_whether_or_not_keys_are_given(outcomes: list[float]) -> None:
    expected = stats.wilson(sum(outcomes), len(outcomes))
    assert limits(stats.proportion(outcomes)) == pytest.approx(limits(expected), abs=1e-12)
    assert stats.proportion(outcomes, keys(len(outcomes), 1)) == stats.proportion(outcomes)
    assert stats.proportion(outcomes).method == "Wilson"


@given(outcomes=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=60))
def test_the_interval_of_a_share_lies_in_the_unit_interval_and_holds_the_share(outcomes: list[float]) -> None:
    estimate = stats.proportion(outcomes)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.low < estimate.high


@given(outcomes=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=60))
def test_the_score_interval_inverts_its_test(outcomes: list[float]) -> None:
    """At each limit the squared distance is z² times the variance stated in the docstring, found here by hand."""
    n, share = len(outcomes), float(np.mean(outcomes))
    tie_share = outcomes.count(0.5) / n
    z_squared = float(scipy.stats.norm.ppf(0.975)) ** 2
    estimate = stats.proportion(outcomes)
    for limit in (estimate.low, estimate.high):
        variance = limit * (1 - limit) - tie_share / 4 * n / (n + z_squared)
        assert n * (share - limit) ** 2 == pytest.approx(z_squared * variance, abs=1e-9)


def test_ties_narrow_the_interval_of_a_share() -> None:
    decided, tied = stats.proportion([0.0, 1.0] * 50), stats.proportion([0.0, 1.0] * 25 + [0.5] * 50)
    assert decided.value == tied.value == 0.5
    assert tied.high - tied.low < 0.8 * (decided.high - decided.low)
    assert tied.method == "score interval, ties one half"


def test_all_ties_are_one_half_but_not_for_certain() -> None:
    estimate = stats.proportion([0.5] * 20)
    assert estimate.value == 0.5
    assert 0.5 - estimate.low == pytest.approx(estimate.high - 0.5)
    assert 0.02 < estimate.high - estimate.low < 0.2


@pytest.mark.parametrize("tie_share", [0.0, 0.3, 0.8])
def test_the_interval_of_independent_outcomes_covers_the_true_share(tie_share: float) -> None:
    generator = np.random.default_rng(0)
    win_share = 0.7 * (1 - tie_share)
    truth = win_share + tie_share / 2
    outcomes = generator.choice([1.0, 0.5, 0.0], p=[win_share, tie_share, 1 - win_share - tie_share], size=(1000, 80))
    covered = [estimate.low <= truth <= estimate.high for estimate in map(stats.proportion, outcomes)]
    assert 0.93 <= np.mean(covered) <= 0.975


@pytest.mark.parametrize("num_prompts", [15, 60])
def test_the_clustered_interval_covers_the_true_share(num_prompts: int) -> None:
    """Prompts differ in difficulty and size, so an interval that takes comparisons for independent is too narrow."""
    generator = np.random.default_rng(1)
    covered, covered_if_independent = [], []
    truth = 0.6
    for simulation in range(300):
        share = generator.beta(1.2, 0.8, size=num_prompts)
        sizes = generator.integers(1, 9, size=num_prompts)
        clusters = [f"{prompt}" for prompt, size in enumerate(sizes) for _ in range(size)]
        outcomes = (generator.random(len(clusters)) < np.repeat(share, sizes)).astype(float)
        estimate = stats.proportion(outcomes, clusters, seed=simulation)
        independent = stats.proportion(outcomes)
        covered.append(estimate.low <= truth <= estimate.high)
        covered_if_independent.append(independent.low <= truth <= independent.high)
    assert 0.90 <= np.mean(covered) <= 0.99
    assert np.mean(covered_if_independent) < 0.90


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=50))
def test_the_mean_has_students_interval(values: list[float]) -> None:
    estimate = stats.mean(values)
    error = scipy.stats.sem(values)
    expected = [np.mean(values) + sign * scipy.stats.t.ppf(0.975, len(values) - 1) * error for sign in (-1, 1)]
    assert [estimate.low, estimate.high] == pytest.approx(expected, abs=1e-6)
    assert (estimate.value, estimate.n) == (pytest.approx(np.mean(values), abs=1e-9), len(values))


def test_equal_clusters_below_forty_give_the_t_interval_of_their_means() -> None:
    values = np.random.default_rng(0).normal(size=(20, 3))
    estimate = stats.mean(values.ravel(), keys(20, 3))
    assert limits(estimate) == pytest.approx(limits(stats.mean(values.mean(axis=1))))
    assert (estimate.n, estimate.method) == (20, "t interval by prompt")


def test_from_forty_prompts_on_the_interval_is_that_of_scipys_bootstrap() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 5, size=80)
    values = generator.normal(size=sizes.sum()) + np.repeat(generator.normal(size=80), sizes)
    clusters = [f"{prompt:02}" for prompt, size in enumerate(sizes) for _ in range(size)]
    totals = np.array([part.sum() for part in np.split(values, np.cumsum(sizes)[:-1])])
    expected = scipy.stats.bootstrap(
        (totals, sizes),
        lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    estimate = stats.mean(values, clusters)
    width = expected.high - expected.low
    assert [estimate.low, estimate.high] == pytest.approx([expected.low, expected.high], abs=0.08 * width)
    assert estimate.value == pytest.approx(values.mean())
    assert (estimate.n, estimate.method) == (80, "bootstrap by prompt")


@pytest.mark.parametrize(
    ("num_prompts", "method"),
    [
        (9, "too few prompts (9)"),
        (10, "t interval by prompt"),
        (39, "t interval by prompt"),
        (40, "bootstrap by prompt"),
    ],
)
def test_the_number_of_prompts_decides_the_method(num_prompts: int, method: str) -> None:
    outcomes = np.random.default_rng(0).integers(0, 2, size=2 * num_prompts)
    for estimate in (f(outcomes, keys(num_prompts, 2)) for f in (stats.proportion, stats.mean)):
        assert (estimate.method, estimate.n) == (method, num_prompts)
        assert estimate.value == outcomes.mean()
        assert math.isnan(estimate.low) == math.isnan(estimate.high) == (num_prompts < 10)


@pytest.mark.parametrize("num_prompts", [12, 50])
@pytest.mark.parametrize("outcomes", [[1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
def test_prompts_that_do_not_differ_still_leave_doubt_about_a_share(num_prompts: int, outcomes: list[float]) -> None:
    estimate = stats.proportion(outcomes * num_prompts, keys(num_prompts, 2))
    assert 0 <= estimate.low <= np.mean(outcomes) <= estimate.high <= 1
    assert estimate.high - estimate.low > 1 / num_prompts
    assert estimate.method == "score interval over prompts, which do not differ"
    if outcomes == [1.0, 1.0]:
        assert limits(estimate) == pytest.approx(limits(stats.wilson(num_prompts, num_prompts)))


def test_a_t_interval_of_a_share_is_cut_at_one() -> None:
    outcomes = np.ones(24)
    outcomes[0] = 0
    uncut, cut = stats.mean(outcomes, keys(12, 2)), stats.proportion(outcomes, keys(12, 2))
    assert uncut.high > 1
    assert cut.high == 1
    assert cut.low == uncut.low


def test_equal_values_have_an_empty_interval_around_their_mean() -> None:
    assert limits(stats.mean([2.0, 2.0, 2.0])) == [2.0, 2.0, 2.0]
    assert limits(stats.mean([2.0] * 100, keys(50, 2))) == [2.0, 2.0, 2.0]


def test_no_data_and_one_value_say_so() -> None:
    for estimate in (stats.proportion([]), stats.proportion([], []), stats.mean([]), stats.mean([], [])):
        assert (estimate.n, estimate.method) == (0, "no data")
        assert all(map(math.isnan, limits(estimate)))
    assert stats.wilson(0, 0).method == "no data"
    lone = stats.mean([3.0])
    assert (lone.value, lone.n, lone.method) == (3.0, 1, "one value")
    assert math.isnan(lone.low)


@settings(max_examples=20)
@given(order=st.permutations(range(120)), seed=st.integers(0, 5))
def test_the_order_of_the_rows_does_not_change_an_interval(order: list[int], seed: int) -> None:
    outcomes = np.random.default_rng(0).integers(0, 2, size=120)
    clusters = keys(60, 2)
    shuffled = stats.proportion(outcomes[order], [clusters[index] for index in order], seed=seed)
    assert shuffled == stats.proportion(outcomes, clusters, seed=seed)


def test_chunks_of_resamples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = np.random.default_rng(0).integers(0, 9, size=(30, 2)).astype(float)
    whole = stats.bootstrap_totals(totals, num_resamples=101, seed=3)
    monkeypatch.setattr(stats, "_CHUNK_VALUES", 200)
    np.testing.assert_array_equal(stats.bootstrap_totals(totals, num_resamples=101, seed=3), whole)
    assert whole.shape == (101, 2)


def test_a_higher_level_gives_a_wider_interval_of_each_kind() -> None:
    outcomes = np.random.default_rng(0).integers(0, 2, size=200).astype(float)
    for clusters in (None, keys(20, 10), keys(100, 2)):
        for function in (stats.proportion, stats.mean):
            narrow, wide = (function(outcomes, clusters, level=level) for level in (0.8, 0.99))
            assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([0.25, 1.0], "an outcome is 0, ½ or 1"),
        ([math.nan, 1.0], "not finite"),
        (np.zeros((2, 2)), "one axis"),
    ],
)
def test_what_is_no_outcome_is_refused(values: list[float] | np.ndarray, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        stats.proportion(values)


def test_keys_that_do_not_match_the_values_are_refused() -> None:
    for clusters in (["a"], ["a", "a", "a"]):
        with pytest.raises(AssertionError, match="one key a value"):
            stats.mean([1.0, 2.0], clusters)


def test_the_interval_of_a_difference_is_newcombe_s_for_two_wilson_intervals():
    # Newcombe (1998), Statistics in Medicine 17, 873-890, Table II, method 10: 56/70 against 48/80.
    found = stats.difference(stats.wilson(56, 70), stats.wilson(48, 80))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_a_difference_has_an_interval_only_if_both_have_one():
    without = stats.mean([1.0])
    found = stats.difference(stats.wilson(5, 10), without)
    assert found.value == -0.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_a_share_of_means_stays_inside_and_is_the_proportion_for_plain_outcomes():
    outcomes = [1.0, 0.5, 0.0, 1.0, 1.0]
    assert stats.mean_share(outcomes) == stats.proportion(outcomes)
    high = stats.mean_share([1.0] * 19 + [2 / 3])
    assert high.value < high.high <= 1
    same = stats.mean_share([1 / 3] * 20)
    assert same.low < 1 / 3 < same.high
