"""Agreement with gold scores: match rate by a loop, correlations of scipy, intervals like those of the bootstrap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import kendalltau, pearsonr, spearmanr, t

from rewardlab.analysis.agreement import CORRELATIONS, agreement, correlation, deal_groups

DRAW = np.random.default_rng(0)
GOLD = DRAW.normal(size=400)
OURS = 0.7 * GOLD + DRAW.normal(0, 0.7, 400)
KEYS = tuple(str(number // 2) for number in range(400))


@pytest.mark.parametrize(("name", "theirs"), [("Pearson", pearsonr), ("Spearman", spearmanr), ("Kendall", kendalltau)])
def test_correlations_are_those_of_scipy(name, theirs):
    found = correlation(OURS, GOLD, KEYS, measure=CORRELATIONS[name])
    assert found.value == pytest.approx(theirs(OURS, GOLD).statistic)
    assert -1 <= found.low < found.value < found.high <= 1
    assert found.n == 200


def test_the_interval_of_independent_rows_is_fishers():
    found = correlation(OURS, GOLD, tuple(map(str, range(400))), measure=CORRELATIONS["Pearson"])
    centre, reach = math.atanh(found.value), 1.96 / math.sqrt(397)
    assert found.low == pytest.approx(math.tanh(centre - reach), abs=0.02)
    assert found.high == pytest.approx(math.tanh(centre + reach), abs=0.02)


def test_prompts_are_dealt_into_a_hundred_groups_of_like_size_and_fewer_into_one_each():
    keys = [f"prompt {number}" for number in range(250)]
    group_R = deal_groups(keys, [key for key in keys for _ in range(2)])
    assert sorted(set(np.bincount(group_R))) == [4, 6]
    assert len(set(group_R)) == 100
    assert sorted(deal_groups(keys[:7], keys[:7])) == list(range(7))


def test_rows_that_repeat_by_prompt_widen_it():
    twice = np.repeat(OURS, 4), np.repeat(GOLD, 4)
    alone = correlation(OURS, GOLD, tuple(map(str, range(400))), measure=CORRELATIONS["Pearson"])
    found = correlation(*twice, tuple(str(number // 4) for number in range(1600)), measure=CORRELATIONS["Pearson"])
    assert found.high - found.low == pytest.approx(alone.high - alone.low, rel=1e-6)


def test_the_order_of_rows_changes_nothing():
    order = DRAW.permutation(400)
    moved = correlation(
        OURS[order], GOLD[order], tuple(KEYS[index] for index in order), measure=CORRELATIONS["Kendall"]
    )
    wanted = correlation(OURS, GOLD, KEYS, measure=CORRELATIONS["Kendall"])
    assert (moved.low, moved.value, moved.high) == pytest.approx((wanted.low, wanted.value, wanted.high))


def test_without_variation_or_prompts_there_is_no_number_or_no_interval():
    assert math.isnan(correlation(np.ones(400), GOLD, KEYS, measure=CORRELATIONS["Pearson"]).value)
    few = correlation(OURS, GOLD, tuple(str(number % 9) for number in range(400)), measure=CORRELATIONS["Pearson"])
    assert few.value > 0.5
    assert math.isnan(few.low)


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize("count", [60, 120, 250])
def test_one_order_has_no_interval_whatever_rounding_leaves_of_it(name, count):
    for sign in (1, -1):
        found = correlation(
            OURS[:count], sign * (3 * OURS[:count] + 1), tuple(map(str, range(count))), measure=CORRELATIONS[name]
        )
        assert found.value == sign
        assert math.isnan(found.low)
        assert found.method == "all in one order"


@pytest.mark.parametrize("name", CORRELATIONS)
def test_a_correlation_that_one_prompt_decides_has_no_interval(name):
    gold = np.zeros(400)
    gold[0] = 1.0
    keys = tuple(map(str, range(400)))
    found = correlation(OURS, gold, keys, measure=CORRELATIONS[name])
    assert np.isfinite(found.value)
    assert math.isnan(found.low)
    assert found.method == "one prompt decides it"
    gold[200:] = 1.0
    assert correlation(OURS, gold, keys, measure=CORRELATIONS[name]).low > -1


def test_the_match_rate_counts_ties_half_and_leaves_gold_ties_out():
    margins = np.array([1.0, -1.0, 0.0, 2.0, -3.0] * 8)
    gold = np.array([2.0, 1.0, 1.0, 0.0, -1.0] * 8)
    found = agreement(
        margins_N=margins,
        gold_margins_N=gold,
        prompts_N=tuple(map(str, range(40))),
        scores_R=OURS,
        gold_scores_R=GOLD,
        prompts_R=KEYS,
    )
    assert found.match.value == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found.gold_ties == 8


@pytest.mark.parametrize("name", ["Pearson", "Kendall"])
def test_few_prompts_have_the_jackknife_of_each_with_one_degree_of_freedom_less(name: str) -> None:
    first, second, count = OURS[:12], GOLD[:12], 12
    value_of = CORRELATIONS[name]
    left = [value_of(np.delete(first, one), np.delete(second, one)) for one in range(count)]
    centre = math.atanh(value_of(first, second))
    error = math.sqrt((count - 1) / count * float(np.square(np.arctanh(left) - centre).sum()))
    reach = float(t.ppf(0.975, count - 1)) * error
    found = correlation(first, second, tuple(map(str, range(count))), measure=value_of)
    assert (found.low, found.high) == pytest.approx((math.tanh(centre - reach), math.tanh(centre + reach)))
