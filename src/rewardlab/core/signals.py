"""Requests to end a run early: signals, as Slurm and users send them, and a limit in hours.

The trainer looks for them between two steps, so that what is on the disk is whole. A second signal ends the process
immediately, as it would without this module, but for `REPEATED`.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from rewardlab.core.errors import RewardlabError, RunInterrupted

RESUME_LATER: Final = 75
"""Exit status of a run that stopped with work left. It is EX_TEMPFAIL of sysexits.h, so that a batch script can tell it
from a failure and queue the run again."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, by the convention of shells (128 + SIGINT)."""
STUCK: Final = 1
"""Exit status of a run whose limit in hours ended before its first step, or that keeps no checkpoints. Queueing it
again would not help."""
HANGUP: Final = "SIGHUP"
"""The signal of a terminal that is closed, or of a connection to it that broke. `nohup` lets a process ignore it."""
ENDING: Final = ("SIGTERM", HANGUP, "SIGUSR1", "SIGUSR2")
"""Signals that by default end a process without a message."""
REPEATED: Final = "SIGUSR2"
"""The signal that may come twice for one request: Slurm sends it to every process of a task, and the program that runs
a container passes its own on to the processes inside. Users do not send it out of impatience, so it never ends a run at
once."""
SIGNALS: Final = (*ENDING, "SIGINT")
_told: Final[list[Callable[[RewardlabError], None]]] = []
"""Who hears of an end at once, with the error that says why."""


@contextmanager
def ending_with_status() -> Iterator[None]:
    """Let the signals of `ENDING` end the process immediately, as by default, but with exit status RESUME_LATER.

    For a program around `train`. While it trains, `StopRequests` replaces these handlers. The disk holds what a kill
    leaves.
    """
    with _exchanged((signal.SIG_DFL,), _end, ENDING):
        yield


def ignore_at_exit() -> None:
    """Ignore SIGUSR1 and SIGUSR2 from now on, in a process whose work is over and whose exit status is decided. Ctrl-C
    ends it at once: it would show where in its own code it was.

    Python takes seconds to end with all that is loaded, and Slurm sends the signal before a time limit whatever a
    process is at: its status would be that of a failure.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name in ("SIGUSR1", "SIGUSR2"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)


def leave_quickly() -> None:
    """Let Python end soon, in a process whose work is over.

    It looks through all objects for unused ones, several times. With torch that takes seconds, and is for nothing:
    what nobody has any more ends here, and what is in use ends with the process.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def hears_of_end(tell: Callable[[RewardlabError], None]) -> Iterator[None]:
    """Within the block, call `tell` with the reason before the process ends at once, as by a signal in
    `ending_with_status`.

    Any code may have been interrupted, so it must take no lock, and use nothing that it does not make itself.
    """
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


def tell_of_end(error: RewardlabError) -> None:
    """Tell those who hear of it that the process ends at once, and why."""
    for tell in _told:
        with suppress(Exception):  # whatever goes wrong, the process has to end
            tell(error)


@contextmanager
def signals_as_ever() -> Iterator[None]:
    """Let signals end the process as by default, around calls that wait in native code, during which Python runs no
    signal handlers. Handlers that the caller installed stay."""
    with _exchanged((_end, _raise, signal.default_int_handler), signal.SIG_DFL, SIGNALS):
        yield


def _end(number: int, _frame: FrameType | None) -> None:
    # `os.write` and `os._exit` instead of `print` and `sys.exit`: the signal may have interrupted any code, and an
    # exception could be caught by it.
    reason = (
        f"stopped at once by {signal.Signals(number).name}. --resume auto goes on from the last checkpoint, if there "
        f"is one."
    )
    _write(f"error: {reason}\n")
    tell_of_end(RunInterrupted(reason, exit_status=RESUME_LATER))
    os._exit(RESUME_LATER)


def _write(text: str) -> None:
    # After SIGHUP the terminal is gone, and the process has to end as asked all the same.
    with suppress(OSError):
        os.write(2, text.encode())


