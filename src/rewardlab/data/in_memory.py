"""Rows that a program holds in memory, as a file would have them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from decimal import Decimal
from numbers import Real
from typing import Final

from rewardlab.core.errors import DataError
from rewardlab.core.types import Preference
from rewardlab.data.rows import Row

MAX_DEPTH: Final = 64
"""Deepest nesting of values in a row; no schema nests deeper."""
MISSING: Final = ("NaTType", "NAType")
"""Types of the values with which pandas marks empty cells."""
NOT_READ: Final = "value of type"


def plain_rows(rows: Iterable[object], label: str) -> Iterator[tuple[int, Row]]:
    """Read rows in memory, a Preference as the mapping of the schema of judged replies.

    Raises DataError for a row that is neither a mapping nor a Preference.
    """
    for number, row in enumerate(rows, start=1):
        if isinstance(row, Preference):
            yield number, _with_plain_numbers(asdict(row))
        elif isinstance(row, Mapping):
            yield number, {str(name): _plain(value) for name, value in row.items()}
        else:
            hint = " Of a table of pandas, give .to_dict('records')." if isinstance(row, str) else ""
            raise DataError(f"{label}:{number}: is a {type(row).__name__}, wanted a mapping or a Preference.{hint}")


def _with_plain_numbers(row: Row) -> Row:
    """Return a Preference as a mapping whose comparisons hold Python's numbers in place of numpy's and torch's.

    NaN stays NaN, which is refused by name: as an empty cell it would become the default.
    """
    if not isinstance(judged := row["comparisons"], (list, tuple)):
        return row
    plain = [
        {name: _unwrapped(value) for name, value in one.items()} if isinstance(one, dict) else one for one in judged
    ]
    return {**row, "comparisons": plain}


def _unwrapped(value: object) -> object:
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _plain(value: object, depth: int = 0) -> object:
    """Return a value of a row as JSON would hold it, in which form it can also be sent to worker processes.

    Values of numpy and pandas become Python's own, and decimals and fractions numbers. NaN and its like, with which
    tables mark empty cells, become None. Of a value that JSON cannot hold its type is left: where it has to be read it
    is refused by name, and in a column that is not read it does no harm.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    if depth > MAX_DEPTH:
        return {NOT_READ: "nested too deeply"}
    if isinstance(value, (Decimal, Real)):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(held, depth + 1) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held, depth + 1) for held in value]
    to_list = getattr(value, "tolist", None)
    if callable(to_list) and not isinstance(value, type):
        return _plain(to_list(), depth + 1)
    kind = type(value).__name__
    return None if kind in MISSING else {NOT_READ: kind}


def fingerprint_of_rows(rows: Iterable[object], label: str) -> str:
    """Return the SHA-256 of rows in memory as JSON."""
    digest = hashlib.sha256()
    for _, row in plain_rows(rows, label):
        digest.update(json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()
