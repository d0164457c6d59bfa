"""Reads a folder again and again: of a file that has not changed nothing is read, of the record only its new rows."""

from __future__ import annotations

import csv
import io
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar, cast

from rewardlab.analysis.metrics import current_column, current_columns
from rewardlab.core.files import UTF8, parse_json, to_float
from rewardlab.report.evaluations import MOST_ROWS

CHUNK_BYTES: Final = 2**22
"""Bytes of a record that are read at a time."""
LOOKED_AT: Final = 4096
"""Bytes before the new rows that show whether the file is still the one that was read."""
END_BYTES: Final = 2**16
"""Bytes at the end of a record in which its last row is sought; a row has less than 4 KB."""
Value = TypeVar("Value")
Stamp = tuple[tuple[int, int, int] | None, ...]
"""Inode, size and time of each file that a value was read from; None for a file that was not there."""


class MetricRow(Mapping[str, float]):
    """One row of a record. Rows with the same columns share their names, so that long records fit into memory."""

    __slots__ = ("_place", "_values")

    def __init__(self, place: Mapping[str, int], values: Sequence[float]) -> None:
        self._place = place
        self._values = values

    def __getitem__(self, name: str) -> float:
        return self._values[self._place[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, name: object) -> bool:
        return name in self._place


@dataclass
class MetricRows:
    """The rows of one metrics.csv or metrics.jsonl by step, as far as they were read.

    A run appends rows, or replaces the whole file, where mostly its last row has changed. So only what follows the
    lines that were read is read, and all of the file if the end of these lines is no longer what it was.
    """

    end: int = 0
    """The byte behind the last whole line that was read."""
    before_end: bytes = b""
    """Up to LOOKED_AT bytes before it."""
    num_rows: int = 0
    """Rows that were read, damaged ones too."""
    num_lost: int = 0
    """Rows that are damaged."""
    columns: Sequence[str] | None = None
    """Those of metrics.csv, by its first line, as they are called today."""
    by_step: dict[int, MetricRow] = field(default_factory=dict)
    _places: dict[tuple[str, ...], Mapping[str, int]] = field(default_factory=dict)
    """The columns that rows have -> name -> its place among them."""

    def read(self, path: Path, problems: list[str]) -> list[Mapping[str, float]]:
        """Return the rows by step. Lines that are incomplete or have no step are counted and left out.

        Raises OSError or csv.Error if the file cannot be read.
        """
        with path.open("rb") as file:
            file.seek(self.end - len(self.before_end))
            if file.read(len(self.before_end)) != self.before_end:
                self._forget()
                file.seek(0)
            try:
                rest = self._add_lines(iter(lambda: file.read(CHUNK_BYTES), b""), path.suffix)
            except BaseException:
                self._forget()
                raise
        rows: Mapping[int, Mapping[str, float]] = self.by_step
        lost = self.num_lost
        if rest:
            # The end of a line may still come, or a full disk may have cut it off: it counts until more is there.
            last = MetricRows(num_rows=self.num_rows, columns=self.columns)
            last._add(rest, path.suffix)
            rows = {**rows, **{step: {**rows.get(step, {}), **row} for step, row in last.by_step.items()}}
            lost += last.num_lost
        if lost:
            problems.append(f"{path.name}: {lost} damaged {'row is' if lost == 1 else 'rows are'} left out.")
        if self.num_rows >= MOST_ROWS:
            problems.append(f"{path.name}: only its first {MOST_ROWS:,} rows are read.")
        return [rows[step] for step in sorted(rows)]

    def _forget(self) -> None:
        vars(self).update(vars(MetricRows()))

    def _add_lines(self, chunks: Iterator[bytes], suffix: str) -> bytes:
        """Add the whole lines of a file, and return what follows the last of them."""
        rest = b""
        for chunk in chunks:
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            self._add(whole + newline, suffix)
            self.end += len(whole + newline)
            self.before_end = (self.before_end + whole + newline)[-LOOKED_AT:]
        return rest

    def _add(self, content: bytes, suffix: str) -> None:
        text = io.StringIO(content.decode(UTF8, errors="replace"), newline="")
        for cells in self._cells_of_csv(text) if suffix == ".csv" else _cells_of_jsonl(text):
            if self.num_rows >= MOST_ROWS:
                return
            self.num_rows += 1
            # Most cells of metrics.csv are empty.
            values = {
                name: number
                for name, cell in cells.items()
                if cell != "" and name and math.isfinite(number := to_float(cell))
            }
            if "step" not in values or values["step"] < 0:
                self.num_lost += 1
            else:
                step = int(values["step"])
                # One step may have several rows, as of training and of an evaluation.
                self.by_step[step] = self._row({**self.by_step.get(step, {}), **values})

    def _row(self, values: Mapping[str, float]) -> MetricRow:
        names = tuple(values)
        if names not in self._places:
            self._places[names] = {name: number for number, name in enumerate(names)}
        return MetricRow(self._places[names], array("d", values.values()))

    def _cells_of_csv(self, text: io.StringIO) -> Iterator[Mapping[str, object]]:
        """Yield the rows of metrics.csv; one that cannot be read is yielded without cells."""
        for row in csv.reader(text):
            if self.columns is None:
                # Renamed once: a long run has as many names of cells as it has rows.
                self.columns = [*map(current_column, row)]
            elif row:
                # A row that a full disk cut off has fewer cells, and its last number may have lost digits.
                yield dict(zip(self.columns, row, strict=True)) if len(row) == len(self.columns) else {}


def read_last_step(path: Path) -> int | None:
    """Return the last step in a metrics.csv or metrics.jsonl, of which only the end is read; None if it has no row
    there.

    Raises OSError or csv.Error if the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.readline(END_BYTES) if path.suffix == ".csv" else b""
        begin = max(file.seek(0, io.SEEK_END) - END_BYTES, len(head))
        file.seek(begin)
        end = file.read(END_BYTES)
    if begin > len(head):
        end = end.partition(b"\n")[2]
    rows = MetricRows()
    rows._add(head + end, path.suffix)
    return max(rows.by_step, default=None)


def _cells_of_jsonl(text: io.StringIO) -> Iterator[Mapping[str, object]]:
    """Yield the rows of metrics.jsonl; one that cannot be read is yielded without cells."""
    for line in text:
        try:
            value = parse_json(line)
        except (ValueError, RecursionError):  # not JSON, or thousands of nested brackets
            value = None
        yield current_columns(value) if isinstance(value, dict) else {}


@dataclass
class Known:
    """What was read from the files of one folder so far; a view that reads it again and again passes it on."""

    rows: MetricRows = field(default_factory=MetricRows)
    _values: dict[Path, tuple[Stamp, object, Sequence[str]]] = field(default_factory=dict)

    def once(self, read: Callable[[Path], Value], paths: Sequence[Path], problems: list[str]) -> Value:
        """Return what `read` makes of the first file, and of the others that it reads itself; `problems` are what it
        adds to them. It is called only if a file has changed since."""
        stamp = tuple(map(_stamp_of, paths))
        kept = self._values.get(paths[0])
        if kept is None or kept[0] != stamp:
            before = len(problems)
            value = read(paths[0])
            self._values[paths[0]] = (stamp, value, problems[before:])
            return value
        problems += kept[2]
        return cast("Value", kept[1])


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
