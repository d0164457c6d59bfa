"""Temperature and affine map: the maximum of the likelihood, and worth something on data that they did not see."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from rewardlab.analysis.judgement import judge_rows
from rewardlab.analysis.scaling import (
    HOTTEST,
    fit_affine,
    fit_scaling,
    fit_temperature,
    judge_scaling,
    loss_changes,
    sides,
)
from rewardlab.analysis.score_table import score_table
from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, ScoreRow
from score_rows import pair_rows


def rows_of(first: np.ndarray, second: np.ndarray, labels: np.ndarray, *, per_prompt: int = 1) -> list[ScoreRow]:
    """Pairs with these scores; so many in a row share a prompt."""
    return pair_rows(list(zip(*map(np.ndarray.tolist, (first, second, labels)), strict=True)), each=per_prompt)


def drawn(count: int, *, true_temperature: float, seed: int, location: float = 0.0) -> list[ScoreRow]:
    """Pairs whose labels follow σ(d / T)."""
    draw = np.random.default_rng(seed)
    first, second = draw.normal(location, 2, count), draw.normal(location, 2, count)
    labels = (draw.random(count) < expit((first - second) / true_temperature)).astype(float)
    return rows_of(first, second, labels)


def nll(logits: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(labels * np.logaddexp(0, -logits) + (1 - labels) * np.logaddexp(0, logits)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 10))
def test_no_other_temperature_has_a_smaller_loss(seed, scale):
    draw = np.random.default_rng(seed)
    logits = draw.normal(0.3, 1, 60) * scale
    labels = draw.choice([0.0, 0.3, 0.5, 1.0], 60)
    found = nll(logits / fit_temperature(logits, labels), labels)
    grid = [nll(logits / temperature, labels) for temperature in np.geomspace(1e-3, 1e3, 400)]
    assert found <= min(grid) + 1e-9


def test_the_temperature_is_that_of_a_logistic_regression_without_intercept():
    linear_model = pytest.importorskip("sklearn.linear_model")
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, 400)
    labels = (draw.random(400) < expit(logits / 3)).astype(float)
    model = linear_model.LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(logits[:, None], labels)
    assert fit_temperature(logits, labels) == pytest.approx(1 / model.coef_[0, 0], rel=1e-4)


def test_the_affine_map_is_that_of_a_logistic_regression_on_platts_targets():
    linear_model = pytest.importorskip("sklearn.linear_model")
    draw = np.random.default_rng(1)
    scores = draw.normal(40, 5, 300)
    targets = (draw.random(300) < expit((scores - 41) / 4)).astype(float)
    yes, no = targets.sum(), (1 - targets).sum()
    smoothed = np.where(targets == 1, (yes + 1) / (yes + 2), 1 / (no + 2))
    twice = np.concatenate([scores, scores])[:, None]
    model = linear_model.LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(
        twice, np.repeat([1, 0], 300), sample_weight=np.concatenate([smoothed, 1 - smoothed])
    )
    scale, shift = fit_affine(scores, targets)
    assert (scale, shift) == pytest.approx((model.coef_[0, 0], model.intercept_[0]), rel=1e-3)


def test_a_model_that_is_too_sure_gets_its_true_temperature_and_better_probabilities():
    scaling = fit_scaling(drawn(4000, true_temperature=3.0, seed=0), beta=1.0)
    assert scaling.temperature == pytest.approx(3.0, rel=0.1)
    judged = judge_scaling(scaling, drawn(4000, true_temperature=3.0, seed=1), beta=1.0)
    for measure in ("NLL", "Brier", "ECE"):
        assert judged.pairs["after"][measure].high < judged.pairs["before"][measure].low, measure
    assert judged.pairs["after − before"]["NLL"].high < 0
    assert judged.pairs["after"]["ECE"].low == 0, "calibrated"
    assert judged.replies["after"]["NLL"].high < judged.replies["before"]["NLL"].low


def test_fitted_numbers_have_intervals_that_hold_them_and_that_of_the_temperature_is_its_slopes():
    held = 0
    for seed in range(60):
        scaling = fit_scaling(drawn(300, true_temperature=2.0, seed=seed), beta=1.0)
        known = scaling.estimates["temperature"]
        assert known.low < scaling.temperature == known.value < known.high
        held += known.low <= 2.0 <= known.high
    assert held >= 53, "of 60, by an interval of 95 %"
    slope = judge_rows(drawn(300, true_temperature=2.0, seed=59), beta=1.0).estimates["eval_calibration_slope"]
    assert [1 / known.high, 1 / known.low] == pytest.approx([slope.low, slope.high])
    assert scaling.estimates["reward_mean"].value == pytest.approx(scaling.reward_mean)
    assert scaling.estimates["reward_std"].value == pytest.approx(scaling.reward_std)


def test_a_slope_that_may_be_nothing_leaves_the_temperature_without_an_end():
    known = fit_scaling(drawn(60, true_temperature=40.0, seed=3), beta=1.0).estimates["temperature"]
    assert 0 < known.low < known.value < known.high == np.inf


def test_beta_and_temperature_make_one_scale():
    rows = drawn(500, true_temperature=2.0, seed=2)
    one, other = fit_scaling(rows, beta=1.0), fit_scaling(rows, beta=4.0)
    assert other.temperature == pytest.approx(4 * one.temperature, rel=1e-6)
    assert other.affine == one.affine, "it maps raw scores"


def test_where_the_scores_lie_moves_the_shift_alone():
    here, there = (fit_scaling(drawn(800, true_temperature=1.0, seed=3, location=mean), beta=1.0) for mean in (0, 500))
    assert there.temperature == pytest.approx(here.temperature, rel=1e-5)
    assert there.affine[0] == pytest.approx(here.affine[0], rel=1e-4)
    at_mean = [scale * one.reward_mean + shift for one in (here, there) for scale, shift in [one.affine]]
    assert at_mean[0] == pytest.approx(at_mean[1], abs=1e-3)
    assert there.reward_mean == pytest.approx(here.reward_mean + 500)
    assert there.reward_std == pytest.approx(here.reward_std)


def test_swapping_the_replies_of_every_pair_changes_nothing():
    rows = drawn(300, true_temperature=2.0, seed=4)
    swapped = [
        replace(
            row,
            reply=1 - row.reply,
            comparisons=tuple(Comparison(first=1, second=0, label=one.label) for one in row.comparisons),
        )
        for row in rows
    ]
    one, other = fit_scaling(rows, beta=1.0), fit_scaling(swapped, beta=1.0)
    assert other.temperature == pytest.approx(one.temperature, rel=1e-9)
    assert other.affine == pytest.approx(one.affine, rel=1e-6)


def test_every_comparison_has_a_preferred_and_another_side():
    rows = rows_of(np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([0.2, 1.0]))
    scores, targets = sides(score_table(rows).pairs.finite)
    assert sorted(zip(scores.tolist(), targets.tolist(), strict=True)) == [(1.0, pytest.approx(0.2)), (2.0, 1.0),
                                                                            (3.0, 0.8), (4.0, 0.0)]  # fmt: skip


def test_pairs_that_are_all_ranked_right_are_at_the_edge():
    draw = np.random.default_rng(5)
    first, labels = draw.normal(0, 1, 80), np.ones(80)
    scaling = fit_scaling(rows_of(first + 1, first, labels), beta=1.0)
    assert scaling.at_edge
    assert 0 < scaling.affine[0] < 10
    again = judge_scaling(scaling, rows_of(first, first + 1, labels), beta=1.0)
    assert np.isfinite(again.pairs["after"]["NLL"].value)


@pytest.mark.parametrize("gap", [1e-3, 2.0, 2.6, 50.0, 1e6])
def test_a_separation_of_any_size_is_at_the_edge(gap):
    other = np.zeros(60)
    preferred = gap * (1 + np.arange(60) / 200)
    scaling = fit_scaling(rows_of(preferred, other, np.ones(60)), beta=1.0)
    assert (scaling.at_edge, scaling.temperature) == (True, pytest.approx(min(1, 1.15 * gap) / HOTTEST, rel=0.01))
    ties = fit_scaling(rows_of(np.append(preferred, 0.0), np.zeros(61), np.append(np.ones(60), 0.5)), beta=1.0)
    assert ties.at_edge, "a tie of label and scores says nothing of the temperature"
    for label in (0.0, 0.5, 0.9):
        labels = np.append(np.ones(59), label)
        assert not fit_scaling(rows_of(preferred, other, labels), beta=100 / gap).at_edge, label


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e3, 1e6])
def test_a_model_of_any_scale_is_calibrated(scale):
    draw = np.random.default_rng(10)
    first, second, labels = draw.normal(0.8, 1, 400), draw.normal(0, 1, 400), np.ones(400)
    usual = fit_scaling(rows_of(first, second, labels), beta=1.0)
    scaled = fit_scaling(rows_of(scale * first, scale * second, labels), beta=1.0)
    assert scaled.temperature == pytest.approx(scale * usual.temperature, rel=1e-5)
    assert not scaled.at_edge


def test_sides_that_a_score_separates_get_platts_targets():
    # Two scores: the best map meets the mean target at each of them.
    scale, shift = fit_affine(np.repeat([1.0, -1.0], [10, 30]), np.repeat([1.0, 0.0], [10, 30]))
    assert expit([scale + shift, -scale + shift]) == pytest.approx([11 / 12, 1 / 32], abs=1e-6)


def test_what_is_not_finite_is_counted_and_left_out():
    rows = drawn(120, true_temperature=1.0, seed=6)
    spoiled = [*rows[:-1], replace(rows[-1], score=np.nan)]
    scaling = fit_scaling(spoiled, beta=1.0)
    assert (scaling.num_comparisons, scaling.num_replies) == (119, 239)
    judged = judge_scaling(scaling, spoiled, beta=1.0)
    assert (judged.num_comparisons, judged.num_non_finite) == (119, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (drawn(49, true_temperature=1.0, seed=7), "49 comparisons with finite scores are too few"),
        (rows_of(np.ones(60), np.ones(60), np.ones(60)), "all scores are equal"),
        (drawn(400, true_temperature=-1.0, seed=8), "would turn their order round"),
    ],
)
def test_data_that_cannot_calibrate_are_refused(rows, message):
    with pytest.raises(DataError, match=message):
        fit_scaling(rows, beta=1.0)


def test_repeated_prompts_are_counted_once():
    draw = np.random.default_rng(9)
    first, second = draw.normal(0, 1, 60), draw.normal(0, 1, 60)
    labels = (draw.random(60) < expit(first - second)).astype(float)
    rows = rows_of(first, second, labels, per_prompt=4)
    judged = judge_scaling(fit_scaling(rows, beta=1.0), rows, beta=1.0)
    assert {estimate.n for row in judged.pairs.values() for estimate in row.values()} == {15}
    assert {estimate.n for row in judged.replies.values() for estimate in row.values()} == {15}


def test_a_change_of_losses_counts_pairs_that_come_out_the_unlikely_way_and_were_not_drawn():
    """All pairs are ranked as labelled, so that a higher temperature only costs, but on one in twenty it would gain."""
    logits = 3 * np.abs(np.random.default_rng(0).normal(size=20)) + 2
    found = loss_changes(logits, logits / 3, np.ones(20), [str(n) for n in range(20)])
    lost = np.logaddexp(0, logits / 3) - np.logaddexp(0, logits)
    for measure, change in found.items():
        assert change.value > 0
        assert change.low < 0 < change.value < change.high, measure
        assert change.method.endswith("paired")
    assert found["NLL"].low < 0.05 * lost.mean() + 0.95 * found["NLL"].value
    three = loss_changes(logits, logits / 3, np.ones(20), [str(n // 10) for n in range(20)])
    assert np.isnan(three["NLL"].low), "two prompts have no interval"


@pytest.mark.parametrize("count", [50, 200])
def test_pairs_that_all_come_out_right_may_hide_as_many_mistakes_as_a_share_of_none_may(count):
    """None of n failed: at 95 % the share that fails is at most 1 − 0.025^(1/n) (Clopper and Pearson 1934)."""
    before, after, keys = np.full(count, 1.0), np.full(count, 3.0), [str(n) for n in range(count)]
    found = loss_changes(before, after, np.ones(count), keys)["NLL"]
    one = np.ones(1)
    right, wrong = (nll(3 * sign * one, one) - nll(sign * one, one) for sign in (1, -1))
    assert (found.value, found.low) == pytest.approx((right, right))
    assert found.high == pytest.approx(right + (wrong - right) * (1 - 0.025 ** (1 / count)), abs=1e-9)
    turned = loss_changes(-before, -after, np.zeros(count), keys)["NLL"]
    assert (turned.low, turned.high) == pytest.approx((found.low, found.high))


def test_pairs_made_surer_and_less_sure_alike_may_hide_a_change_either_way():
    before = np.tile([1.0, 3.0], 25)
    found = loss_changes(before, 4 - before, np.ones(50), [str(n) for n in range(50)])["NLL"]
    assert found.value == pytest.approx(0, abs=1e-12)
    assert found.high == pytest.approx(-found.low)


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "each"), [(20, 1), (40, 1), (20, 4)])
@pytest.mark.parametrize(("ahead", "sure", "temperature"), [(2.33, 3.0, 3.0), (2.33, 1.0, 0.8), (0.74, 3.0, 3.0)])
def test_changes_of_losses_hold_the_truth(prompts, each, ahead, sure, temperature):
    generator, keys = np.random.default_rng(1), [str(n // each) for n in range(prompts * each)]
    alike = np.sqrt(0.7 if each > 1 else 0.0)

    def drawn(count: int) -> np.ndarray:
        common, own = generator.normal(size=count), generator.normal(size=(count, each))
        return sure * ahead * (ahead + np.sqrt(2) * (alike * common[:, None] + np.sqrt(1 - alike**2) * own)).ravel()

    def change(logits: np.ndarray) -> float:
        return float((np.logaddexp(0, -logits / temperature) - np.logaddexp(0, -logits)).mean())

    truth, held = change(drawn(400_000 // each)), 0
    for _ in range(200):
        logits = drawn(prompts)
        one = loss_changes(logits, logits / temperature, np.ones(len(keys)), keys)["NLL"]
        held += one.low <= truth <= one.high
    assert held >= 200 * 0.95 - 2 * np.sqrt(200 * 0.95 * 0.05)
