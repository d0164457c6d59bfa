"""Writing of the rows of the input with their scores, as JSON Lines, JSON, CSV or Parquet; columns keep their types."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import to_json
from rewardlab.core.optional import import_optional
from rewardlab.data.readers import read_each_row
from rewardlab.serve.file_scoring.parquet import Schema, require_types, told_in_words, write_batches
from rewardlab.serve.file_scoring.results import Columns, Result, together
from rewardlab.serve.file_scoring.rows import Survey, writable

FORMATS: Final = {".jsonl": "jsonl", ".jsonl.gz": "jsonl.gz", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Ending of an output -> its format. A name without an ending is JSON Lines."""


def format_of(target: Path) -> str:
    """Return the format that the name of an output asks for. Raises ConfigError for an unknown ending."""
    for ending, kind in FORMATS.items():
        if target.name.endswith(ending) and target.name != ending:
            return kind
    if not target.suffix:
        return "jsonl"
    raise ConfigError(f"--output {target}: unknown ending {target.suffix!r}. Wanted one of {', '.join(FORMATS)}.")


class Output:
    """An output in one format. It looks at all rows before anything is scored, and writes them when all are scored."""

    def __init__(self, source: Path, kind: str) -> None:
        self.source = source
        self.kind = kind
        self.keeps_batches = kind == "parquet" and source.suffix == ".parquet"
        """Whether columns are copied as they are, without becoming Python values."""
        self.as_json = not self.keeps_batches
        """Whether every column must have a form in JSON."""
        self._schema: Schema | None = None
        if kind == "parquet":
            import_optional("pyarrow.parquet", "an --output in Parquet")
            self._schema = None if self.keeps_batches else Schema(source)

    def look(self, row: Mapping[str, Any]) -> None:
        """Take note of the columns of a row. Raises DataError if they do not fit those of the rows before."""
        if self._schema is not None:
            self._schema.look(row)

    def require(self, columns: Columns) -> None:
        """Raise DataError if a column of the rows that were looked at has no form in this format."""
        if self._schema is not None:
            self._schema.kept(columns)
        elif self.keeps_batches:
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(self.source) as file:
                require_types(self.source, file.schema_arrow, columns)

    def write(self, path: Path, survey: Survey, columns: Columns, results: Iterable[Result]) -> None:
        """Write the rows of the input with their results to `path`, and flush them to the disk.

        Raises DataError if the input is not the one that was scored, or Parquet cannot hold a value after all; OSError
        if the disk is full.
        """
        if self.keeps_batches:
            with told_in_words(self.source):
                write_batches(path, self.source, columns, results)
        elif self._schema is not None:
            with told_in_words(self.source):
                self._schema.write(path, columns, self._rows(columns, results))
        elif self.kind == "csv":
            _write_csv(path, survey, columns, self._rows(columns, results))
        elif self.kind == "json":
            _write_list(path, self._rows(columns, results))
        else:
            with _text(path, packed=self.kind == "jsonl.gz") as file:
                for rest, added in self._rows(columns, results):
                    file.write(to_json({**rest, **added}, indent=None) + "\n")

    def _rows(self, columns: Columns, results: Iterable[Result]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield for each row (the columns that are kept, the columns that it gets)."""
        for (line, row), result in together(read_each_row(self.source), results, self.source):
            if isinstance(row, DataError):
                row = {}
            elif result.is_refused:
                row, _ = writable(row, f"{self.source}:{line}")
            yield columns.rest(row, result), columns.values(row, result)


@contextmanager
def _text(path: Path, *, packed: bool = False) -> Iterator[io.TextIOWrapper]:
    """Open a text file, gzipped if `packed`; it is on the disk when the block has ended."""
    with path.open("wb") as raw:
        # The header has neither name nor time, so that the same rows give the same bytes.
        stream: Any = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if packed else raw
        text = io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="")
        yield text
        text.flush()
        text.detach()
        if packed:
            stream.close()
        raw.flush()
        os.fsync(raw.fileno())


def _write_list(path: Path, rows: Iterable[tuple[dict[str, Any], Any]]) -> None:
    """Write rows as one JSON list, a row a line."""
    with _text(path) as file:
        for number, (rest, own) in enumerate(rows):
            file.write((",\n" if number else "[\n") + to_json({**rest, **own}, indent=None))
        file.write("\n]\n")


class _Lines:
    """Takes rows of a `csv.writer` and ends each with a line feed.

    The csv module quotes a cell with a carriage return or a line feed only if that character is part of its own line
    end, while readers take either of them for the end of a row. So the writer gets both as its line end, and this
    class replaces them.
    """

    END: Final = "\r\n"

    def __init__(self, file: io.TextIOWrapper) -> None:
        self.file = file

    def write(self, line: str) -> int:
        """Write one row."""
        return self.file.write(line.removesuffix(self.END) + "\n")


def _write_csv(path: Path, survey: Survey, columns: Columns, rows: Iterable[tuple[dict[str, Any], Any]]) -> None:
    """Write rows under a header; every row has all columns. Texts stay as they are, other values become JSON."""
    added = columns.added
    kept = [name for name in survey.columns if name not in (*columns.dropped, *added)]
    with _text(path) as file:
        writer = csv.writer(_Lines(file), lineterminator=_Lines.END)
        writer.writerow([*kept, *added])
        for rest, own in rows:
            values = {**rest, **own}
            writer.writerow([_cell(values.get(name)) for name in (*kept, *added)])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else to_json(value, indent=None)
