"""Two models on the same comparisons: tests and intervals by hand, and the laws of exchanging them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import binom, binomtest, norm, ttest_1samp

from rewardlab.analysis.aligned import ScoreSet, align
from rewardlab.analysis.bounded import Unlikely
from rewardlab.analysis.paired import (
    PairComparison,
    compare_metric,
    compare_metrics,
    compare_pair,
    equivalence,
    margin_values,
    mcnemar,
)
from scored import rows_of
from skewed import failing_apart

N = 200
KEYS = tuple(map(str, range(N)))
DRAW = np.random.default_rng(4)
TRUTH = DRAW.normal(0.8, 1.0, N)
FIRST = np.stack([TRUTH + DRAW.normal(0, 1.0, N), np.zeros(N)], 1)
SECOND = 3 * np.stack([TRUTH + DRAW.normal(0, 0.6, N), np.zeros(N)], 1)


def compared(first=FIRST, second=SECOND, *, betas=(1.0, 1.0), **more) -> PairComparison:
    sets = [
        ScoreSet(name=name, rows=rows_of(scores), beta=beta)
        for name, scores, beta in zip(("a", "b"), (first, second), betas, strict=True)
    ]
    return compare_pair(align(sets), 1, **more)


def test_the_numbers_are_those_of_a_loop():
    found = compared()
    right = [(one[0] > one[1], two[0] > two[1]) for one, two in zip(FIRST, SECOND, strict=True)]
    only_a, only_b = sum(a and not b for a, b in right), sum(b and not a for a, b in right)
    assert (found.verdicts.only_first, found.verdicts.only_second) == (only_a, only_b)
    assert found.metrics["accuracy"].difference.value == pytest.approx((only_b - only_a) / N)
    assert found.metrics["accuracy"].test.p == pytest.approx(binomtest(only_a, only_a + only_b).pvalue)
    assert found.mcnemar is not None
    assert found.mcnemar.p == pytest.approx(found.metrics["accuracy"].test.p)
    nll = [np.log1p(np.exp(-(scores[:, 0] - scores[:, 1]))) for scores in (FIRST, SECOND)]
    assert found.metrics["nll"].difference.value == pytest.approx((nll[1] - nll[0]).mean())
    size = [scores[:, 0].mean() / np.sqrt(np.square(scores[:, 0]).mean()) for scores in (FIRST, SECOND)]
    assert found.metrics["margin"].first.value == pytest.approx(size[0])
    assert found.metrics["margin"].difference.value == pytest.approx(size[1] - size[0])


def test_some_metrics_alone_are_those_of_the_whole_comparison():
    sets = [ScoreSet(name=name, rows=rows_of(scores), beta=1.0) for name, scores in (("a", FIRST), ("b", SECOND))]
    aligned, whole = align(sets), compared()
    some = compare_metrics(aligned, ["accuracy", "nll"])
    assert some.metrics == {name: whole.metrics[name] for name in ("accuracy", "nll")}
    assert (some.first, some.second, some.verdicts) == (whole.first, whole.second, whole.verdicts)
    assert some.comparisons == whole.comparisons == N


def test_exchanging_the_models_negates_differences_and_keeps_p():
    here, there = compared(), compared(SECOND, FIRST)
    for metric, found in here.metrics.items():
        other = there.metrics[metric]
        assert other.test.p == found.test.p
        assert other.difference.value == pytest.approx(-found.difference.value)
        assert other.difference.low == pytest.approx(-found.difference.high)
        assert other.difference.high == pytest.approx(-found.difference.low)
    assert there.smallest == here.smallest


def test_a_model_does_not_differ_from_itself():
    found = compared(FIRST, FIRST)
    assert found.metrics["accuracy"].test.p == 1.0
    assert found.metrics["accuracy"].difference.value == 0.0
    # Equal verdicts on 200 pairs do not prove that no pair would part them.
    assert found.metrics["accuracy"].difference.low < 0 < found.metrics["accuracy"].difference.high
    assert math.isnan(found.smallest.value)


def test_the_margin_in_standard_deviations_has_no_scale():
    once, scaled = margin_values(SECOND[:, 0]), margin_values(1e-3 * SECOND[:, 0])
    assert np.allclose(once, scaled)
    assert abs(once.mean()) <= 1
    assert not margin_values(np.zeros(5)).any()


def test_the_interval_of_the_margin_is_that_of_the_bootstrap():
    values = margin_values(FIRST[:, 0])
    draws = FIRST[:, 0][np.random.default_rng(0).integers(0, N, (4000, N))]
    spread = (draws.mean(1) / np.sqrt(np.square(draws).mean(1))).std()
    assert values.std(ddof=1) / math.sqrt(N) == pytest.approx(spread, rel=0.05)


def test_a_clear_loss_of_margin_is_as_clear_as_by_students_test():
    a, b = margin_values(FIRST[:, 0]), margin_values(SECOND[:, 0])
    assert compared().metrics["margin"].test.p == pytest.approx(ttest_1samp(b - a, 0).pvalue, abs=0.01)


def test_mcnemar_is_for_independent_rows_without_ties():
    right, wrong = np.ones(12), np.zeros(12)
    assert mcnemar(right, wrong, KEYS[:12]) is not None
    assert mcnemar(right, wrong, ("a",) * 12) is None
    assert mcnemar(np.full(12, 0.5), wrong, KEYS[:12]) is None


def test_without_a_beta_there_is_no_nll():
    assert "nll" not in compared(betas=(1.0, None)).metrics


# --- non-inferiority and equivalence --------------------------------------------------------------------------


def changes(better: int, worse: int, n: int = N) -> np.ndarray:
    return np.array([1.0] * better + [-1.0] * worse + [0.0] * (n - better - worse))


def test_tost_of_accuracies_by_hand():
    """20 pairs won, 16 lost, of 200; margin 0.05. The larger p of two: Wilson's interval of the share (1 + change)/2
    for as many plain outcomes as these are worth is left where its limit is the margin; and Tango's score test."""
    change = changes(20, 16)
    share = 0.5 + change.mean() / 2
    row = np.var(change / 2)
    row = (N * row + share * (1 - share)) / (N + 1)
    worth = share * (1 - share) / (row / N)
    bounds = [(1 - 0.05) / 2, (1 + 0.05) / 2]
    z = [(share - bound) / math.sqrt(bound * (1 - bound) / worth) for bound in bounds]
    found = equivalence("accuracy", change, KEYS, margin=0.05)
    worse, better = (
        max(norm.sf(z[0]), norm.sf(tango(20, 16, -0.05))),
        max(norm.cdf(z[1]), norm.cdf(tango(20, 16, 0.05))),
    )
    assert found.not_worse.p == pytest.approx(worse, rel=1e-6)
    assert found.equivalent.p == pytest.approx(max(worse, better), rel=1e-6)


