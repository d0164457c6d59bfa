"""Find datasets by name, as files or on the hub, and read their rows.

A name is a file, a folder (`folder/<split>.jsonl`), the beginning of a path (`folder/name` for
`folder/name.<split>.jsonl.gz`) or otherwise a hub name (`organisation/name`, `organisation/name:configuration`).
"""

from __future__ import annotations

import csv
import difflib
import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from rewardlab.core.errors import DataError
from rewardlab.core.files import parse_line, read_json, read_lines, sha256_file
from rewardlab.core.types import Preference
from rewardlab.data.in_memory import fingerprint_of_rows, plain_rows
from rewardlab.data.rows import CAUSES, MAX_CHARACTERS, Row, UnreadRow

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Words in a file name that name its split and not its dataset."""
ALL_ROWS = "all rows"
IN_MEMORY = "in memory"
"""Stand for the split of a single file without a split in its name, and of rows in memory."""
CSV_LISTS = ("responses", "scores", "ranking")
"""Columns whose cells are JSON lists."""
MAX_RECORD_CHARACTERS = 4 * MAX_CHARACTERS
"""Most characters of a CSV row. In a longer one a double quote is missing, so that the row never ends."""
OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
PARQUET_ROWS = 2048
"""Rows of a Parquet file in memory at a time."""
MAX_NAMES_SHOWN = 8
"""File names listed in a message."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A dataset that was found."""

    name: str
    """For metrics: the file name without split and extension, or the hub name."""
    split: str
    """The split in the file's name if it has one, else the one asked for; `all rows` for a lone file."""
    label: str
    """Beginning of the places of rows: the file name or `hub-name[split]`."""
    path: Path | None
    """None for a hub dataset, and for rows in memory."""
    rows: Iterable[object] | None = field(default=None, repr=False, compare=False)
    """Rows in memory, which can be iterated more than once."""


def find_sources(names: Sequence[str], split: str) -> tuple[Source, ...]:
    """Return where each dataset is, with labels that tell all of them apart.

    Raises DataError for a name that is not found, is ambiguous, is given twice, or is not UTF-8.
    """
    for name in names:
        _require_text(name)
    located = [(name, _find_file(name, split)) for name in names]
    paths = [path for _, path in located if path is not None]
    for known in paths:
        _require_text(str(known))
    for place, count in Counter(str(path.resolve()) if path else name for name, path in located).items():
        if count > 1:
            raise DataError(f"dataset {place} is named {count} times. Name it once.")
    sources = []
    for name, path in located:
        if path is None:
            sources.append(Source(name=name, split=split, label=f"{name}[{split}]", path=None))
        else:
            label = _distinct_label(path, paths)
            bare, own_split = _bare_name(path, label, split)
            sources.append(
                Source(
                    name=bare, split=own_split or (ALL_ROWS if path == Path(name) else split), label=label, path=path
                )
            )
    counts = Counter(source.name for source in sources)
    return tuple(
        replace(source, name=source.label) if source.path and counts[source.name] > 1 else source for source in sources
    )


