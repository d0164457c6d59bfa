"""Several processes on one socket: started, restarted when they die, swapped together, counted together.

The parent holds the socket, so that connections wait while a worker starts again; it answers no request itself.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.signals import HANGUP, listened_to
from rewardlab.serve.http.metrics import Families, add_up, lasting, without_others
from rewardlab.serve.http.refusals import SwapGoesOnError
from rewardlab.serve.http.worker import CANNOT_LOAD, Line, Outcome, WorkerPlan, deaf_to_terminal, run_worker

logger = logging.getLogger(__name__)

GIVEN_UP: Final = 1
"""Exit status when a worker cannot be kept alive."""
STEADY_S: Final = 60.0
"""Seconds of serving after which a worker's earlier deaths are forgotten."""
BACKOFF_S: Final = (0.0, 0.5, 2.0, 5.0, 10.0)
"""Seconds before each new start in a row. If a worker dies once more while no other one serves, the parent ends; while
another one does, it is tried again every RETRY_S."""
RETRY_S: Final = 60.0
LOOK_EVERY_S: Final = 2.0
"""Seconds between two looks at the counts and the health of the workers."""
ANSWER_TIMEOUT_S: Final = 3.0
SILENT_LOOKS: Final = 8
"""After this many looks in a row without an answer, which takes 40 s, a worker counts as hanging and is ended."""
SWAP_TIMEOUT_S: Final = 1800.0
"""Seconds that loading a model may take; a worker that takes longer is ended."""
END_MARGIN_S: Final = 10.0
"""Seconds beyond the drain timeout after which a worker that has not ended is killed."""

STATUS_S: Final = 1.0
"""Seconds within which the status of a process that has ended is known."""


class Worker:
    """A process as its parent sees it."""

    def __init__(self, number: int, process: BaseProcess, line: Line) -> None:
        self.number = number
        self.process = process
        self.line = line
        self.loaded = False
        """Whether it has its models, and so answers its parent."""
        self.serving = False
        self.serving_since_s: float | None = None
        self.departed = False
        """Whether its counts are among those of workers that have ended."""
        self.num_silent = 0
        """Looks in a row without an answer."""
        self.failed: str | None = None
        """The reason why its models could not be loaded."""
        self.counts: Families = []
        """Its newest counts."""
        self.num_counted = 0
        """How often it had counted by then."""
        self._ending = threading.Lock()
        """Held while the system is asked for the status of the process, which it tells once: of two threads that ask at
        the same time, the other one would take the process for alive."""

    def has_ended(self, timeout_s: float | None = None) -> bool:
        """Wait until the process has ended, or so long; return whether it has."""
        if not wait([self.process.sentinel], timeout_s):
            return False
        end = time.monotonic() + STATUS_S
        with self._ending:
            self.process.join()
            # The start of another worker asks for the status of all too, and has that of this one a moment later.
            while self.process.exitcode is None and time.monotonic() < end:
                time.sleep(0.001)
        return True

    def kill(self) -> None:
        """End the process at once, unless it has ended."""
        with self._ending:
            self.process.kill()


