"""Advantages are those of TRL's own code, in float64, to 1e-12."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.peer_source import defined, lines_of, of_trl, run
from rewardlab.core.errors import ConfigError
from rewardlab.rl import RULES, RolloutError, advantages, combine, floored
from rewardlab.rl.credit import advantages_of_several
from rewardlab.rl.shaping import clipped, kl_of_replies, kl_shaped

NEAR = 1e-12
NANSTD = run([defined(of_trl("trainer/utils.py"), "nanstd")], {"torch": torch})["nanstd"]
OF_GRPO, OF_RLOO = (
    lines_of(
        defined(of_trl(file), "_generate_and_score_completions").body,
        first="unscorable_mask = ",
        through="advantages = torch.nan_to_num(advantages",
    )
    for file in ("trainer/grpo_trainer.py", "trainer/rloo_trainer.py")
)
OF_ASYNC = lines_of(
    defined(of_trl("experimental/async_grpo/async_rollout_worker.py"), "_score_group").body,
    first="arr = ",
    through="scored.std()",
)


def by_trl(rewards_per_func: Any, size: int, lines: Any, **settings: Any) -> np.ndarray:
    """What a trainer makes of rewards [N, K], which come in whole groups of `size`."""
    rewards = torch.as_tensor(np.array(rewards_per_func, dtype=np.float64))
    trainer = SimpleNamespace(
        reward_weights=torch.ones(rewards.shape[1], dtype=torch.float64),
        reward_funcs=[None] * rewards.shape[1],
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        normalize_advantages=False,
        reward_clip_range=None,
        beta=0.0,
    )
    vars(trainer).update({name: value for name, value in settings.items() if hasattr(trainer, name)})
    names = {"torch": torch, "nanstd": NANSTD, "self": trainer, "device": "cpu", "gather": lambda tensor: tensor}
    names |= {"rewards_per_func": rewards, "num_generations": size} | settings
    return run(lines, names)["advantages"].numpy()


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    """Counts that TRL divides become numbers of the default type, so its Bessel's correction is rounded to that."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@st.composite
def groups_of_rewards(draw, *, functions: int = 1):
    """Rewards [N, K] in whole groups, and the size of a group.

    Rewards are multiples of 1/64, of which TRL's sums are exact: the mean of equal rewards is that reward.
    """
    size, count = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    values = st.integers(-1280, 1280).map(lambda n: n / 64) | st.sampled_from([0.0, 1.0, 5.25])
    rows = st.lists(st.tuples(*[values] * functions), min_size=size * count, max_size=size * count)
    return draw(rows), size


