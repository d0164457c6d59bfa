"""Preference datasets by name -> preferences, with counts that account for every row.

`readers` finds and reads files (JSONL, JSON, CSV; Parquet and hub names through optional packages), `formats` knows
what the rows mean, and `tally` counts. A row is kept, or dropped for one named cause; none is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.core.files import parse_line
from rewardlab.core.types import Preference
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.formats import Schema, read_rows, recognise_rows
from rewardlab.data.formats.mapping import mapped
from rewardlab.data.formats.shp import SHP, SHP_BY_POST, draw_of_post, passes_filter
from rewardlab.data.judgements import Rules, seeded_generator
from rewardlab.data.pairs import group_rows, key_of, mark_rows
from rewardlab.data.readers import has_lines, read_row_lines, read_source
from rewardlab.data.rows import MAX_CHARACTERS, Row, UnreadRow, UnusableRowError
from rewardlab.data.tally import Tally

logger = logging.getLogger("rewardlab")
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
MOST_DAMAGED = 100
"""How many lines at the beginning of a file need not be JSON objects, where damaged lines are allowed."""


def first_rows(names: Sequence[str], split: str, *, streaming: bool = False) -> list[tuple[str, Row]]:
    """Return (name, first row) of every dataset that has rows. `streaming` spares the download of hub data.

    Raises DataError if a dataset cannot be found or read.
    """
    return first_rows_in(find_sources(names, split, streaming=streaming))


def first_rows_in(sources: Iterable[Source]) -> list[tuple[str, Row]]:
    """Return (label, first row) of every source that has rows. Raises DataError if one cannot be read."""
    first = []
    for source in sources:
        rows = (row for _, row in read_source(source) if not isinstance(row, UnreadRow))
        first += [(source.label, row) for row in islice(rows, 1)]
    return first


Unit = tuple[int, str | tuple[Row, ...]]
"""What becomes one preference: (its line or row number, a line of JSON or its rows, two of them in long-form data)."""


def open_units(source: Source, rules: Rules, *, may_be_damaged: bool = False) -> tuple[Schema, Iterator[Unit]]:
    """Return (schema, all units) of a dataset, in order, as the flags of `rules` have it read.

    With `may_be_damaged`, the first lines need not be JSON objects; such a line becomes a unit as it stands, unless
    several rows make one preference.

    Raises DataError if there are no rows, if their schema is unknown, or if they cannot be read.
    """
    # JSON Lines stay unparsed here, so that worker processes do the parsing. Only the first rows are parsed, to
    # recognise the schema.
    lines = read_row_lines(source.path) if source.path and has_lines(source) else None
    damaged: list[tuple[int, str]] = []
    if lines is not None and may_be_damaged:
        damaged, lines = _without_damaged_head(source, lines)
    rows = read_source(source) if lines is None else _parsed(source, lines)
    head = []
    for number, row in rows:
        head.append((number, row))
        if not isinstance(row, UnreadRow):
            break
    if not head:
        where = "" if source.rows is not None else " Is it the right file, and written to the end?"
        raise DataError(f"{source.label}: no rows.{where}")
    number, row = head[-1]
    if isinstance(row, UnreadRow):
        raise DataError(f"{source.label}: every row has more than {MAX_CHARACTERS:,} characters. Is it the right file?")
    schema = recognise_rows(row, f"{source.label}:{number}", rules.reading)
    if damaged and (schema.join is not None or schema.name == SHP.name):
        assert source.path is not None
        _ = parse_line(source.path, *damaged[0])  # raises
    if schema.join is not None:
        return schema, group_rows(chain(head, rows), partial(_group_of, schema, rules))
    if schema.name == SHP.name and rules.reading.max_per_post is not None:
        by_post = partial(_group_of, SHP_BY_POST, rules)
        marked = mark_rows(chain(head, rows), by_post, partial(_beyond_cap, source.label, rules))
        return schema, ((number, (row,)) for number, row in marked)
    units = ((number, (row,)) for number, row in chain(head, rows if lines is None else ()))
    if lines is None:
        return schema, units
    rest = ((number, line if isinstance(line, str) else (line,)) for number, line in lines)
    return schema, chain(damaged, units, rest)


def _without_damaged_head(
    source: Source, lines: Iterator[tuple[int, str | UnreadRow]]
) -> tuple[list[tuple[int, str]], Iterator[tuple[int, str | UnreadRow]]]:
    """Return (the first lines up to the first JSON object, the others). Raises DataError if all are damaged."""
    assert source.path is not None
    damaged: list[tuple[int, str]] = []
    first: DataError | None = None
    for number, line in lines:
        if isinstance(line, str):
            try:
                parse_line(source.path, number, line)
            except DataError as error:
                first = first or error
                damaged.append((number, line))
                if len(damaged) == MOST_DAMAGED:
                    raise DataError(
                        f"{first} So are the {MOST_DAMAGED - 1} lines after it. Is it the right file?"
                    ) from error
                continue
        return damaged, chain([(number, line)], lines)
    if damaged:
        parse_line(source.path, *damaged[0])
    return damaged, lines


def rows_of_units(source: Source, rules: Rules, numbers: Collection[int]) -> dict[int, list[int]]:
    """Return number of a unit -> numbers of all its rows, for the units of these numbers.

    Numbers of rows are those of `read_source`. Raises DataError if the dataset cannot be read.
    """
    schema, _ = open_units(source, rules, may_be_damaged=True)
    members: dict[int, list[int]] = {number: [number] for number in sorted(numbers)}
    if schema.join is None or not numbers:
        return members
    firsts: dict[bytes, int] = {}
    for number, row in read_source(source):
        key = key_of(number, row, partial(_group_of, schema, rules))
        # A unit has the number of its first row.
        if number in members:
            firsts[key] = number
        elif key in firsts:
            members[firsts[key]].append(number)
    return members


def _known(row: Row, rules: Rules) -> Row:
    """Return a row as the formats know it, with its label as it stands if `--map-label` does not name it.

    Reading drops such a row later, and the others of its preference with it.
    """
    try:
        return mapped(row, rules.reading)
    except UnusableRowError:
        return mapped(row, replace(rules.reading, map_label=()))


def _group_of(schema: Schema, rules: Rules, row: Row) -> object:
    """Return the value that a row shares with the other rows of its preference."""
    return schema.group_of(_known(row, rules))


def _beyond_cap(label: str, rules: Rules, number: int, rows: Sequence[Row]) -> list[int]:
    """Return which judgements of a post are left out because of `--max-per-post`."""
    known = [_known(row, rules) for row in rows]
    kept = draw_of_post(known, f"{label}:{number}", rules)
    return [index for index, row in enumerate(known) if index not in kept and passes_filter(row, rules)]


def _parsed(source: Source, lines: Iterator[tuple[int, str | UnreadRow]]) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row) of JSON Lines. Raises DataError as `parse_line` does."""
    assert source.path is not None
    for number, line in lines:
        yield number, parse_line(source.path, number, line) if isinstance(line, str) else line


