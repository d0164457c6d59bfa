"""Sums of replies by unit and block, means that changed between two windows, and what leaving groups out gives.

Legend: N rollouts, U units (prompts, or one unit of all replies), B blocks, C columns, H groups of prompts.
"""

from __future__ import annotations

import numpy as np

from rewardlab.analysis.intervals import FloatArray
from rewardlab.rl.audit.columns import IntArray


def jackknife(replicates: FloatArray) -> tuple[float, float]:
    """Return variance and degrees of freedom from the values without each group; NaN is a group that is not there."""
    there = replicates[np.isfinite(replicates)]
    if len(there) < 2:
        return 0.0, 0.0
    return float((len(there) - 1) / len(there) * np.square(there - there.mean()).sum()), float(len(there) - 1)


def sums_of(columns_NC: FloatArray, unit_N: IntArray, block_N: IntArray, blocks: int) -> FloatArray:
    """Return [U, B, C] sums of columns by unit and block."""
    units = int(unit_N.max()) + 1
    flat = unit_N * blocks + block_N
    sums = [np.bincount(flat, column, minlength=units * blocks) for column in columns_NC.T]
    cells: FloatArray = np.stack(sums, axis=1).reshape(units, blocks, -1).astype(np.float64)
    return cells


def padded(cells_UBC: FloatArray, units: int) -> FloatArray:
    """Return cells with empty units at the end."""
    more = units - cells_UBC.shape[0]
    return np.pad(cells_UBC, ((0, more), (0, 0), (0, 0))) if more else cells_UBC


def mean_change(before_U3: FloatArray, after_U3: FloatArray) -> FloatArray:
    """Return [2] weighted mean changes of two columns, from sums and counts of units; NaN if no unit is in both."""
    changes_U2, weights_U = changes(before_U3, after_U3)
    total = weights_U.sum()
    found: FloatArray = weights_U @ changes_U2 / total if total > 0 else np.full(2, np.nan)
    return found


def changes(before_U3: FloatArray, after_U3: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return [U, 2] changes of each unit and [U] its weight, 0 where it is in one window alone."""
    # Counts are whole numbers; what is left after a subtraction may be off by rounding in the sums alone.
    n, m = before_U3[:, 2:], after_U3[:, 2:]
    both = (n > 0.5) & (m > 0.5)
    changes = np.where(both, after_U3[:, :2] / np.maximum(m, 1) - before_U3[:, :2] / np.maximum(n, 1), 0.0)
    weights = np.where(both, n * m / np.maximum(n + m, 1), 0.0)
    return changes, weights[:, 0]


def without_units(before_U3: FloatArray, after_U3: FloatArray, group_U: IntArray, groups: int) -> FloatArray:
    """Return [H, 2] the mean change without the units of each group; NaN for a group without units."""
    changes_U2, weights_U = changes(before_U3, after_U3)
    weighted_U3 = np.column_stack([changes_U2 * weights_U[:, None], weights_U])
    by_group = np.stack([np.bincount(group_U, column, minlength=groups) for column in weighted_U3.T], axis=1)
    left = weighted_U3.sum(0) - by_group
    found: FloatArray = safe(left[:, :2], left[:, 2:])
    found[by_group[:, 2] == 0] = np.nan
    return found


def within(total_U5: FloatArray) -> FloatArray:
    """Return [U, 2] sums of squares of the reward, and of its products with the evidence, around means of units."""
    n = np.maximum(total_U5[:, 0], 1)
    square = total_U5[:, 3] - np.square(total_U5[:, 1]) / n
    product = total_U5[:, 4] - total_U5[:, 1] * total_U5[:, 2] / n
    return np.stack([np.maximum(square, 0.0), product], axis=1)


def or_whole(replicates: FloatArray, whole: FloatArray | np.float64) -> FloatArray:
    """Return values without each group; the whole value where the group is not there."""
    found: FloatArray = np.where(np.isnan(replicates), whole, replicates)
    return found


def ratio(parts_B2: FloatArray) -> FloatArray:
    """Return the second column over the first; NaN where the first is 0."""
    return safe(parts_B2[:, 1], parts_B2[:, 0])


def safe(above: FloatArray, below: FloatArray) -> FloatArray:
    """Return quotients; NaN where what is below is not above 0."""
    found: FloatArray = np.where(below > 0, above / np.where(below > 0, below, 1.0), np.nan)
    return found
