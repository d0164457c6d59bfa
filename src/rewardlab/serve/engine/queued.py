"""A request in the queue, and a batch that is filled with parts of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from rewardlab.core.types import TokenGroup
from rewardlab.data.merging import Merging
from rewardlab.serve.engine.api import Scored
from rewardlab.serve.engine.request_tokens import Unit

MAX_TOTAL: Final = 4
"""A batch has at most so many times the token budget, counting tokens that the cache has."""


@runtime_checkable
class Model(Protocol):
    """What computes a batch. Equal objects are one model."""

    def score(self, groups: Sequence[TokenGroup], *, budget: int) -> tuple[list[Any], list[int]]:
        """Return (float32 rewards [K] of each group, how many tokens of each group came from a cache)."""

    def num_known(self, group: TokenGroup) -> int:
        """Return how many first tokens of the group a cache has now."""

    def free_memory(self) -> None:
        """Give up memory that is not needed, after it ran out."""

    def is_usable(self) -> bool:
        """Return whether the device still computes, after a batch failed."""


@dataclass(kw_only=True, eq=False)
class Work:
    """A request in the queue."""

    model: Model
    units: Sequence[Unit]
    num_replies: int
    finish: Callable[[Work], Scored]
    """Makes the answer from scores and counts; may raise the error with which the request fails."""
    future: Future[Scored] = field(default_factory=Future)
    scores: list[float | None] = field(init=False)
    computed_tokens: int = 0
    cached_tokens: int = 0
    num_taken: int = 0
    """Units that were put into a batch."""
    num_done: int = 0

    def __post_init__(self) -> None:
        self.scores = [None] * self.num_replies


Batch = list[tuple[Work, Unit]]


class Filling:
    """A batch to be, in tokens to compute."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.batch: Batch = []
        self._merging = Merging()
        self._computed = self._total = 0
        # Work -> (units in the batch, tokens that they add).
        self._of: dict[Work, tuple[int, int]] = {}

    @property
    def is_full(self) -> bool:
        """Return whether nothing more fits."""
        return self._computed >= self.budget

    def take(self, work: Work, share: int) -> bool:
        """Add the next units of a request that fit, until it has `share` tokens; return whether that held it back.

        The first unit of a request is not held to its share, and the first of the batch not to the budget either.
        """
        count, own = self._of.get(work, (0, 0))
        held_back = False
        for unit in work.units[work.num_taken + count :]:
            merging, group = self._merging, unit.group
            cost = merging.cost_of(group)
            new = cost if merging.has(group) else cost - work.model.num_known(group)
            fits = self._computed + new <= self.budget and self._total + cost <= MAX_TOTAL * self.budget
            # Stop here, so that later parts of the same request do not overtake the one that does not fit.
            if self.batch and not fits:
                break
            if held_back := bool(count) and own + new > share:
                break
            merging.add(group)
            self._computed, self._total = self._computed + new, self._total + cost
            count, own = count + 1, own + new
            self.batch.append((work, unit))
        self._of[work] = count, own
        return held_back


def num_tokens(units: Sequence[Unit]) -> int:
    """Return the tokens to be computed for units, each with its own prompt."""
    return sum(unit.group.num_tokens for unit in units)
