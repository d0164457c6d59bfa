"""Long-form data: the two rows of a pair brought together, wherever in the file they are."""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rewardlab.data.rows import Row, is_absent


def group_pairs(rows: Iterable[tuple[int, Row]]) -> Iterator[tuple[int, tuple[Row, ...]]]:
    """Rows by `pair_id`, numbered and ordered by the first row of each pair.

    A row without a pair_id is a group of its own, so that it is counted. Since the two sides of a pair may be far
    apart, all rows wait in a temporary file; in memory are 32 bytes a row.
    """
    numbers, starts, keys = array("q"), array("q"), bytearray()
    with tempfile.TemporaryFile() as file:
        for number, row in rows:
            pair_id = row.get("pair_id")
            key = f"row {number}" if is_absent(pair_id) else f"pair {_text(pair_id)}"
            keys += hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:16]
            numbers.append(number)
            starts.append(file.tell())
            file.write(_pickled(row))
        for members in _groups(bytes(keys)):
            group = []
            for member in members:
                file.seek(starts[member])
                group.append(pickle.load(file))
            yield numbers[members[0]], tuple(group)


def _text(value: object) -> str:
    """A `pair_id` as the text by which it is known."""
    try:
        return str(value)
    except (RecursionError, ValueError):  # thousands of brackets or digits
        return str(TooDeep())


@dataclass(frozen=True, repr=False)
class TooDeep:
    """In place of a value that is nested too deep to be kept; no schema has a use for one."""

    def __repr__(self) -> str:
        return "a value nested too deep to keep"


def _pickled(row: Row) -> bytes:
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
    """Positions of equal keys of 16 bytes, in order; the groups in the order of their first positions."""
    halves = np.frombuffer(keys, dtype="<u8").reshape(-1, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal keys stay in order
    differs = np.any(np.diff(halves[order], axis=0), axis=1)
    borders = np.concatenate([[0], np.flatnonzero(differs) + 1, [len(order)]]) if len(order) else np.zeros(1, int)
    firsts = order[borders[:-1]]
    for group in np.argsort(firsts, kind="stable"):
        yield order[borders[group] : borders[group + 1]].tolist()