class Workers:
    """The parent of `count` workers."""

    def __init__(
        self,
        plan: WorkerPlan,
        models: Mapping[str, Path],
        bound: socket.socket,
        *,
        count: int,
        backoff_s: Sequence[float] = BACKOFF_S,
    ) -> None:
        self._plan = plan
        self._backoff_s = backoff_s
        self._folders = {name: str(folder) for name, folder in models.items()}
        self._digests: dict[str, str] = {}
        """Digests that the workers serve: those of the first one, then those that were swapped in."""
        self._bound = bound
        self._count = count
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, Worker] = {}
        self._deaths = [0] * count
        self._departed: list[Families] = []
        self._counting = threading.Lock()
        """Held while counts move from a worker to the sum of departed workers."""
        self._swapping = threading.Lock()
        self._changed = threading.Condition()
        self._ready = False
        """Whether all workers have served at a time."""
        self._ending = False
        self._status = 0
        self._error: str | None = None

    def run(self, on_ready: Callable[[], None] = lambda: None) -> int:
        """Serve until `begin_end` or a signal; return the exit status. `on_ready` is called once all workers accept.

        Raises ConfigError with the worker's words if the models cannot be loaded at the start.
        """
        if threading.current_thread() is threading.main_thread():
            for number in listened_to(("SIGTERM", "SIGINT", HANGUP)):
                signal.signal(number, self._on_signal)
        for number in range(self._count):
            self._start(number)
        looker = threading.Thread(target=self._look, daemon=True)
        looker.start()
        while not self._ending:
            with self._changed:
                self._changed.wait(0.1)
            if not self._ready and self.num_serving() == self._count:
                self._ready = True
                on_ready()
        self._end_all()
        if self._error is not None and not self._ready:
            raise ConfigError(self._error)
        return self._status

    def num_serving(self) -> int:
        """Return how many workers accept."""
        return sum(worker.serving for worker in list(self._workers.values()))

    def begin_end(self, status: int = 0) -> None:
        """End all workers, each after answering what it has taken."""
        self._status = self._status or status
        self._ending = True

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._ending:
            for worker in list(self._workers.values()):
                worker.process.kill()
            os._exit(128 + number)
        self.begin_end()

    # One worker's life.

    def _start(self, number: int) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=run_worker,
            args=(there, self._bound, dict(self._folders), self._plan),
            name=f"rewardlab-worker-{number}",
            daemon=True,
        )
        worker = Worker(number, process, Line(here))
        with deaf_to_terminal():
            process.start()
        there.close()
        self._workers[number] = worker
        threading.Thread(target=self._attend, args=(worker,), daemon=True).start()

    def _attend(self, worker: Worker) -> None:
        """Answer a worker until it is gone, then start it again."""
        while (message := worker.line.receive()) is not None:
            what, *rest = message
            if what == "answer":
                worker.line.answered(*rest)
            elif what == "failed":
                worker.failed = rest[0]
            elif what == "loaded":
                worker.loaded = True
                threading.Thread(target=self._let_serve, args=(worker, rest[0]), daemon=True).start()
            else:
                threading.Thread(target=self._answer, args=(worker, what, rest), daemon=True).start()
        worker.line.gone()
        worker.has_ended()
        with self._counting:
            self._departed.append(lasting(worker.counts))
            worker.departed, worker.loaded, worker.serving = True, False, False
        self._after_death(worker)

    def _let_serve(self, worker: Worker, loaded: dict[str, str]) -> None:
        """Let a worker accept once it has the models that the others have, by their digests."""
        with self._swapping:
            for name in self._folders:
                if not self._agree(worker, name, loaded.get(name, "")):
                    return
            try:
                worker.line.send("go")
            except OSError:
                return
            worker.serving_since_s = time.monotonic()
            worker.serving = True
        with self._changed:
            self._changed.notify_all()

    def _agree(self, worker: Worker, name: str, digest: str) -> bool:
        """Make a worker that loaded this digest serve the same one as all others; return whether it does, else end
        it."""
        folder, wanted = self._folders[name], self._digests.setdefault(name, digest)
        if digest != wanted:
            # It may have loaded before a swap, or while the folder was written.
            good, value = self._swapped(worker, name, folder)
            if not good:
                self._end(worker, f"could not load {name}")
                return False
            digest = value["digest"]
        if digest == wanted:
            return True
        told = f"{folder} holds {digest[:12]} now, and {wanted[:12]} is served as {name}"
        if self.num_serving() == 0:
            logger.warning("%s: nobody has the other one any more, so that of the folder is served from now on", told)
            self._digests[name] = digest
            return True
        if not self._ready:
            self._give_up(f"{told}. Start again when nobody writes the folder.")
        self._end(worker, f"is kept out ({told}; swap to what all are to serve)")
        return False

    def _end(self, worker: Worker, why: str) -> None:
        """End a worker, so that it is started again."""
        if self._ending:  # some are gone then, and others still answer
            return
        logger.warning("worker %d %s; it starts anew", worker.number, why)
        worker.loaded = worker.serving = False
        worker.kill()

    def _after_death(self, worker: Worker) -> None:
        if self._ending:
            return
        status = worker.process.exitcode
        failed = worker.failed if status == CANNOT_LOAD else None
        if failed is not None and not self._ready:
            self._give_up(failed)
            return
        since_s = worker.serving_since_s
        steady = since_s is not None and time.monotonic() - since_s > STEADY_S
        deaths = self._deaths[worker.number] = 1 if steady else self._deaths[worker.number] + 1
        why = f"status {status}" + ("" if failed is None else f" ({failed})")
        if deaths > len(self._backoff_s) and not (self._ready and self.num_serving()):
            self._give_up(f"worker {worker.number} died {deaths} times in a row, last with {why}.")
            return
        pause = self._backoff_s[deaths - 1] if deaths <= len(self._backoff_s) else RETRY_S
        logger.warning("worker %d ended with %s; it starts again in %g s", worker.number, why, pause)
        time.sleep(pause)
        if not self._ending:
            self._start(worker.number)

    def _give_up(self, why: str) -> None:
        logger.error("ending: %s", why)
        self._error = why
        self.begin_end(GIVEN_UP)

    # Requests of the workers.

    def _answer(self, worker: Worker, what: str, rest: list[Any]) -> None:
        number, *arguments = rest
        outcome = self._swap(worker, *arguments) if what == "swap" else (True, self.counts())
        try:
            worker.line.send("told", number, outcome)
        except OSError:
            return

    def _swap(self, first: Worker, name: str, folder: str) -> Outcome:
        """Swap in the worker that was asked, then in all others; one that cannot is ended and started anew.

        If the first one cannot load the folder, no worker is changed.
        """
        if not self._swapping.acquire(blocking=False):
            return False, (SwapGoesOnError.kind, "Another swap, or the start of a worker, is not finished. Try again.")
        try:
            outcome = self._swapped(first, name, folder)
            if not outcome[0]:
                return outcome
            self._folders[name], self._digests[name] = folder, outcome[1]["digest"]
            others = [one for one in self._workers.values() if one is not first and one.serving]
            with ThreadPoolExecutor(max(1, len(others))) as threads:
                outcomes = list(threads.map(lambda one: self._swapped(one, name, folder), others))
            for other, (good, value) in zip(others, outcomes, strict=True):
                if not good or value["digest"] != outcome[1]["digest"]:
                    self._end(other, f"could not swap {name}")
            return outcome
        finally:
            self._swapping.release()

    def _swapped(self, worker: Worker, name: str, folder: str) -> Outcome:
        try:
            return worker.line.ask("swap", name, folder, timeout_s=SWAP_TIMEOUT_S)
        except TimeoutError:
            self._end(worker, f"did not load {name} in {SWAP_TIMEOUT_S:g} s")
        except OSError:
            pass
        return False, ("engine_failed", "A worker ended while it swapped. The others keep the model they had.")

    def counts(self) -> Families:
        """Return the counts of all workers added up, with those of workers that have ended."""
        serving = [worker for worker in list(self._workers.values()) if worker.serving]
        with ThreadPoolExecutor(max(1, len(serving))) as threads:
            list(threads.map(self._count_of, serving))
        with self._counting:
            # Keep the departed workers as one sum, so that the list does not grow with every death and model.
            departed = add_up(self._departed)
            if digests := set(self._digests.values()):
                departed = without_others(departed, digests)
            self._departed = [departed]
            present = [worker for worker in list(self._workers.values()) if not worker.departed]
            return add_up(
                [departed, *(worker.counts if worker.serving else lasting(worker.counts) for worker in present)]
            )

    def _count_of(self, worker: Worker) -> bool | None:
        """Ask a worker for its counts; return whether its engine is alive, None if it does not answer.

        If it does not answer in time, its last counts are kept.
        """
        try:
            good, value = worker.line.ask("counts", timeout_s=ANSWER_TIMEOUT_S)
        except (OSError, TimeoutError):
            return None
        if not good:
            return None
        healthy: bool
        with self._counting:
            number, counts, healthy = value
            # Of two answers to questions at the same time, the older one may come last.
            if not worker.departed and number > worker.num_counted:
                worker.num_counted, worker.counts = number, counts
        return healthy

    def _look(self) -> None:
        """Look at each worker every LOOK_EVERY_S seconds."""
        while not self._ending:
            time.sleep(LOOK_EVERY_S)
            for worker in list(self._workers.values()):
                if worker.loaded and not self._ending:
                    self.look_at(worker)

    def look_at(self, worker: Worker) -> None:
        """Ask a worker for its counts; end one whose engine is dead, or that has not answered for many looks."""
        alive = self._count_of(worker)
        worker.num_silent = worker.num_silent + 1 if alive is None else 0
        if not worker.loaded:
            return
        if alive is False:
            self._end(worker, "has no engine any more")
        elif worker.num_silent >= SILENT_LOOKS:
            self._end(worker, f"has not answered {worker.num_silent} times in a row")

    def _end_all(self) -> None:
        self._bound.close()
        deadline = time.monotonic() + self._plan.drain_timeout_s + END_MARGIN_S
        for worker in list(self._workers.values()):
            if not worker.serving:
                # This one still loads its models: it has taken no request, and would read the message only afterwards.
                worker.kill()
                continue
            with contextlib.suppress(OSError):
                worker.line.send("end")
        for worker in list(self._workers.values()):
            if not worker.has_ended(max(0.0, deadline - time.monotonic())):
                logger.warning("worker %d did not end in time and is killed", worker.number)
                worker.kill()
                worker.has_ended()
