"""Work begun in a thread of its own, to be waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """What `make` will return, begun now. The thread is a daemon: one that never returns keeps no process alive."""

    def __init__(self, key: Hashable, make: Callable[[], Result]) -> None:
        """`key` says what is being made."""
        self.key = key
        self._done = threading.Event()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(make,), daemon=True).start()

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
