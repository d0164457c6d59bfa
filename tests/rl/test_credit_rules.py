"""Laws of advantages, for every rule, and those of verl and OpenRLHF derived again with torch in float64.

Neither library is installed with the tests. `benchmarks/credit_rules.py` runs their own functions.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import ConfigError
from rewardlab.rl import RULES, AdvantageRule, RolloutError, advantages
from rewardlab.rl.credit import NOT_OF_REWARDS_ALONE, advantages_of_several

NEAR = 1e-12
Rows = list[tuple[float, int]]
ROWS = st.lists(
    st.tuples(st.integers(-640, 640).map(lambda n: n / 64) | st.sampled_from([0.0, 1.0]), st.integers(0, 3)),
    min_size=1,
    max_size=16,
)


def grouped(rewards: torch.Tensor, groups: list[int], of_group: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A function of each group of two or more; 0 for single rollouts."""
    found = torch.zeros_like(rewards)
    for group in set(groups):
        mine = torch.tensor([other == group for other in groups])
        if mine.sum() > 1:
            found[mine] = of_group(rewards[mine])
    return found


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    others = [torch.cat([rewards[:i], rewards[i + 1 :]]).mean() for i in range(len(rewards))]
    return rewards - torch.stack(others)


DERIVED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "verl-grpo": lambda one, _: (one - one.mean()) / (one.std() + 1e-6),
    "verl-grpo-no-std": lambda one, _: one - one.mean(),
    "verl-rloo": lambda one, _: leave_one_out(one),
    "verl-gpg": lambda one, all_: (one - one.mean()) * len(all_) / max(1, int((all_ != 0).sum())),
    "openrlhf-group-norm": lambda one, _: (one - one.mean()) / (one.std() + 1e-9),
    "openrlhf-rloo": lambda one, _: leave_one_out(one),
    "openrlhf-dr-grpo": lambda one, _: one - one.mean(),
}


def test_every_rule_is_derived_again_or_held_against_the_code_of_trl() -> None:
    assert {name for name in RULES if not name.startswith("trl")} == set(DERIVED)
    assert not set(RULES) & set(NOT_OF_REWARDS_ALONE)


@pytest.mark.parametrize("rule", [*DERIVED])
@settings(max_examples=30, deadline=None)
@given(rows=ROWS)
def test_rules_of_verl_and_openrlhf(rule: str, rows: Rows) -> None:
    rewards, groups = zip(*rows, strict=True)
    found = advantages(rewards, groups, rule=rule).advantages_R
    all_rewards = torch.tensor(rewards, dtype=torch.float64)
    expected = grouped(all_rewards, [*groups], lambda one: DERIVED[rule](one, all_rewards))
    np.testing.assert_allclose(found, expected.numpy(), atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("rule", [*RULES])
@settings(max_examples=30, deadline=None)
@given(rows=ROWS, noise=st.sampled_from([None, 0.01, 0.5, 3.0]))
def test_advantages_sum_to_0_in_each_group_and_have_the_sign_of_the_deviation(rule, rows, noise) -> None:
    rewards, groups = (np.array(column) for column in zip(*rows, strict=True))
    found = advantages(rewards, groups, rule=rule, noise_R=None if noise is None else [noise] * len(rows))
    for group in set(groups.tolist()):
        mine = found.advantages_R[groups == group]
        assert abs(math.fsum(mine)) <= 1e-13 * max(1.0, np.abs(mine).sum())
        deviations = rewards[groups == group] - rewards[groups == group].mean()
        assert (mine * deviations >= 0).all()
        if noise is None:
            assert ((mine != 0) == (np.abs(deviations) > 1e-14)).all()


@pytest.mark.parametrize("rule", [*RULES])
@settings(max_examples=20, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 99), shift=st.integers(-50, 50))
def test_neither_the_order_of_rollouts_nor_what_is_added_to_a_group_matters(rule, rows, seed, shift) -> None:
    rewards, groups = (np.array(column) for column in zip(*rows, strict=True))
    order = np.random.default_rng(seed).permutation(len(rows))
    found = advantages(rewards, groups, rule=rule).advantages_R
    mixed = advantages(rewards[order], groups[order], rule=rule).advantages_R
    np.testing.assert_allclose(mixed, found[order], atol=NEAR)
    if RULES[rule].scale not in ("batch", "nonzero"):
        moved = advantages(rewards + shift * (groups == groups[0]), groups, rule=rule).advantages_R
        np.testing.assert_allclose(moved, found, atol=NEAR)


@pytest.mark.parametrize("rule", [*RULES])
def test_a_single_rollout_and_equal_rewards_have_advantage_exactly_0_and_are_counted(rule) -> None:
    found = advantages([5.1, 0.7, 0.7, 0.7], ["alone", "equal", "equal", "equal"], rule=rule)
    assert found.advantages_R.tolist() == [0.0] * 4
    assert (found.num_groups, found.num_groups_single, found.num_groups_below) == (2, 1, 1)


@pytest.mark.parametrize("rule", [*RULES])
@pytest.mark.parametrize("size", [1e-300, 1e200, 1e307])
def test_rewards_of_any_size_have_finite_advantages_with_their_signs(rule, size) -> None:
    found = advantages([0.0, size, 3 * size, 0.0], [0] * 4, rule=rule).advantages_R
    assert np.isfinite(found).all()
    assert np.sign(found[[0, 2]]).tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_missing_reward_is_an_error_that_names_the_rollout(bad) -> None:
    with pytest.raises(RolloutError, match="rollout 2: ") as refused:
        advantages([1.0, 2.0, bad], [0, 0, 0])
    assert refused.value.rollouts == (2,)


def test_what_is_beyond_all_floats_is_an_error_that_names_the_rollout() -> None:
    with pytest.raises(RolloutError, match="no advantage") as caught:
        advantages([1.7e308] + [0.0] * 9, [0] * 10, rule="verl-gpg")
    assert caught.value.rollouts == (0,)
    for weights in ([1.0, 1.0], [10.0, -10.0]):
        with pytest.raises(RolloutError, match="no reward") as caught:
            advantages_of_several([[0.0, 1e308], [0.0, 1e308]], [0, 0], weights_K=weights)
        assert caught.value.rollouts == (1,)


def test_a_rule_is_a_name_or_ones_own() -> None:
    own = advantages([1.0, 3.0], [0, 0], rule=AdvantageRule(ddof=0, epsilon=0.0)).advantages_R
    assert own.tolist() == [-1.0, 1.0]
    with pytest.raises(ConfigError, match=r"rule: got 'grpo'\. Wanted one of trl, "):
        advantages([1.0], [0], rule="grpo")
    with pytest.raises(ConfigError, match="its baseline weighs each reward by the length of the reply"):
        advantages([1.0], [0], rule="verl-opo")


@pytest.mark.parametrize(
    ("field", "value"), [("baseline", "best"), ("scale", "max"), ("ddof", 2), ("epsilon", -1.0), ("epsilon", math.nan)]
)
def test_a_rule_that_is_none_is_refused(field, value) -> None:
    rule = AdvantageRule(epsilon=1.0)
    object.__setattr__(rule, field, value)
    with pytest.raises(ConfigError, match=f"{field}: got "):
        rule.__post_init__()


def test_neither_torch_nor_a_training_library_is_imported() -> None:
    code = (
        "import sys; import rewardlab.rl.credit, rewardlab.rl.noise, rewardlab.rl.shaping;"
        "print(sorted({'torch', 'transformers', 'trl', 'scipy'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
