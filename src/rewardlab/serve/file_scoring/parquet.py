"""Writing of the rows with their scores as Parquet. A column has one type, which is found before anything is scored."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.data.readers import PARQUET_ROWS
from rewardlab.serve.file_scoring.results import CUT, PICKED, SHORTENED, Columns, Result, together
from rewardlab.serve.file_scoring.rows import ROWS_AT_A_TIME

AS_TEXT: Final = ("score_errors",)
"""Columns whose mappings are written as JSON texts in Parquet, since their keys differ from row to row."""
EXACT: Final = 2**53
"""Every whole number up to this one has an exact float64."""


class Schema:
    """The types of the columns of rows that are to become a Parquet file."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self._waiting: list[Mapping[str, Any]] = []
        self._found: Any = None
        self._large: set[tuple[str, ...]] = set()
        """Places of whole numbers that float64 does not hold exactly, as paths of names."""

    def look(self, row: Mapping[str, Any]) -> None:
        """Take note of the types in a row. Raises DataError if a column has values of types that do not go together."""
        self._waiting.append(row)
        if len(self._waiting) >= ROWS_AT_A_TIME:
            self._unify()

    def _unify(self) -> None:
        import pyarrow as pa

        rows, self._waiting = self._waiting, []
        names = list(dict.fromkeys(name for row in rows for name in row))
        for name in names:
            try:
                values = pa.array([row.get(name) for row in rows])
                self._large |= set(_large_in(values, (name,)))
                own = pa.schema([(name, values.type)])
                self._found = pa.unify_schemas([self._found or pa.schema([]), own], promote_options="permissive")
                if any(_is_float_at(self._found.field(path[0]).type, path[1:]) for path in self._large):
                    raise OverflowError("whole numbers beyond 2^53 and others with a fraction")
            except (pa.ArrowException, OverflowError) as error:
                raise DataError(
                    f"{self.source}: the column {name!r} cannot be written as Parquet, in which all values of a column "
                    f"have one type ({str(error).splitlines()[0]}). Name an --output that ends in .jsonl."
                ) from error

    def write(self, path: Path, columns: Columns, rows: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Write rows to `path`."""
        import pyarrow as pa

        kept = self.kept(columns)
        remaining = iter(rows)
        with _parquet(path, pa.schema([*kept, *_added(columns)])) as writer:
            while batch := list(islice(remaining, PARQUET_ROWS)):
                arrays = [pa.array([rest.get(one.name) for rest, _ in batch], type=one.type) for one in kept]
                arrays += _arrays(columns, [{**rest, **own} for rest, own in batch])
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=writer.schema))

    def kept(self, columns: Columns) -> list[Any]:
        """Return the fields of the input that are kept. Raises DataError if Parquet has no form for one."""
        import pyarrow as pa
        import pyarrow.parquet

        self._unify()
        require_types(self.source, self._found, columns)
        kept = [one for one in self._found if one.name not in (*columns.dropped, *columns.added)]
        for one in kept:
            try:
                pyarrow.parquet.ParquetWriter(pa.BufferOutputStream(), pa.schema([one])).close()
            except pa.ArrowException as error:
                raise DataError(
                    f"{self.source}: the column {one.name!r} cannot be written as Parquet ({error}). Name an --output "
                    f"that ends in .jsonl."
                ) from error
        return kept


def _large_in(values: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the places in an Arrow array at which some whole number has no exact float64."""
    import pyarrow as pa
    import pyarrow.compute

    kind = values.type
    if pa.types.is_int64(kind):
        ends = pyarrow.compute.min_max(values).as_py()
        if ends["min"] is not None and max(-ends["min"], ends["max"]) > EXACT:
            yield path
    elif pa.types.is_list(kind):
        yield from _large_in(values.flatten(), (*path, ""))
    elif pa.types.is_struct(kind):
        for number, field in enumerate(kind):
            yield from _large_in(values.field(number), (*path, field.name))


def _is_float_at(kind: Any, path: tuple[str, ...]) -> bool:
    """Return whether an Arrow type has floats at a place that `_large_in` found."""
    import pyarrow as pa

    if not path:
        return bool(pa.types.is_floating(kind))
    return _is_float_at(kind.value_type if pa.types.is_list(kind) else kind.field(path[0]).type, path[1:])


def require_types(source: Path, found: Any, columns: Columns) -> None:
    """Raise DataError if a column of the input has another type than the values that picked rows get in it."""
    import pyarrow as pa

    kinds = pa.types
    for name, fits, wanted in (
        ("response", (kinds.is_string, kinds.is_large_string, kinds.is_string_view), "texts"),
        ("response_index", (kinds.is_integer,), "whole numbers"),
    ):
        if name not in columns.added or name not in found.names:
            continue
        kind = found.field(name).type
        kind = kind.value_type if kinds.is_dictionary(kind) else kind
        if not any(fit(kind) for fit in (*fits, kinds.is_null)):
            raise DataError(
                f"{source}: the column {name!r} is {kind}, and --pick best writes {wanted} there. Rename it, or name "
                f"an --output that ends in .jsonl."
            )


def _added(columns: Columns) -> list[Any]:
    """Return the Parquet fields of the columns that rows get."""
    import pyarrow as pa

    number, numbers, text = pa.float64(), pa.list_(pa.float64()), pa.string()
    types = {"score": number, "score_std": number, "scores": numbers, "score_stds": numbers}
    types |= {"response_index": pa.int64(), CUT: pa.list_(pa.int64()), SHORTENED: pa.list_(pa.int64())}
    return [pa.field(name, types.get(name, text)) for name in columns.added]


def _arrays(columns: Columns, added: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the Parquet columns that rows get."""
    import pyarrow as pa

    def value(own: Mapping[str, Any], name: str) -> Any:
        found = own.get(name)
        return json.dumps(found, ensure_ascii=False) if name in AS_TEXT and found is not None else found

    return [pa.array([value(own, one.name) for own in added], type=one.type) for one in _added(columns)]


@contextmanager
def _parquet(path: Path, schema: Any) -> Iterator[Any]:
    """Open a Parquet file to be written; it is on the disk when the block has ended."""
    import pyarrow.parquet

    with path.open("wb") as file:
        with pyarrow.parquet.ParquetWriter(file, schema) as writer:
            yield writer
        file.flush()
        os.fsync(file.fileno())


def write_batches(path: Path, source: Path, columns: Columns, results: Iterable[Result]) -> None:
    """Write a Parquet file with the columns of another one as they are, and the results of its rows."""
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet

    remaining = iter(results)
    with pyarrow.parquet.ParquetFile(source) as file:
        schema = file.schema_arrow
        kept = [one for one in schema if one.name not in (*columns.dropped, *columns.added)]
        asked = [name for name in ("messages", "response", *PICKED) if name in schema.names]
        # Drop the notes of the `datasets` library, which describe the columns of the input and no longer hold.
        notes = {key: value for key, value in (schema.metadata or {}).items() if key != b"huggingface"}
        with _parquet(path, pa.schema([*kept, *_added(columns)], metadata=notes)) as writer:
            for batch in file.iter_batches(batch_size=PARQUET_ROWS):
                rows = batch.select(asked).to_pylist()
                own = [result for _, result in together(iter(rows), islice(remaining, len(rows)), source)]
                added = [columns.values(row, result) for row, result in zip(rows, own, strict=True)]
                picked = [columns.picks(row, result) for row, result in zip(rows, own, strict=True)]
                # Rows without a picked reply keep the values that they have.
                theirs = [name for name in ("response", "response_index") if name in schema.names]
                added = [
                    one if is_picked else {name: row[name] for name in theirs} | one
                    for row, one, is_picked in zip(rows, added, picked, strict=True)
                ]
                arrays = [batch.column(one.name) for one in kept]
                if (place := pa.schema(kept).get_field_index("responses")) >= 0 and any(picked):
                    nothing = pa.scalar(None, arrays[place].type)
                    arrays[place] = pyarrow.compute.if_else(pa.array(picked), nothing, arrays[place])
                arrays += _arrays(columns, added)
                writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=writer.schema))
    _ = list(together(iter(()), remaining, source))


@contextmanager
def told_in_words(source: Path) -> Iterator[None]:
    """Raise DataError in place of an error of pyarrow about a value."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OverflowError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{source}: a value cannot be written as Parquet ({said}). Name an --output that ends in .jsonl."
        ) from error
