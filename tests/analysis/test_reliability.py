"""The reliability curve, the parts of the Brier score, and the logistic regressions of calibration and of length."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.special import logit as logit_of
from scipy.stats import t as student
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss

from rewardlab.analysis.lengths import (
    length_coefficients,
    length_controlled,
    length_controlled_accuracy,
    length_controlled_influence,
)
from rewardlab.analysis.logistic import calibration_intercept, calibration_slope, logistic
from rewardlab.analysis.reliability import reliability
from rewardlab.analysis.score_table import Pairs

probabilities = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))


def pairs_of(difference: np.ndarray, length: np.ndarray, label: np.ndarray) -> Pairs:
    """Pairs by their differences."""
    n = difference.size
    zeros, index = np.zeros(n), np.arange(n)
    return Pairs(
        difference=difference, label=label, preferred=difference, other=zeros, length_preferred=length + 500.0,
        length_other=zeros + 500.0, truncated=np.zeros(n, dtype=bool), prompt=index, source=index, preference=index,
    )  # fmt: skip


def both_orders(p: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([p, 1 - p]), np.concatenate([y, 1 - y])


def made(n: int, sharpness: float = 1.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities of a model that is too sure by `sharpness`, and labels."""
    generator = np.random.default_rng(seed)
    logit = 1.5 * generator.normal(size=n)
    return expit(sharpness * logit), (generator.random(n) < expit(logit)).astype(np.float64)