def _require_text(name: str) -> None:
    """Raise DataError for a name that is not UTF-8 or has a null character: logs and manifests cannot hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        raise DataError(f"dataset {shown}: its name is not UTF-8. Rename the file, or link to it.") from None
    if "\0" in name:
        raise DataError(f"dataset {name!r}: a file name cannot have a null character.")


def fingerprint(source: Source) -> str | None:
    """Return a text that changes with the content of a dataset; None for hub data without a fingerprint.

    For a file it is the SHA-256. Raises DataError if hub data or rows in memory cannot be read.
    """
    if source.path is not None:
        return sha256_file(source.path)
    if source.rows is not None:
        return fingerprint_of_rows(source.rows, source.label)
    hub_fingerprint = getattr(_load_hub(source.name, source.split), "_fingerprint", None)
    return f"hub {hub_fingerprint}" if hub_fingerprint else None


def source_of_rows(rows: object, name: str) -> Source:
    """Return rows in memory as a dataset: mappings, `Preference`s, a `datasets.Dataset`, or an iterable of such rows.

    Rows of an iterator, which can be iterated only once, are copied to a list. Raises DataError for anything else.
    """
    is_one = isinstance(rows, (str, bytes, Mapping, Preference, Path))
    if is_one or not isinstance(rows, Iterable):
        kind = type(rows).__name__
        raise DataError(
            f"{name}: got a {kind}, wanted rows: mappings such as {{'prompt': …, 'chosen': …, 'rejected': …}}, "
            f"Preferences, or a datasets.Dataset. Files and hub names go to --dataset."
        )
    # What is no sequence may give other rows, or none, when it is walked again.
    held = rows if hasattr(rows, "__getitem__") and hasattr(rows, "__len__") else list(rows)
    return Source(name=name, split=IN_MEMORY, label=name, path=None, rows=held)


def has_lines(source: Source) -> bool:
    """Whether the dataset is a file of JSON Lines, whose lines can be read without parsing them."""
    return source.path is not None and source.path.suffix not in READERS


def read_source(source: Source) -> Iterator[tuple[int, Row]]:
    """Return an iterator of (line number, row); in formats without lines, of (row number from 1, row).

    Raises DataError, naming file and line of what cannot be read, or the package to install.
    """
    if source.rows is not None:
        return plain_rows(source.rows, source.label)
    if source.path is None:
        return _read_hub(source.name, source.split)
    return READERS.get(source.path.suffix, _read_jsonl)(source.path)


def read_row_lines(path: Path) -> Iterator[tuple[int, str | UnreadRow]]:
    """Yield (line number, unparsed line) of JSON Lines, with an `UnreadRow` in place of a line that is too long.

    Raises DataError as `read_lines` does.
    """
    for number, line in read_lines(path, max_characters=MAX_CHARACTERS):
        yield number, line if len(line) <= MAX_CHARACTERS else UnreadRow()


def read_all_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row) of JSON Lines of which none may be left out.

    Raises DataError, naming file and line, if a line cannot be read or is longer than a row of training data may be.
    Such a line is never held in memory as a whole.
    """
    for number, row in _read_jsonl(path):
        if isinstance(row, UnreadRow):
            raise DataError(f"{path}:{number}: {CAUSES['row_too_long']}. Shorten its texts, or take it out.")
        yield number, row


def require_rows(path: Path) -> None:
    """Raise DataError unless `path` is a JSONL file whose first line is a row."""
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    if next(read_all_rows(path), None) is None:
        raise DataError(f"{path}: no rows to score.")


# --- finding -------------------------------------------------------------------------------------------------


