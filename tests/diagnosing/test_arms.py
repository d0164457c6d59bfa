"""Intervals over seeds and conversations against plain oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rewardlab.analysis.influence import share_by_influence
from rewardlab.diagnosing.arms import Arm, Contrast, over_seeds, p_of_mean, share_of


def arm_of(right, clusters=None) -> Arm:
    right = np.asarray(right, dtype=np.float64)
    names = [str(n) for n in range(right.shape[1])] if clusters is None else [str(c) for c in clusters]
    return Arm(right_SN=right, clusters=tuple(names))


def drawn(truth: float, *, seeds: int = 5, rows: int = 60, seed: int = 0) -> Arm:
    draw = np.random.default_rng(seed)
    return arm_of((draw.random((seeds, rows)) < truth).astype(float), np.arange(rows) // 2)


def test_the_interval_over_seeds_is_students():
    values = np.array([0.5, 0.55, 0.6, 0.52, 0.49])
    found = over_seeds(values)
    low, high = scipy_stats.t.interval(0.95, 4, loc=values.mean(), scale=scipy_stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((values.mean(), low, high))
    assert p_of_mean(values, 0.5) == pytest.approx(scipy_stats.ttest_1samp(values, 0.5).pvalue)


def test_equal_seeds_have_no_spread_and_only_the_truth_is_possible():
    same = np.full(5, 0.5)
    assert (over_seeds(same).low, over_seeds(same).high) == (0.5, 0.5)
    assert p_of_mean(same, 0.5) == 1.0
    assert p_of_mean(same + 0.1, 0.5) == 2 / 2 ** len(same)


def test_the_variance_over_conversations_is_that_of_their_means():
    arm = drawn(0.7)
    contrast = Contrast.of([(arm, 1.0)], 0.5)
    totals = arm.right_SN.mean(0).reshape(-1, 2).mean(1)
    assert contrast.value == pytest.approx(totals.mean() - 0.5)
    assert contrast.variance_conversations == pytest.approx(totals.var(ddof=1) / len(totals))
    assert contrast.variance_seeds == pytest.approx(arm.by_seed.var(ddof=1) / 5)


def test_what_is_common_to_two_arms_cancels():
    arm = drawn(0.7)
    same = Contrast.of([(arm, 1.0), (arm, -1.0)])
    assert same.value == 0
    assert same.variance == pytest.approx(0, abs=1e-20)
    assert same.p_above() == 1.0


def test_conversations_that_some_seeds_did_not_judge_weigh_by_those_that_did():
    right = np.array([[1.0, 0.0, np.nan], [1.0, np.nan, 0.0]])
    arm = arm_of(right)
    assert arm.by_seed.tolist() == [0.5, 0.5]
    assert arm.num_judged == 3
    assert arm.influences() == pytest.approx({"0": 0.25, "1": -0.125, "2": -0.125})


def test_an_arm_has_one_accuracy_though_its_seeds_judge_different_comparisons():
    draw = np.random.default_rng(4)
    right = (draw.random((5, 80)) < np.linspace(0.2, 0.9, 80)).astype(float)
    for seed, row in enumerate(right):
        row[draw.random(80) < 0.2 + 0.15 * seed] = np.nan
    arm = arm_of(right, np.arange(80) // 2)
    assert np.nanmean(np.nanmean(right, axis=0)) != pytest.approx(arm.mean, abs=0.001)
    found = arm.over_conversations()
    assert found.value == arm.over_seeds().value == arm.mean
    assert found.low < arm.mean < found.high
    assert found.n == 40
    assert found.method.endswith("by conversation")


def test_the_interval_over_conversations_is_the_same_by_outcomes_and_by_influences():
    arm = drawn(0.7)
    # A comparison that no seed judged leaves everything as it was.
    more = arm_of(np.hstack([arm.right_SN, np.full((5, 1), np.nan)]), [*arm.clusters, "other"])
    whole, apart = arm.over_conversations(), more.over_conversations()
    assert (whole.value, whole.low, whole.high, whole.n) == (apart.value, apart.low, apart.high, apart.n)
    by_influence = share_by_influence(arm.mean, 60 * arm._moved_N(), np.array(arm.clusters, dtype=int))
    assert (by_influence.low, by_influence.high) == pytest.approx((whole.low, whole.high))


def test_conversations_of_which_nothing_was_judged_say_nothing_of_how_far_conversations_differ():
    arm, beside = drawn(0.7, rows=24), drawn(0.6, rows=24, seed=1)
    # Forty conversations of which all pairs are ties, or none of equal length.
    others = [f"other {n}" for n in range(40)]
    more, more_beside = (
        arm_of(np.hstack([one.right_SN, np.full((5, 40), np.nan)]), [*one.clusters, *others]) for one in (arm, beside)
    )
    assert more.num_conversations == arm.num_conversations == 12
    assert (
        Contrast.of([(more, 1.0), (more_beside, -1.0)]).estimate()
        == Contrast.of([(arm, 1.0), (beside, -1.0)]).estimate()
    )
    assert repr(share_of(more, more)) == repr(share_of(arm, arm)), "equal, also where both are NaN"


@pytest.mark.parametrize("seed", range(4))
def test_the_limits_of_a_share_are_those_at_which_the_contrast_is_barely_significant(seed):
    part, whole = drawn(0.6, seed=seed, rows=400), drawn(0.85, seed=seed + 50, rows=400)
    found = share_of(part, whole)
    assert found.value == pytest.approx((part.mean - 0.5) / (whole.mean - 0.5))
    freedom = min(Contrast.of([(arm, 1.0)]).freedom for arm in (part, whole))
    t = scipy_stats.t.ppf(0.975, freedom)
    for limit in (found.low, found.high):
        at = Contrast.of([(part, 1.0), (whole, -limit)], 0.5 * (1 - limit))
        assert abs(at.value) == pytest.approx(t * math.sqrt(at.variance), rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_limits_of_a_share_of_few_conversations_are_those_of_the_score_test(seed):
    whole = arm_of(np.ones((5, 20)))
    part = arm_of(np.repeat(np.random.default_rng(seed).random((1, 20)) < 0.9, 5, axis=0))
    found = share_of(part, whole)
    low, high = (Contrast.of([(part, 1.0), (whole, -limit)], 0.5 * (1 - limit)) for limit in (found.low, found.high))
    assert low.bounded.p_above(0.0) == pytest.approx(0.025, rel=1e-6)
    assert high.bounded.p_below(0.0) == pytest.approx(0.025, rel=1e-6)


def test_a_model_is_all_of_itself_and_one_at_chance_has_no_shares():
    narrower = 1.0
    for rows in (60, 400, 4000):
        arm = drawn(0.8, rows=rows)
        same = share_of(arm, arm)
        assert same.value == pytest.approx(1.0)
        # Other conversations may tell even what agreed on all of these apart.
        width = same.high - same.low
        assert same.low < 1 < same.high
        assert 0 < width < narrower * 1.5
        narrower = width
    assert narrower < 0.02
    assert math.isnan(share_of(arm, drawn(0.5, seed=3)).low)


@pytest.mark.parametrize("right", [15, 20, 40])
def test_outcomes_that_happen_to_agree_are_no_certainty(right):
    all_right = arm_of(np.ones((5, right)))
    contrast = Contrast.of([(all_right, 1.0)], 0.9)
    assert contrast.variance == 0
    assert contrast.p_above() == pytest.approx(max(0.9**right, contrast.bounded.p_above(0.0)))
    assert contrast.p_above() >= 0.9**right
    found = contrast.estimate()
    assert found.low <= 0.025 ** (1 / right) - 0.9
    assert found.high == pytest.approx(0.1)
    # A flip by one seed is a variance, but of nothing that the seeds share.
    flipped = np.ones((5, right))
    flipped[0, 0] = 0
    assert Contrast.of([(arm_of(flipped), 1.0)], 0.9).p_above() > 0.5 * 0.9**right


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("conversations", [12, 20, 40])
def test_few_conversations_are_told_from_the_limit_no_more_often_than_promised(conversations):
    """Heads that mostly agree: what they have in common shows in conversations alone."""
    draw, found, passed, times = np.random.default_rng(5), 0, 0, 300
    for _ in range(times):
        shared = np.repeat((draw.random((1, conversations)) < 0.95).astype(float), 5, axis=0)
        full, part = arm_of(np.ones((5, conversations))), arm_of(shared)
        found += Contrast.of([(part, 1.0), (full, -0.9)], 0.05).p_above() <= 0.05
        passed += Contrast.of([(full, 1.0), (part, -1.0)]).estimate().high < 0.05
    most = 2 * math.sqrt(0.05 * 0.95 / times)
    assert found / times <= 0.05 + most
    assert passed / times <= 0.025 + most


def arms_of_conversations(
    draw: np.random.Generator, truths: tuple[float, float], *, conversations: int, alike: float
) -> list[Arm]:
    """Two arms of three seeds on six comparisons of each conversation, whose errors are `alike`."""
    of = np.arange(conversations).repeat(6)

    def normal() -> np.ndarray:
        own = draw.normal(size=of.size)
        return math.sqrt(alike) * draw.normal(size=conversations)[of] + math.sqrt(1 - alike) * own

    shared, arms = normal(), []
    for truth in truths:
        level = math.sqrt(0.5) * shared + 0.5 * normal() + 0.5 * draw.normal(size=(3, of.size))
        arms.append(arm_of((level < scipy_stats.norm.ppf(truth)).astype(float), of))
    return arms


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("alike", "least_passed", "least_found"), [(0.3, 0.8, 0.8), (0.97, 0.4, 0.6)])
def test_few_conversations_of_several_comparisons_tell_a_loss_from_none(alike, least_passed, least_found):
    """If all comparisons of any conversation might turn round together, about 15 % would pass, and 65 % be found."""
    draw, times = np.random.default_rng(11), 150
    found = {truth: np.zeros(2) for truth in (0.95, 0.85)}
    for _ in range(times):
        for truth, own in found.items():
            full, arm = arms_of_conversations(draw, (0.95, truth), conversations=30, alike=alike)
            drop = Contrast.of([(full, 1.0), (arm, -1.0)])
            own += (drop.p_above() <= 0.05, drop.estimate().high < 0.10)
    assert found[0.95][1] / times >= least_passed
    assert found[0.85][0] / times >= least_found
    assert found[0.95][0] / times <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / times)
    assert found[0.85][1] / times <= 0.025 + 2 * math.sqrt(0.025 * 0.975 / times)


def test_comparisons_that_agree_in_every_conversation_count_as_one():
    right = np.random.default_rng(3).random((1, 20)) < 0.9
    once = arm_of(np.repeat(right, 5, axis=0))
    often = arm_of(np.repeat(np.repeat(right, 5, axis=0), 4, axis=1), np.arange(20).repeat(4))
    one, many = (Contrast.of([(arm, 1.0)], 0.5).estimate() for arm in (once, often))
    assert (many.low, many.high) == pytest.approx((one.low, one.high))


def test_the_p_value_is_uniform_where_nothing_is_there():
    p_values = [
        Contrast.of([(drawn(0.6, seed=2 * n, rows=100), 1.0), (drawn(0.6, seed=2 * n + 1, rows=100), -1.0)]).p_above()
        for n in range(200)
    ]
    # Variances counted twice make it rarer than the level, never more frequent.
    assert np.mean(np.array(p_values) < 0.05) <= 0.09
    assert 0.3 < np.median(p_values) < 0.7
