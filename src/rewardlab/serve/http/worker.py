"""A worker, one of several processes that serve on the same socket, and its messages to and from the parent.

    parent -> worker   ("go", {}), ("end",), ("swap", call, name, folder), ("counts", call), ("told", ask, outcome)
    worker -> parent   ("loaded", digests), ("failed", message), ("answer", call, outcome), ("swap", ask, name, folder),
                       ("counts", ask)

An outcome is (True, value) or (False, (kind, message)). Values are plain, so that no side unpickles classes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from rewardlab.client.protocol import ServedModel
from rewardlab.core.errors import RewardlabError
from rewardlab.core.signals import leave_quickly
from rewardlab.serve.engine.api import (
    DrainingError,
    Engine,
    EngineFailedError,
    Refused,
    UnknownModelError,
    WrongDigestError,
)
from rewardlab.serve.http.app import make_app
from rewardlab.serve.http.config import HttpConfig
from rewardlab.serve.http.metrics import Families
from rewardlab.serve.http.refusals import SWAP_FAILURES, NotSwappedError, SwapGoesOnError, not_swapped
from rewardlab.serve.http.run import Server, end_at_once, serve_until_ended
from rewardlab.serve.http.telemetry import Spans, spans_from_environment

Outcome = tuple[bool, Any]
COUNTS_TIMEOUT_S: Final = 5.0
CANNOT_LOAD: Final = 2
OF_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals that a terminal sends to all of its processes: at Ctrl-C, and when it is closed."""
"""Exit status of a worker whose models could not be loaded."""
_KINDS: Final[Mapping[str, type[Refused]]] = {
    one.kind: one
    for one in (
        UnknownModelError,
        WrongDigestError,
        NotSwappedError,
        SwapGoesOnError,
        DrainingError,
        EngineFailedError,
    )
}


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """The settings with which every worker is started."""

    load: Callable[[Mapping[str, Path]], Engine]
    """Makes the engine of a process from the folders of its models; a function of a module, so that it can be sent."""
    config: HttpConfig
    drain_timeout_s: float
    otel: bool = False


def outcome_of(work: Callable[[], Any]) -> Outcome:
    """Return the result of `work`, or its refusal, in a form that can be sent to another process."""
    try:
        return True, work()
    except Refused as refused:
        return False, (refused.kind, str(refused))
    except SWAP_FAILURES as error:
        return False, (NotSwappedError.kind, str(not_swapped(error)))
    except Exception as error:
        return False, (EngineFailedError.kind, f"The engine failed ({type(error).__name__}).")


def value_or_refusal(outcome: Outcome) -> Any:
    """Return the value of an outcome. Raises the Refused that it holds."""
    good, value = outcome
    if good:
        return value
    kind, message = value
    raise _KINDS.get(kind, EngineFailedError)(message)


class Line:
    """A line between two processes, which several threads may send on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Outcome]] = {}

    def send(self, *message: Any) -> None:
        """Send a message. Raises OSError if the other side is gone."""
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Any:
        """Return the next message; None when the other side is gone."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def ask(self, what: str, *arguments: Any, timeout_s: float | None) -> Outcome:
        """Send a question and return its outcome. Raises TimeoutError; OSError if the other side goes away."""
        number, future = next(self._numbers), Future[Outcome]()
        self._waiting[number] = future
        try:
            self.send(what, number, *arguments)
            return future.result(timeout_s)
        finally:
            self._waiting.pop(number, None)

    def answered(self, number: int, outcome: Outcome) -> None:
        """Hand an answer to the thread that waits for it; one that nobody waits for any more is dropped."""
        if (future := self._waiting.get(number)) is not None and not future.done():
            future.set_result(outcome)

    def gone(self) -> None:
        """Fail all that wait."""
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(OSError("the other process is gone"))

    def close(self) -> None:
        """Close this end."""
        self._connection.close()