def _find_file(name: str, split: str) -> Path | None:
    """Return the absolute path of a local dataset; None if the name can only be one on the hub.

    Links are not followed: in the cache of the hub they point to files whose names are hashes. Raises DataError for an
    unknown extension, for several files that match, and if a name that must be local is not found.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if _extension(path) is None:
            raise DataError(f"{path}: unknown extension. Preferences are read from {', '.join(EXTENSIONS)} files.")
        return path.absolute()
    wanted = [path / f"{split}{extension}" for extension in EXTENSIONS]
    if path.name:
        wanted += [path.with_name(f"{path.name}.{split}{extension}") for extension in EXTENSIONS]
    candidates = [candidate for candidate in wanted if candidate.is_file()]
    if len(candidates) > 1:
        raise DataError(
            f"dataset {name!r}, split {split!r}: could be {' or '.join(map(str, candidates))}. Name one of these files."
        )
    if candidates:
        return candidates[0].absolute()
    near = _near_files(path)
    if _is_path_like(name, path) or near:
        endings = f"(.* is one of {', '.join(EXTENSIONS)})"
        looked_for = str(path) if _extension(path) else f"{path}/{split}.* and {path}.{split}.* {endings}"
        raise DataError(
            f"dataset {name!r}, split {split!r}: no such file. Looked for {looked_for}. "
            + (f"There is: {_listed(near)}." if near else f"No data file in {path.parent} has a name like it.")
        )
    return None


def _is_path_like(name: str, path: Path) -> bool:
    """Whether a name must be local: names on the hub have at most one slash and none of our extensions."""
    return name.startswith((".", "/", "~")) or path.exists() or name.count("/") > 1 or _extension(path) is not None


def _near_files(path: Path) -> list[str]:
    """Return the data files in the folder `path`, or those beside it with a name that begins with or resembles its
    name."""
    if path.is_dir():
        return [str(file) for file in _data_files(path)]
    beside = {file.name: str(file) for file in _data_files(path.parent)} if path.parent.is_dir() else {}
    stem = path.name.removesuffix(_extension(path) or "")
    same = [file for name, file in beside.items() if name.startswith(f"{stem}.")]
    by_stem: dict[str, list[str]] = {}
    for name, file in beside.items():
        by_stem.setdefault(_strip_split(name.removesuffix(_extension(Path(name)) or ""), "")[0], []).append(file)
    alike = [file for name in difflib.get_close_matches(_strip_split(stem, "")[0], by_stem) for file in by_stem[name]]
    return same or alike


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if _extension(file) and file.is_file())


def _extension(path: Path) -> str | None:
    return next((extension for extension in EXTENSIONS if path.name.endswith(extension)), None)


def _distinct_label(path: Path, paths: Sequence[Path]) -> str:
    """Return the file name, preceded by as many folders as are needed to tell it from the other paths."""
    depth = 1
    while sum(other.parts[-depth:] == path.parts[-depth:] for other in paths) > 1:
        depth += 1
    return _as_text("/".join(path.parts[-depth:]))


def _bare_name(path: Path, label: str, split: str) -> tuple[str, str | None]:
    """Return (name without extension and split, split in the file's name or None)."""
    bare, own_split = _strip_split(label.removesuffix(_extension(path) or ""), split)
    return bare or _as_text(path.parent.name or path.stem), own_split


def _as_text(name: str) -> str:
    """Return a file name with bytes that are not UTF-8 escaped, since it is written to files and messages."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _strip_split(stem: str, split: str) -> tuple[str, str | None]:
    """Split `name.train` into (`name`, `train`), `folder/train` into (`folder`, `train`), `train` into (``,
    `train`)."""
    for word in (split, *SPLITS):
        for ending in (f".{word}", f"/{word}"):
            if word and stem.endswith(ending):
                return stem.removesuffix(ending), word
        if word and stem == word:
            return "", word
    return stem, None


# --- reading -------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in read_row_lines(path):
        yield number, parse_line(path, number, line) if isinstance(line, str) else line


def _read_json(path: Path) -> Iterator[tuple[int, Row]]:
    """Read a list of rows, or a mapping from columns to lists of equal length. Raises DataError for anything else."""
    try:
        value = read_json(path)
    except DataError as error:
        raise DataError(f"{error} If every line is a row of its own, rename it to .jsonl.") from error
    if isinstance(value, dict):
        value = _rows_of_columns(path, value)
    if not isinstance(value, list):
        raise DataError(f"{path}: got a JSON {type(value).__name__}, wanted a list of rows or columns of equal length.")
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: row {number} is {type(row).__name__}, wanted a JSON object.")
        yield number, row


def _rows_of_columns(path: Path, columns: dict[str, object]) -> list[dict[str, object]]:
    """Return the rows of a mapping of columns. Raises DataError unless all columns are lists of equal length."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    if len(lists) < len(columns) or len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{name} ({len(lists[name]) if name in lists else 'not a list'})" for name in columns)
        raise DataError(f"{path}: wanted a list of rows, or columns that are lists of equal length; got {lengths}.")
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _read_csv(path: Path) -> Iterator[tuple[int, Row]]:
    """Read rows under a header line, numbered by their first line. Cells may hold line breaks, and lists as JSON.

    Raises DataError, naming file and line, for anything that is not CSV in UTF-8 with commas.
    """
    line = 1
    limit_before = csv.field_size_limit(MAX_RECORD_CHARACTERS)
    try:
        # Spreadsheets write a byte order mark. Without utf-8-sig it would become part of the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _RecordLines(file)
            reader = csv.reader(lines, strict=True)
            columns = next(reader, [])
            _require_commas(path, columns)
            if twice := [name for name, count in Counter(columns).items() if count > 1]:
                raise DataError(
                    f"{path}:1: the header names the column {twice[0]!r} more than once. Rename or remove one."
                )
            line = reader.line_num + 1
            for cells in reader:
                first_line, line = line, reader.line_num + 1
                lines.characters = 0
                if len(cells) > len(columns):
                    raise DataError(
                        f"{path}:{first_line}: {len(cells)} cells under a header of {len(columns)} columns. "
                        f"Put cells that contain a comma in double quotes."
                    )
                if cells:
                    yield first_line, {name: _cell(name, text) for name, text in zip_longest(columns, cells)}
    except _EndlessRecordError as error:
        raise DataError(
            f"{path}:{line}: this row has no end within {MAX_RECORD_CHARACTERS:,} characters. Is a double quote "
            f"missing? Double quotes within a cell are written twice."
        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}:{line}: not valid CSV in UTF-8 ({error}). Fix or replace the file.") from error
    finally:
        csv.field_size_limit(limit_before)


