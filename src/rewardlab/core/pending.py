"""Work begun in a thread of its own, to be waited for only so long."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

Result = TypeVar("Result")

PATIENCE_S: Final = 5.0
"""How long the end of the process waits for work begun. A thread that is inside of torch when the interpreter goes
aborts the process, whatever its exit status was to be."""
_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


@atexit.register
def let_finish() -> None:
    """Wait for all work begun, for `PATIENCE_S` at most."""
    end = time.monotonic() + PATIENCE_S
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


class Pending(Generic[Result]):
    """What `make` will return, begun now. A thread that never returns keeps no process alive: it is a daemon."""

    def __init__(self, key: Hashable, make: Callable[[], Result]) -> None:
        """`key` says what is being made."""
        self.key = key
        self._done = threading.Event()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        thread = threading.Thread(target=self._run, args=(make,), daemon=True)
        thread.start()
        _threads.add(thread)

    def wait(self, timeout_s: float) -> bool:
        """Whether it is made, after at most so many seconds."""
        return self._done.wait(timeout_s)

    def result(self) -> Result:
        """What was made, once `wait` said so; what `make` raised is raised here."""
        assert self._done.is_set(), "wait first"
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self, make: Callable[[], Result]) -> None:
        try:
            self._results.append(make())
        except BaseException as error:  # whoever waits gets it
            self._error = error
        finally:
            self._done.set()
