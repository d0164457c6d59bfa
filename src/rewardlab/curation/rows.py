"""Read the rows of datasets as training reads them: each is a preference, or has a cause for which it is not one.

Nothing is tokenised. Rows are read in chunks, which a function may summarise in worker processes, so that memory does
not grow with the data and all cores help.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError
from rewardlab.core.files import parse_line
from rewardlab.core.types import Preference
from rewardlab.data.finding import Source
from rewardlab.data.formats import Schema, read_rows, schema_named
from rewardlab.data.judgements import ParsedRow, Rules
from rewardlab.data.pipeline import ALONE, chunked
from rewardlab.data.rows import Row, UnusableRowError
from rewardlab.data.sources import Unit, open_units
from rewardlab.data.workers import Crew

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ReadRow:
    """One row (in formats with several rows a preference, all of them), read or refused."""

    place: str
    """`file:line`, which is also the id of its preference."""
    number: int
    """Its line or row number, from 1."""
    preference: Preference | None
    cause: str | None
    """The cause for which it is not a preference, one of `rows.CAUSES`; None if it is one."""
    detail: str | None
    """What was found, in words; None if it is a preference."""
    rows: tuple[Mapping[str, object], ...]
    """The row as it stands in the file, or the rows; an empty one for a line that is not a JSON object."""
    parsed: ParsedRow | None = None
    """The preference with the counts of what was left out of it; None if the row is not a preference."""


def map_rows(
    source: Source,
    rules: Rules,
    summarise: Callable[[Sequence[ReadRow]], Result],
    crew: Crew,
    *,
    title: str,
    opened: tuple[Schema, Iterable[Unit]] | None = None,
    may_be_damaged: bool = False,
) -> Iterator[Result]:
    """Yield `summarise` of each chunk of rows, in the order of the file, under a progress bar.

    `summarise` must be picklable (a function of a module, or a `functools.partial` of one), as must its results: chunks
    of large data are handled by the workers of `crew`. It must not depend on how rows are divided into chunks. `opened`
    are units that were opened already, as `open_units` gives them. With `may_be_damaged` a line that is not a JSON
    object counts as a row without a preference, with the cause `not_json`.

    Raises DataError if the dataset becomes unreadable.
    """
    schema, units = open_units(source, rules, may_be_damaged=may_be_damaged) if opened is None else opened
    # Workers get their rows sent, so the rows of a source in memory need not be sent with every job.
    job = partial(_work, replace(source, rows=None), schema.name, rules, summarise, may_be_damaged)
    with bar(title=title, unit=" rows") as shown:
        for count, result in crew.map(job, chunked(units), alone=ALONE):
            shown.update(count)
            yield result


def walk(
    source: Source,
    rules: Rules,
    *,
    numbers: Collection[int] | None = None,
    opened: tuple[Schema, Iterable[Unit]] | None = None,
    may_be_damaged: bool = False,
) -> Iterator[ReadRow]:
    """Yield every row of a dataset, in the order of the file, read in this process; or those with these `numbers`.

    Raises DataError if the dataset becomes unreadable. `opened` and `may_be_damaged` are those of `map_rows`.
    """
    schema, units = open_units(source, rules, may_be_damaged=may_be_damaged) if opened is None else opened
    for unit in units:
        if numbers is not None and unit[0] not in numbers:
            continue
        yield from _read([unit], source, schema.name, rules, may_be_damaged)


def _work(
    source: Source,
    schema: str,
    rules: Rules,
    summarise: Callable[[Sequence[ReadRow]], Result],
    may_be_damaged: bool,
    units: tuple[Unit, ...],
) -> tuple[int, Result]:
    return len(units), summarise(list(_read(units, source, schema, rules, may_be_damaged)))


def _read(
    units: Iterable[Unit], source: Source, schema_name: str, rules: Rules, may_be_damaged: bool
) -> Iterator[ReadRow]:
    schema = schema_named(schema_name, rules.reading)
    for number, content in units:
        rows: tuple[Row, ...]
        place = f"{source.label}:{number}"
        if isinstance(content, str):
            assert source.path is not None, "only files have lines"
            try:
                rows = (parse_line(source.path, number, content),)
            except DataError as error:
                if not may_be_damaged:
                    raise
                detail = str(error).removeprefix(f"{source.path}:{number}: ")
                yield ReadRow(place=place, number=number, rows=({},), preference=None, cause="not_json", detail=detail)
                continue
        else:
            rows = content
        read: dict[str, Any] = {"place": place, "number": number, "rows": rows}
        try:
            parsed = read_rows(rows, schema=schema, place=place, rules=rules)
        except UnusableRowError as unusable:
            yield ReadRow(preference=None, cause=unusable.cause, detail=unusable.detail, **read)
        else:
            yield ReadRow(preference=parsed.preference, cause=None, detail=None, parsed=parsed, **read)