def _require_commas(path: Path, columns: Sequence[str]) -> None:
    """Raise DataError for a header that is a single cell with another separator in it."""
    separator = next((mark for mark in OTHER_SEPARATORS if len(columns) == 1 and mark in columns[0]), None)
    if separator is not None:
        raise DataError(
            f"{path}:1: the header {columns[0]!r} is separated by {OTHER_SEPARATORS[separator]}, wanted commas. Save "
            f"the file again with commas (cells that contain one in double quotes), or as .jsonl."
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


def _cell(column: str, text: str | None) -> object:
    """Return a cell as a list if it holds messages or a list of K-wise data in JSON, otherwise as text.

    Other cells stay text even if they are JSON, since a reply may be `[1]`.
    """
    if text and text.startswith("[") and text.endswith("]"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if column in CSV_LISTS or (value and all(isinstance(entry, dict) for entry in value)):
            return value
    return text


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    """Read rows of a Parquet file, batch by batch. Raises DataError if it cannot be read, or without pyarrow."""
    parquet = _import("pyarrow.parquet", f"{path}: reading Parquet")
    is_time = importlib.import_module("pyarrow.types").is_temporal
    number = 0
    try:
        file = parquet.ParquetFile(path)
        # No schema uses times, and converting one after the year 9999 to Python raises an error.
        times = [field.name for field in file.schema_arrow if is_time(field.type)]
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            for row in batch.drop_columns(times).to_pylist():
                number += 1
                yield number, row
    except (OSError, ValueError, OverflowError) as error:
        # The errors of pyarrow itself are ValueErrors.
        raise DataError(f"{path}: cannot be read as Parquet after row {number} ({error}). Replace the file.") from error


def _read_hub(name: str, split: str) -> Iterator[tuple[int, Row]]:
    yield from enumerate(_load_hub(name, split), start=1)


def _load_hub(name: str, split: str) -> Any:
    """Return a dataset of the hub. Raises DataError if it is not to be had, or without the package datasets."""
    datasets = _import("datasets", f"dataset {name!r} is not a local file or folder, and reading it from the hub")
    hub_name, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(hub_name, configuration or None, split=split)
    except Exception as error:
        # The library raises its own errors, those of the hub and those of the network, which have no common base.
        raise DataError(
            f"dataset {name!r}, split {split!r}: no local file or folder, and the hub did not give it "
            f"({type(error).__name__}: {_first_line(error)}). Check name, split and network, or give a local path."
        ) from error


def _import(module: str, what: str) -> Any:
    """Import an optional package when it is needed.

    Raises DataError, saying how to install it, if that fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{what} needs the package {package}, which cannot be imported ({error}). "
            f'Install it with: pip install "rewardlab[hub]"'
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


READERS: Mapping[str, Callable[[Path], Iterator[tuple[int, Row]]]] = {
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""File name ending -> reader. Every other file is JSON Lines."""