@contextmanager
def _exchanged(present: Sequence[Any], handler: Any, names: Sequence[str]) -> Iterator[None]:
    """Set `handler` for those of the named signals whose handler is one of `present`.

    Handlers that the caller installed stay.
    """
    # Python lets only the main thread set handlers.
    changed = {}
    if threading.current_thread() is threading.main_thread():
        for name in names:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) in present:
                changed[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in changed.items():
            signal.signal(number, before)


class Terminated(KeyboardInterrupt):
    """A signal that asked the process to end, raised where it arrived as Ctrl-C raises KeyboardInterrupt."""


@contextmanager
def raised_at_once() -> Iterator[None]:
    """Let the signals of `ENDING` raise `Terminated`, and SIGINT KeyboardInterrupt, wherever the block is.

    For work that can be interrupted anywhere, since what is on the disk is always whole.
    """
    with _all_handled(_raise):
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Let signals wait until the block ends, which must be a matter of milliseconds."""
    came: list[int] = []
    try:
        with _all_handled(lambda number, _frame: came.append(number)):
            yield
    finally:
        for number in came[:1]:
            signal.raise_signal(number)


def listened_to(names: Sequence[str] = SIGNALS) -> Iterator[int]:
    """Yield those of the named signals that the system has and that ask this process to end: not SIGHUP in a process
    that `nohup` or a shell has told to ignore it."""
    for name in names:
        number = getattr(signal, name, None)
        if number is not None and (name != HANGUP or signal.getsignal(number) is not signal.SIG_IGN):
            yield number


@contextmanager
def _all_handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in listened_to():
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(signal.Signals(number).name)


_whole: Final[list[list[Path]]] = []
"""For each `ended_by_signals` around the present code, the outermost first: where its results stand, once they do."""


@contextmanager
def ended_by_signals(then: str) -> Iterator[None]:
    """Let signals end the block wherever it is, so that nothing half written stays behind.

    Raises RunInterrupted with a message that ends by `then`, or by where the results are if they are whole already;
    then there is nothing left to do, and the exit status is 0, but for Ctrl-C. Of blocks in each other the outermost
    does this. It decorates functions, too.
    """
    places: list[Path] = []
    _whole.append(places)
    try:
        with raised_at_once():
            yield
    except KeyboardInterrupt as ended:
        # A command that another one calls is a part of its work, so that the other one says what is to be done.
        if len(_whole) > 1:
            raise
        said = f"What it had to write is whole: {places[-1]}" if places else then
        if isinstance(ended, Terminated):
            status = 0 if places else RESUME_LATER
            raise RunInterrupted(f"stopped by {ended}. {said}", exit_status=status) from None
        raise RunInterrupted(f"interrupted. {said}", exit_status=INTERRUPTED) from None
    finally:
        _whole.pop()


def results_are_whole(place: Path) -> None:
    """Say that the command that signals may end (`ended_by_signals`) has written all of its results, and where."""
    if _whole:
        _whole[-1].append(place)


GOES_ON: Final = "The same command goes on from what is finished."
BEGINS_ANEW: Final = "The same command begins anew."
"""For `ended_by_signals`: what a command does whose work is kept, and one whose work is not."""
IS_WHOLE: Final = "What an ended command left under this name is whole."
"""For the error that refuses to replace a result which gets its name when all of it is written."""


class StopRequests:
    """Context manager that notices signals and a limit in hours. Signals are noticed in the main thread only."""

    def __init__(self, *, max_hours: float | None = None) -> None:
        """`max_hours` are counted from now."""
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._max_hours = max_hours
        self._received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            for number in listened_to():
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in list(self._before):
            self._restore(number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        if (os.environ.get("RANK") or "0") == "0":
            # A step may take minutes. `os.write`, since the signal may have interrupted a line that is being printed.
            again = "" if self._received == REPEATED else "; a second one ends it at once"
            _write(f"\n{self.reason}: the run ends after its present step or evaluation{again}\n")
        # From now on a second signal has its previous effect: a user who presses Ctrl-C again wants out at once.
        for listened in list(self._before):
            if signal.Signals(listened).name != REPEATED:
                self._restore(listened)

    def _restore(self, number: int) -> None:
        if number in self._before:
            before = self._before.pop(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)

    @property
    def reason(self) -> str:
        """The name of the signal or limit that asked for an end, for messages; empty if none did."""
        if self._received is not None:
            return "Ctrl-C" if self._received == "SIGINT" else self._received
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return f"--max-hours {self._max_hours:g}"
        return ""

    @property
    def signalled(self) -> bool:
        """Return whether a signal asked for an end."""
        return self._received is not None

    @property
    def exit_status(self) -> int:
        """The exit status for the process: `INTERRUPTED` after Ctrl-C, otherwise `RESUME_LATER`."""
        return INTERRUPTED if self._received == "SIGINT" else RESUME_LATER
