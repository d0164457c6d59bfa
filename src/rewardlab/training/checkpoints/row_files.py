"""The record of a run in its checkpoints: rows that change no more are in files that all checkpoints share.

checkpoints/step_N/rows/
  0.json, 1.json, …   the first rows of the record, ROWS_IN_FILE in each

A checkpoint takes over files of an earlier one, by links, so that its cost hardly grows with the run: of the one before
the last, where that is still kept, so that no block of the disk is in both of two that follow each other. What was
damaged since is written again, and so is all where the file system has no links. The newest rows are in state.json.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from rewardlab.core.files import sha256_file, to_json, write_text
from rewardlab.training.monitoring.records import Records

ROWS_IN_FILE: Final = 256
ROOM: Final = "rows"


class RowFiles:
    """Writes the rows of a record that change no more once, for all checkpoints that this process writes."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._sums: list[str] = []
        """SHA-256 of each file."""
        self._newest: list[Path] = []
        """The last two checkpoints, the older one first."""
        self._rewritten = records.rewritten

    def write(self, folder: Path) -> tuple[dict[str, str], list[dict[str, float | None]]]:
        """Put files of rows into a new checkpoint; return (name -> SHA-256, the rows that are in none)."""
        if self._rewritten != self._records.rewritten:
            self._sums, self._rewritten = [], self._records.rewritten
        rows = [self._records.rows[step] for step in sorted(self._records.rows)]
        # The last row may still change.
        count = max(len(rows) - 1, 0) // ROWS_IN_FILE
        if count:
            (folder / ROOM).mkdir()
        earlier = next((one for one in self._newest if len(self._newest) > 1 and one.is_dir()), Path())
        for number in range(count):
            name = name_of(number)
            if number < len(self._sums) and _linked(earlier / name, folder / name, self._sums[number]):
                continue
            begin = number * ROWS_IN_FILE
            write_text(folder / name, to_json(rows[begin : begin + ROWS_IN_FILE], indent=None))
            self._sums[number : number + 1] = [sha256_file(folder / name)]
        return {name_of(number): self._sums[number] for number in range(count)}, rows[count * ROWS_IN_FILE :]

    def kept(self, folder: Path) -> None:
        """Note where the checkpoint is that was written last, and is complete now."""
        self._newest = [*self._newest[-1:], folder]


def read_rows(folder: Path, count: int) -> list[Any]:
    """Return the rows in the first `count` files of a checkpoint."""
    return [row for number in range(count) for row in json.loads((folder / name_of(number)).read_text())]


def name_of(number: int) -> str:
    """Return the name of a file in the folder of a checkpoint."""
    return f"{ROOM}/{number}.json"


def _linked(source: Path, target: Path, sha256: str) -> bool:
    """Give a file a second name; return whether that was possible, and it has this checksum."""
    try:
        if sha256_file(source) != sha256:
            return False
        os.link(source, target)
    # The file system has no links, or the checkpoint was removed by hand. The file is written instead, and an error
    # that is none of links, such as a full disk, is told by that.
    except OSError:
        return False
    return True
