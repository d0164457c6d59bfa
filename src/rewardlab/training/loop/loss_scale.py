"""The number that a loss is multiplied with while its gradients are computed in float16, which ends at 65,504.

Below 6e-8 a float16 number is zero, and a step's gradients reach that. So the loss is made larger, and the float32
gradients of the weights smaller again by as much (Micikevicius et al. 2018, "Mixed precision training"). Powers of two
change no digit. Where other trainers leave a step out whose gradients became infinite, here it is computed again with
half the scale: every step is taken, whatever the scale began with. The steps after it go up again, doubling each time,
to half of what was too much; so one unusual batch does not leave the others with gradients that are zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.distributed.ranks import Ranks

FIRST: Final = 2.0**16
"""The scale that a run begins with, as PyTorch's GradScaler does."""
LEAST: Final = 1.0
"""No smaller scale is tried: gradients that are infinite with it are none that could be trained with."""
STEPS_TO_GROW: Final = 2000
"""Steps in a row without a retry after which a larger scale is tried, as there."""


@dataclass
class LossScale:
    """The scale of the coming step, and how it moves."""

    moves: bool
    """Whether there is any need of it; otherwise it stays 1."""
    value: float = 1.0
    goal: float = 1.0
    """The largest scale that is not known to be too much."""
    steps: int = 0
    """Steps in a row that were taken at the goal."""
    first_try: float | None = None
    """The scale with which a step that is computed again was begun."""

    @classmethod
    def of(cls, *, in_float16: bool) -> LossScale:
        """That of a run's first step."""
        first = FIRST if in_float16 else 1.0
        return cls(moves=in_float16, value=first, goal=first)

    def halve(self) -> bool:
        """After gradients that are not finite; whether there is a smaller scale to try."""
        if not self.moves or self.value <= LEAST:
            return False
        if self.first_try is None:
            self.first_try = self.value
        self.value = max(LEAST, self.value / 2)
        return True

    def is_too_large(self, ranks: Ranks, grad_norm: float, *, in_float32: Iterable[float]) -> bool:
        """Whether the gradients of a step, on any rank, left the range of float16 though what is float32 did not: its
        losses and the head's gradient. The scale is halved then; False if that cannot help.
        """
        if not self.moves:
            return False
        lost, overflowed = ranks.any(not all(map(math.isfinite, in_float32)), not math.isfinite(grad_norm))
        return overflowed and not lost and self.halve()

    def count_step(self) -> None:
        """After a step that was taken."""
        if not self.moves:
            return
        if self.first_try is not None:
            self.goal, self.steps, self.first_try = max(LEAST, self.first_try / 2), 0, None
        elif self.value < self.goal:
            self.value = min(self.goal, self.value * 2)
        else:
            self.steps += 1
            if self.steps >= STEPS_TO_GROW:
                self.value, self.goal, self.steps = self.value * 2, self.goal * 2, 0

    def state(self) -> list[float]:
        """For a checkpoint, between two steps."""
        return [self.value, self.goal, self.steps]

    def restore(self, state: Any) -> None:
        """Inverse of `state`."""
        value, goal, steps = state
        self.value, self.goal, self.steps = float(value), float(goal), int(steps)
