"""Best-of-n curves equal brute force over all subsets, and keep the laws of a maximum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.analysis import stats
from rewardlab.analysis.best_of_n import (
    Candidates,
    Point,
    curves_of,
    kl_upper_bound,
    picked,
    points_of,
)
from rewardlab.core.errors import DataError

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12)
TIED = st.lists(st.sampled_from([-1.5, 0.0, 0.5, 2.0]), min_size=1, max_size=8)


def best_of_n(candidates_P: Sequence[Candidates], *, most: int | None = None) -> tuple[Point, ...]:
    return points_of(curves_of(candidates_P, most=most))


def by_all_subsets(proxy: Sequence[float], gold: Sequence[float], n: int) -> float:
    """The mean over all subsets of n replies, each with the mean gold score of its best replies."""
    values = []
    for subset in combinations(range(len(proxy)), n):
        best = max(proxy[i] for i in subset)
        values.append(np.mean([gold[i] for i in subset if proxy[i] == best]))
    return float(np.mean(values))


@settings(max_examples=60, deadline=None)
@given(proxy=st.one_of(TIED, SCORES.map(lambda scores: scores[:8])), seed=st.integers(0, 999))
def test_a_curve_is_the_mean_over_all_subsets_with_ties_and_without(proxy: list[float], seed: int) -> None:
    gold = np.random.default_rng(seed).normal(size=len(proxy)).tolist()
    for judge in (proxy, gold):
        found = picked(np.array(proxy), np.array(judge), most=len(proxy))
        wanted = [by_all_subsets(proxy, judge, n) for n in range(1, len(proxy) + 1)]
        assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12 * (1 + np.ptp(judge)))


def test_tied_replies_are_picked_equally_often() -> None:
    """Of 1, 5, 5 two are drawn: {5, 5}, {1, 5}, {1, 5}. Each of the tied ones is picked in half of the cases."""
    assert picked(np.array([5.0, 1.0, 5.0]), np.array([4.0, 100.0, 8.0]), most=3) == pytest.approx([112 / 3, 6.0, 6.0])


@settings(deadline=None)
@given(scores=SCORES)
def test_one_reply_is_the_mean_and_all_are_the_largest(scores: list[float]) -> None:
    found = picked(np.array(scores), np.array(scores), most=len(scores))
    assert found[0] == pytest.approx(np.mean(scores), rel=1e-12, abs=1e-12 * (1 + np.ptp(scores)))
    assert found[-1] == max(scores)


@settings(deadline=None)
@given(scores=st.lists(SCORES, min_size=1, max_size=4))
def test_the_curve_of_the_proxy_never_falls(scores: list[list[float]]) -> None:
    points = best_of_n([Candidates(prompt=str(number), proxy_K=own) for number, own in enumerate(scores)])
    values = [point.proxy.value for point in points]
    assert values == sorted(values)
    assert all(point.proxy_gain.value >= 0 for point in points)
    assert len(points) == min(map(len, scores))


@settings(deadline=None)
@given(proxy=st.one_of(TIED, SCORES), data=st.data())
def test_the_order_of_the_replies_changes_nothing(proxy: list[float], data: st.DataObject) -> None:
    gold = np.arange(len(proxy), dtype=float)
    order = data.draw(st.permutations(range(len(proxy))))
    found = picked(np.array(proxy)[order], gold[order], most=len(proxy))
    assert found == pytest.approx(picked(np.array(proxy), gold, most=len(proxy)), rel=1e-12, abs=1e-12)


@pytest.mark.slow
def test_thousands_of_replies_stay_finite_and_rise_to_the_largest() -> None:
    """The mean of the largest of n of 1, …, K is n(K + 1)/(n + 1)."""
    num = 5000
    scores = np.random.default_rng(0).permutation(np.arange(1.0, num + 1))
    found = picked(scores, scores, most=num)
    n = np.arange(1, num + 1)
    assert found == pytest.approx(n * (num + 1) / (n + 1), rel=1e-12)
    assert (np.diff(found) > 0).all()
    assert found[-1] == num


def test_many_replies_with_ties_equal_exact_whole_binomials() -> None:
    """The weights C(i − 1, n − 1)/C(K, n) as fractions of whole numbers, far beyond what a float can hold."""
    generator, num, most = np.random.default_rng(3), 1200, 900
    proxy, gold = generator.integers(0, 400, num).astype(float), generator.normal(size=num)
    found = picked(proxy, gold, most=most)
    order = np.argsort(proxy, kind="stable")
    level = {value: float(gold[proxy == value].mean()) for value in np.unique(proxy)}
    for n in (2, 31, 500, most):
        whole = math.comb(num, n)
        weights = [Fraction(math.comb(i, n - 1), whole) for i in range(num)]
        assert sum(weights) == 1
        exact = math.fsum(float(weight) * level[proxy[k]] for weight, k in zip(weights, order, strict=True))
        assert found[n - 1] == pytest.approx(exact, abs=1e-12)


def test_curves_of_prompts_have_the_means_of_the_points() -> None:
    generator = np.random.default_rng(0)
    candidates = [
        Candidates(prompt=f"p{p % 15}", proxy_K=generator.normal(size=6), gold_K=generator.normal(size=6))
        for p in range(20)
    ]
    curves = curves_of(candidates, most=4)
    assert curves.proxy_PN.shape == (20, 4)
    assert curves.gold_PN is not None
    assert points_of(curves)[2].gold == stats.mean(curves.gold_PN[:, 2], curves.prompts)
    bare = curves_of([Candidates(prompt="a", proxy_K=[1.0, 2.0])])
    assert bare.gold_PN is None
    assert points_of(bare)[0].gold is None


def test_a_proxy_that_says_the_opposite_of_gold_picks_ever_worse_replies() -> None:
    proxy = np.arange(6.0)
    assert (np.diff(picked(proxy, -proxy, most=6)) < 0).all()


def test_intervals_are_over_prompts_and_gains_within_them() -> None:
    generator = np.random.default_rng(0)
    levels = 10 * np.arange(20.0)
    scores_PK = levels[:, None] + generator.normal(size=(20, 5))
    candidates = [Candidates(prompt=f"p{p}", proxy_K=own, gold_K=-own) for p, own in enumerate(scores_PK)]
    points = best_of_n(candidates)
    assert [point.n for point in points] == [1, 2, 3, 4, 5]
    assert points[-1].proxy == stats.mean(scores_PK.max(axis=1))
    assert points[-1].proxy_gain.value == pytest.approx(float(np.mean(scores_PK.max(1) - scores_PK.mean(1))))
    # Levels of prompts differ by far more than replies: the level is hardly known, what is gained is.
    assert points[-1].proxy.high - points[-1].proxy.low > 20
    assert points[-1].proxy_gain.high - points[-1].proxy_gain.low < 1
    for point in points:
        assert point.gold is not None
        assert point.gold_gain is not None
        assert point.gold.value == pytest.approx(-point.proxy.value)
        assert point.gold_gain.value <= 0


def test_prompts_of_one_name_are_one_prompt_and_few_have_no_interval() -> None:
    scores_PK = np.random.default_rng(0).normal(size=(24, 3))
    apart, repeated, few = (
        best_of_n([Candidates(prompt=str(p % num), proxy_K=own) for p, own in enumerate(scores_PK)])[1].proxy
        for num in (24, 12, 9)
    )
    assert (apart.n, repeated.n, few.n) == (24, 12, 9)
    assert apart.value == repeated.value == few.value
    assert math.isnan(few.low)
    assert few.method == "too few prompts (9)"


def test_with_replies_of_different_numbers_the_curve_ends_at_the_fewest_and_uses_all() -> None:
    points = best_of_n([Candidates(prompt="a", proxy_K=[1.0, 2.0]), Candidates(prompt="b", proxy_K=[0.0, 3.0, 9.0])])
    assert [point.proxy.value for point in points] == pytest.approx([(1.5 + 4.0) / 2, (2.0 + (3 + 9 + 9) / 3) / 2])
    assert len(best_of_n([Candidates(prompt="a", proxy_K=[1.0, 2.0, 3.0])], most=2)) == 2


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        ([], "got none"),
        ([Candidates(prompt="ice", proxy_K=[])], "prompt 'ice': it has no replies"),
        ([Candidates(prompt="ice", proxy_K=[1.0, math.nan])], "prompt 'ice': the score of reply 1 .* is nan"),
        ([Candidates(prompt="ice", proxy_K=[None, 1.0])], "prompt 'ice': the score of reply 0 .* is None"),
        (
            [Candidates(prompt="ice", proxy_K=[1.0, 2.0], gold_K=[1.0, math.inf])],
            "prompt 'ice': the gold score of reply 1 .* is inf",
        ),
        (
            [Candidates(prompt="ice", proxy_K=[1.0], gold_K=[1.0]), Candidates(prompt="fog", proxy_K=[1.0])],
            "prompt 'fog': it has 1 reply and none of their gold scores",
        ),
        ([Candidates(prompt="ice", proxy_K=[1.0], gold_K=[1.0, 2.0])], "1 reply and 2 of their gold scores"),
    ],
)
def test_what_has_no_score_is_an_error_that_names_the_prompt(candidates: list[Candidates], said: str) -> None:
    with pytest.raises(DataError, match=said):
        best_of_n(candidates)


def divergence(probabilities: np.ndarray, scores: np.ndarray, n: int) -> float:
    """KL of best-of-n from the policy, by its probability of each outcome; ties are broken at random."""
    best = np.zeros_like(probabilities)
    for score in set(scores):
        tied = scores == score
        at_most, below = probabilities[scores <= score].sum(), probabilities[scores < score].sum()
        best[tied] = (at_most**n - below**n) * probabilities[tied] / probabilities[tied].sum()
    kept = best > 0
    return float(np.sum(best[kept] * np.log(best[kept] / probabilities[kept])))


@settings(deadline=None)
@given(
    masses=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=9),
    levels=st.integers(1, 9),
    n=st.integers(1, 40),
)
def test_the_bound_is_never_below_the_divergence(masses: list[float], levels: int, n: int) -> None:
    probabilities = np.array(masses) / sum(masses)
    scores = np.arange(len(masses)) % levels
    assert divergence(probabilities, scores.astype(float), n) <= kl_upper_bound(n) + 1e-12


def test_the_bound_is_the_divergence_where_no_two_draws_are_equal_and_far_above_it_where_all_are() -> None:
    for n in (2, 16):
        gaps = [
            kl_upper_bound(n) - divergence(np.full(number, 1 / number), np.arange(float(number)), n)
            for number in (20, 200, 2000)
        ]
        assert gaps[0] > gaps[1] > gaps[2] > 0
        assert gaps[2] < 1e-4
        assert divergence(np.array([1.0]), np.zeros(1), n) == 0 < kl_upper_bound(n)
    assert kl_upper_bound(1) == 0