def run_worker(connection: Connection, bound: socket.socket, models: Mapping[str, str], plan: WorkerPlan) -> None:
    """Run as a worker: load the models, wait for the parent's go, and serve until the parent says end or is gone."""
    leave_to_the_parent()
    _log_on_stdout()
    line = Line(connection)
    try:
        engine = plan.load({name: Path(folder) for name, folder in models.items()})
        spans = spans_from_environment() if plan.otel else Spans(None)
    except SWAP_FAILURES as error:
        line.send("failed", str(error) if isinstance(error, RewardlabError) else f"{type(error).__name__}: {error}")
        sys.exit(CANNOT_LOAD)
    _Process(line, engine, spans, plan).run(bound)
    leave_quickly()


class _Process:
    """A worker whose models are loaded."""

    def __init__(self, line: Line, engine: Engine, spans: Spans, plan: WorkerPlan) -> None:
        self._line = line
        self._engine = engine
        self._plan = plan
        self._loading = False
        """Whether a thread loads a model that is to be swapped in; the parent asks for one at a time."""
        self._counting = threading.Lock()
        self._num_counted = 0
        self._served = make_app(
            engine, plan.config, swap=self._swap_everywhere, gather=self._counts_of_all, spans=spans
        )

    def run(self, bound: socket.socket) -> None:
        """Serve once the parent says go, until it says end or is gone."""
        self._line.send("loaded", {one.name: one.digest for one in self._engine.served()})
        # Before its go the parent may send swaps that were made while this process loaded.
        while (message := self._line.receive()) is not None and message[0] not in ("go", "end"):
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        if message is None or message[0] == "end":
            self._engine.close()
            return
        serve_until_ended(
            self._served,
            bound,
            self._plan.config.limits,
            drain_timeout_s=self._plan.drain_timeout_s,
            signals=False,
            on_start=lambda server: threading.Thread(target=self._attend, args=(server,), daemon=True).start(),
        )
        if self._loading:
            end_at_once()

    def _attend(self, server: Server) -> None:
        # After the end has begun, too: a swap that is under way is answered through the parent.
        while (message := self._line.receive()) is not None:
            if message[0] == "end":
                server.begin_end()
            elif message[0] == "told":
                self._line.answered(message[1], message[2])
            else:
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()
        server.begin_end()
        self._line.gone()

    def _answer(self, message: Any) -> None:
        what, number, *arguments = message
        if what == "swap":
            name, folder = arguments
            self._loading = True
            outcome = outcome_of(lambda: self._engine.swap(name, Path(folder)).model_dump(mode="json"))
            self._loading = False
        else:
            outcome = outcome_of(self._counted)
        # If the parent is gone, `_attend` ends the server.
        with contextlib.suppress(OSError):
            self._line.send("answer", number, outcome)

    def _counted(self) -> tuple[int, Families, bool]:
        """Return the counts, how often they were counted (several threads may answer, and one overtake another), and
        whether the engine is alive."""
        with self._counting:
            self._num_counted += 1
            number, families = self._num_counted, self._served.metrics.families()
        return number, families, self._engine.healthy()

    def _swap_everywhere(self, name: str, folder: Path) -> ServedModel:
        outcome = self._line.ask("swap", name, str(folder), timeout_s=None)
        return ServedModel.model_validate(value_or_refusal(outcome))

    def _counts_of_all(self, _own: Families) -> Families:
        families: Families = value_or_refusal(self._line.ask("counts", timeout_s=COUNTS_TIMEOUT_S))
        return families


@contextlib.contextmanager
def deaf_to_terminal() -> Iterator[None]:
    """Let processes that are started in the block not hear of Ctrl-C and SIGHUP until they call `leave_to_the_parent`.

    Both reach all processes of a terminal, and Python is not ready to ignore them before seconds of imports.
    """
    resource_tracker.ensure_running()  # as starting a process does; if it starts then, it lifts the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_parent() -> None:
    """Ignore Ctrl-C and SIGHUP in this process: its parent decides what to do."""
    for number in OF_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_TERMINAL)


def _log_on_stdout() -> None:
    """Send the package's log to stdout, with the number of the process."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"[{os.getpid()}] %(message)s"))
    log = logging.getLogger("rewardlab")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
