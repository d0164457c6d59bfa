"""Preference datasets by name -> preferences, with a report that accounts for every row.

`readers` finds and reads files (JSONL, JSON, CSV; Parquet and hub names through optional packages), `formats` knows
what the rows mean, and this module counts. A row is kept, or dropped for one named cause; none is lost.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.core.files import parse_line
from rewardlab.core.terminal import plural
from rewardlab.core.types import Preference
from rewardlab.data.cells import has_json_text
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.formats import Schema, read_rows, recognise_rows, unit_of
from rewardlab.data.formats.mapping import mapped
from rewardlab.data.formats.shown import described_in_brief
from rewardlab.data.formats.shp import SHP, SHP_BY_POST, draw_of_post, passes_filter
from rewardlab.data.judgements import ParsedRow, Rules, seeded_generator
from rewardlab.data.pairs import group_rows, key_of, mark_rows
from rewardlab.data.readers import has_lines, read_row_lines, read_source
from rewardlab.data.rows import CAUSES, FILTERS, MAX_CHARACTERS, Row, UnreadRow, UnusableRowError

logger = logging.getLogger("rewardlab")
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
MAX_EXAMPLES = 3
"""Examples reported for each cause."""
MOST_DAMAGED = 100
"""How many lines at the beginning of a file need not be JSON objects, where damaged lines are allowed."""


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """The counts of the rows of one dataset; kept + dropped = rows_read."""

    name: str
    split: str
    rows_read: int
    """Number of rows; where several rows make one preference, of their pairs, prompts or posts."""
    kept: int
    """Rows that became preferences, before the limit."""
    dropped: Mapping[str, int]
    """Cause -> rows, most frequent first."""
    examples: Mapping[str, tuple[str, ...]]
    """Cause -> up to three places, as `file:line: detail`."""
    skipped_ties: int
    """Comparisons of kept K-wise rows that were not made because the scores are equal."""
    skipped_identical: int
    """Comparisons of kept K-wise rows that were not made because the replies are the same text."""
    labelled: int
    """Kept rows with a `label`, the probability that `chosen` is preferred."""
    swapped: int
    """Of these, those below ½: `rejected` is preferred."""
    unused_by_limit: int
    """Kept rows left out by the limit."""
    sha256: str | None
    """Hash of the file, of the list of several files, or of rows in memory; None for data from the hub."""
    format: str = ""
    """The format that was recognised, and the columns by which."""
    second_preferred: int = 0
    """Comparisons that rows of judged replies hold with a label below ½: `second` is preferred."""
    json_texts: int = 0
    """Kept rows in which a text is messages written as JSON, which are read as the text that they are."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """Cause -> judgements of kept groups of rows that a flag left out."""
    hub: Mapping[str, object] | None = None
    """For data from the hub: the revision that was asked for, the commit, and how they were streamed."""

    def __post_init__(self) -> None:
        assert self.kept + sum(self.dropped.values()) == self.rows_read, self

    def as_dict(self) -> dict[str, object]:
        """Return a JSON mapping for manifests and reports."""
        return {
            "name": self.name,
            "split": self.split,
            "format": self.format,
            "rows_read": self.rows_read,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "examples": {cause: list(places) for cause, places in self.examples.items()},
            "skipped_ties": self.skipped_ties,
            "skipped_identical": self.skipped_identical,
            "skipped": dict(self.skipped),
            "labelled": self.labelled,
            "swapped": self.swapped,
            "second_preferred": self.second_preferred,
            "json_texts": self.json_texts,
            "unused_by_limit": self.unused_by_limit,
            "sha256": self.sha256,
            **({} if self.hub is None else {"hub": dict(self.hub)}),
        }

    def require_usable(self, label: str, max_drop_fraction: float) -> None:
        """Raise DataError if no row is left, or more than the allowed share was dropped.

        Rows that a filter leaves out because a flag asks for it count for neither.
        """
        causes = "\n".join(
            f"  {cause}: {count} ({CAUSES[cause]}), for example " + "; ".join(self.examples[cause])
            for cause, count in self.dropped.items()
        )
        unit = unit_of(self.format)
        if not self.kept:
            none = plural(self.rows_read, f"the only {unit} cannot", f"none of the {self.rows_read} {unit}s can")
            raise DataError(f"{label}: {none} be used:\n{causes}\nFix the data, or the flags that the causes name.")
        wanted = self.rows_read - sum(self.dropped.get(cause, 0) for cause in FILTERS)
        dropped = wanted - self.kept
        if (share := dropped / wanted) > max_drop_fraction:
            raise DataError(
                f"{label}: {dropped} of {wanted} {plural(wanted, unit)} cannot be used, a share of {share:.3f}, "
                f"and at most {max_drop_fraction:g} is allowed:\n{causes}\n"
                f"Fix the data, or allow it with --max-drop-fraction {math.ceil(share * 100) / 100:g}."
            )


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


@dataclass(kw_only=True)
class Tally:
    """Running counts of the rows read so far."""

    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    skipped_ties: int = 0
    skipped_identical: int = 0
    labelled: int = 0
    swapped: int = 0
    second_preferred: int = 0
    json_texts: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    format: str = ""
    """The recognised format, once the dataset was opened."""
    first: str = ""
    """The first row that became a preference, in brief."""

    def keep(self, parsed: ParsedRow) -> None:
        """Count a row that became a preference."""
        self.kept += 1
        self.first = self.first or described_in_brief(parsed.preference)
        self.skipped_ties += parsed.skipped_ties
        self.skipped_identical += parsed.skipped_identical
        self.skipped.update(parsed.skipped)
        self.labelled += parsed.label is not None
        self.swapped += parsed.label is not None and parsed.label < 0.5
        self.second_preferred += parsed.second_preferred
        self.json_texts += has_json_text(parsed.preference)

    def drop(self, place: str, unusable: UnusableRowError) -> None:
        """Count a row that was dropped."""
        self.dropped[unusable.cause] += 1
        places = self.examples.setdefault(unusable.cause, [])
        if len(places) < MAX_EXAMPLES:
            places.append(f"{place}: {unusable.detail}")

    def add(self, later: Tally) -> None:
        """Add the counts of the rows that follow these."""
        self.kept += later.kept
        self.dropped.update(later.dropped)
        for cause, places in later.examples.items():
            self.examples[cause] = (self.examples.get(cause, []) + places)[:MAX_EXAMPLES]
        self.skipped_ties += later.skipped_ties
        self.skipped_identical += later.skipped_identical
        self.labelled += later.labelled
        self.swapped += later.swapped
        self.second_preferred += later.second_preferred
        self.json_texts += later.json_texts
        self.skipped.update(later.skipped)
        self.format = self.format or later.format
        self.first = self.first or later.first

    def as_dict(self) -> dict[str, object]:
        """Return the counts as a JSON mapping."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tally:
        """Return the counts from a mapping: the inverse of `as_dict`. Other names in it are ignored."""
        counters = {name: Counter(values[name]) for name in ("dropped", "skipped")}
        return cls(**{name: values[name] for name in vars(cls())} | counters)

    def report(self, source: Source, *, used: int, sha256: str | None) -> SourceReport:
        """Return the report on a dataset of which `used` preferences are used."""
        return SourceReport(
            name=source.name,
            split=source.split,
            rows_read=self.kept + self.dropped.total(),
            kept=self.kept,
            dropped=dict(self.dropped.most_common()),
            examples={cause: tuple(self.examples[cause]) for cause, _ in self.dropped.most_common()},
            skipped_ties=self.skipped_ties,
            skipped_identical=self.skipped_identical,
            labelled=self.labelled,
            swapped=self.swapped,
            second_preferred=self.second_preferred,
            json_texts=self.json_texts,
            unused_by_limit=self.kept - used,
            sha256=sha256,
            format=self.format,
            skipped=dict(self.skipped.most_common()),
        )


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