def parse_units(
    units: Iterable[Unit], *, source: Source, schema: Schema, rules: Rules
) -> tuple[list[Preference | None], Tally]:
    """Return (for each unit its preference, or None if it is dropped; the counts).

    Raises DataError for a line that is not a JSON object, and where a flag forbids dropping a row.
    """
    preferences: list[Preference | None] = []
    tally = Tally()
    for number, content in units:
        place = f"{source.label}:{number}"
        if isinstance(content, str):
            assert source.path is not None
            content = (parse_line(source.path, number, content),)
        try:
            parsed = read_rows(content, schema=schema, place=place, rules=rules)
        except UnusableRowError as unusable:
            tally.drop(place, unusable)
            preferences.append(None)
        else:
            tally.keep(parsed)
            preferences.append(parsed.preference)
    return preferences, tally


def draw_streamed(
    source: Source, schema: Schema, units: Iterable[Unit], *, rules: Rules, limit: int
) -> tuple[list[Unit], Tally]:
    """Return (the units of at most `limit` preferences drawn from a stream, the counts of the units that were read).

    Each is drawn among the next `--shuffle-buffer` units, and its place is taken by the unit behind them; the rest of
    the stream is not read.

    Raises DataError as `parse_units` does.
    """
    chosen: list[Unit] = []
    tally = Tally(format=schema.label)
    for unit in _shuffled(units, rules.reading.shuffle_buffer, seeded_generator(rules.seed, rules.source)):
        (preference,), counts = parse_units([unit], source=source, schema=schema, rules=rules)
        tally.add(counts)
        if preference is not None:
            chosen.append(unit)
            if len(chosen) == limit:
                break
    return chosen, tally


Stream = tuple[Schema, list[Unit], Tally]
"""(schema, units drawn from a stream, the counts of the units that were read)."""


def open_streamed(source: Source, rules: Rules, limit: int | None) -> Stream | None:
    """Return the units that a limit draws from a stream, and log how they were drawn.

    None if the source is not a stream, or has no limit. Raises DataError as `open_units` and `draw_streamed` do.
    """
    if not (source.is_on_hub and source.streaming) or limit is None:
        return None
    schema, units = open_units(source, rules)
    drawn, tally = draw_streamed(source, schema, units, rules=rules, limit=limit)
    tell_streamed(source, limit, rules.reading.shuffle_buffer)
    return schema, drawn, tally


def tell_streamed(source: Source, limit: int, shuffle_buffer: int) -> None:
    """Log that a limit did not draw among all rows."""
    logger.warning(
        "streamed: %s: the limit %d drew each row among %d rows of the stream (--shuffle-buffer), not among all rows",
        source.label,
        limit,
        shuffle_buffer,
    )


def _shuffled(units: Iterable[Unit], size: int, generator: np.random.Generator) -> Iterator[Unit]:
    """Yield units in an order that is random within a buffer.

    The library of the hub has such a buffer too, but it shuffles the files as well and loses the numbers of the rows.
    """
    buffer: list[Unit] = []
    for unit in units:
        if len(buffer) < size:
            buffer.append(unit)
            continue
        drawn = int(generator.integers(size))
        yield buffer[drawn]
        buffer[drawn] = unit
    for drawn in generator.permutation(len(buffer)):
        yield buffer[drawn]


def chosen_by_limit(rules: Rules, kept: int, limit: int | None) -> Numbers:
    """Return the indices of the kept preferences that are used, in order of use. A smaller limit gives a prefix."""
    if limit is None:
        return np.arange(kept)
    return seeded_generator(rules.seed, rules.source).permutation(kept)[:limit]