@pytest.mark.slow
@given(judged=st.lists(st.tuples(probabilities, st.sampled_from([0.0, 0.3, 0.5, 1.0])), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_the_parts_are_those_of_isotonic_regression_of_pairs_in_both_orders(judged: list) -> None:
    p, y = (np.array(column) for column in zip(*judged, strict=True))
    # A probability a hair from ½ is one with its mirror image only here, so no such hair.
    p = p.round(6)
    found = reliability(logit_of(p), y, np.arange(p.size), draws=2)
    twice, labels = both_orders(p, y)
    fitted = IsotonicRegression().fit(twice, labels).predict(twice)
    best, model, half = (np.square(g - labels).mean() for g in (fitted, twice, 0.5))
    assert found.miscalibration.value == pytest.approx(model - best, abs=1e-9)
    assert found.discrimination.value == pytest.approx(half - best, abs=1e-9)
    assert found.uncertainty.value == pytest.approx(half, abs=1e-9)
    assert sum(found.weight) == p.size
    assert len(found.probability) == len(found.recalibrated) == 2 * len(found.weight)
    assert np.all(np.diff(found.probability) >= 0)
    assert np.all(np.diff(found.recalibrated) >= 0)


def test_the_parts_sum_to_the_brier_score_and_the_curve_is_that_of_scikit_learn() -> None:
    p, y = made(400, 2.0)
    found = reliability(logit_of(p), y, np.arange(400), draws=20)
    parts = found.miscalibration.value - found.discrimination.value + found.uncertainty.value
    assert parts == pytest.approx(brier_score_loss(y, p))
    twice, labels = both_orders(p, y)
    # To the last digit, a probability is not the one that its log odds give.
    fitted = IsotonicRegression(out_of_bounds="clip").fit(twice, labels)
    assert fitted.predict(found.probability) == pytest.approx(np.array(found.recalibrated), abs=1e-9)


def test_equal_margins_are_one_point_of_the_curve_whichever_reply_stands_first() -> None:
    generator = np.random.default_rng(1)
    logit = np.round(1.5 * generator.normal(size=300), 1)
    label = (generator.random(300) < expit(0.6 * logit)).astype(np.float64)
    turned = generator.random(300) < 0.5
    one = reliability(logit, label, np.arange(300) // 2, draws=20)
    other = reliability(
        np.where(turned, -logit, logit), np.where(turned, 1 - label, label), np.arange(300) // 2, draws=20
    )
    assert one.weight == other.weight
    assert one.miscalibration.value == pytest.approx(other.miscalibration.value, abs=1e-12)
    assert one.null_miscalibration == pytest.approx(other.null_miscalibration, abs=1e-12)
    twice, labels = both_orders(expit(np.abs(logit)), np.where(logit < 0, 1 - label, label))
    fitted = IsotonicRegression().fit(twice, labels).predict(twice)
    assert one.miscalibration.value == pytest.approx(
        np.square(twice - labels).mean() - np.square(fitted - labels).mean(), abs=1e-9
    )


def test_margins_that_differ_by_rounding_alone_are_one_point_of_the_curve() -> None:
    margins = np.array([0.3 - 0.1, 0.5 - 0.3, -(0.9 - 0.7), 0.2, 1.0])
    assert len(set(np.abs(margins))) > 2
    found = reliability(margins, np.array([1.0, 0.0, 1.0, 0.0, 1.0]), np.arange(5), draws=2)
    assert found.weight == (4, 1)


@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1.0])
def test_the_curve_tells_margins_apart_however_small_they_are(scale: float) -> None:
    margins = scale * np.arange(1.0, 201.0)
    label = (np.arange(200) >= 100).astype(np.float64)
    found = reliability(margins, label, np.arange(200), draws=2)
    assert found.discrimination.value == pytest.approx(0.125, abs=1e-12)


def test_the_curve_tells_probabilities_apart_that_are_all_nearly_1() -> None:
    margins = np.arange(36.0, 236.0)
    found = reliability(margins, (np.arange(200) >= 100).astype(np.float64), np.arange(200), draws=2)
    assert found.discrimination.value == pytest.approx(0.125, abs=1e-12)


def test_a_calibrated_model_lies_in_its_bands_and_one_that_is_too_sure_does_not() -> None:
    for sharpness, calibrated in ((1.0, True), (2.5, False)):
        p, y = made(2000, sharpness)
        found = reliability(logit_of(p), y, np.arange(2000), draws=200)
        low, high = found.null_miscalibration
        assert (low <= found.miscalibration.value <= high) == calibrated
        assert (found.miscalibration.low == 0) == calibrated
        curve = np.interp(found.band_probability, found.probability, found.recalibrated)
        inside = (np.array(found.band_low) <= curve) & (curve <= np.array(found.band_high))
        assert (inside.mean() > 0.8) == calibrated


def test_pairs_of_a_prompt_that_are_alike_widen_the_parts() -> None:
    p, y = made(100, 2.0)
    alone = reliability(logit_of(p), y, np.arange(100), draws=20).discrimination
    five = reliability(
        *(np.repeat(v, 5) for v in (logit_of(p), y)), np.repeat(np.arange(100), 5), draws=20
    ).discrimination
    assert five.n == alone.n == 100
    assert "by prompt" in five.method
    assert five.high - five.low > 0.7 * (alone.high - alone.low)


@pytest.mark.parametrize(("each", "copies"), [(1, 1), (5, 1), (5, 5)], ids=["one a prompt", "own labels", "copies"])
def test_the_null_of_a_calibrated_model_knows_how_alike_the_labels_of_a_prompt_are(each: int, copies: int) -> None:
    generator = np.random.default_rng(5)
    above = []
    for seed in range(60):
        p = expit(1.2 * generator.normal(size=60)).repeat(each)
        uniform = generator.random(60 * each // copies).repeat(copies)
        found = reliability(
            logit_of(p), (uniform < p).astype(np.float64), np.arange(60).repeat(each), seed=seed, draws=60
        )
        above.append(found.miscalibration.value > found.null_miscalibration[1])
    assert np.mean(above) <= 0.15


def test_copies_of_a_pair_leave_the_null_as_wide_as_it_is_for_one() -> None:
    p, y = made(80)
    prompt = np.arange(80)
    one = reliability(logit_of(p), y, prompt, draws=300)
    five = reliability(logit_of(p.repeat(5)), y.repeat(5), prompt.repeat(5), draws=300)
    apart = reliability(logit_of(p.repeat(5)), y.repeat(5), np.arange(400), draws=300)
    assert five.null_miscalibration[1] == pytest.approx(one.null_miscalibration[1], rel=0.2)
    assert apart.null_miscalibration[1] < 0.6 * five.null_miscalibration[1]
    widths = [np.mean(np.subtract(found.band_high, found.band_low)) for found in (one, five, apart)]
    assert widths[1] == pytest.approx(widths[0], rel=0.1)
    assert widths[2] < 0.8 * widths[1]


@pytest.mark.parametrize("seed", range(12))
def test_labels_that_are_the_models_own_probabilities_have_its_slope_and_nothing_that_varies(seed: int) -> None:
    generator = np.random.default_rng(seed)
    logit = 1.5 * generator.normal(size=20 + 15 * seed)
    found = calibration_slope(logit, expit(logit), np.arange(logit.size))
    assert found.value == pytest.approx(1)
    assert (math.isnan(found.low), found.method) == (True, "no variation")
    length = generator.normal(size=logit.size)
    for one in length_coefficients(pairs_of(logit, length, expit(logit)), beta=1.0):
        assert math.isnan(one.low)


def test_labels_of_their_own_leave_the_null_as_narrow_as_for_pairs_apart() -> None:
    for seed in range(2):
        generator = np.random.default_rng(seed)
        p = expit(1.2 * generator.normal(size=80)).repeat(5)
        y = (generator.random(400) < p).astype(np.float64)
        apart, five = (reliability(logit_of(p), y, own, draws=150) for own in (np.arange(400), np.arange(400) // 5))
        assert five.null_miscalibration[1] == pytest.approx(apart.null_miscalibration[1], rel=0.2)


def test_nothing_to_judge_has_an_empty_curve() -> None:
    found = reliability(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64))
    assert (found.probability, found.band_low, found.miscalibration.method) == ((), (), "no data")


# --- regressions -----------------------------------------------------------------------------------------------


def test_a_logistic_regression_is_that_of_scikit_learn_with_the_sandwich_of_its_scores() -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(500, 2)) * [1.0, 100.0]
    y = (generator.random(500) < expit(x @ [0.8, -0.01])).astype(np.float64)
    coefficient, influence = logistic(x, y)
    oracle = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-12, max_iter=1000).fit(x / [1.0, 100.0], y)
    assert coefficient * [1.0, 100.0] == pytest.approx(oracle.coef_[0], rel=1e-4)
    left = np.array([logistic(np.delete(x, k, 0), np.delete(y, k))[0] for k in range(0, 500, 5)])
    assert (coefficient - left) * 499 == pytest.approx(influence[::5], rel=0.1, abs=0.01)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.array([[1.0], [2.0], [-1.0]]), np.array([1.0, 1.0, 0.0])),
        (np.zeros((4, 1)), np.array([1.0, 0.0, 1.0, 0.0])),
        (np.ones((4, 2)), np.array([1.0, 0.0, 1.0, 0.0])),
        (np.empty((0, 1)), np.empty(0)),
    ],
    ids=["separated", "no variation", "twice the same column", "no rows"],
)
def test_a_regression_without_one_best_fit_has_none(x: np.ndarray, y: np.ndarray) -> None:
    assert logistic(x, y) is None


