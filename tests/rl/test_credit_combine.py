"""Rewards of environment and model as one, before anything is normalised."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import ConfigError
from rewardlab.rl import RULES, RolloutError, advantages, combine
from rewardlab.rl.credit import Combined

FORMULAS = {
    "replace": lambda e, s, c: c * s,
    "add": lambda e, s, c: e + c * s,
    "multiply": lambda e, s, c: e * c * s,
    "weighted": lambda e, s, c: (1 - c) * e + c * s,
    "bonus": lambda e, s, c: e + c * s if e > 0 else e,
}


@pytest.mark.slow
@given(
    how=st.sampled_from([*FORMULAS]),
    rows=st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(0, 2)), min_size=1, max_size=9),
    coefficient=st.floats(0, 1),
)
@settings(max_examples=100, deadline=None)
def test_each_way_is_its_formula_and_moves_no_further_than_its_noise(how, rows, coefficient) -> None:
    environment, scores, noise = (np.array(column) for column in zip(*rows, strict=True))
    formula = np.vectorize(FORMULAS[how], otypes=[float])
    found = combine(scores, environment, how=how, coefficient=coefficient, noise_R=noise)
    np.testing.assert_allclose(found.rewards_R, formula(environment, scores, coefficient), atol=1e-13)
    for moved in (scores + noise, scores - noise):
        apart = np.abs(formula(environment, moved, coefficient) - found.rewards_R)
        np.testing.assert_allclose(apart, found.noise_R, atol=1e-13)


def test_the_coefficient_is_1_if_it_is_left_out_but_a_weight_has_to_be_stated() -> None:
    assert combine([2.0, -3.0]).rewards_R.tolist() == [2.0, -3.0]
    assert combine([2.0], [1], how="add").rewards_R.tolist() == [3.0]
    assert combine([2.0], how="replace", coefficient=0.5).rewards_R.tolist() == [1.0]
    with pytest.raises(ConfigError, match="coefficient: got None; wanted a weight from 0 to 1"):
        combine([2.0], [1.0], how="weighted")
    with pytest.raises(ConfigError, match=r"coefficient: got 1\.5; wanted a weight"):
        combine([2.0], [1.0], how="weighted", coefficient=1.5)
    with pytest.raises(ConfigError, match=r"coefficient: got -1\.0; .* negate its scores"):
        combine([2.0], [1.0], how="add", coefficient=-1.0)
    with pytest.raises(ConfigError, match="coefficient: got nan"):
        combine([2.0], coefficient=math.nan)


@pytest.mark.parametrize("how", [*FORMULAS])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_missing_score_is_an_error_that_names_the_rollout_whatever_the_way(how, bad) -> None:
    with pytest.raises(RolloutError, match="1 of 3 rollouts have no score .*rollout 2: ") as refused:
        combine([1.0, 2.0, bad], [1.0, 0.0, 1.0], how=how, coefficient=0.5)
    assert refused.value.rollouts == (2,)


@pytest.mark.parametrize("how", ["add", "multiply", "weighted", "bonus"])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_missing_reward_of_the_environment_is_an_error_where_it_is_used(how, bad) -> None:
    with pytest.raises(RolloutError, match="no reward of the environment .*rollout 0: "):
        combine([1.0, 2.0], [bad, 1.0], how=how, coefficient=0.5)
    assert combine([1.0, 2.0], [bad, 1.0], how="replace").rewards_R.tolist() == [1.0, 2.0]


def test_a_bonus_needs_no_score_where_there_is_none_to_be_had() -> None:
    found = combine(
        [None, 2.0, math.nan], [0.0, 1.0, -1.0], how="bonus", coefficient=0.25, noise_R=[math.nan, 0.4, 1.0]
    )
    assert found.rewards_R.tolist() == [0.0, 1.5, -1.0]
    assert found.noise_R == pytest.approx([0.0, 0.1, 0.0], rel=1e-13)


def test_a_reward_that_overflows_is_an_error_and_not_infinity() -> None:
    with pytest.raises(RolloutError, match=r"no reward .*rollout 1: inf[,)]"):
        combine([1.0, 1e300], [1.0, 1e300], how="multiply")


def test_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="the environment's rewards: got 1 for 2 rollouts"):
        combine([1.0, 2.0], [1.0], how="add")
    with pytest.raises(ConfigError, match="noise: got 1 for 2 rollouts"):
        combine([1.0, 2.0], noise_R=[0.1])
    with pytest.raises(ConfigError, match="how='add' needs the environment's rewards"):
        combine([1.0, 2.0], how="add")
    with pytest.raises(ConfigError, match="noise: got 2 for 1"):
        Combined(rewards_R=np.zeros(1), noise_R=np.zeros(2))
    with pytest.raises(RolloutError, match="no reward"):
        Combined(rewards_R=np.array([math.nan]), noise_R=np.zeros(1))


@pytest.mark.parametrize("how", ["replace", "add", "weighted"])
@pytest.mark.parametrize("rule", [*RULES])
def test_scores_of_5_without_a_reward_of_the_environment_give_signed_advantages(how, rule) -> None:
    """Added after the normalisation, they would all be positive: every reply would be made likelier."""
    scores = [5.0, 5.1, 5.2, 5.3]
    combined = combine(scores, [0.0] * 4, how=how, coefficient=1.0)
    found = advantages(combined.rewards_R, ["prompt"] * 4, rule=rule).advantages_R
    assert np.sign(found).tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert abs(found.sum()) < 1e-12
    assert found[0] == pytest.approx(3 * found[1])
