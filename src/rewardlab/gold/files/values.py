"""Files of JSON values that are not rows of ours: one list of them all, or one a line, whatever the name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rewardlab.core.errors import DataError
from rewardlab.core.files import parse_json, read_json, read_lines
from rewardlab.data.readers import holds_lines


def first_line(path: Path) -> str:
    """Return the first line that is not empty, without white space around it; an empty text if there is none."""
    return next((line.strip() for _, line in read_lines(path)), "")


def read_values(path: Path) -> object:
    """Return what a file holds: the rows of its lines as a list, or the one JSON value.

    Raises DataError, naming file and line, for what is not JSON.
    """
    return _of_lines(path) if _holds_rows(path) else read_json(path)


def _holds_rows(path: Path) -> bool:
    """Return whether a file has a row in each line: it has several lines and the first is a value of its own, or its
    name says so, unless a list of several lines begins in the first."""
    lines = (line for _, line in read_lines(path))
    first, several = next(lines, ""), next(lines, None) is not None
    named = ".jsonl" in path.suffixes
    try:
        parse_json(first)
    except (ValueError, RecursionError):
        return not first.lstrip().startswith("[") if named else path.suffix == ".json" and holds_lines(path)
    return named or several


def _of_lines(path: Path) -> list[Any]:
    """Return the rows of JSON Lines, or of the one line that holds them all. Raises DataError naming a bad line."""
    rows = list(_lines(path))
    is_whole = len(rows) == 1 and isinstance(rows[0], list) and bool(rows[0])
    return rows[0] if is_whole and isinstance(rows[0][0], list | dict | str) else rows


def _lines(path: Path) -> Iterator[Any]:
    for number, line in read_lines(path):
        try:
            yield parse_json(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not valid JSON ({error}). Fix or remove this line.") from error
