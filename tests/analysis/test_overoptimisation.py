"""Curves, fits and comparisons of proxies: against formulas, and where the data cannot tell."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from rewardlab.analysis import stats
from rewardlab.analysis.best_of_n import Candidates, Curves, curves_of, kl_upper_bound
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.overoptimisation import (
    MOST_SIZES,
    adjusted,
    contrasts,
    fit_gain,
    judge,
    size_at,
    sizes_of,
    within_spread,
)
from rewardlab.analysis.paired import significance_of

MOST = 12
D_N = np.sqrt([kl_upper_bound(n) for n in range(1, MOST + 1)])


def of_form(alpha: float, beta: float, *, noise: float = 0.0, prompts: int = 40, seed: int = 0) -> np.ndarray:
    """[C, N] curves d(α − βd), α and β with noise by prompt, on levels of their own."""
    generator = np.random.default_rng(seed)
    own_alpha = alpha + noise * generator.normal(size=(prompts, 1))
    own_beta = beta + noise * generator.normal(size=(prompts, 1))
    return 10 * generator.normal(size=(prompts, 1)) + D_N * (own_alpha - own_beta * D_N)


def curves(gold_PN: np.ndarray) -> Curves:
    return Curves(prompts=tuple(map(str, range(len(gold_PN)))), proxy_PN=np.cumsum(np.abs(gold_PN), 1), gold_PN=gold_PN)


def test_a_curve_of_the_form_has_its_alpha_and_beta_to_rounding_and_its_highest_point() -> None:
    fit = fit_gain(of_form(1.5, 0.8))
    assert fit.alpha.value == pytest.approx(1.5, abs=1e-9)
    assert fit.beta.value == pytest.approx(0.8, abs=1e-9)
    assert fit.furthest < 1e-9
    noisy = fit_gain(of_form(1.5, 0.8, noise=0.4))
    assert noisy.alpha.low < 1.5 < noisy.alpha.high
    assert noisy.beta.low < 0.8 < noisy.beta.high
    assert noisy.why_not == ""
    assert noisy.highest is not None
    assert noisy.highest.value == pytest.approx(noisy.alpha.value / (2 * noisy.beta.value))
    assert noisy.highest.low < 1.5 / 1.6 < noisy.highest.high


def test_the_highest_point_is_held_where_its_beta_is_hardly_told_from_0() -> None:
    generator, held = np.random.default_rng(1), []
    for _ in range(400):
        of_alpha_C, of_beta_C = 0.8 * generator.normal(size=(2, 20))
        own_C2 = np.stack([1.0 + 0.5 * of_beta_C + 0.87 * of_alpha_C, 0.4 + of_beta_C], axis=1)
        fit = fit_gain(own_C2 @ np.stack([D_N, -(D_N**2)]), draws=1)
        if fit.highest is not None:
            held.append(fit.highest.low <= 1.0 / 0.8 <= fit.highest.high)
    assert 150 < len(held) < 250, "β is told from 0 in half of the draws"
    assert np.mean(held) >= 0.93, "by the spread of the quotient alone 88 % are held"


@pytest.mark.parametrize("prompts", [1, 2, 9])
def test_a_few_prompts_have_no_highest_point(prompts: int) -> None:
    assert fit_gain(of_form(1.0, 0.4, noise=0.01, prompts=prompts)).highest is None


def test_the_interval_of_the_highest_point_is_fiellers() -> None:
    own_C2 = np.random.default_rng(2).normal(size=(400, 2)) * 0.3 + (1.0, 0.4)
    fit = fit_gain(own_C2 @ np.stack([D_N, -(D_N**2)]), draws=1)
    alpha, beta = own_C2.mean(0)
    covariance = np.cov(own_C2.T) / 400 * student.ppf(0.975, 399) ** 2
    squares = [
        4 * (beta**2 - covariance[1, 1]), -4 * (alpha * beta - covariance[0, 1]), alpha**2 - covariance[0, 0]
    ]  # fmt: skip
    low, high = np.sort(np.roots(squares))
    assert fit.highest is not None
    assert (fit.highest.low, fit.highest.high) == pytest.approx((low, high), rel=5e-3)


def test_a_fit_is_weighted_least_squares_of_the_mean_curve() -> None:
    gold_CN = np.random.default_rng(0).normal(size=(30, MOST)).cumsum(1)
    gain_N = (gold_CN - gold_CN[:, :1]).mean(0)
    root_N = np.sqrt(np.gradient(D_N))
    design = np.stack([D_N, -(D_N**2)], 1) * root_N[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(design, gain_N * root_N, rcond=None)
    fit = fit_gain(gold_CN)
    assert (fit.alpha.value, fit.beta.value) == pytest.approx((alpha, beta))


def test_a_beta_that_may_be_zero_and_a_short_reach_cannot_be_told() -> None:
    straight = fit_gain(of_form(1.0, 0.0, noise=0.5))
    assert straight.why_not == "the interval of β includes 0"
    assert straight.highest is None
    short = fit_gain(of_form(1.5, 0.8, noise=0.1)[:, :4])
    assert short.why_not == "d reaches 0.80 only; take an n of 7 or more"
    assert fit_gain(of_form(1.5, 0.8, noise=0.1)[:, :7]).why_not == ""
    few = fit_gain(of_form(1.5, 0.8, noise=0.1, prompts=9))
    assert few.why_not == "there is no interval (too few prompts (9))"
    two = fit_gain(of_form(1.5, 0.8)[:, :2])
    assert math.isnan(two.alpha.value)
    assert two.why_not


def test_another_form_is_seen_and_the_form_itself_seldom_by_chance() -> None:
    step = np.where(D_N > 0.9, 1.0, 0.0) + 0.2 * np.random.default_rng(0).normal(size=(60, MOST)).cumsum(1)
    assert fit_gain(step).misfit < 0.01
    wrong = 0
    for seed in range(40):
        noise = 0.1 * np.random.default_rng(seed).normal(size=(60, MOST)).cumsum(1)
        wrong += fit_gain(of_form(1.5, 0.8, prompts=60) + noise, draws=199).misfit <= 0.05
    assert wrong <= 6


def test_a_curve_that_bends_upwards_has_no_highest_point() -> None:
    fit = fit_gain(of_form(1.0, -0.8, noise=0.1))
    assert fit.why_not == ""
    assert fit.highest is None


@given(n=st.floats(1.0, 1e6))
def test_a_size_has_its_bound(n: float) -> None:
    d = math.sqrt(max(math.log(n) - (n - 1) / n, 0.0))
    # Near n = 1 the bound is flat: d is what has to agree.
    again = size_at(d)
    assert math.sqrt(max(math.log(again) - (again - 1) / again, 0.0)) == pytest.approx(d, abs=1e-6)


def test_sizes_are_all_up_to_a_limit_and_then_thinned_with_both_ends() -> None:
    assert sizes_of(1) == (1,)
    assert sizes_of(MOST_SIZES) == tuple(range(1, MOST_SIZES + 1))
    for most in (33, 64, 1000):
        found = sizes_of(most)
        assert found[:16] == tuple(range(1, 17))
        assert found[-1] == most
        assert len(found) <= MOST_SIZES
        assert list(found) == sorted(set(found))


def test_a_spread_is_that_within_prompts() -> None:
    parts = [np.array([0.0, 2.0]), np.array([10.0, 11.0, 12.0]), np.array([5.0])]
    assert within_spread(parts) == pytest.approx(math.sqrt((2.0 + 2.0) / 3))
    assert within_spread([np.full(3, 0.1), np.full(4, 0.7)]) == 0.0
    assert within_spread([np.array([1.0])]) == 0.0


def test_a_proxy_is_told_in_its_own_spread_and_one_that_is_constant_not_at_all() -> None:
    generator = np.random.default_rng(0)
    candidates = [
        Candidates(prompt=str(p), proxy_K=generator.normal(size=5), gold_K=generator.normal(size=5)) for p in range(20)
    ]
    found = curves_of(candidates)
    plain, wide = (judge(found, proxy="a", prompts="in", scale=scale, draws=99) for scale in (1.0, 4.0))
    assert wide.scaled[3].high == pytest.approx(plain.points[3].proxy_gain.high / 4)
    assert plain.most == 5
    constant = judge(found, proxy="a", prompts="in", scale=0.0, draws=99)
    assert math.isnan(constant.scaled[3].value)


def test_verdicts_are_of_p_values_that_know_of_the_other_curves() -> None:
    turning = of_form(1.0, 1.0, noise=0.2)
    one = judge(curves(turning), proxy="a", prompts="in", scale=1.0, draws=199)
    assert one.turn.p == 1 / 200
    assert one.verdict == "undecided", "not yet adjusted"
    (alone,) = adjusted([one])
    assert alone.verdict == "turns over"
    among = adjusted([replace(one, turn=replace(one.turn, p=p)) for p in (0.03, 0.04, 0.9)])
    assert [own.adjusted_p for own in among] == pytest.approx([0.09, 0.09, 0.9])
    assert [own.verdict for own in among] == ["undecided"] * 3, "a fall of all that gold gained could hide"
    rising = judge(curves(of_form(1.0, 0.0, noise=0.05)), proxy="a", prompts="in", scale=1.0, draws=199)
    assert [own.verdict for own in adjusted([rising])] == ["no turn-over"]
    few = judge(curves(turning[:9]), proxy="a", prompts="in", scale=1.0, draws=99)
    assert [own.verdict for own in adjusted([few, one])] == ["undecided", "turns over"]


def test_two_proxies_are_told_apart_where_the_interval_shows_it_too() -> None:
    generator, doubted = np.random.default_rng(0), 0
    for _ in range(40):
        # In the mean the second gains nothing: seldom much, and otherwise it loses a little.
        change = np.exp(generator.normal(size=(30, 1))) - math.exp(0.5)
        pair = {"base": curves(np.zeros((30, 2))), "second": curves(change + np.zeros((30, 2)))}
        (found,) = contrasts({"in": pair})
        flips = significance_of(change[:, 0], tuple(map(str, range(30)))).p
        assert found.p >= flips
        assert found.p >= 0.05 or not found.difference.low <= 0 <= found.difference.high
        doubted += flips < 0.05 <= found.p
    assert doubted > 0


def test_proxies_are_paired_by_prompt_at_the_largest_n_and_p_values_know_of_each_other() -> None:
    generator = np.random.default_rng(0)
    base = 10 * generator.normal(size=(30, 1)) + np.zeros((30, 4))
    better = base + np.array([0.0, 0.1, 0.2, 0.3]) + 0.1 * generator.normal(size=(30, 4))
    same = base + 0.1 * generator.normal(size=(30, 4))
    own = {"base": curves(base + 0.1 * generator.normal(size=(30, 4))), "better": curves(better), "same": curves(same)}
    found = contrasts({"in": own, "out": own})
    assert [(one.prompts, one.first, one.second) for one in found[:4]] == [
        ("in", "base", "better"),
        ("in", "base", "same"),
        ("in", "better", "same"),
        ("out", "base", "better"),
    ]
    assert found[0].n == 4
    first, second = own["base"].gold_PN, own["better"].gold_PN
    assert first is not None
    assert second is not None
    assert found[0].difference.value == stats.mean(second[:, -1] - first[:, -1]).value
    assert found[0].difference.low > 0
    assert found[0].adjusted < 0.05 < found[1].adjusted
    assert [one.adjusted for one in found] == holm([one.p for one in found])
    few = contrasts({"in": {"base": curves(first[:9]), "better": curves(second[:9])}})
    assert math.isnan(few[0].p)


@pytest.mark.parametrize("change", [0.0, 1.0, -1.0])
def test_of_picks_that_hardly_ever_differ_nothing_is_said(change: float) -> None:
    """Of two judges that pick replies of equal gold but on four of fifty prompts, and of a curve that is flat there."""
    flat, other = np.zeros((50, 3)), np.zeros((50, 3))
    other[:4, 1:] = change
    (found,) = contrasts({"in": {"flat": curves(flat), "other": curves(other)}})
    assert math.isnan(found.difference.low)
    assert math.isnan(found.p)
    one = judge(curves(other), proxy="a", prompts="in", scale=1.0, draws=99)
    assert one.points[2].gold_gain is not None
    assert math.isnan(one.points[2].gold_gain.low)
    assert one.points[0].gold_gain is not None
    assert (one.points[0].gold_gain.low, one.points[0].gold_gain.high) == (0.0, 0.0), "a reply is itself"
    assert [own.verdict for own in adjusted([one])] == ["undecided"]
    assert "differ" in one.turn.fall.method