def names_of(rows: list, size: int) -> list[int]:
    return [number // size for number in range(len(rows))]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(groups_of_rewards(), st.sampled_from(["trl", "trl-batch", "trl-none"]))
def test_grpo(drawn, rule) -> None:
    rows, size = drawn
    scale = {"trl": "group", "trl-batch": "batch", "trl-none": "none"}[rule]
    ours = advantages([row[0] for row in rows], names_of(rows, size), rule=rule).advantages_R
    theirs = by_trl(rows, size, OF_GRPO, scale_rewards=scale)
    np.testing.assert_allclose(ours, theirs, atol=NEAR, rtol=NEAR)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(groups_of_rewards(), st.booleans())
def test_rloo(drawn, normalised) -> None:
    rows, size = drawn
    rule = "trl-rloo-normalized" if normalised else "trl-rloo"
    ours = advantages([row[0] for row in rows], names_of(rows, size), rule=rule).advantages_R
    theirs = by_trl(rows, size, OF_RLOO, normalize_advantages=normalised)
    np.testing.assert_allclose(ours, theirs, atol=NEAR, rtol=NEAR)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(groups_of_rewards(functions=2))
def test_async_grpo_which_adds_rewards_up_without_weights(drawn) -> None:
    rows, size = drawn
    ours = advantages_of_several([*zip(*rows, strict=True)], names_of(rows, size), rule="trl-async").advantages_R
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    theirs = [
        run(OF_ASYNC, {"np": np, "all_rewards": [*zip(*group, strict=True)], "logger": logging.getLogger("trl")})
        for group in groups
    ]
    np.testing.assert_allclose(ours, np.concatenate([one["advantages"] for one in theirs]), atol=NEAR, rtol=NEAR)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(groups_of_rewards(functions=2), st.sampled_from(["sum_then_normalize", "normalize_then_sum"]))
def test_several_functions_with_weights(drawn, aggregation) -> None:
    rows, size = drawn
    weights = [0.5, 2.0]
    ours = advantages_of_several(
        [*zip(*rows, strict=True)], names_of(rows, size), weights_K=weights, aggregation=aggregation
    )
    theirs = by_trl(
        rows,
        size,
        OF_GRPO,
        multi_objective_aggregation=aggregation,
        reward_weights=torch.tensor(weights, dtype=torch.float64),
    )
    np.testing.assert_allclose(ours.advantages_R, theirs, atol=NEAR, rtol=NEAR)


def test_rloo_with_its_clipping_and_its_kl_penalty() -> None:
    generator = np.random.default_rng(0)
    rows, size = generator.normal(size=(12, 1)) * 4, 4
    policy, reference = -generator.random((2, 12, 5)) * 3
    lengths = generator.integers(1, 6, size=12)
    mask = np.arange(5) < lengths[:, None]
    shaped = kl_shaped(
        clipped(combine(rows[:, 0]), low=-2.0, high=3.0),
        kl_of_replies(
            [row[:n] for row, n in zip(policy, lengths, strict=True)],
            [row[:n] for row, n in zip(reference, lengths, strict=True)],
            estimator="k1",
        ),
        beta=0.3,
    )
    ours = advantages(shaped.rewards_R, names_of([*rows], size), rule="trl-rloo").advantages_R
    theirs = by_trl(
        rows,
        size,
        OF_RLOO,
        beta=0.3,
        reward_clip_range=(-2.0, 3.0),
        old_per_token_logps=torch.tensor(policy),
        ref_per_token_logps=torch.tensor(reference),
        completion_mask=torch.tensor(mask),
    )
    np.testing.assert_allclose(ours, theirs, atol=NEAR, rtol=NEAR)


def test_a_missing_score_is_silently_left_out_by_trl_and_an_error_here() -> None:
    rows = [[1.0], [float("nan")], [3.0], [4.0]]
    assert by_trl(rows, 4, OF_GRPO)[1] == 0.0
    with pytest.raises(RolloutError, match="rollout 1: nan"):
        advantages([row[0] for row in rows], [0] * 4)
    with pytest.raises(RolloutError, match="no reward of function 1 .*rollout 0: missing"):
        advantages_of_several([[1.0, 2.0], [None, 2.0]], [0, 0])


def test_groups_within_the_noise_have_advantage_exactly_0_in_trl_in_float32() -> None:
    def in_float32(rewards: Any) -> dict[str, Any]:
        trainer = SimpleNamespace(
            reward_weights=torch.ones(1, dtype=torch.float32),
            multi_objective_aggregation="sum_then_normalize",
            scale_rewards="group",
        )
        column = torch.tensor(rewards, dtype=torch.float32)[:, None]
        names = {"torch": torch, "nanstd": NANSTD, "device": "cpu", "self": trainer}
        return run(OF_GRPO, names | {"num_generations": len(rewards), "rewards_per_func": column})

    scores = [5.1, 5.12, 5.07, 5.11, 5.13, 5.09]
    plain = by_trl([[score] for score in scores], 6, OF_GRPO)
    assert np.abs(plain).max() > 1.0
    found = advantages(scores, [0] * 6, noise_R=[0.3] * 6)
    seen = in_float32(found.rewards_R)
    assert not seen["advantages"].any()
    assert seen["is_std_zero"].all()
    equal = in_float32([5.13] * 6)["advantages"].tolist()
    assert equal == [pytest.approx(-0.0047, abs=1e-4)] * 6  # the mean of equal rewards is not that reward in float32
    assert not in_float32(floored([5.13] * 6, [0] * 6, [0.3] * 6).rewards_R)["advantages"].any()


def test_settings_that_do_not_fit_together_are_refused() -> None:
    rows = [[1.0, 2.0], [3.0, 4.0]]
    with pytest.raises(ConfigError, match="normalize_then_sum: got noise"):
        advantages_of_several(rows, [0, 0], aggregation="normalize_then_sum", noise_KR=[[0.1, 0.1], None])
    with pytest.raises(ConfigError, match="a rule with scale 'batch'"):
        advantages_of_several(rows, [0, 0], aggregation="normalize_then_sum", rule="trl-batch")
    with pytest.raises(ConfigError, match="weights: got"):
        advantages_of_several(rows, [0, 0], weights_K=[1.0])
    with pytest.raises(ConfigError, match="weights: got"):
        advantages_of_several(rows, [0, 0], weights_K=[1.0, math.nan])
    with pytest.raises(ConfigError, match="noise: got that of 1"):
        advantages_of_several(rows, [0, 0], noise_KR=[[0.1, 0.1]])
    with pytest.raises(ConfigError, match="rewards of function 1: got 3 for 2"):
        advantages_of_several([[1.0, 2.0], [1.0, 2.0, 3.0]], [0, 0])
    with pytest.raises(ConfigError, match="got those of no function"):
        advantages_of_several([], [0, 0])


def test_the_noise_of_several_functions_adds_up_by_their_weights() -> None:
    rewards, noise = [[0.0, 2.0], [0.0, 0.0]], [[0.1, 0.1], [0.5, 0.5]]  # 1 from the mean; moved by 0.6, and by 1.1
    assert advantages_of_several(rewards, [0, 0], noise_KR=noise).advantages_R.any()
    found = advantages_of_several(rewards, [0, 0], weights_K=[1.0, -2.0], noise_KR=noise)
    assert not found.advantages_R.any()
    assert found.num_groups_below == 1


def test_every_rule_of_trl_is_tested_here() -> None:
    tested = {"trl", "trl-batch", "trl-none", "trl-rloo", "trl-rloo-normalized", "trl-async"}
    assert {name for name in RULES if name.startswith("trl")} == tested
