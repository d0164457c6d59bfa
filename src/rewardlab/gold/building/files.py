"""The files of one side: preferences in our form and in TRL's, as lines and as columns, and the gold rows below them.

train.jsonl              rows of the project, with label and gold margin (`strength`)
train.trl.jsonl          {"chosen": [messages], "rejected": [messages]}, a pair a line
train.columns.json       {"chosen": [[messages], …], "rejected": [[messages], …]}, the same pairs
labels.train.jsonl       the gold rows of this side, as they were read
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from rewardlab.core.files import to_json
from rewardlab.curation.files.forms import as_own_row
from rewardlab.curation.files.writing import facts_of
from rewardlab.curation.rewriting import as_line
from rewardlab.gold.building.pairing import Judged
from rewardlab.gold.files.rows import GoldRow


class SideFiles:
    """Takes the rows of one side."""

    def __init__(self, folder: Path, name: str, stack: ExitStack) -> None:
        self.folder, self.name = folder, name
        self.num_rows = self.num_pairs = self.num_labels = 0
        self._own, self._trl, self._labels = (
            stack.enter_context((folder / file).open("wb"))
            for file in (f"{name}.jsonl", f"{name}.trl.jsonl", f"labels.{name}.jsonl")
        )
        self._columns = stack.enter_context(_columns(folder / f"{name}.columns.json"))

    def write(self, row: GoldRow, judged: Sequence[Judged]) -> None:
        """Write a row, and what became of it."""
        self._labels.write(as_line(row.as_json(), row.where).encode())
        self.num_labels += 1
        for one in judged:
            own = as_own_row(one.preference, one.id, one.preference.source)
            self._own.write(as_line(own, row.where).encode())
            self.num_rows += 1
            for chosen, rejected in one.pairs():
                better, worse = (to_json(side, indent=None).encode() for side in (chosen, rejected))
                self._trl.write(b'{"chosen": %b, "rejected": %b}\n' % (better, worse))
                self._columns.write(better, worse)
                self.num_pairs += 1

    def facts(self) -> list[dict[str, object]]:
        """Return what the manifest says about each file, once all are closed."""
        counts = {
            f"{self.name}.jsonl": self.num_rows,
            f"{self.name}.trl.jsonl": self.num_pairs,
            f"{self.name}.columns.json": self.num_pairs,
            f"labels.{self.name}.jsonl": self.num_labels,
        }
        return [facts_of(self.folder / file, count) for file, count in counts.items()]


class Columns:
    """Takes pairs for a file of two columns: the second waits in a file of its own until the first is complete."""

    def __init__(self, chosen: BinaryIO, rejected: BinaryIO) -> None:
        self._sinks = (chosen, rejected)
        self._count = 0

    def write(self, *sides: bytes) -> None:
        """Write the two sides of a pair, as JSON."""
        before = b",\n" if self._count else b"\n"
        for sink, side in zip(self._sinks, sides, strict=True):
            sink.write(before + side)
        self._count += 1


@contextmanager
def _columns(path: Path) -> Iterator[Columns]:
    """Yield the writer of pairs to a file of two columns, which is complete when the block ends."""
    waiting = path.with_name(f"{path.name}.rejected")
    try:
        with path.open("wb") as file:
            file.write(b'{"chosen": [')
            with waiting.open("wb") as rejected:
                yield Columns(file, rejected)
            file.write(b'\n],\n"rejected": [')
            with waiting.open("rb") as rejected:
                shutil.copyfileobj(rejected, file)
            file.write(b"\n]}\n")
    finally:
        waiting.unlink(missing_ok=True)
