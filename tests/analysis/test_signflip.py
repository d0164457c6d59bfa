"""The sign-flip test by prompt equals enumeration, scipy's permutation test and McNemar's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test

from rewardlab.analysis import signflip
from rewardlab.analysis.signflip import DRAWS, attainable_size, effective_prompts, sign_flip


def by_brute_force(totals: np.ndarray) -> float:
    """The share of all sign patterns whose sum is at least as far from 0 as the one seen."""
    signs = np.array(list(itertools.product((-1, 1), repeat=len(totals))))
    return float(np.mean(np.abs(signs @ totals) >= abs(totals.sum()) - 1e-9))


half_steps = st.lists(st.integers(-6, 6), min_size=1, max_size=9).map(lambda steps: np.array(steps) / 2)


@given(half_steps)
def test_multiples_of_one_half_get_the_p_of_all_patterns(totals):
    assert sign_flip(totals).p == pytest.approx(by_brute_force(totals), rel=1e-12)


@given(st.lists(st.floats(-9, 9).map(lambda x: x + 0.01), min_size=1, max_size=9))
def test_any_totals_of_few_prompts_get_the_p_of_all_patterns(totals):
    found = sign_flip(np.array(totals))
    assert found.p == pytest.approx(by_brute_force(np.array(totals)), rel=1e-12)
    assert "exact" in found.method


@given(half_steps)
def test_exchanging_the_models_leaves_p_as_it_is(totals):
    assert sign_flip(-totals).p == sign_flip(totals).p


@pytest.mark.parametrize(("won", "lost"), [(12, 3), (40, 40), (300, 210), (5, 0)])
def test_independent_outcomes_get_the_p_of_mcnemar(won, lost):
    totals = np.array([1.0] * won + [-1.0] * lost + [0.0] * 50)
    assert sign_flip(totals).p == pytest.approx(binomtest(won, won + lost).pvalue, rel=1e-9)


def test_many_prompts_of_many_sizes_are_exact_too():
    generator = np.random.default_rng(0)
    totals = generator.integers(-5, 6, 20_000) / 2 + np.where(generator.random(20_000) < 0.03, 0.5, 0.0)
    found = sign_flip(totals)
    assert "exact" in found.method
    spread = np.sqrt(np.square(totals).sum())
    from scipy.stats import norm

    assert found.p == pytest.approx(2 * norm.sf((totals.sum() - 0.25) / spread), rel=0.01)


def test_random_patterns_agree_with_scipys_permutation_test():
    totals = np.random.default_rng(3).normal(0.25, 1, 40)
    ours = sign_flip(totals)
    theirs = permutation_test(
        (totals,), np.sum, permutation_type="samples", n_resamples=40_000, rng=np.random.default_rng(1)
    )
    assert "random" in ours.method
    assert ours.p == pytest.approx(theirs.pvalue, abs=0.012)


def test_random_patterns_never_give_a_p_of_zero_and_repeat_with_their_seed():
    totals = np.linspace(1.0, 2.0, 60)
    assert sign_flip(totals).p == 1 / (1 + DRAWS)
    mixed = np.random.default_rng(0).normal(size=60)
    assert sign_flip(mixed, seed=1) == sign_flip(mixed, seed=1)
    assert sign_flip(mixed, seed=1) != sign_flip(mixed, seed=2)


def test_prompts_without_a_difference_say_nothing():
    totals = np.array([0.5, -1.0, 2.0, 1.5])
    assert sign_flip(np.concatenate([totals, np.zeros(30)])) == sign_flip(totals)
    assert sign_flip(np.zeros(12)).p == 1.0


def test_a_few_heavy_prompts_among_many_get_no_normal_limit():
    # Five prompts carry the sum, so that no p-value can be below that of five: 2/2⁵.
    heavy, light = np.ones(5), 1e-4 * np.random.default_rng(1).uniform(-1, 1, 5_000)
    found = sign_flip(np.concatenate([heavy, light]))
    assert "random" in found.method
    assert found.p == pytest.approx(2 / 2**5 / 2, abs=0.02), "half of the light ones reach what was seen"
    even = np.random.default_rng(2).uniform(0.9, 1.1, 5_100) * np.resize([1, -1], 5_100)
    assert "normal limit" in sign_flip(even).method


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e200])
def test_equal_prompts_count_fully_and_heavy_ones_alone(size):
    assert effective_prompts(np.full(40, size)) == pytest.approx(40)
    assert effective_prompts(size * np.concatenate([np.ones(3), np.full(500, 1e-6)])) == pytest.approx(3, rel=1e-6)
    assert effective_prompts(np.zeros(4)) == 0


def test_random_patterns_and_the_normal_limit_agree_with_all_patterns(monkeypatch):
    totals = np.random.default_rng(4).normal(0.3, 1, 14)
    exact = sign_flip(totals).p
    monkeypatch.setattr(signflip, "MOST_PATTERNS", 1)
    assert sign_flip(totals).p == pytest.approx(exact, abs=0.02)
    monkeypatch.setattr(signflip, "NORMAL_PROMPTS", 0)
    assert sign_flip(totals).p == pytest.approx(exact, abs=0.05)
    assert "normal limit" in sign_flip(totals).method


@given(half_steps)
def test_the_attainable_size_is_the_largest_share_of_patterns_whose_p_is_small_enough(totals):
    signs = np.array(list(itertools.product((-1, 1), repeat=len(totals))))
    sums = np.abs(signs @ totals)
    small = [reached for reached in np.unique(sums) if np.mean(sums >= reached) <= 0.05]
    wanted = np.mean(sums >= min(small)) if small else 0.0
    assert attainable_size(totals, alpha=0.05) == pytest.approx(wanted, abs=1e-12)


def test_many_sizes_of_many_prompts_take_work_in_proportion_to_prompts_and_sums(monkeypatch):
    done = 0

    def counted(first, second):
        nonlocal done
        done += len(first) * len(second)
        return np.correlate(first, second[::-1], "full")

    monkeypatch.setattr(signflip.np, "convolve", counted)
    totals = np.round(np.random.default_rng(0).normal(0, 30, 1_000)) / 2
    found = sign_flip(totals)
    assert "exact" in found.method
    # Each prompt moves every sum to two others; sums that are possible have one parity.
    assert done <= len(totals) * (1.1 * np.abs(2 * totals).sum() + 200 * 200)
    assert found.p == pytest.approx(_by_steps(totals), rel=1e-12)


def test_few_prompts_of_large_totals_take_no_operation_for_each_sum(monkeypatch):
    calls = 0

    def counted(first, second):
        nonlocal calls
        calls += 1
        return np.correlate(first, second[::-1], "full")

    monkeypatch.setattr(signflip.np, "convolve", counted)
    # Twenty prompts of hundreds of replies: thousands of pairs in each total.
    totals = np.round(np.random.default_rng(0).normal(0, 8_000, 20)) / 2
    found = sign_flip(totals)
    assert "exact" in found.method
    assert calls <= len(totals)
    assert found.p == pytest.approx(_by_steps(totals), rel=1e-12)


def _by_steps(totals: np.ndarray) -> float:
    """The exact p, one prompt after the other."""
    steps = np.abs(2 * totals).astype(int)
    whole = int(steps.sum())
    chances = np.zeros(2 * whole + 1)
    chances[whole] = 1.0
    for step in steps.tolist():
        chances = (np.roll(chances, step) + np.roll(chances, -step)) / 2
    return float(chances[np.abs(np.arange(-whole, whole + 1)) >= round(abs(2 * totals.sum()))].sum())
