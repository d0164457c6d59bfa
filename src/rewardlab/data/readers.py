"""Read the rows of a dataset that was found: JSON Lines, JSON, CSV, Parquet, Arrow, the hub, memory."""

from __future__ import annotations

import csv
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from rewardlab.core.errors import DataError
from rewardlab.core.files import UTF8, absent, not_utf8, parse_line, read_json, read_lines, sha256_file, sha256_json
from rewardlab.core.optional import import_optional
from rewardlab.data.cells import CSV_LISTS, conversions, converted, lists_in, read_cell
from rewardlab.data.finding import Source
from rewardlab.data.hub import load_hub, one_line, read_hub
from rewardlab.data.in_memory import fingerprint_of_rows, plain_rows
from rewardlab.data.rows import CAUSES, MAX_CHARACTERS, Row, UnreadRow, UnusableRowError, is_message, require_bounded
from rewardlab.data.shards import EXTENSIONS, OTHER_FORMATS, files_of_saved

SEPARATED = {".csv": ",", ".tsv": "\t"}
"""Ending of the files that are tables in text -> what stands between their cells."""
ASKED_LISTS = ("messages", "prompt", "responses")
"""The only columns of rows to be scored whose cells may hold lists: a reply or a note stays the text that it is."""
ASKED_LINE = '{"prompt": …, …}'
"""What a line of such rows looks like."""
MAX_RECORD_CHARACTERS = 4 * MAX_CHARACTERS
"""Most characters of a CSV row. In a longer one a double quote is missing, so that the row never ends."""
SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "vertical bar"}
"""What stands between the cells of a table, and its name."""
COLUMNS = re.compile(r'\s*\{\s*"(prompt|chosen|rejected)"\s*:\s*\[\s*\[')
"""Matches the beginning of a file of columns of conversations. A row of a preference never begins so: its sides are
texts or messages."""
TEXTS = ("prompt", "chosen", "rejected", "messages")
"""Columns by which a JSON object is told to be one row or a mapping of columns."""
HEAD = 4096
"""Number of characters at the beginning of a file by which its content is recognised."""
PARQUET_ROWS = 2048
"""Rows of a Parquet file in memory at a time."""


def fingerprint(source: Source) -> str | None:
    """Return a text that changes with the content of a dataset; None for hub data without a fingerprint, and for those
    that are streamed.

    For a file it is the SHA-256; for several files, that of the list of theirs. Raises DataError if hub data or rows in
    memory cannot be read.
    """
    if source.rows is not None:
        return fingerprint_of_rows(source.rows, source.label)
    if source.path is None:
        if source.streaming:
            return None
        hub_fingerprint = getattr(load_hub(source.name, source.split), "_fingerprint", None)
        return f"hub {hub_fingerprint}" if hub_fingerprint else None
    if not source.shards and not source.path.is_dir():
        return sha256_file(source.path)
    files = source.shards or files_of_saved(source.path)
    return sha256_json([[path.name, sha256_file(path)] for path in files])


def has_lines(source: Source) -> bool:
    """Return whether the dataset is a single file of JSON Lines, whose lines can be read without parsing them."""
    path = source.path
    return path is not None and not source.shards and not path.is_dir() and holds_lines(path)


def holds_lines(path: Path) -> bool:
    """Return whether a file is read as JSON Lines: by its name, unless it is one JSON object that holds columns, or as
    a .json file that has an object in each line."""
    return _is_lines_named_json(path) if path.suffix in READERS else not _holds_columns(path)


def _is_lines_named_json(path: Path) -> bool:
    """Return whether a .json file has a JSON object in its first line and more behind it, as a single value never has.

    Within a JSON value only a comma or a closing bracket follows an object.
    """
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding=UTF8, errors="replace") as file:
        if not file.read(HEAD).lstrip().startswith("{"):
            return False
        file.seek(0)
        lines = (line.strip() for line in file if line.strip())
        first, second = next(lines, ""), next(lines, "")
    return first.endswith("}") and bool(second) and not second.startswith((",", "}", "]"))


def _holds_columns(path: Path) -> bool:
    """Return whether a .jsonl file is one JSON object with a list of conversations for each side, in one line or in
    many."""
    if path.suffix != ".jsonl":
        return False
    with path.open(encoding=UTF8, errors="replace") as file:
        if not COLUMNS.match(file.read(HEAD)):
            return False
        file.seek(0)
        first = next((line for line in file if line.strip()), "")
        return not first.rstrip().endswith("}") or not any(line.strip() for line in file)


