"""Long-form data: bring the two rows of a pair together, wherever in the file they are."""

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
    """Yield (number of its first row, all rows) of every pair, in the order of their first rows.

    A row without a `pair_id` is a pair of its own, so that it is counted when it is dropped. Since the two sides of a
    pair may be far apart, all rows are kept in a temporary file; memory holds 32 bytes for each row.
    """
    numbers, starts, keys = array("q"), array("q"), bytearray()
    with tempfile.TemporaryFile() as file:
        for number, row in rows:
            pair_id = row.get("pair_id")
            # The prefixes keep a pair_id that reads like a row number from joining that row.
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
    """Return a `pair_id` as the text that identifies it."""
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
