"""Who does the parts of a stage's work: sources in this process, or copies of one in the workers of a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from rewardlab.gold.engine import EngineConfig
from rewardlab.gold.pool import Finished, Pool, Source
from rewardlab.gold.servers import open_all

Item = TypeVar("Item")
Result = TypeVar("Result")


Accept = Callable[[Mapping[str, Any]], None]
"""Called with what decides the results of a team before it begins; raises where that is not wanted."""


def anyone(identity: Mapping[str, Any]) -> None:
    """Accept every team, whatever decides its results."""


class Team(Protocol[Item, Result]):
    """Does the parts of a piece of work, by sources in this process or by workers on Ray."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides the results."""

    async def run(self, parts: Iterator[Sequence[Item]], keep: Callable[[Finished[Item, Result]], None]) -> None:
        """Do all parts; `keep` gets each once it is finished. Raises RewardlabError if nobody is left to go on."""


class InProcess(Generic[Item, Result]):
    """Sources that this process opened."""

    def __init__(self, opened: Sequence[Source[Item, Result]]) -> None:
        self.identity = opened[0].identity
        self._opened = opened

    async def run(self, parts: Iterator[Sequence[Item]], keep: Callable[[Finished[Item, Result]], None]) -> None:
        """Do all parts. Raises as `Pool.run`."""
        await Pool(self._opened, keep).run(parts)


@asynccontextmanager
async def team_of(
    make: Callable[[], Sequence[Source[Item, Result]]], config: EngineConfig
) -> AsyncIterator[Team[Item, Result]]:
    """Open the sources that do the parts, and close them after the block.

    `make` returns sources that are not open. For Ray, which sends it to the workers, it can be pickled and returns one.

    Raises what opening them raises; DataError without Ray, EndpointError for a cluster that cannot be used.
    """
    if config.engine == "ray":
        from rewardlab.gold.on_ray import cluster

        with cluster(make, config) as workers:
            yield workers
        return
    sources = make()
    try:
        yield InProcess(await open_all(sources))
    finally:
        await asyncio.gather(*(source.close() for source in sources), return_exceptions=True)