def test_a_regression_is_that_of_its_columns_in_another_unit_however_small() -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=(60, 2))
    y = (generator.random(60) < expit(x @ [0.8, -0.5])).astype(np.float64)
    units = np.array([2.0**-800, 2.0**400])
    usual, found = logistic(x, y), logistic(x * units, y)
    for ours, own in zip(found, usual, strict=True):
        assert (ours * units == own).all()
    assert logistic(x * 2.0**-1000, y) is None  # coefficients and influences that float64 may not hold


def test_slope_and_intercept_of_a_calibrated_model_are_one_and_zero_and_a_sharper_one_is_told() -> None:
    logit = np.log(made(4000)[0] / (1 - made(4000)[0]))
    y = made(4000)[1]
    slope, intercept = (f(logit, y, np.arange(4000)) for f in (calibration_slope, calibration_intercept))
    assert slope.low < 1 < slope.high
    assert intercept.low < 0 < intercept.high
    doubled = calibration_slope(2 * logit, y, np.arange(4000))
    assert doubled.value == pytest.approx(slope.value / 2)
    assert calibration_intercept(2 * logit, y, np.arange(4000)).high < 0


def test_limits_of_a_slope_are_where_its_score_test_rejects() -> None:
    """With the variance of the labels there, which of single pairs is that of the model."""
    logit = np.concatenate([np.linspace(0.5, 6.0, 48), [0.4, 0.9]])
    y = np.append(np.ones(48), [0.0, 0.0])
    found = calibration_slope(logit, y, np.arange(50))
    for limit in (found.low, found.high):
        p = expit(limit * logit)
        score = (logit * (y - p)).sum() / np.sqrt((logit**2 * p * (1 - p)).sum())
        assert abs(score) == pytest.approx(student.ppf(0.975, 49), rel=1e-6)
    assert found.high - found.value > 1.1 * (found.value - found.low)


