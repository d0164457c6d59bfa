"""Work that runs in its own thread, and for which callers can wait with a time limit."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

Result = TypeVar("Result")

PATIENCE_S: Final = 5.0
"""Seconds that the exit of the process waits for unfinished work. A thread that is inside torch when the interpreter
shuts down aborts the process, and its exit status is lost."""
_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()
"""Threads of unfinished work. Of the process, since its exit has to wait for them, whoever started them."""


@atexit.register
def let_finish() -> None:
    """Wait for all unfinished work, `PATIENCE_S` seconds at most."""
    end = time.monotonic() + PATIENCE_S
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


class Pending(Generic[Result]):
    """The future result of `make`, which starts now. Its thread is a daemon, so it does not keep the process alive."""

    def __init__(self, key: Hashable, make: Callable[[], Result]) -> None:
        """`key` identifies what is being made, for the caller."""
        self.key = key
        self._done = threading.Event()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        thread.start()
        _threads.add(thread)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds. Return whether the work has ended."""
        return self._done.wait(timeout_s)

    def result(self) -> Result:
        """Return the result, once `wait` returned True. An error of `make` is raised here."""
        assert self._done.is_set(), "wait first"
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self, make: Callable[[], Result]) -> None:
        try:
            self._results.append(make())
        except BaseException as error:
            # Kept for the thread that calls `result`, which raises it.
            self._error = error
        finally:
            self._done.set()
