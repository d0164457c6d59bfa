"""Scorers in the loops of trainers: one for each event loop, and one for programs whose threads wait for a score.

Connections belong to the event loop in which they were made, and trainers make theirs late, or several.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from rewardlab.core.errors import RewardlabError
from rewardlab.rl.rollouts import Rollout, RolloutError
from rewardlab.rl.scorer import Scored


@runtime_checkable
class Scorer(Protocol):
    """What is needed of a `RewardScorer`."""

    async def details(self, rollouts: Iterable[Any]) -> list[Scored]:
        """Return what is known of each rollout's score, in order."""

    async def aclose(self) -> None:
        """Close connections, let the model go."""


class LoopScorer:
    """Scores rollouts in whichever event loop asks, each with a scorer of its own, made when it first asks."""

    def __init__(self, make: Callable[[], Scorer]) -> None:
        self._make = make
        self._scorers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Scorer] = weakref.WeakKeyDictionary()

    def here(self) -> Scorer:
        """Return the scorer of the running event loop, made if it has none yet. Raises as `make` does."""
        loop = asyncio.get_running_loop()
        if loop not in self._scorers:
            self._scorers[loop] = self._make()
        return self._scorers[loop]

    async def details(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return what is known of each rollout's score, in order.

        Raises RolloutError naming the rollout that has no finite score, and for whatever else keeps them from having
        one. It can be sent to another process, which not all causes can.
        """
        try:
            scored = await self.here().details(rollouts)
        except RolloutError:
            raise
        except RewardlabError as error:
            raise RolloutError(f"{_names(rollouts)}: {error}", rollouts=tuple(range(len(rollouts)))) from error
        if len(scored) != len(rollouts):
            raise RolloutError(f"{_names(rollouts)}: {len(scored)} scores for {len(rollouts)} rollouts.")
        for number, (rollout, one) in enumerate(zip(rollouts, scored, strict=True)):
            require_finite(one.score, rollout.name, number)
        return scored

    async def aclose(self) -> None:
        """Close the scorer of the running loop, if it has one."""
        if (scorer := self._scorers.pop(asyncio.get_running_loop(), None)) is not None:
            await scorer.aclose()


def require_finite(score: Any, name: str, number: int = 0) -> float:
    """Return a score. Raises RolloutError naming the rollout if it is missing or not a finite number."""
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if not is_number or not math.isfinite(score):
        raise RolloutError(
            f"{name}: the score is {score!r:.40}; wanted a finite number. Nothing is trained on it.", rollouts=(number,)
        )
    return float(score)


def _names(rollouts: Sequence[Rollout]) -> str:
    if not rollouts:
        return "no rollouts"
    more = f" and {len(rollouts) - 1} more" if len(rollouts) > 1 else ""
    return f"{rollouts[0].name}{more}"


class WaitingScorer:
    """Scores rollouts for threads that wait, which share one scorer in a thread of its own."""

    def __init__(self, make: Callable[[], Scorer]) -> None:
        self._scorer = LoopScorer(make)
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None

    def details(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return what is known of each rollout's score, in order. Raises as `LoopScorer.details` does."""
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="rewardlab-rewards", daemon=True)
                thread.start()
                self._running = loop, thread
            loop = self._running[0]
        return asyncio.run_coroutine_threadsafe(self._scorer.details(rollouts), loop).result()

    def close(self) -> None:
        """Close the scorer and end the thread; a later call begins anew."""
        with self._lock:
            if self._running is None:
                return
            (loop, thread), self._running = self._running, None
        asyncio.run_coroutine_threadsafe(self._scorer.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
