"""Rewriting of datasets without some rows, or with their labels flipped; all other rows stay unchanged.

Rows of JSON Lines, whether compressed or in numbered files, stay the same byte for byte; rows of other formats become
JSON Lines. A file appears whole or not at all.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import parse_line, replacing, to_json
from rewardlab.core.folders import remove_left_over
from rewardlab.core.optional import import_optional
from rewardlab.core.zst import DamagedZstError, open_zst, packing_zst
from rewardlab.data.finding import Source
from rewardlab.data.readers import holds_lines, read_source
from rewardlab.data.rows import MAX_CHARACTERS, Row
from rewardlab.data.shards import files_of_saved

ENDINGS: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst")
"""Endings of files of rows."""
SURROGATES: Final = "surrogateescape"
"""The handling of decoding errors with which bytes that are not UTF-8 survive reading and writing."""
Stamp = tuple[tuple[int, int], ...]
"""Size and time of each file of a dataset; empty for one that has no files."""
Turn = Callable[[Row, str], Mapping[str, object]]
"""(row, place) -> the row with its label flipped."""
_PIECE: Final = MAX_CHARACTERS + 1
"""Most characters of a line that are in memory at a time; a longer line is copied in pieces."""
_TEXTS: Final = (date, time, timedelta, Decimal, UUID)
"""Types whose values are written to JSON as texts."""


def ending_of(path: Path, endings: Iterable[str] = ENDINGS) -> str | None:
    """Return the longest of these endings that a file has; None if it has none."""
    fitting = [ending for ending in endings if path.name.endswith(ending) and path.name != ending]
    return max(fitting, key=len, default=None)


def trace_beside(target: Path, name: str) -> Path:
    """Return the file beside a cleaned one that says why rows are missing: `clean.NAME` of `clean.jsonl.zst`."""
    return target.with_name(f"{target.name.removesuffix(ending_of(target) or '')}.{name}")


def also_rows(numbers: Sequence[int]) -> dict[str, object]:
    """Return the entry of a trace with the numbers of all rows of a preference; nothing if it has only one row."""
    return {"rows": list(numbers)} if len(numbers) > 1 else {}


def require_package(path: Path, what: str) -> None:
    """Raise DataError, saying how to install it, if the package that the ending of a file needs is missing."""
    if path.suffix == ".zst":
        import_optional("zstandard", what, "data")


# --- what is read --------------------------------------------------------------------------------------------


def files_of(source: Source) -> tuple[Path, ...]:
    """Return the files that a dataset consists of, in order; none for rows of the hub and in memory."""
    if source.path is None:
        return ()
    if source.shards:
        return source.shards
    return tuple(files_of_saved(source.path)) if source.path.is_dir() else (source.path,)


def require_apart(targets: Sequence[Path], inputs: Iterable[Source]) -> None:
    """Raise ConfigError for a file to write that is a folder, is one of the datasets that are read, or is named twice.

    No --overwrite allows any of these.
    """
    read = {path.resolve() for source in inputs for path in files_of(source)}
    for number, path in enumerate(targets):
        if path.is_dir():
            raise ConfigError(f"{path} is a folder. Name a file in it.")
        if path.resolve() in read:
            raise ConfigError(f"{path} is a dataset that is read, and would be replaced. Choose another name.")
        if path.resolve() in {other.resolve() for other in targets[:number]}:
            raise ConfigError(f"{path} would be written twice. Choose another name.")


def stamp(source: Source) -> Stamp:
    """Return the size and time of each file of a dataset, which change when the file does."""
    states = [path.stat() for path in files_of(source)]
    return tuple((state.st_size, state.st_mtime_ns) for state in states)


def require_unchanged(source: Source, since: Stamp) -> None:
    """Raise DataError unless the files of a dataset are those of an earlier `stamp`."""
    try:
        same = stamp(source) == since
    except OSError:
        same = False
    if not same:
        raise DataError(f"{source.label} changed while it was read. Start again when it is complete.")


def _lines(source: Source) -> Iterator[tuple[int, bool, str]]:
    """Yield (number, whether a line begins, text with the line end) of every line of JSON Lines, as they stand.

    Numbers are those of `readers.read_source`: of a single file those of its lines, else those of all rows. Empty lines
    between the rows of several files have the number 0.
    """
    number = own = 0
    for place, path in enumerate(files_of(source)):
        with _opened(path) as file:
            for line, (begins, text) in enumerate(_pieces(file)):
                if place and not line:
                    # A byte order mark may stand only at the beginning of the output: drop those of later files.
                    text = text.removeprefix("\ufeff")
                if begins:
                    is_counted = not source.shards or bool(text.removeprefix("\ufeff").strip())
                    number += is_counted
                    own = number if is_counted else 0
                yield own, begins, text


def _opened(path: Path) -> TextIOWrapper:
    if path.suffix == ".zst":
        return open_zst(path, "utf-8", errors=SURROGATES, newline="")
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", errors=SURROGATES, newline="")


def _pieces(file: TextIOWrapper) -> Iterator[tuple[bool, str]]:
    """Yield (whether a line begins, text): whole lines, or pieces of lines that are too long."""
    before = "\n"
    while text := file.readline(_PIECE):
        # A piece may end between the two characters of the line end \r\n.
        begins = before.endswith(("\n", "\r")) and not (before.endswith("\r") and text == "\n")
        yield begins, text
        before = text


# --- what is written -----------------------------------------------------------------------------------------


class Nulls:
    """Replaces NaN in rows of tables by null, since JSON has no NaN, and counts it by column.

    It does so only in rows that reading uses, which read the same with a null. In `unread` rows NaN stays an error,
    since without it these rows might be used.
    """

    def __init__(self, unread: Collection[int]) -> None:
        self.columns: dict[str, tuple[int, str]] = {}
        """Column -> (number of rows, place of the first one)."""
        self._unread = unread

    def of(self, row: Mapping[str, object], number: int, place: str) -> Mapping[str, object]:
        """Return a row with null for every NaN."""
        found = {name: value for name, value in row.items() if _holds_nan(value)}
        if not found or number in self._unread:
            return row
        for name in found:
            count, first = self.columns.get(name, (0, place))
            self.columns[name] = (count + 1, first)
        return {**row, **{name: _without_nan(value) for name, value in found.items()}}


def _holds_nan(value: object) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    if isinstance(value, Mapping):
        return any(map(_holds_nan, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_nan, value))


def _without_nan(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _without_nan(own) for name, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(own) for own in value]
    return None if _holds_nan(value) else value


def write_without(
    source: Source,
    target: Path,
    touched: Collection[int],
    *,
    since: Stamp,
    turn: Turn | None = None,
    nulls: Nulls | None = None,
) -> int:
    """Write a dataset without the rows of these numbers, or with `turn` of each in its place.

    Return how many rows it then has. `touched` are numbers of rows as they are read, not of preferences: see
    `sources.rows_of_units`. `since` is the dataset's `stamp` from before its rows were judged. `nulls` replaces NaN of
    tables by null; without it NaN is an error, like any other value that JSON cannot hold.

    Raises DataError if the dataset cannot be read or has changed, or if a row cannot be written as JSON.
    """
    require_unchanged(source, since)
    files = files_of(source)
    # The .arrow files of folders that `datasets` saved are tables, not lines.
    only_lines = bool(files) and all(path.suffix != ".arrow" and holds_lines(path) for path in files)
    with replacing_lines(target) as sink:
        if only_lines:
            count = _copy_lines(source, touched, sink, turn)
        else:
            count = _copy_rows(source, touched, sink, turn, nulls)
        require_unchanged(source, since)
    return count


def _copy_lines(source: Source, touched: Collection[int], sink: Any, turn: Turn | None) -> int:
    """Write the lines of JSON Lines; return how many rows they are."""
    count, ended = 0, True
    try:
        for number, begins, text in _lines(source):
            is_touched = number in touched
            if is_touched and turn is None:
                continue
            if is_touched and turn is not None:
                text = _turned_line(text, source, number, turn)
            # If the last line of the file before has no line end, add one.
            sink.write(("" if ended or not begins else "\n").encode() + text.encode("utf-8", SURROGATES))
            ended = text.endswith(("\n", "\r"))
            count += begins and bool(text.removeprefix("\ufeff").strip())
    except (EOFError, gzip.BadGzipFile, zlib.error, DamagedZstError) as error:
        raise DataError(f"{source.label}: cannot be read again ({error}). Is it complete?") from error
    return count


def _turned_line(text: str, source: Source, number: int, turn: Turn) -> str:
    assert source.path is not None, "only files have lines"
    place = f"{source.label}:{number}"
    return as_line(turn(parse_line(source.path, number, text.removeprefix("\ufeff")), place), place)


def _copy_rows(source: Source, touched: Collection[int], sink: Any, turn: Turn | None, nulls: Nulls | None) -> int:
    """Write the rows of a dataset in another format as lines of JSON; return how many they are."""
    count = 0
    for number, row in read_source(source):
        place = f"{source.label}:{number}"
        if number in touched:
            if turn is None:
                continue
            row = turn(row, place)
        if nulls is not None:
            row = nulls.of(row, number, place)
        sink.write(as_line(row, place).encode())
        count += 1
    return count


def as_line(row: Mapping[str, object], place: str) -> str:
    """Return a row as a line of JSON; times and exact numbers become texts.

    Raises DataError for a value that JSON cannot hold.
    """
    try:
        text = to_json(dict(row), indent=None)
    except TypeError:
        text = _with_texts(row, place)
    except (ValueError, RecursionError) as error:
        raise _unwritable(place, error) from error
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair can only be written escaped.
        text = json.dumps(json.loads(text))
    return text + "\n"


def _with_texts(row: Mapping[str, object], place: str) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_as_text)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unwritable(place, error) from error


def _as_text(value: object) -> str:
    """Return a value of one of `_TEXTS` as text. Raises TypeError for any other value that JSON cannot hold."""
    if isinstance(value, _TEXTS):
        return str(value)
    raise TypeError(f"a value of the type {type(value).__name__}")


def _unwritable(place: str, error: Exception) -> DataError:
    return DataError(f"{place}: cannot be written as JSON ({error}). Take the value, or its column, out first.")


@contextmanager
def replacing_lines(path: Path) -> Iterator[Any]:
    """Yield a stream of bytes into a file that is compressed as its name says, and otherwise as `replacing` does.

    The same bytes give the same file. Raises DataError without the package that .zst needs.
    """
    remove_left_over(path)
    with replacing(path) as raw:
        if path.suffix == ".gz":
            # The header has neither name nor time, so that the same rows give the same bytes.
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                yield packed
        elif path.suffix == ".zst":
            with packing_zst(raw, f"{path}: writing .zst") as packed:
                yield packed
        else:
            yield raw