def test_the_interval_of_a_slope_goes_by_prompt_and_by_how_soft_labels_are() -> None:
    p, y = made(150)
    logit = np.log(p / (1 - p))
    one = calibration_slope(logit, y, np.arange(150))
    repeated = calibration_slope(np.repeat(logit, 4), np.repeat(y, 4), np.repeat(np.arange(150), 4))
    assert (repeated.low, repeated.high) == pytest.approx((one.low, one.high), rel=0.001)
    apart = calibration_slope(np.repeat(logit, 4), np.repeat(y, 4), np.arange(600))
    assert apart.high - apart.low == pytest.approx((one.high - one.low) / 2, rel=0.1)
    soft = calibration_slope(logit, (p + expit(0.8 * logit)) / 2, np.arange(150))
    assert soft.high - soft.low < (one.high - one.low) / 5


def test_slope_and_intercept_do_not_depend_on_the_order_of_replies() -> None:
    p, y = made(200)
    logit, sign = np.log(p / (1 - p)), np.where(np.random.default_rng(0).random(200) < 0.5, -1, 1)
    for function in (calibration_slope, calibration_intercept):
        one = function(logit, y, np.arange(200))
        other = function(sign * logit, np.where(sign < 0, 1 - y, y), np.arange(200))
        assert (one.value, one.low) == pytest.approx((other.value, other.low), abs=1e-9)


def test_a_perfect_model_has_no_slope_and_says_why() -> None:
    found = calibration_slope(np.linspace(1, 3, 30), np.ones(30), np.arange(30))
    assert np.isnan(found.value)
    assert found.method == "no finite value fits best"


@pytest.mark.parametrize("largest", [1e3, 65504.0, 1e6, 1e12])
def test_one_score_far_beyond_all_others_does_not_hide_the_slope(largest: float) -> None:
    """In half precision the largest score is 65504. Ranked rightly, such a pair says nothing about the slope."""
    p, y = made(300)
    logit, clusters = np.log(p / (1 - p)), np.arange(301)
    found = calibration_slope(np.append(logit, largest), np.append(y, 1.0), clusters)
    others = calibration_slope(logit, y, clusters[:-1])
    assert (found.value, found.low, found.high) == pytest.approx((others.value, others.low, others.high), rel=1e-3)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3, 1e6, 1e150])
def test_a_model_that_is_sure_of_everything_is_judged_or_refused_but_never_fails(scale: float) -> None:
    p, y = made(200)
    logit = scale * np.log(p / (1 - p))
    slope, intercept = (f(logit, y, np.arange(200)) for f in (calibration_slope, calibration_intercept))
    assert slope.value * scale == pytest.approx(calibration_slope(logit / scale, y, np.arange(200)).value)
    assert intercept.value < 0.3 or intercept.method == "no finite value fits best"
    found = reliability(logit, y, np.arange(200), draws=5)
    assert found.discrimination.value <= 0.25


