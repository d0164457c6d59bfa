"""The ranks of a run and the collectives by which they agree. A single process agrees with itself at no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

Thing = TypeVar("Thing")


@dataclass(kw_only=True)
class Signs:
    """Where this process is in the run, for the others that may have to wait for it."""

    step: int = 0
    """The steps done."""
    calls: int = 0
    """The collectives begun; all ranks begin the same ones in the same order."""
    waits: bool = False
    """Whether the last of them has not ended."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Say that a collective begins, and when it has ended."""
        self.calls += 1
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of the run.

    Every method is a collective: all ranks call it, in the same order, or the run hangs.
    """

    rank: int = 0
    size: int = 1
    signs: Signs = field(default_factory=Signs, compare=False)
    """Where this process is."""

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, the one that logs and writes."""
        return self.rank == 0

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Return the sum of each number over the ranks, in float64; the result is the same on all ranks."""
        if self.size == 1:
            return list(numbers)
        # On the CPU, and so through gloo: the numbers are on the host anyway, and float64 keeps counts of tokens exact.
        sums = torch.tensor(numbers, dtype=torch.float64)
        with self.signs.waiting():
            dist.all_reduce(sums)
        return [float(number) for number in sums]

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, whether it is set on any rank."""
        # Flags travel as numbers, so that one collective is enough for several of them.
        return tuple(number > 0 for number in self.total([float(flag) for flag in flags]))

    def gather(self, thing: Thing) -> list[Thing]:
        """Return what every rank passes in, ordered by rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        with self.signs.waiting():
            dist.all_gather_object(things, thing)
        return things

    def from_first(self, thing: Thing) -> Thing:
        """Return what the first rank passes in; the argument of the other ranks is ignored."""
        if self.size == 1:
            return thing
        things = [thing]
        with self.signs.waiting():
            dist.broadcast_object_list(things, src=0)
        return things[0]

    def by_first(self, do: Callable[[], Thing]) -> Thing:
        """Run `do` on the first rank alone and return its result on all ranks.

        Raises on all ranks the error that `do` raised on the first.
        """
        if self.size == 1:
            return do()
        result: tuple[Any, Exception | None] = (None, None)
        if self.is_first:
            try:
                result = (do(), None)
            # The error must reach all ranks: if only the first one raised, the others would wait for it in the
            # broadcast below.
            except Exception as error:
                result = (None, error)
        value, failure = self.from_first(result)
        if failure is not None:
            raise failure
        answer: Thing = value
        return answer

    def wait(self) -> None:
        """Wait until all ranks have called this: a barrier."""
        self.total([0.0])


ALONE = Ranks()


class Parallel:
    """How ranks share the work of a step. This class is for a process that is alone; its subclasses are for several."""

    can_back_off = True
    """Whether a rank that runs out of memory in a step can still tell the others.

    False where the others would be waiting for it inside a layer, in a collective of FSDP.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Prepare for a forward pass of a step; called before each one."""

    def drop_gathered(self) -> None:
        """Drop gathered copies of parameters.

        Called before parameters are looked up outside a step, since a forward pass without a backward pass, as in an
        evaluation, may leave them gathered.
        """

    def finish_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave every rank with the gradients summed over the ranks, or with its shard of that sum.

        Called after the last backward pass of a step.
        """
