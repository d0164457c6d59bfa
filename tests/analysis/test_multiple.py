"""Holm's correction, the set of models that may be the best, and ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.analysis.multiple import confidence_set, holm, standings
from rewardlab.analysis.signflip import sign_flip
from skewed import failing_apart

p_values = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


@given(p_values)
def test_holm_is_the_closed_test_of_bonferroni(p_values):
    """An adjusted p-value is the largest Bonferroni p-value of all sets of hypotheses that hold this one."""
    for index, found in enumerate(holm(p_values)):
        others = [other for other in range(len(p_values)) if other != index]
        sets = [(index, *rest) for size in range(len(p_values)) for rest in itertools.combinations(others, size)]
        worst = max(min(1.0, len(chosen) * min(p_values[one] for one in chosen)) for chosen in sets)
        assert found == pytest.approx(worst)


def gains(n: int, *accuracies: float, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {f"m{number}": (generator.random(n) < share).astype(float) for number, share in enumerate(accuracies)}


def test_the_best_and_those_like_it_may_be_the_best_and_a_bad_one_may_not():
    found = standings(gains(600, 0.5, 0.8, 0.8), np.arange(600))
    assert found["m0"].p_best < 0.05 < min(found["m1"].p_best, found["m2"].p_best)
    assert max(one.p_best for one in found.values()) == 1.0
    assert found["m0"].rank.value == found["m0"].rank.low == found["m0"].rank.high == 3
    assert [(found[name].rank.low, found[name].rank.high) for name in ("m1", "m2")] == [(1, 2), (1, 2)]
    assert sum(one.first for one in found.values()) == pytest.approx(1)


def test_equal_models_share_their_rank_and_may_all_be_the_best():
    one = gains(50, 0.7)["m0"]
    found = standings({"a": one, "b": one, "c": one}, np.arange(50))
    assert {name: own.rank.value for name, own in found.items()} == {"a": 2.0, "b": 2.0, "c": 2.0}
    assert all(own.p_best > 0.5 for own in found.values())
    assert found["a"].first == pytest.approx(1 / 3)


def test_a_model_far_below_gets_the_smallest_p_that_the_draws_allow():
    totals = np.stack([np.full(200, 0.9), np.full(200, 0.1)], 1)
    assert confidence_set(totals, draws=999).tolist() == [1.0, 1 / 1000]


def test_of_two_models_the_worse_has_the_p_of_the_sign_flip_test():
    totals = np.random.default_rng(5).integers(0, 3, (60, 2)) / 1.0
    exact = sign_flip(totals[:, 1] - totals[:, 0]).p
    assert min(confidence_set(totals, draws=20_000)) == pytest.approx(exact, abs=0.01)


def test_below_ten_prompts_nothing_is_said():
    found = standings(gains(40, 0.5, 0.9, 0.9), np.arange(40) % 9)
    assert math.isnan(found["m0"].p_best)
    assert math.isnan(found["m0"].rank.low)


def test_models_of_equal_nll_that_fail_in_different_ways_may_all_be_the_best():
    generator, prompts_N = np.random.default_rng(1), np.arange(50)
    sure, unsure = 0, 0
    for seed in range(60):
        timid, bold = failing_apart(generator)
        gains_of = {"timid": -timid, "bold": -bold, "between": -(timid + bold) / 2}
        flips = standings(gains_of, prompts_N, draws=20, flips=499, seed=seed)
        both = standings(gains_of, prompts_N, draws=20, flips=499, seed=seed, of_any_size=True)
        sure += min(one.p_best for one in flips.values()) < 0.05
        unsure += min(one.p_best for one in both.values()) < 0.05
        assert all(both[name].p_best >= flips[name].p_best for name in gains_of)
    assert sure > 6
    assert unsure <= 4


def test_a_model_that_is_worse_everywhere_is_taken_out_by_both():
    base = np.random.default_rng(2).random(40)
    found = standings({"good": -base, "like it": -base + 1e-3, "bad": -base - 1}, np.arange(40), of_any_size=True)
    assert found["bad"].p_best < 0.01
    assert found["like it"].p_best == 1


@pytest.mark.slow
def test_many_models_that_are_equally_good_are_all_kept_in_most_samples():
    kept = [
        min(one.p_best for one in standings(gains(150, *[0.7] * 6, seed=seed), np.arange(150), draws=300).values())
        for seed in range(40)
    ]
    assert np.mean(np.array(kept) >= 0.05) >= 0.85


def test_of_four_models_whose_gains_have_long_tails_upwards_few_are_taken_out():
    generator, out = np.random.default_rng(0), 0
    for _ in range(150):
        drawn = np.exp(1.5 * generator.normal(size=(4, 15)))
        found = standings(dict(zip("abcd", drawn, strict=True)), np.arange(15), of_any_size=True, draws=5, flips=499)
        out += min(own.p_best for own in found.values()) < 0.05
    assert out / 150 < 0.09, "by flips and by intervals alone 12 %: the worst is the one whose large gains are missing"


def test_models_that_take_each_others_gains_do_not_hide_one_that_is_worse():
    generator = np.random.default_rng(0)
    drawn = generator.normal(size=(4, 30)) - np.array([[2.0], [0.0], [0.0], [0.0]])
    found = standings(dict(zip("abcd", drawn, strict=True)), np.arange(30), of_any_size=True)
    assert [own.p_best < 0.01 for own in found.values()] == [True, False, False, False]