def test_a_model_that_sees_length_alone_gets_one_half_and_its_coefficient_is_told() -> None:
    generator = np.random.default_rng(4)
    # Two thirds of preferred replies are longer, by as much as the others are shorter.
    size = generator.integers(1, 100, 3000).astype(np.float64)
    length = np.where(generator.random(3000) < 2 / 3, size, -size)
    by_length = pairs_of(np.sign(length), length, np.ones(3000))
    assert by_length.outcome.mean() == pytest.approx(2 / 3, abs=0.03)
    assert length_controlled_accuracy(by_length).value == pytest.approx(0.5)

    signal = generator.normal(1.0, 1.0, 3000)
    honest = length_controlled_accuracy(pairs_of(signal, length, np.ones(3000)))
    assert honest.value == pytest.approx((signal > 0).mean(), abs=0.02)
    overrates = length_coefficients(pairs_of(signal + 0.02 * length, length, np.ones(3000)), beta=1.0)[1]
    assert overrates.high < 0
    # In standard deviations of the length difference, whatever the unit of length.
    thousands = length_coefficients(pairs_of(signal + 0.02 * length, length / 1000, np.ones(3000)), beta=1.0)[1]
    assert (thousands.value, thousands.low) == pytest.approx((overrates.value, overrates.low))


def in_strata(seed: int, *, prompts: int = 15, each: int = 8) -> Pairs:
    """Pairs of four sizes of length difference, which are the strata, and some of equal length."""
    generator = np.random.default_rng(seed)
    num = prompts * each
    length = generator.choice([0.0, 1.0, 2.0, 3.0, 4.0], num) * generator.choice([-1.0, 1.0], num)
    pairs = pairs_of(generator.normal(0.5, 1.0, num), length, np.ones(num))
    return replace(pairs, prompt=np.repeat(np.arange(prompts), each))


def test_accuracy_with_length_controlled_has_the_influences_of_leaving_out_prompts() -> None:
    pairs = in_strata(5)
    length, prompt = pairs.length_difference, pairs.prompt
    value, influence, kept = length_controlled_influence(pairs)
    assert (kept == (length != 0)).all()

    def accuracy(left: np.ndarray) -> float:
        of_strata = [[pairs.outcome[(length == sign * size) & left] for sign in (1, -1)] for size in (1, 2, 3, 4)]
        numbers = [sum(side.size for side in sides) for sides in of_strata]
        return float(np.average([np.mean([side.mean() for side in sides]) for sides in of_strata], weights=numbers))

    assert value == pytest.approx(accuracy(kept))
    moves = np.array([value - accuracy(prompt != one) for one in range(15)])
    share = np.bincount(prompt[kept]) / kept.sum()
    wanted = kept.sum() * np.sqrt(14 / 15 * (1 - share)) * moves
    assert np.bincount(prompt[kept], influence) == pytest.approx(wanted, abs=1e-9)


def test_a_stratum_with_few_prompts_on_a_side_is_left_out_however_many_pairs_they_have() -> None:
    pairs = in_strata(6)
    length, longest = pairs.length_difference.copy(), np.abs(pairs.length_difference) == 4
    for prompts, counts in ((4, False), (5, True)):
        longer = longest & (pairs.prompt < prompts)
        assert longer.sum() > 5
        length[longest] = np.where(longer[longest], 4.0, -4.0)
        given = replace(pairs, length_preferred=length + 500.0)
        assert length_controlled(given)[longest].all() == length_controlled(given)[longest].any() == counts


@pytest.mark.parametrize("outcome", [1.0, 0.5, 0.0])
def test_accuracy_with_length_controlled_that_never_varies_is_known_as_so_many_prompts_know_it(outcome: float) -> None:
    """To the last digit: what rounding leaves of sums of shares would be taken for a known variance."""
    for seed in range(20):
        pairs = in_strata(seed, prompts=20)
        pairs = replace(pairs, difference=np.full(160, 2 * outcome - 1))
        value, influence, _ = length_controlled_influence(pairs)
        found = length_controlled_accuracy(pairs)
        assert value == outcome
        assert not influence.any()
        assert found.high - found.low > 0.05


def test_length_that_never_differs_leaves_nothing_to_control() -> None:
    pairs = pairs_of(np.array([1.0, -1.0] * 10), np.zeros(20), np.ones(20))
    assert length_controlled_accuracy(pairs).method == "no strata with both sides"
    assert "do not vary" in length_coefficients(pairs, beta=1.0)[0].method
