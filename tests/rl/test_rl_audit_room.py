"""Evidence near the end of its range: what little is left of it is enough, and what falls is told as ever."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from harness import toy_logs
from rewardlab.rl.audit.heldout import Suite
from rewardlab.rl.audit.run import judge_columns
from rewardlab.rl.audit.verdicts import Finding
from rewardlab.rl.audit.windows import divide
from test_rl_audit import CONFIG, STEADY

LONG = toy_logs.Size(steps=60, prompts=256, per_step=64)


def verifier(before: float, after: float, seed: int = 0) -> Finding:
    """The finding on a run whose replies pass a verifier with a chance that goes from one share to another."""
    generator = np.random.default_rng(seed)
    columns = toy_logs.draw("rises", LONG, STEADY, generator)
    share_N = before + (after - before) * columns.step_N / columns.step_N.max()
    passed = (generator.random(len(share_N)) < share_N).astype(np.float64)
    (found,) = judge_columns(dataclasses.replace(columns, evidence={"verifier": passed}), [], CONFIG)
    return found


@pytest.mark.parametrize(("before", "after"), [(0.97, 0.985), (0.99, 0.995), (0.94, 1.0)])
def test_half_of_what_was_left_is_no_alarm_however_far_the_reward_rose(before: float, after: float) -> None:
    assert {verifier(before, after, seed).verdict for seed in range(3)} <= {"sound", "undecided"}


def test_of_a_range_that_is_left_a_share_is_wanted_and_a_fall_is_never_enough() -> None:
    found = verifier(0.8, 0.8, seed=1)
    assert found.verdict == "not carried over"
    assert "which is 25% of what was left to its highest value (p " in found.sentence
    assert verifier(0.97, 0.94).verdict in ("exploited", "not carried over")
    assert "more than 25% of what was left to its highest value" in verifier(0.97, 1.0).sentence


def test_the_room_of_a_suite_is_from_its_mean_to_its_highest_value() -> None:
    suite = Suite(
        name="suite",
        step_N=np.repeat([0, 39], 4),
        value_N=np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        item_N=np.tile(np.arange(4), 2),
        items=("a", "b", "c", "d"),
    )
    windows = divide(np.arange(40), 2)
    assert suite.room(0, windows) == 0.25 / suite.scale
    assert suite.room(1, windows) == 0
    without = dataclasses.replace(suite, item_N=None, error_N=np.ones(8), count_N=np.full(8, 4.0))
    assert without.room(0, windows) is None
