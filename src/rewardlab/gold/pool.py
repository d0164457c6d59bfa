"""Parts of long work, divided among sources that may fail: servers, a model in this process, other machines.

A part that fails is tried again later, by another source if one is free. One that keeps failing, and at two sources
where there are two, is divided, until the items that are at fault are alone; these have the cause in place of a result
once every source has failed at them.
A source that has only failed for a while is left out; when none is left, the work ends with an error, and what was
finished is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar, runtime_checkable

from rewardlab.core.errors import EndpointError, RewardlabError

logger = logging.getLogger("rewardlab")
TRIES: Final = 3
"""How often a part is tried before it is divided."""
PATIENCE: Final = 8
"""A source is left out after this many failures in a row, and as many more as it may have parts under way."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Item_contra = TypeVar("Item_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


class PassingError(Exception):
    """A failure of a source that may be better a moment later, or elsewhere. Its text is for users."""


@runtime_checkable
class Source(Protocol[Item_contra, Result_co]):
    """Whatever does the work. Made without cost."""

    name: str
    """Name in messages."""
    places: int
    """Parts that it may have under way at a time."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides its results, once it is open."""

    async def open(self) -> None:
        """Load or connect. Raises RewardlabError."""

    async def ask(self, items: Sequence[Item_contra]) -> Sequence[Result_co]:
        """Return a result for each item. Raises PassingError for what may pass, RewardlabError for what will not."""

    async def close(self) -> None:
        """End what `open` began."""


@dataclass
class _Part(Generic[Item]):
    items: Sequence[Item]
    failures: int = 0
    failed_at: set[str] = field(default_factory=set)
    """Names of the sources that it failed at."""


Finished = list[tuple[Sequence[Item], Sequence[Result] | str]]
"""Items with their results, or with why they have none."""


class Pool(Generic[Item, Result]):
    """Sources at work on the parts of one piece of work."""

    def __init__(self, sources: Sequence[Source[Item, Result]], keep: Callable[[Finished[Item, Result]], None]) -> None:
        """Hand each finished part to `keep` at once."""
        assert sources, "at least one source is needed"
        self._alive = list(sources)
        self._keep = keep
        self._free = {source.name: source.places for source in sources}
        self._failures = dict.fromkeys(self._free, 0)
        self._again: deque[_Part[Item]] = deque()

    async def run(self, parts: Iterator[Sequence[Item]]) -> None:
        """Do all parts. Raises what a source raises, once nobody is left to go on; what was finished is kept."""
        fresh = (_Part(items) for items in parts)
        waiting: dict[asyncio.Task[Sequence[Result]], tuple[_Part[Item], Source[Item, Result]]] = {}
        try:
            while True:
                self._fill(waiting, fresh)
                if not waiting:
                    return
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                self._take([(task, *waiting.pop(task)) for task in done])
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    def _fill(
        self,
        waiting: dict[asyncio.Task[Sequence[Result]], tuple[_Part[Item], Source[Item, Result]]],
        fresh: Iterator[_Part[Item]],
    ) -> None:
        """Hand out parts as long as there are parts and free places; those that failed come last."""
        while free := [source for source in self._alive if self._free[source.name] > 0]:
            part = next(fresh, None) or self._to_try_again(free)
            if part is None:
                return
            failed_at = part.failed_at
            source = max(free, key=lambda one: (one.name not in failed_at, self._free[one.name]))
            self._free[source.name] -= 1
            waiting[asyncio.ensure_future(source.ask(part.items))] = part, source

    def _to_try_again(self, free: Sequence[Source[Item, Result]]) -> _Part[Item] | None:
        """Take the first failed part that one of these sources may try; None if there is none.

        A part that has failed often enough waits for a source that has not tried it, as long as there is one.
        """
        for number, part in enumerate(self._again):
            waits_for = self._untried(part) if part.failures >= TRIES else []
            if not waits_for or any(source in waits_for for source in free):
                del self._again[number]
                return part
        return None

    def _untried(self, part: _Part[Item]) -> list[Source[Item, Result]]:
        """Return the sources at work that have not failed at this part."""
        return [source for source in self._alive if source.name not in part.failed_at]

    def _take(self, done: Sequence[tuple[asyncio.Task[Sequence[Result]], _Part[Item], Source[Item, Result]]]) -> None:
        """Keep what is finished; then raise the first error that will not pass, if there is one."""
        finished: Finished[Item, Result] = []
        fatal: BaseException | None = None
        for task, part, source in done:
            self._free[source.name] += 1
            error = task.exception()
            if error is None:
                self._failures[source.name] = 0
                finished.append((part.items, task.result()))
            elif isinstance(error, PassingError):
                fatal = fatal or self._failed(part, source, error, finished)
            else:
                fatal = fatal or error
        if finished:
            self._keep(finished)
        if fatal is not None:
            raise fatal

    def _failed(
        self,
        part: _Part[Item],
        source: Source[Item, Result],
        error: PassingError,
        finished: Finished[Item, Result],
    ) -> RewardlabError | None:
        """Put a part back, divide it, or give up its one item. Return an error if no source is left."""
        self._failures[source.name] += 1
        if source in self._alive and self._failures[source.name] >= PATIENCE + source.places:
            self._alive.remove(source)
            if not self._alive:
                return EndpointError(f"{error} Nothing else can go on with it; what is finished is kept.")
            logger.warning("%s: left out after %d failures: %s", source.name, self._failures[source.name], error)
            # The failure that showed the source to be down does not count against the part.
            part.failures -= 1
        part.failures += 1
        part.failed_at.add(source.name)
        # A source that is dying fails any part three times. Where there are others, that says nothing about the part.
        is_tried = not self._untried(part) or (len(part.items) > 1 and len(part.failed_at) > 1)
        if part.failures < TRIES or not is_tried:
            self._again.append(part)
        elif len(part.items) > 1:
            # The halves have one try left before they are divided too.
            half = len(part.items) // 2
            self._again += [_Part(items, TRIES - 1) for items in (part.items[:half], part.items[half:])]
        else:
            finished.append((part.items, str(error)))
        return None
