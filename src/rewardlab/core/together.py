"""Files that get their names together, wherever they stand, once all of them are whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from rewardlab.core.signals import held_back, results_are_whole


class Waiting:
    """Files that are whole and have no names yet (see `together`)."""

    def __init__(self, last: Path | None) -> None:
        self._last = last
        self._temporary: dict[Path, Path] = {}

    def add(self, path: Path, temporary: Path) -> None:
        """Let the file `temporary` wait for the name `path`."""
        self._temporary[path] = temporary

    def place(self) -> None:
        """Give all of them their names."""
        for path in sorted(self._temporary, key=lambda path: path == self._last):
            self._temporary[path].replace(path)
            del self._temporary[path]

    def where(self, path: Path) -> Path:
        """Return where the file can be read that waits for a name, or has it already."""
        return self._temporary.get(path, path)

    def discard(self) -> None:
        """Remove those that have no names."""
        for temporary in self._temporary.values():
            temporary.unlink(missing_ok=True)


_waiting: ContextVar[Waiting | None] = ContextVar("_waiting", default=None)


def present() -> Waiting | None:
    """Return where files that are whole have to wait now; None if they get their names at once."""
    return _waiting.get()


@contextmanager
def together(*, last: Path | None = None) -> Iterator[Waiting]:
    """Let the files that are replaced in the block get their names when it ends without an error, all at once: the one
    called `last` after the others, which else follow each other as they were written.

    No signal can come between. On an error, and if the process is killed before, what was there stays; a kill in the
    very moment may leave some of them without the others.
    """
    waiting = Waiting(last)
    token = _waiting.set(waiting)
    try:
        yield waiting
        with held_back():
            waiting.place()
            if last is not None:
                results_are_whole(last)
    finally:
        _waiting.reset(token)
        waiting.discard()


@contextmanager
def one_by_one() -> Iterator[None]:
    """Let the files that are replaced in the block get their names at once, within `together` too."""
    token = _waiting.set(None)
    try:
        yield
    finally:
        _waiting.reset(token)
