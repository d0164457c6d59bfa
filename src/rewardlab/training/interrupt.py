"""Requests to end a run early: signals, as Slurm and people send them, and a limit in hours.

While it trains they are heeded between two steps, and a second signal of the same kind is as one outside of training:
it ends the run where it stands. What is on disk is whole in either case.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Final

from rewardlab.core.errors import RunInterrupted

RESUME_LATER: Final = 75
"""Exit status of a run that stopped with work left: EX_TEMPFAIL of sysexits.h, so a batch script can tell it from a
failure and queue the run again."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, by the custom of shells."""
STUCK: Final = 1
"""Exit status of a run whose limit in hours let it do nothing."""
SIGNALS: Final = ("SIGTERM", "SIGUSR1", "SIGINT")


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """SIGTERM and SIGUSR1 raise RunInterrupted in the main thread where it stands: reading and judging begin anew."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise RunInterrupted(
            f"stopped at once by {signal.Signals(number).name}. Start the same command again with --resume auto to go "
            f"on.",
            exit_status=RESUME_LATER,
            together=False,
        )

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequests:
    """Listens while it is entered; only the main thread can."""

    def __init__(self, *, max_hours: float | None = None) -> None:
        """`max_hours` count from now."""
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._max_hours = max_hours
        self._received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for name in SIGNALS:
                if (number := getattr(signal, name, None)) is not None:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in list(self._before):
            self._restore(number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        self._restore(number)

    def _restore(self, number: int) -> None:
        if number in self._before:
            before = self._before.pop(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)

    @property
    def reason(self) -> str:
        """What asked for an end, in words; empty if nothing did."""
        if self._received is not None:
            return "Ctrl-C" if self._received == "SIGINT" else self._received
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"--max-hours {self._max_hours:g}"
        return ""

    @property
    def exit_status(self) -> int:
        """With which the process should end."""
        return INTERRUPTED if self._received == "SIGINT" else RESUME_LATER
