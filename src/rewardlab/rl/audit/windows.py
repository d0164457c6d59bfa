"""The windows of a run whose changes are looked at: equal shares of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rewardlab.rl.audit.columns import IntArray

MIN_STEPS: Final = 4
"""Fewest steps of a window. With fewer, little can be said about how much steps differ."""


def divide(steps: Sequence[int] | IntArray, windows: int) -> list[IntArray]:
    """Return the steps of each window, in equal numbers.

    There are fewer windows than wanted if one of them would have fewer than `MIN_STEPS` steps, and none if there are
    too few steps for two windows.
    """
    unique = np.unique(np.asarray(steps, dtype=np.int64))
    number = min(windows, len(unique) // MIN_STEPS)
    return list(np.array_split(unique, number)) if number >= 2 else []


def windows_of(step_N: IntArray, windows: Sequence[IntArray]) -> IntArray:
    """Return [N] the window of each step.

    A step before the first window belongs to the first, and one after the last window to the last.
    """
    firsts = np.array([window[0] for window in windows])
    found: IntArray = np.maximum(np.searchsorted(firsts, step_N, side="right") - 1, 0)
    return found
