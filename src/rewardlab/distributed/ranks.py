"""The processes of a run and what they agree on. A process that is alone agrees with itself at no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

Thing = TypeVar("Thing")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of the run. Every method is called by all of them, in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the one that logs and writes."""
        return self.rank == 0

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64, the same on all of them."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(number) for number in sums]

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag whether it is up on any rank."""
        return tuple(number > 0 for number in self.total([float(flag) for flag in flags]))

    def gather(self, thing: Thing) -> list[Thing]:
        """What every rank hands in, by rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def from_first(self, thing: Thing) -> Thing:
        """What the first rank hands in."""
        if self.size == 1:
            return thing
        things = [thing]
        dist.broadcast_object_list(things, src=0)
        return things[0]

    def by_first(self, do: Callable[[], Thing]) -> Thing:
        """What the first rank alone does: its result on all ranks, or its error."""
        if self.size == 1:
            return do()
        result: tuple[Any, Exception | None] = (None, None)
        if self.is_first:
            try:
                result = (do(), None)
            except Exception as error:  # handed on, and raised below
                result = (None, error)
        found, failure = self.from_first(result)
        if failure is not None:
            raise failure
        answer: Thing = found
        return answer

    def wait(self) -> None:
        """Until all ranks are here."""
        self.total([0.0])


ALONE = Ranks()


class Parallel:
    """How ranks share the work of a step; this one is for a process that is alone."""

    can_back_off = True
    """Whether a rank that runs out of memory in a step can tell the others, or they wait for it inside a layer."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Called before each forward pass of a step."""

    def drop_gathered(self) -> None:
        """Called before parameters are looked up outside a step: a forward pass alone may leave gathered copies."""

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called after the last backward pass of a step: every rank then has the sum, or its shard of it."""
