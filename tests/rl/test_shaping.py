"""Shaping by stated figures: formulas, those of TRL, verl and OpenRLHF, and what becomes of noise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.peer_source import defined, of_trl, run
from rewardlab.core.errors import ConfigError
from rewardlab.core.spec import CalibrationSpec
from rewardlab.rl import RolloutError, combine
from rewardlab.rl.credit import Combined
from rewardlab.rl.shaping import (
    clipped,
    kl_of_replies,
    kl_of_tokens,
    kl_shaped,
    length_penalised,
    overlong_punished,
    rewards_of_tokens,
    standardised,
    standardised_by,
)

PUNISHMENT = run([defined(of_trl("rewards/other_rewards.py"), "_SoftOverlongPunishment")], {})[
    "_SoftOverlongPunishment"
]
LENGTHS = [0, 3, 10, 12, 40]
ALL: dict[str, Callable[[Combined], Combined]] = {
    "clipped": lambda rewards: clipped(rewards, low=-1.0, high=2.0),
    "standardised": lambda rewards: standardised(rewards, mean=3.0, std=0.5),
    "length_penalised": lambda rewards: length_penalised(rewards, LENGTHS, target_tokens=10, per_token=0.1),
    "overlong_punished": lambda rewards: overlong_punished(rewards, LENGTHS, max_tokens=20, buffer_tokens=10),
    "kl_shaped": lambda rewards: kl_shaped(rewards, [0.0, 1.0, -0.5, 2.0, 3.0], beta=0.1),
}


@pytest.mark.parametrize("name", [*ALL])
@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 2), st.floats(-1, 1)), min_size=5, max_size=5))
def test_what_noise_moves_is_moved_no_further_than_the_noise_that_is_returned(name, rows) -> None:
    scores, noise, direction = (np.array(column) for column in zip(*rows, strict=True))
    found = ALL[name](combine(scores, noise_R=noise))
    moved = ALL[name](combine(scores + direction * noise))
    assert (np.abs(moved.rewards_R - found.rewards_R) <= found.noise_R).all()


def test_shaping_leaves_what_it_is_given_as_it_is() -> None:
    given_ = combine([1.0, 2.0, 3.0, 4.0, 5.0], noise_R=[0.1] * 5)
    noise = given_.noise_R.tolist()
    for shape in ALL.values():
        shape(given_)
    assert given_.rewards_R.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert given_.noise_R.tolist() == noise


def test_standardising_divides_the_noise_and_clipping_does_not_change_it() -> None:
    rewards = combine([3.0, 4.0], noise_R=[0.3, 0.4])
    found = standardised(rewards, mean=3.0, std=2.0)
    assert found.rewards_R.tolist() == [0.0, 0.5]
    assert found.noise_R == pytest.approx([0.15, 0.2], rel=1e-13)
    found = clipped(rewards, low=-1, high=1)
    assert found.rewards_R.tolist() == [1.0, 1.0]
    assert found.noise_R.tolist() == rewards.noise_R.tolist() == pytest.approx([0.3, 0.4], rel=1e-13)


def test_the_figures_of_the_model_are_those_of_its_calibration() -> None:
    calibration = CalibrationSpec(
        reward_mean=3.0, reward_std=2.0, num_replies=9, num_comparisons=9, precision="fp32", data={}, judged={}
    )
    assert standardised_by(combine([7.0]), calibration).rewards_R.tolist() == [2.0]
    with pytest.raises(ConfigError, match="holds no mean and standard deviation .* `rewardlab calibrate`"):
        standardised_by(combine([7.0]), None)


def test_the_length_penalty_is_linear_above_its_target() -> None:
    found = length_penalised(combine([1.0] * 5), LENGTHS, target_tokens=10, per_token=0.1)
    np.testing.assert_allclose(found.rewards_R, [1.0, 1.0, 1.0, 0.8, -2.0], atol=1e-15)


@given(st.integers(1, 60), st.integers(1, 60), st.lists(st.integers(0, 100), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_punishment_of_overlong_replies_is_that_of_trl(most, buffer, lengths) -> None:
    buffer = min(buffer, most)
    theirs = PUNISHMENT(most, buffer)(completion_ids=[[1] * length for length in lengths])
    ours = overlong_punished(combine([0.0] * len(lengths)), lengths, max_tokens=most, buffer_tokens=buffer)
    np.testing.assert_allclose(ours.rewards_R, theirs, atol=1e-15)


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 3), st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_the_punishment_of_overlong_replies_is_that_of_verl_and_openrlhf(most, buffer, factor, length) -> None:
    buffer, length = min(buffer, most), min(length, most)  # replies that the limit did not end
    beyond = length - (most - buffer)
    verl = min(-beyond / buffer * factor, 0)
    openrlhf = -min(beyond, buffer) / buffer * factor if beyond > 0 else 0.0
    found = overlong_punished(combine([0.0]), [length], max_tokens=most, buffer_tokens=buffer, factor=factor)
    assert found.rewards_R.tolist() == [pytest.approx(verl, abs=1e-15)] == [pytest.approx(openrlhf, abs=1e-15)]


PAIRS = st.lists(st.tuples(st.floats(-12, 0), st.floats(-12, 0)), min_size=1, max_size=8)


@given(PAIRS)
@settings(max_examples=60, deadline=None)
def test_estimators_of_the_divergence_are_those_of_verl_and_openrlhf(pairs) -> None:
    policy, reference = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    ratio = policy - reference
    expected = {"k1": ratio, "k2": 0.5 * ratio.square(), "k3": torch.exp(-ratio) + ratio - 1}
    for name, values in expected.items():
        found = kl_of_tokens(policy.tolist(), reference.tolist(), estimator=name)
        np.testing.assert_allclose(found, values.numpy(), atol=1e-13, rtol=1e-12)
        assert name == "k1" or (found >= 0).all()


def test_k1_and_k3_have_the_divergence_as_their_mean_and_k2_has_not() -> None:
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    divergence = float(np.sum(policy * np.log(policy / reference)))
    mean = {
        name: float(policy @ kl_of_tokens(np.log(policy), np.log(reference), estimator=name))
        for name in ("k1", "k2", "k3")
    }
    assert mean["k1"] == pytest.approx(divergence, rel=1e-12)
    assert mean["k3"] == pytest.approx(divergence, rel=1e-12)
    assert mean["k2"] != pytest.approx(divergence, rel=0.05)


def test_the_reward_of_a_reply_is_the_sum_of_those_of_its_tokens() -> None:
    policy, reference = [[-1.0, -2.0, -0.5], [-3.0]], [[-1.5, -1.0, -0.5], [-4.0]]
    kl = kl_of_replies(policy, reference, estimator="k1")
    assert kl.tolist() == [-0.5, 1.0]
    shaped = kl_shaped(combine([2.0, 1.0], noise_R=[0.1, 0.2]), kl, beta=0.5)
    assert shaped.rewards_R.tolist() == [2.25, 0.5]
    assert shaped.noise_R == pytest.approx([0.1, 0.2], rel=1e-13)
    tokens = rewards_of_tokens(2.0, kl_of_tokens(policy[0], reference[0], estimator="k1"), beta=0.5)
    assert tokens.tolist() == [-0.25, 0.5, 2.0]
    assert tokens.sum() == shaped.rewards_R[0]


def test_numbers_of_several_rows_are_refused_and_half_precision_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"kl_T: got numbers of shape \[1, 3\]; wanted those of one reply"):
        rewards_of_tokens(2.0, np.zeros((1, 3)), beta=0.1)
    with pytest.raises(ConfigError, match=r"policy: got numbers of shape \[3, 1\]"):
        kl_of_tokens(np.zeros((3, 1)), np.zeros(3), estimator="k1")
    with pytest.raises(ConfigError, match=r"rollout 0: .*reference: got numbers of shape \[1, 2\]"):
        kl_of_replies([[0.0]], [np.zeros((1, 2))], estimator="k1")
    policy = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    found = kl_of_tokens(list(policy), list(torch.tensor([-1.5, -1.0])), estimator="k1")
    assert found.tolist() == [0.5, -1.0]
    with pytest.raises(RolloutError, match="at token 1 is nan"):
        kl_of_tokens([-1.0, None], [-1.0, -1.0], estimator="k1")


def test_a_divergence_that_is_not_finite_names_rollout_and_token() -> None:
    with pytest.raises(RolloutError, match="rollout 1: the KL divergence at token 1 is inf") as refused:
        kl_of_replies([[-1.0], [-1.0, -1.0]], [[-1.0], [-1.0, -math.inf]], estimator="k1")
    assert refused.value.rollouts == (1,)
    with pytest.raises(RolloutError, match="at token 0 is inf"):
        kl_of_tokens([-2000.0], [0.0], estimator="k3")
    with pytest.raises(RolloutError, match="at token 0 is nan"):
        kl_of_tokens([math.nan], [0.0], estimator="k2")
    with pytest.raises(RolloutError, match="no KL divergence .*rollout 0: missing"):
        kl_shaped(combine([1.0]), [None], beta=0.1)
    with pytest.raises(RolloutError, match="no reward"):
        rewards_of_tokens(math.nan, [0.0], beta=0.1)
    with pytest.raises(RolloutError, match="not finite"):
        rewards_of_tokens(1.0, [math.nan], beta=0.1)


def test_what_is_beyond_all_floats_is_an_error_that_names_the_rollout() -> None:
    with pytest.raises(RolloutError, match="not finite"):
        rewards_of_tokens(1.7e308, [-1.7e308], beta=1.0)
    two = combine([0.0, 1.0])
    calls: list[Callable[[], object]] = [
        lambda: kl_of_replies([[0.0], [1e308, 1e308]], [[0.0], [0.0, 0.0]], estimator="k1"),
        lambda: kl_shaped(two, [0.0, 1e308], beta=1000.0),
        lambda: length_penalised(two, [1, 10**300], target_tokens=1, per_token=1e100),
    ]
    for call in calls:
        with pytest.raises(RolloutError) as refused:
            call()
        assert refused.value.rollouts == (1,)


def test_figures_that_are_not_stated_or_not_possible_are_refused() -> None:
    one = combine([1.0])
    refused: dict[str, Callable[[], object]] = {
        "high: got 0.*above low, which is 1": lambda: clipped(one, low=1.0, high=0.0),
        "low: got -inf": lambda: clipped(one, low=-math.inf, high=0.0),
        "std: got 0": lambda: standardised(one, mean=0.0, std=0.0),
        "mean: got nan": lambda: standardised(one, mean=math.nan, std=1.0),
        "per_token: got -1": lambda: length_penalised(one, [3], target_tokens=3, per_token=-1.0),
        "target_tokens: got -3": lambda: length_penalised(one, [3], target_tokens=-3, per_token=1.0),
        "numbers of tokens: got 2 for 1": lambda: length_penalised(one, [3, 4], target_tokens=3, per_token=1.0),
        "buffer_tokens: got 30; wanted 1 to 20": lambda: overlong_punished(one, [3], max_tokens=20, buffer_tokens=30),
        "buffer_tokens: got 0": lambda: overlong_punished(one, [3], max_tokens=20, buffer_tokens=0),
        "factor: got -1": lambda: overlong_punished(one, [3], max_tokens=20, buffer_tokens=5, factor=-1.0),
        "estimator: got 'k4'": lambda: inspect.unwrap(kl_of_tokens)([0.0], [0.0], estimator="k4"),
        "got 1 of the policy and 2 of the reference": lambda: kl_of_tokens([0.0], [0.0, 0.0], estimator="k1"),
        "rollout 0: log-probabilities": lambda: kl_of_replies([[0.0]], [[0.0, 0.0]], estimator="k1"),
        "log-probabilities of the reference: got 2 for 1": lambda: kl_of_replies([[0.0]], [[0.0]] * 2, estimator="k1"),
        "beta: got -0.1": lambda: kl_shaped(one, [0.0], beta=-0.1),
        "KL divergences: got 2 for 1": lambda: kl_shaped(one, [0.0, 1.0], beta=0.1),
        "a reply without tokens": lambda: rewards_of_tokens(1.0, [], beta=0.1),
    }
    for message, call in refused.items():
        with pytest.raises(ConfigError, match=message):
            call()
    with pytest.raises(RolloutError, match="rollout 0 has -1 tokens"):
        length_penalised(one, [-1], target_tokens=3, per_token=1.0)
