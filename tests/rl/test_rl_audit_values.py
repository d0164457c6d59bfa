"""A held-out suite given as values with intervals: its change against the formula by hand, and how sure it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.stats import norm, ttest_ind

from rewardlab.rl.audit.heldout import Suite
from rewardlab.rl.audit.run import judge_columns
from test_rl_audit import CONFIG, record

WINDOWS = [np.arange(10), np.arange(10, 20), np.arange(20, 30), np.arange(30, 40)]
SPREAD = 0.4
"""Standard deviation of an item."""


def suite(step_N: np.ndarray, value_N: np.ndarray, *, items: int) -> Suite:
    return Suite(
        name="suite",
        step_N=step_N.astype(np.int64),
        value_N=value_N,
        item_N=None,
        error_N=np.full(len(step_N), SPREAD / np.sqrt(items)),
        count_N=np.full(len(step_N), float(items)),
    )


def test_checkpoints_as_near_as_their_intervals_say_have_the_error_of_the_intervals() -> None:
    found = suite(np.array([0, 9, 30, 39]), np.array([0.70, 0.701, 0.75, 0.751]), items=400).change(0, 3, WINDOWS)
    assert found.value == pytest.approx(0.05 / SPREAD)
    assert found.error == pytest.approx(np.sqrt(2 / 400))
    assert found.p_at_most(0.0) == pytest.approx(norm.sf(found.value / found.error), rel=1e-4)


def test_checkpoints_that_lie_further_apart_are_compared_as_by_welch() -> None:
    before, after = np.array([0.70, 0.76, 0.71]), np.array([0.80, 0.85, 0.79])
    steps = np.array([0, 4, 9, 30, 34, 39])
    found = suite(steps, np.concatenate([before, after]), items=1_000_000).change(0, 3, WINDOWS)
    welch = ttest_ind(after, before, equal_var=False, alternative="greater")
    assert found.degrees == pytest.approx(welch.df)
    assert found.p_at_most(0.0) == pytest.approx(welch.pvalue)


def test_two_checkpoints_a_window_are_rarely_sure_of_a_fall_that_is_none() -> None:
    generator, alarms, of = np.random.default_rng(0), 0, 150
    steps = np.array([0, 9, 10, 19, 20, 29, 30, 39])
    columns = dataclasses.replace(record(), evidence={})
    for _ in range(of):
        # The last window falls by the most that counts as no change, and checkpoints vary by half of that.
        values = 0.7 - CONFIG.least_change * SPREAD * (steps >= 30) + 0.02 * generator.normal(size=len(steps))
        (found,) = judge_columns(columns, [suite(steps, values, items=10_000)], CONFIG)
        alarms += found.verdict == "exploited"
    assert alarms / of <= 0.06, "0.13 if two checkpoints are as good as many"
