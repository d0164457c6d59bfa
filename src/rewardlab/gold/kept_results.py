"""Keeps each result of a stage on disk as soon as it is there, under a hash of everything that decides it.

A stage that was killed finds it again and does only the rest, whatever rows came before or between. A line that a kill
has torn is cut off.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.files import append_text, encodable, require_no_pipe, sha256_json, to_json

logger = logging.getLogger("rewardlab")
FILE: Final = "kept.jsonl"


def key_of(**decides: Any) -> str:
    """Return the name of a piece of work: a hash of everything that decides its result."""
    return sha256_json(decides)[:32]


class Kept:
    """Results by key. They stay on the disk; in memory are only their places."""

    def __init__(self, folder: Path) -> None:
        """Open the results in `folder`, or begin with none. Raises DataError if the file is a pipe."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        require_no_pipe(self.path)
        self.path.touch()
        self.is_done = True
        """Whether these results can be deleted once the output is written."""
        self._places: dict[str, tuple[int, int]] = {}
        self._open()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def _open(self) -> None:
        end = damaged = 0
        with self.path.open("rb") as file:
            for line in file:
                entry = _parsed(line)
                if entry is not None:
                    self._places[entry["key"]] = (end, len(line))
                elif line.endswith(b"\n"):
                    damaged += 1
                else:
                    logger.info("%s: the last line was cut off by the end of the run; it is done again", self.path)
                    break
                end += len(line)
        if end < self.path.stat().st_size:
            os.truncate(self.path, end)
        if damaged:
            logger.warning("%s: %d lines are damaged; what they held is done again", self.path, damaged)

    def add(self, results: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Keep results. They are on the disk when this returns. Raises OSError if the disk is full."""
        lines = [encodable(to_json({"key": key, **result}, indent=None)) + "\n" for key, result in results]
        start = self.path.stat().st_size
        append_text(self.path, "".join(lines))
        for (key, _), line in zip(results, lines, strict=True):
            size = len(line.encode())
            self._places[key] = (start, size)
            start += size

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a result; None if it is not there."""
        return next(self.each([key]))

    def each(self, keys: Sequence[str]) -> Iterator[dict[str, Any] | None]:
        """Yield the result of each key, None where it is not there."""
        with self.path.open("rb") as file:
            for key in keys:
                place = self._places.get(key)
                if place is None:
                    yield None
                    continue
                file.seek(place[0])
                entry = _parsed(file.read(place[1]))
                assert entry is not None, "it was whole when it was read or written"
                yield {name: value for name, value in entry.items() if name != "key"}


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return an entry, None for a line that is not whole."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("key"), str) else None