def read_source(source: Source) -> Iterator[tuple[int, Row]]:
    """Return an iterator of (line number, row); in formats without lines, and of several files, of (row number from 1,
    row).

    Raises DataError, naming file and line of what cannot be read, or the package to install.
    """
    if source.rows is not None:
        return plain_rows(source.rows, source.label)
    if source.path is None:
        return read_hub(source.name, source.split, streaming=source.streaming)
    if source.shards:
        return enumerate((row for path in source.shards for _, row in _read_file(path)), start=1)
    return _read_saved(source.path) if source.path.is_dir() else _read_file(source.path)


def _read_file(path: Path) -> Iterator[tuple[int, Row]]:
    # A .jsonl file that does not hold lines holds columns.
    return _read_jsonl(path) if holds_lines(path) else READERS.get(path.suffix, _read_json)(path)


def read_row_lines(path: Path) -> Iterator[tuple[int, str | UnreadRow]]:
    """Yield (line number, unparsed line) of JSON Lines, with an `UnreadRow` in place of a line that is too long.

    Raises DataError as `read_lines` does.
    """
    for number, line in read_lines(path, max_characters=MAX_CHARACTERS):
        yield number, line if len(line) <= MAX_CHARACTERS else UnreadRow()


def read_each_row(path: Path) -> Iterator[tuple[int, Row | DataError]]:
    """Yield (line number, row) of a file of any format of which no row may be left out, numbered as by `read_source`.

    In place of a row that cannot be read by itself comes the error that says why, naming file and line: a line that is
    not a JSON object, or a row with more text than a row of training data may have. Such a line of JSON Lines is never
    held in memory as a whole. Times in Parquet files become texts. Of a CSV file only the cells of `ASKED_LISTS` may be
    lists.

    Raises DataError for a file that becomes unreadable: not UTF-8, damaged, not in the format of its name.
    """
    if path.suffix == ".parquet":
        rows = _read_parquet(path, keep_times=True)
    elif path.suffix in SEPARATED:
        rows = _read_csv(path, SEPARATED[path.suffix], listed=ASKED_LISTS)
    elif path.suffix in READERS and not holds_lines(path):
        rows = READERS[path.suffix](path)
    else:
        for number, line in read_row_lines(path):
            yield number, _row_or_error(path, number, line)
        return
    for number, row in rows:
        try:
            require_bounded(row)
        except UnusableRowError:
            yield number, _too_long(path, number)
        else:
            yield number, row


def _row_or_error(path: Path, number: int, line: str | UnreadRow) -> Row | DataError:
    if isinstance(line, UnreadRow):
        return _too_long(path, number)
    try:
        return parse_line(path, number, line, like=ASKED_LINE)
    except DataError as error:
        return error


def _too_long(path: Path, number: int) -> DataError:
    return DataError(f"{path}:{number}: {CAUSES['row_too_long']}. Shorten its texts, or take it out.")


def require_rows(path: Path) -> None:
    """Raise DataError unless `path` is a file of a known format that has rows; they may be unusable."""
    if path.is_dir():
        raise DataError(f"{path}: a folder, wanted one file. Name a file in it, {', '.join(EXTENSIONS)}.")
    if not path.is_file():
        raise DataError(f"{path}: {absent(path)}.")
    if path.name.endswith(OTHER_FORMATS):
        raise DataError(
            f"{path}: unknown ending. Rows are read from {', '.join(EXTENSIONS)} files; convert it to one of these."
        )
    if next(read_each_row(path), None) is None:
        raise DataError(f"{path}: no rows to score.")


# --- reading -------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in read_row_lines(path):
        yield number, parse_line(path, number, line) if isinstance(line, str) else line


def _read_json(path: Path) -> Iterator[tuple[int, Row]]:
    """Read a list of rows, one row, a mapping from columns to lists of equal length, or the examples of a BIG-bench
    task.

    Raises DataError for anything else.
    """
    try:
        value = read_json(path)
    except DataError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise not_utf8(path) from error
        raise DataError(f"{error} Wanted one list of rows, columns of equal length, or an object a line.") from error
    if isinstance(value, dict):
        value = value["examples"] if _is_task(value) else [value] if _is_row(value) else _rows_of_columns(path, value)
    if not isinstance(value, list):
        raise DataError(f"{path}: got a JSON {type(value).__name__}, wanted a list of rows or columns of equal length.")
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: row {number} is {type(row).__name__}, wanted a JSON object.")
        yield number, row