def tango(won: int, lost: int, limit: float) -> float:
    """Tango's (1998) score statistic of a difference of 200 pairs."""
    b = -won - lost + (2 * N - won + lost) * limit
    losing = (math.sqrt(b * b + 8 * N * lost * limit * (1 - limit)) - b) / (4 * N)
    return (won - lost - N * limit) / math.sqrt(N * (2 * losing + limit * (1 - limit)))


def test_models_that_differ_on_few_pairs_are_not_worse_no_more_often_than_told():
    """3 % of 400 pairs lost, none won, at the margin; by the interval alone 9 % were found not worse at 5 %."""
    keys, found = tuple(map(str, range(400))), 0.0
    for lost in range(40):
        if equivalence("accuracy", changes(0, lost, 400), keys, margin=0.03).not_worse.p <= 0.05:
            found += binom.pmf(lost, 400, 0.03)
    assert found <= 0.05


def test_tost_of_many_pairs_is_that_of_the_normal_approximation():
    change = changes(2000, 1900, 20_000)
    keys = tuple(map(str, range(20_000)))
    error = change.std() / math.sqrt(20_000)
    found = equivalence("accuracy", change, keys, margin=0.02)
    by_hand = [norm.sf((change.mean() + 0.02) / error), norm.sf((0.02 - change.mean()) / error)]
    assert found.not_worse.p == pytest.approx(by_hand[0], rel=0.1)
    assert found.equivalent.p == pytest.approx(max(by_hand), rel=0.1)


@pytest.mark.parametrize("margin", [0.02, 0.05, 0.08, 0.12, 0.3])
@pytest.mark.parametrize(("better", "worse"), [(20, 16), (16, 20), (4, 30), (0, 0)])
def test_the_tests_agree_with_their_ninety_percent_interval(margin, better, worse):
    found = equivalence("accuracy", changes(better, worse), KEYS, margin=margin)
    assert found.is_not_worse == (found.interval.low > -margin)
    assert found.is_equivalent == (-margin < found.interval.low and found.interval.high < margin)


