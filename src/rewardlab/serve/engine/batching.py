"""The queue of requests for one device, computed in batches by one thread.

A batch begins with the oldest request. If a part of that one was computed before, every other batch begins with the
oldest request of which nothing was computed yet: so a small request does not wait for all batches of a large one, and
the large one still gets at least every other batch. A batch is filled up with work for the same model, oldest first,
as far as the token budget allows. One request takes at most half of the budget as long as others have work that fits.
Work of different requests with equal prompts becomes one group. If a batch fails, its requests are computed
separately, so that only the one at fault fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from rewardlab.core.types import TokenGroup
from rewardlab.data.merging import Place, merged
from rewardlab.data.pack import Piece, part_of
from rewardlab.model.out_of_memory import is_out_of_memory
from rewardlab.serve.engine.api import DrainingError, EngineFailedError, QueueFullError
from rewardlab.serve.engine.queued import Batch, Filling, Work, num_tokens
from rewardlab.serve.engine.request_tokens import Unit

logger = logging.getLogger("rewardlab")
LOOKED_AT: Final = 512
"""The largest number of requests that are looked at to fill up a batch."""
RETRY_S: Final = (1.0, 60.0)
"""The shortest and the longest time after which a client is told to try again."""


@dataclass(kw_only=True)
class Counts:
    """What was done since the start."""

    batches: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    busy_s: float = 0.0


class Batcher:
    """The queue of a device and the thread that computes."""

    def __init__(self, *, token_budget: int, max_waiting_tokens: int, max_batch_wait_ms: float) -> None:
        self.token_budget = token_budget
        self.max_waiting_tokens = max_waiting_tokens
        self.counts = Counts()
        self._max_batch_wait_s = max_batch_wait_ms / 1000
        self._changed = threading.Condition()
        # Ordered by arrival; a dict, so that what was cancelled leaves at once.
        self._waiting: dict[int, Work] = {}
        self._waiting_tokens = 0
        self._jobs: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._running: Batch = []
        # Whether the last batch began with the oldest request.
        self._oldest_began = False
        self._draining = self._closed = False
        self._thread = threading.Thread(target=self._run, name="rewardlab-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> tuple[int, int]:
        """The numbers (requests, tokens) that wait."""
        with self._changed:
            return len(self._waiting), self._waiting_tokens

    def alive(self) -> bool:
        """Return whether the thread computes what it is given."""
        return self._thread.is_alive() and not self._closed

    def submit(self, work: Work) -> None:
        """Queue a request. Raises QueueFullError or DrainingError."""
        size = num_tokens(work.units)
        with self._changed:
            if self._draining or not self.alive():
                raise DrainingError("the server is about to end and takes no more requests.", retry_after_s=RETRY_S[0])
            if self._waiting and self._waiting_tokens + size > self.max_waiting_tokens:
                raise QueueFullError(
                    f"{self._waiting_tokens} tokens are waiting, and at most {self.max_waiting_tokens} may. Try again "
                    f"later.",
                    retry_after_s=self._seconds_of(self._waiting_tokens),
                )
            self._waiting[id(work)] = work
            self._waiting_tokens += size
            self._changed.notify_all()
        work.future.add_done_callback(lambda future: self._withdraw(work) if future.cancelled() else None)

    def call(self, job: Callable[[], Any]) -> Future[Any]:
        """Run a function in the thread that computes, between two batches. Raises DrainingError if it has ended."""
        future: Future[Any] = Future()
        with self._changed:
            if not self.alive():
                raise DrainingError("the engine is closed.", retry_after_s=RETRY_S[0])
            self._jobs.append((job, future))
            self._changed.notify_all()
        return future

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others; return whether none is left."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    def begin_end(self) -> None:
        """Let the thread end after its batch, which fails what waits; wait for neither."""
        with self._changed:
            self._draining = self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread after its batch; what waits fails with DrainingError."""
        self.begin_end()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._abandon()

    def _abandon(self) -> None:
        """Fail all that waits."""
        with self._changed:
            left, self._waiting, self._waiting_tokens = list(self._waiting.values()), {}, 0
            jobs, self._jobs = self._jobs, []
            self._changed.notify_all()
        for work in left:
            _fail(work.future, _ended())
        for _, future in jobs:
            _fail(future, DrainingError("the engine is closed.", retry_after_s=RETRY_S[0]))

    def _withdraw(self, work: Work) -> None:
        """Take a request out of the queue."""
        with self._changed:
            if self._waiting.pop(id(work), None) is not None:
                self._waiting_tokens -= num_tokens(work.units[work.num_taken :])
                self._changed.notify_all()

    def _seconds_of(self, tokens: int) -> float:
        """Return how long so many tokens take at the speed so far, within RETRY_S."""
        done = self.counts.computed_tokens + self.counts.cached_tokens
        seconds = tokens * self.counts.busy_s / done if done else 0.0
        return min(max(seconds, RETRY_S[0]), RETRY_S[1])

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._jobs or self._closed)
                    if self._closed:
                        return
                if self._run_jobs():
                    continue
                if self._max_batch_wait_s:
                    self._wait_for_more()
                with self._changed:
                    self._running = self._take()
                if self._running:
                    self._compute(self._running)
                with self._changed:
                    self._running = []
                    self._changed.notify_all()
        except BaseException:
            # Nothing above should raise. If something does all the same, nobody must wait for an answer that never
            # comes.
            logger.exception("the engine's thread ended")
            raise
        finally:
            self._closed = True
            # `_fail` leaves requests alone that have an answer already.
            for work, _ in self._running:
                _fail(work.future, EngineFailedError("the engine's thread ended."))
            self._running = []
            self._abandon()

    def _run_jobs(self) -> bool:
        """Run the functions that wait; return whether there were any.

        No variable of `_run` may name them: they hold models, which would stay in memory until the next ones.
        """
        with self._changed:
            jobs, self._jobs = self._jobs, []
        for job, future in jobs:
            _run_job(job, future)
        return bool(jobs)

    def _wait_for_more(self) -> None:
        """Wait a little for a batch to fill up."""
        deadline = time.monotonic() + self._max_batch_wait_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._waiting_tokens >= self.token_budget or self._closed, deadline - time.monotonic()
            )

    def _take(self) -> Batch:
        """Take the next batch out of the queue."""
        if not self._waiting:
            return []
        first = self._begins()
        others = (work for work in islice(self._waiting.values(), LOOKED_AT) if work is not first)
        works = [first, *(work for work in others if work.model is first.model)]
        filling = Filling(self.token_budget)
        # The second pass gives the room that is left to requests that had their half in the first one.
        for share in (self.token_budget // 2, self.token_budget):
            works = [work for work in works if not filling.is_full and filling.take(work, share)]
        for work, unit in filling.batch:
            work.num_taken += 1
            self._waiting_tokens -= unit.group.num_tokens
            if work.num_taken == len(work.units):
                self._waiting.pop(id(work), None)
        return filling.batch

    def _begins(self) -> Work:
        """Return the request with which the next batch begins."""
        oldest = next(iter(self._waiting.values()))
        if oldest.num_taken and self._oldest_began:
            new = next((work for work in self._waiting.values() if not work.num_taken), None)
            if new is not None:
                self._oldest_began = False
                return new
        self._oldest_began = True
        return oldest

    def _compute(self, batch: Batch) -> None:
        """Compute a batch and finish the requests that are complete."""
        batch = [(work, unit) for work, unit in batch if not work.future.done()]
        if self._closed:
            # These requests have left the queue, so `_abandon` does not reach them.
            for work, _ in batch:
                _fail(work.future, _ended())
            return
        if not batch:
            return
        groups, places = merged([unit.group for _, unit in batch])
        model = batch[0][0].model
        started = time.perf_counter()
        try:
            values, cached = model.score(groups, budget=self.token_budget)
        except Exception as error:  # kernels, drivers and models raise errors of any class
            self.counts.busy_s += time.perf_counter() - started
            self._compute_apart(batch, error)
            return
        counts = self.counts
        counts.busy_s += time.perf_counter() - started
        counts.batches += 1
        for group, num_cached in zip(groups, cached, strict=True):
            counts.cached_tokens += num_cached
            counts.computed_tokens += group.num_tokens - num_cached
            counts.prompt_tokens += min(group.prompt_tokens)
        _share_out(batch, groups, places, values, cached)
        for work, _ in batch:
            work.num_done += 1
            if work.num_done == len(work.units):
                finish(work)

    def _compute_apart(self, batch: Batch, error: Exception) -> None:
        """Compute a batch that failed in two halves; if it is a single unit, fail its request."""
        model = batch[0][0].model
        out_of_memory = is_out_of_memory(error)
        if out_of_memory:
            model.free_memory()
        if len(batch) > 1:
            # The traceback keeps the frames of the failed pass alive, and with them its tensors, when memory is short.
            error.__traceback__ = None
            middle = len(batch) // 2
            self._compute(batch[:middle])
            self._compute(batch[middle:])
            return
        ((work, unit),) = batch
        if out_of_memory and unit.group.num_replies > 1:
            error.__traceback__ = None
            # One unit has become two, and each half counts as one done: correct the count beforehand.
            work.num_done -= 1
            for part in _halves(unit):
                self._compute([(work, part)])
            return
        # The text of the error may quote what was sent, so the client gets only its class.
        logger.error("a request could not be computed", exc_info=error)
        self._withdraw(work)
        why = "memory ran out" if out_of_memory else f"the model raised {type(error).__name__}"
        _fail(work.future, EngineFailedError(f"the request could not be computed: {why}."))
        if not model.is_usable():
            logger.error("the device does not compute any more; the engine ends")
            with self._changed:
                self._draining = self._closed = True


def _share_out(
    batch: Batch, groups: Sequence[TokenGroup], places: Sequence[Place], values: Sequence[Any], cached: Sequence[int]
) -> None:
    """Give requests the scores of what was computed together, and count the tokens.

    What several of them have in common is counted for the first.
    """
    begun: set[int] = set()
    counted: set[tuple[int, int]] = set()
    for (work, unit), (number, replies) in zip(batch, places, strict=True):
        if number not in begun:
            begun.add(number)
            work.computed_tokens += len(groups[number].shared) - cached[number]
            work.cached_tokens += cached[number]
        for place, reply in zip(unit.places, replies, strict=True):
            work.scores[place] = float(values[number][reply])
            if (number, reply) not in counted:
                counted.add((number, reply))
                work.computed_tokens += len(groups[number].suffixes[reply])


def finish(work: Work) -> None:
    """Give a request its answer, or what it fails with, unless it was cancelled."""
    if not work.future.set_running_or_notify_cancel():
        return
    try:
        work.future.set_result(work.finish(work))
    except Exception as error:
        work.future.set_exception(error)


def _ended() -> DrainingError:
    return DrainingError("the server ended before it came to this request.", retry_after_s=RETRY_S[0])


def _fail(future: Future[Any], error: Exception) -> None:
    """Fail a future, unless it was cancelled or is done."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


def _run_job(job: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)


def _halves(unit: Unit) -> list[Unit]:
    """Return the replies of a unit as two units."""
    middle, count = unit.group.num_replies // 2, unit.group.num_replies
    return [
        Unit(group=part_of(unit.group, Piece(0, first, stop, 0)), places=unit.places[first:stop])
        for first, stop in ((0, middle), (middle, count))
    ]