def _is_task(value: dict[str, Any]) -> bool:
    """Return whether a value is a task of BIG-bench: examples, and facts on them that are not columns."""
    return isinstance(value.get("examples"), list) and not all(isinstance(other, list) for other in value.values())


def _is_row(value: dict[str, Any]) -> bool:
    """Return whether an object is one row, and no mapping of columns: its prompt and sides are texts or messages.

    A column of texts or conversations is a list of other things than messages.
    """
    sides = [value[name] for name in TEXTS if isinstance(value.get(name), list)]
    if any(not side or not all(map(is_message, side)) for side in sides):
        return False
    return bool(sides) or any(isinstance(one, str) or is_message(one) for one in value.values())


def _rows_of_columns(path: Path, columns: dict[str, object]) -> list[dict[str, object]]:
    """Return the rows of a mapping of columns. Raises DataError unless all columns are lists of equal length."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if len(lists) < len(columns) or len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{name} ({len(lists[name]) if name in lists else 'not a list'})" for name in columns)
        by_pandas = all(isinstance(values, dict) and "0" in values for values in columns.values())
        hint = ' pandas writes rows by to_json(…, orient="records", lines=True).' if columns and by_pandas else ""
        raise DataError(
            f"{path}: wanted a list of rows, or columns that are lists of equal length; got {lengths}.{hint}"
        )
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _read_csv(path: Path, separator: str = ",", *, listed: Sequence[str] | None = None) -> Iterator[tuple[int, Row]]:
    """Read rows under a header line, numbered by their first line. Cells may hold line breaks, and lists as JSON.

    `listed` names the columns that may hold lists, None for all.

    Raises DataError as `_read_texts` does.
    """
    lists: Sequence[str] | None = None
    for number, texts in _read_texts(path, separator):
        if lists is None:
            lists = CSV_LISTS if listed is not None else lists_in(texts)
        yield (
            number,
            {
                name: read_cell(name, text, lists) if listed is None or name in listed else text
                for name, text in texts.items()
            },
        )


def _read_texts(path: Path, separator: str) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield (number of its first line, column -> cell) of each row under a header line.

    Raises DataError, naming file and line, for anything that is not CSV in UTF-8 with this separator.
    """
    line = 1
    try:
        # Spreadsheets write a byte order mark. Without utf-8-sig it would become part of the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _RecordLines(file)
            reader = csv.reader(lines, delimiter=separator, strict=True)
            columns = next(_long_records(reader), [])
            _require_separator(path, separator, columns)
            _require_once(f"{path}:1: the header", columns)
            line = reader.line_num + 1
            for cells in _long_records(reader):
                first_line, line = line, reader.line_num + 1
                lines.characters = 0
                if len(cells) > len(columns):
                    raise DataError(
                        f"{path}:{first_line}: {len(cells)} cells under a header of {len(columns)} columns. "
                        f"Put cells that contain a {SEPARATORS[separator]} in double quotes."
                    )
                if cells:
                    yield first_line, dict(zip_longest(columns, cells))
    except _EndlessRecordError as error:
        raise DataError(
            f"{path}:{line}: this row has no end within {MAX_RECORD_CHARACTERS:,} characters. Is a double quote "
            f"missing? Double quotes within a cell are written twice."
        ) from error
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    except csv.Error as error:
        ends = "unexpected end of data" in str(error)
        asked = "a cell begins with a double quote here that none closes" if ends else f"not valid CSV ({error})"
        raise DataError(f"{path}:{line}: {asked}. Double quotes within a cell are written twice.") from error


