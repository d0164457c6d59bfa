"""The order in which a run sees its groups.

Which groups make up step k is a function of (seed, k), the batch size, and the number of groups, or their prompts,
alone. No random state is carried from step to step, so a run can be resumed at any step.

Legend: G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import prompt_numbers
from rewardlab.data.splits import Numbers


@dataclass(frozen=True, eq=False)
class Bundles:
    """Which groups have one prompt, and how many of them are drawn together."""

    prompt_G: Numbers
    """The number of each group's prompt."""
    most: int
    """Groups of a prompt that are drawn together; what is left of it comes in a smaller bundle."""

    def shuffled(self, order: Numbers, draw: np.random.Generator) -> Numbers:
        """Return an order of the groups with those of a bundle beside each other, and bundles drawn anew."""
        by_prompt = order[np.argsort(self.prompt_G[order], kind="stable")]
        prompts = self.prompt_G[by_prompt]
        begins = np.flatnonzero(np.diff(prompts, prepend=-1))
        place = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
        bundle = np.cumsum(place % self.most == 0) - 1
        drawn = draw.permutation(int(bundle[-1]) + 1 if len(bundle) else 0)
        return by_prompt[np.argsort(drawn[bundle], kind="stable")]


def bundles_of(groups: Sequence[TokenGroup], most: int) -> Bundles | None:
    """Return the bundles of at most so many groups of a prompt; None if each is drawn by itself."""
    return Bundles(prompt_numbers(groups), most) if most > 1 else None


def steps_per_epoch(num_groups: int, batch_size: int) -> int:
    """Return the number of optimiser steps in one epoch, of which the last may have fewer groups."""
    return -(-num_groups // batch_size)


def batch_of_step(
    step: int, *, num_groups: int, batch_size: int, seed: int, bundles: Bundles | None = None
) -> list[int]:
    """Return the indices of the groups whose losses make up optimiser step `step` (from 0)."""
    epoch, position = divmod(step, steps_per_epoch(num_groups, batch_size))
    chosen = _order(seed, epoch, num_groups, bundles)[position * batch_size : (position + 1) * batch_size]
    return [int(index) for index in chosen]


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, num_groups: int, bundles: Bundles | None) -> npt.NDArray[np.int64]:
    """Return the order of the groups in an epoch. The latest one is cached, since every step of the epoch needs it."""
    draw = np.random.default_rng((seed, epoch))
    order = draw.permutation(num_groups)
    return order if bundles is None else bundles.shuffled(order, draw)
