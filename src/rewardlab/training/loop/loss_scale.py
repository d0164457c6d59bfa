"""The factor on the loss while gradients are computed in float16, whose largest number is 65,504.

A float16 number below 6e-8 becomes zero, and gradients are often smaller than that. So the loss is multiplied by a
scale, and the float32 gradients of the weights are divided by it (Micikevicius et al. 2018, "Mixed precision
training"). The scale is a power of two, which changes no digit.

Other trainers skip a step whose gradients became infinite. Here it is computed again with half the scale, so every step
is taken, whatever the first scale was. The steps after it double the scale again, up to half of what was too large, so
that one unusual batch does not leave the later ones with gradients of zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.distributed.ranks import Ranks

FIRST: Final = 2.0**16
"""The scale of a run's first step; PyTorch's GradScaler begins with the same."""
LEAST: Final = 1.0
"""The smallest scale that is tried: gradients that are infinite even without scaling cannot be trained with."""
STEPS_TO_GROW: Final = 2000
"""Steps in a row without a retry after which a larger scale is tried, as in GradScaler."""


@dataclass
class LossScale:
    """The scale of the coming step, and how it changes."""

    moves: bool
    """Whether gradients are computed in float16; otherwise the scale stays 1."""
    value: float = 1.0
    goal: float = 1.0
    """The largest scale that is not known to be too large."""
    steps: int = 0
    """Steps in a row that were taken with the scale at its goal."""
    first_try: float | None = None
    """The scale with which the present step was first tried, if it is being computed again."""

    @classmethod
    def of(cls, *, in_float16: bool) -> LossScale:
        """Return the scale for the first step of a run."""
        first = FIRST if in_float16 else 1.0
        return cls(moves=in_float16, value=first, goal=first)

    def halve(self) -> bool:
        """Halve the scale after gradients that are not finite; return whether there was a smaller one to try."""
        if not self.moves or self.value <= LEAST:
            return False
        if self.first_try is None:
            self.first_try = self.value
        self.value = max(LEAST, self.value / 2)
        return True

    def halve_if_too_large(self, ranks: Ranks, grad_norm: float, *, in_float32: Iterable[float]) -> bool:
        """Halve the scale if a step's gradients overflowed float16 on any rank, though its float32 numbers are finite.

        The numbers in float32 are its losses and the head's gradient norm. Return whether the scale was halved, so that
        the step has to be computed again; False also if halving cannot help. Every rank calls it.
        """
        if not self.moves:
            return False
        # A loss that is not finite in float32 is a real failure, which a smaller scale would only hide. The ranks
        # decide together, since all of them must repeat the step or none.
        lost, overflowed = ranks.any(not all(map(math.isfinite, in_float32)), not math.isfinite(grad_norm))
        return overflowed and not lost and self.halve()

    def count_step(self) -> None:
        """Raise the scale if it is time to; called after every step that was taken."""
        if not self.moves:
            return
        if self.first_try is not None:
            # The goal is half of the scale that failed. Going back to that scale would make every step fail once and
            # cost double.
            self.goal, self.steps, self.first_try = max(LEAST, self.first_try / 2), 0, None
        elif self.value < self.goal:
            # A retry may have halved the scale many times for one batch; it recovers by doubling once a step.
            self.value = min(self.goal, self.value * 2)
        else:
            self.steps += 1
            if self.steps >= STEPS_TO_GROW:
                self.value, self.goal, self.steps = self.value * 2, self.goal * 2, 0

    def state(self) -> list[float]:
        """Return what a checkpoint keeps, between two steps."""
        return [self.value, self.goal, self.steps]

    def restore(self, state: Any) -> None:
        """Inverse of `state`."""
        value, goal, steps = state
        self.value, self.goal, self.steps = float(value), float(goal), int(steps)
