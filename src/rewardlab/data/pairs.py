"""Bring the rows that make one preference together, wherever in the file they are.

The two rows of a pair in long form, the judgements of one post in SHP, the judged replies to one prompt. Since they may
be far apart, all rows are kept in a temporary file; memory holds 32 bytes for each row.
"""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

from rewardlab.data.rows import CappedRow, Row, UnreadRow, is_absent


def group_rows(
    rows: Iterable[tuple[int, Row]], group_of: Callable[[Row], object]
) -> Iterator[tuple[int, tuple[Row, ...]]]:
    """Yield (number of its first row, all rows) of every group, in the order of their first rows.

    Rows are of one group if `group_of` gives values of the same text. A row without a value is a group of its own, so
    that it is counted when it is dropped.
    """
    with tempfile.TemporaryFile() as file:
        kept = _Kept(file, rows, group_of)
        for members in kept.groups():
            yield kept.numbers[members[0]], tuple(kept.row(member) for member in members)


def key_of(number: int, row: Row, group_of: Callable[[Row], object]) -> bytes:
    """Return 16 bytes that the rows of one group share. A row without a value is a group of its own."""
    value = None if isinstance(row, UnreadRow) else group_of(row)
    # The prefixes keep a value that reads like a row number from joining that row.
    key = f"row {number}" if is_absent(value) else f"pair {_text(value)}"
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:16]


def mark_rows(
    rows: Iterable[tuple[int, Row]],
    group_of: Callable[[Row], object],
    left_out: Callable[[int, Sequence[Row]], Collection[int]],
) -> Iterator[tuple[int, Row]]:
    """Yield all rows in their order, those that `left_out` names in the place of a `CappedRow`.

    `left_out` gets the number of the first row of a group and all its rows, and returns indices among these.
    """
    with tempfile.TemporaryFile() as file:
        kept = _Kept(file, rows, group_of)
        marked = set[int]()
        for members in kept.groups():
            if len(members) > 1:
                out = left_out(kept.numbers[members[0]], [kept.row(member) for member in members])
                marked.update(members[index] for index in out)
        for place, number in enumerate(kept.numbers):
            yield number, CappedRow() if place in marked else kept.row(place)


class _Kept:
    """Rows in a temporary file, by the group that each belongs to."""

    def __init__(self, file: IO[bytes], rows: Iterable[tuple[int, Row]], group_of: Callable[[Row], object]) -> None:
        self.file = file
        self.numbers, self.starts, self.keys = array("q"), array("q"), bytearray()
        for number, row in rows:
            self.keys += key_of(number, row, group_of)
            self.numbers.append(number)
            self.starts.append(file.tell())
            file.write(_pickled(row))

    def row(self, place: int) -> Row:
        """Return the row that came as number `place`, from 0."""
        self.file.seek(self.starts[place])
        row: Row = pickle.load(self.file)
        return row

    def groups(self) -> Iterator[list[int]]:
        """Yield the places of the rows of each group."""
        return _groups(bytes(self.keys))


def _text(value: object) -> str:
    """Return a value as the text that identifies it."""
    try:
        return str(value)
    except (RecursionError, ValueError):
        # It has thousands of nested brackets or of digits.
        return str(TooDeep())


@dataclass(frozen=True, repr=False)
class TooDeep:
    """Stands for a value that is nested too deep to be pickled. No schema uses such values."""

    def __repr__(self) -> str:
        return "a value nested too deep to keep"


def _pickled(row: Row) -> bytes:
    """Return a row pickled, with values that are nested too deep replaced by `TooDeep`."""
    try:
        return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
    except RecursionError:
        return pickle.dumps({name: _kept(value) for name, value in row.items()}, protocol=pickle.HIGHEST_PROTOCOL)


def _kept(value: object) -> object:
    try:
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except RecursionError:
        return TooDeep()
    return value


def _groups(keys: bytes) -> Iterator[list[int]]:
    """Yield the positions of equal 16-byte keys, in order, the groups in the order of their first positions."""
    halves = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
    # `lexsort` is stable, so rows with equal keys stay in order.
    order = np.lexsort((halves[:, 1], halves[:, 0]))
    differs = np.any(np.diff(halves[order], axis=0), axis=1)
    borders = np.concatenate([[0], np.flatnonzero(differs) + 1, [len(order)]]) if len(order) else np.zeros(1, int)
    firsts = order[borders[:-1]]
    for group in np.argsort(firsts, kind="stable"):
        yield order[borders[group] : borders[group + 1]].tolist()