def test_more_nll_is_worse():
    change = np.random.default_rng(0).normal(0.2, 0.5, N)
    worse = equivalence("nll", change, KEYS, margin=0.1)
    better = equivalence("nll", -change, KEYS, margin=0.1)
    assert worse.not_worse.p > 0.9
    assert better.not_worse.p < 0.01
    assert worse.equivalent.p == pytest.approx(better.equivalent.p, abs=1e-6)


def sharp_pairs(generator: np.random.Generator, count: int) -> np.ndarray:
    """Logits of the preferred replies by a model that is right on nine of ten, and by one as good that is too sure."""
    true = 6 * generator.normal(size=count)
    sign = np.where(generator.random(count) < expit(true), 1.0, -1.0)
    first, second = (true + 0.5 * generator.normal(size=count) for _ in range(2))
    return sign * np.stack([first, 1.6 * second])


@pytest.mark.slow
def test_a_model_that_is_too_sure_is_not_called_as_good_because_few_of_its_mistakes_were_drawn():
    def nll(logits: np.ndarray) -> np.ndarray:
        first, second = np.logaddexp(0, -logits)
        return second - first

    margin = float(nll(sharp_pairs(np.random.default_rng(0), 400_000)).mean())
    generator, keys, found = np.random.default_rng(1), tuple(map(str, range(40))), []
    for _ in range(150):
        logits = sharp_pairs(generator, 40)
        ends = Unlikely.of_nll(logits)
        both = [equivalence("nll", nll(logits), keys, margin=margin, unlikely=one) for one in (ends, None)]
        found.append([one.is_not_worse for one in both])
        assert both[0].is_not_worse == (both[0].interval.high < margin), "the interval says what the test says"
        assert both[0].interval.low <= both[1].interval.low
    held, plain = np.mean(found, axis=0)
    assert held <= 0.05 + 2 * (0.05 * 0.95 / 150) ** 0.5
    assert plain > 0.1, "by what varied alone"


def test_a_margin_of_nll_knows_what_mistakes_would_cost():
    logits = sharp_pairs(np.random.default_rng(2), 60)
    logits = np.abs(logits)
    change = np.diff(np.logaddexp(0, -logits), axis=0)[0]
    keys = tuple(map(str, range(60)))
    one, other = (
        equivalence("nll", change, keys, margin=0.02, unlikely=ends) for ends in (Unlikely.of_nll(logits), None)
    )
    assert other.not_worse.p < 0.001
    assert one.not_worse.p > 0.05, "none of its mistakes was drawn"
    assert one.interval.high > 0.02 > other.interval.high


def test_where_models_disagree_a_mistake_is_what_both_together_do_not_expect():
    ends = Unlikely.of_nll(np.array([[5.0, 2.0], [-1.0, 1.0]]))
    chance = 1 / (1 + np.exp([5.0, 2.0])) + 1 / (1 + np.exp([-1.0, 1.0]))
    assert ends.chances == pytest.approx(chance / 2)
    lost = np.logaddexp(0, [[5.0, 2.0], [-1.0, 1.0]])
    assert ends.values == pytest.approx(lost[1] - lost[0])


def test_below_ten_prompts_nothing_is_said_about_equivalence():
    found = equivalence("accuracy", changes(3, 2), tuple(str(number % 9) for number in range(N)), margin=0.05)
    assert math.isnan(found.not_worse.p)
    assert not found.is_not_worse


def test_the_limit_of_the_interval_is_where_p_is_five_percent():
    change = changes(20, 16)

    def beyond(margin: float) -> float:
        return equivalence("accuracy", change, KEYS, margin=margin).not_worse.p - 0.05

    low = equivalence("accuracy", change, KEYS, margin=0.05).interval.low
    assert brentq(beyond, 1e-3, 0.5, xtol=1e-9) == pytest.approx(-low, abs=1e-6)


def test_models_of_equal_nll_that_fail_in_different_ways_are_seldom_told_apart():
    generator, keys = np.random.default_rng(0), tuple(map(str, range(50)))
    found = [compare_metric("nll", *failing_apart(generator), keys) for _ in range(150)]
    assert np.mean([one.test.p < 0.05 for one in found]) < 0.07
    for one in found:
        assert one.test.p >= 0.05 or not one.difference.low <= 0 <= one.difference.high
    assert any("the interval's p is larger" in one.test.method for one in found)
    assert len({one.test.method for one in found}) > 1


def test_below_ten_prompts_p_of_a_mean_is_that_of_the_signs():
    found = compare_metric("nll", np.ones(9), np.arange(9) / 9, tuple("abcdefghi"))
    assert found.test.p == 2 / 2**9
    assert math.isnan(found.difference.low)