def _long_records(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the records of a `csv.reader`, whose cells may be as long as a row may be.

    The limit of the csv module holds for the whole process, so it is raised for one record at a time: the reader of a
    file may stop in the middle, and two files may be read in turns.
    """
    while True:
        limit_before = csv.field_size_limit(MAX_RECORD_CHARACTERS)
        try:
            cells = next(reader, None)
        finally:
            csv.field_size_limit(limit_before)
        if cells is None:
            return
        yield cells


def _require_once(names_them: str, columns: Sequence[str]) -> None:
    """Raise DataError if a column has the name of another one."""
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise DataError(f"{names_them} names the column {twice[0]!r} more than once. Rename or remove one.")


def _require_separator(path: Path, wanted: str, columns: Sequence[str]) -> None:
    """Raise DataError for a header that is a single cell with another separator in it."""
    if (found := next((mark for mark in SEPARATORS if len(columns) == 1 and mark in columns[0]), None)) is not None:
        raise DataError(
            f"{path}:1: the header {columns[0]!r} is separated by {SEPARATORS[found]}s, wanted {SEPARATORS[wanted]}s. "
            f"Save the file again with {SEPARATORS[wanted]}s (cells that contain one in double quotes), or as .jsonl."
        )


class _EndlessRecordError(Exception):
    """A row of a CSV file exceeds `MAX_RECORD_CHARACTERS`. `_read_csv` turns it into a DataError."""


class _RecordLines:
    """The lines of a CSV file. Raises _EndlessRecordError if a row has more characters than it may.

    The csv module limits single cells only, so a missing quote would make it read the rest of the file into memory.
    """

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.characters = 0
        """Characters of the current row. `_read_csv` sets it to 0 for each row."""

    def __iter__(self) -> Iterator[str]:
        while line := self.file.readline(MAX_RECORD_CHARACTERS + 1):
            self.characters += len(line)
            if self.characters > MAX_RECORD_CHARACTERS:
                raise _EndlessRecordError
            yield line


def _read_parquet(path: Path, *, keep_times: bool = False) -> Iterator[tuple[int, Row]]:
    """Read rows of a Parquet file, batch by batch, without columns of times; with `keep_times`, those are texts. Maps
    become mappings, and decimals numbers of Python.

    Raises DataError if it cannot be read or a map has a key twice, and without pyarrow.
    """
    parquet = import_optional("pyarrow.parquet", f"{path}: reading Parquet")
    is_time = importlib.import_module("pyarrow.types").is_temporal
    number = 0
    try:
        file = parquet.ParquetFile(path)
        _require_once(f"{path}: its schema", file.schema_arrow.names)
        # No schema uses times, and converting one after the year 9999 to Python raises an error.
        times = [field.name for field in file.schema_arrow if is_time(field.type)]
        by_column = conversions(file.schema_arrow)
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            for name in times if keep_times else ():
                place = batch.schema.get_field_index(name)
                batch = batch.set_column(place, name, batch.column(place).cast("string"))
            for row in batch.drop_columns([] if keep_times else times).to_pylist():
                number += 1
                yield number, converted(row, by_column, f"{path}:{number}")
    except DataError:
        raise
    except (OSError, ValueError, OverflowError) as error:
        # The errors of pyarrow itself are ValueErrors.
        raise DataError(f"{path}: cannot be read as Parquet after row {number} ({error}). Replace the file.") from error


def _read_saved(folder: Path) -> Iterator[tuple[int, Row]]:
    """Read rows of a folder that `Dataset.save_to_disk` wrote, a batch at a time.

    Raises DataError if it cannot be read, or without the package datasets.
    """
    datasets = import_optional("datasets", f"{folder}: reading a folder that datasets saved")
    number = 0
    try:
        table = datasets.load_from_disk(str(folder), keep_in_memory=False)
        # Python values, whatever form of rows was set before the dataset was saved.
        table = table.with_format(None)
        for batch in table.iter(batch_size=PARQUET_ROWS):
            for row in zip(*batch.values(), strict=True):
                number += 1
                yield number, dict(zip(batch, row, strict=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # Damaged tables raise the errors of pyarrow, which are ValueErrors, and damaged descriptions any of the others.
        raise DataError(
            f"{folder}: cannot be read as a dataset that was saved, after row {number} "
            f"({type(error).__name__}: {one_line(error)}). Is it complete? Save it again."
        ) from error


READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, Row]]]] = {
    ".json": _read_json,
    **{ending: partial(_read_csv, separator=separator) for ending, separator in SEPARATED.items()},
    ".parquet": _read_parquet,
}
"""File name ending -> reader. Every other file is JSON Lines, which may be compressed, and so are some .json files."""
