"""Scorers in the loops of trainers: one for each event loop, and one for programs whose threads wait for a score.

Connections belong to the event loop in which they were made, and trainers make theirs late, or several.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, runtime_checkable

from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.core.loop_thread import LoopThread
from rewardlab.core.remaking import added, remade
from rewardlab.core.terminal import number_of
from rewardlab.rl.config import ScorerConfig
from rewardlab.rl.noise import Noise
from rewardlab.rl.rollouts import Rollout, RolloutError, named
from rewardlab.rl.scorer import RewardScorer, Scored

LOOK_EVERY_S: Final = 0.1
"""Seconds between two looks whether a loop still runs in which something is to be done."""


@runtime_checkable
class Scorer(Protocol):
    """The part of a `RewardScorer` that trainers' loops use."""

    async def details(self, rollouts: Iterable[Any]) -> list[Scored]:
        """Return what is known about each rollout's score, in order."""

    async def aclose(self) -> None:
        """Close connections and release the model."""


class LoopScorer:
    """Scores rollouts in whichever event loop asks, each with a scorer of its own, made when it first asks."""

    def __init__(self, make: Callable[[], Scorer]) -> None:
        self._make = make
        self._scorers: dict[asyncio.AbstractEventLoop, Scorer] = {}

    def here(self) -> Scorer:
        """Return the scorer of the running event loop, made if it has none yet. Raises as `make` does."""
        loop = asyncio.get_running_loop()
        if loop not in self._scorers:
            # Drop the scorers of loops that have ended: each refers to its loop, and both would be kept forever.
            for ended in [other for other in list(self._scorers) if other.is_closed()]:
                self._scorers.pop(ended, None)
            self._scorers[loop] = self._make()
        return self._scorers[loop]

    async def details(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return what is known about each rollout's score, in order.

        Raises RolloutError naming the rollout that has no finite score. Any other error of the scorer is raised as a
        RolloutError too, since that can be sent to another process, which not every error can.
        """
        try:
            scored = await self.here().details(rollouts)
        except RolloutError:
            raise
        except RewardlabError as error:
            raise RolloutError(f"{named(rollouts)}: {error}", rollouts=tuple(range(len(rollouts)))) from error
        if len(scored) != len(rollouts):
            raise RolloutError(
                f"{named(rollouts)}: {number_of(len(scored), 'score')} for {number_of(len(rollouts), 'rollout')}."
            )
        for number, (rollout, one) in enumerate(zip(rollouts, scored, strict=True)):
            require_finite(one.score, rollout.name, number)
        return scored

    async def aclose(self) -> None:
        """Close the scorer of the running loop, if it has one."""
        if (scorer := self._scorers.pop(asyncio.get_running_loop(), None)) is not None:
            await scorer.aclose()

    def close(self) -> None:
        """Close the scorers of all loops. Raises ConfigError in a thread that runs one of them."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        for loop, scorer in list(self._scorers.items()):
            if loop is here:
                raise ConfigError("the scorer of the running event loop is closed with `await aclose()`.")
            if not loop.is_closed():
                _finish(scorer.aclose(), loop)
        self._scorers.clear()


def _finish(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Do `work` in a loop and wait for its end: in the thread that runs the loop, or here if none does.

    The other thread may stop the loop at any time, and what it has left is done here. A loop that is closed meanwhile
    has no connections any more.
    """
    try:
        handed = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # closed at this moment
        work.close()
        return
    while not handed.done() and not loop.is_closed():
        if not loop.is_running():
            _run_until_done(handed, loop)
        wait([handed], LOOK_EVERY_S)
    if handed.done():
        handed.result()


def _run_until_done(handed: Future[None], loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until what was handed to it is done: in this thread, or in one of its own if this one runs a loop."""

    def run() -> None:
        # Another thread may begin to run the loop, stop it, or close it, at this moment.
        with suppress(RuntimeError):
            waited_for = [asyncio.wrap_future(handed, loop=loop)]
            loop.run_until_complete(asyncio.gather(*waited_for, return_exceptions=True))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        run()
    else:
        # A thread runs one loop at a time, and a cell of a notebook runs in one.
        helper = threading.Thread(target=run, daemon=True)
        helper.start()
        helper.join()


def require_finite(score: Any, name: str, number: int = 0) -> float:
    """Return a score. Raises RolloutError naming the rollout if it is missing or not a finite number."""
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if not is_number or not math.isfinite(score):
        raise RolloutError(
            f"{name}: the score is {score!r:.40}; wanted a finite number. Nothing is trained on it.", rollouts=(number,)
        )
    return float(score)


class WaitingScorer:
    """Scores rollouts for threads that wait, which share one scorer in a thread of its own."""

    def __init__(self, make: Callable[[], Scorer]) -> None:
        self._scorer = LoopScorer(make)
        self._lock = threading.Lock()
        self._running: LoopThread | None = None

    def details(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return what is known about each rollout's score, in order. Raises as `LoopScorer.details` does."""
        with self._lock:
            if self._running is None:
                self._running = LoopThread("scorer", self._scorer.aclose)
            running = self._running
        return running.wait(self._scorer.details(rollouts))

    def close(self) -> None:
        """Close the scorer and end the thread; a later call begins anew."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.close()


class BlockingScorer:
    """A `RewardScorer` for programs without an event loop: it scores in a thread of its own, and the caller waits.

    Any number of threads may share it.
    """

    def __init__(
        self, source: str | Path | Sequence[str | Path], config: ScorerConfig | None = None, **settings: Any
    ) -> None:
        """Make a scorer. `source`, `config`, `settings` and errors are those of `RewardScorer`."""
        self._sources = source
        self._scorer = RewardScorer(source, config, **settings)
        self._thread = LoopThread("scorer", self._scorer.aclose)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to another process as source and settings; there it loads or connects anew."""
        sources = (self._sources, self._scorer.config)
        return remade, (BlockingScorer, type(self), sources, {}), added(self, {"_sources", "_scorer", "_thread"})

    def __enter__(self) -> BlockingScorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, rollouts: Iterable[Any]) -> list[float]:
        """Return what `RewardScorer.score` returns. Raises as it does."""
        return self._thread.wait(self._scorer.score(rollouts))

    def details(self, rollouts: Iterable[Any]) -> list[Scored]:
        """Return what `RewardScorer.details` returns. Raises as it does."""
        return self._thread.wait(self._scorer.details(rollouts))

    def noise(self) -> Noise:
        """Return what `RewardScorer.noise` returns. Raises as it does."""
        return self._thread.wait(self._scorer.noise())

    def close(self) -> None:
        """Close connections and release the models. Calls that still wait in other threads end with ConfigError."""
        self._thread.close()
