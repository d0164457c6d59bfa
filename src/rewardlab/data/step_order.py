"""The order in which a run sees its groups.

Which groups make up step k is a function of (seed, k), the batch size and the number of groups alone. No random state
is carried from step to step, so a run can be resumed at any step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


def steps_per_epoch(num_groups: int, batch_size: int) -> int:
    """Return the number of optimiser steps in one epoch, of which the last may have fewer groups."""
    return -(-num_groups // batch_size)


def batch_of_step(step: int, *, num_groups: int, batch_size: int, seed: int) -> list[int]:
    """Return the indices of the groups whose losses make up optimiser step `step` (from 0)."""
    epoch, position = divmod(step, steps_per_epoch(num_groups, batch_size))
    chosen = _order(seed, epoch, num_groups)[position * batch_size : (position + 1) * batch_size]
    return [int(index) for index in chosen]


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, num_groups: int) -> npt.NDArray[np.int64]:
    """Return the order of the groups in an epoch. The latest one is cached, since every step of the epoch needs it."""
    return np.random.default_rng((seed, epoch)).permutation(num_groups)
