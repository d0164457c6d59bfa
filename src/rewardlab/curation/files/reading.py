"""Reading of datasets that are rewritten: each is opened, its rows are counted, and the chosen ones become lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rewardlab.core.config import to_mapping
from rewardlab.core.errors import DataError
from rewardlab.core.files import provenance, versions_of
from rewardlab.core.terminal import listed, plural, short
from rewardlab.core.types import Preference
from rewardlab.curation.config import RowsConfig
from rewardlab.curation.rewriting import files_of
from rewardlab.curation.rows import ReadRow, map_rows
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source, find_sources
from rewardlab.data.formats import SCHEMAS, unit_of
from rewardlab.data.formats.context import COLUMNS as CONTEXT
from rewardlab.data.hub import hub_facts
from rewardlab.data.judgements import SCORES, Rules
from rewardlab.data.readers import fingerprint
from rewardlab.data.reading import tell_oddities
from rewardlab.data.rows import Row, UnusableRowError, is_absent
from rewardlab.data.sources import Stream, chosen_by_limit, open_streamed, open_units
from rewardlab.data.tally import SourceReport, Tally
from rewardlab.data.winners import first_of, tell_other_winners
from rewardlab.data.workers import Crew, available_cores

logger = logging.getLogger("rewardlab")
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Extract = TypeVar("Extract")
PACKAGES: Final = ("rewardlab", "numpy", "scipy", "pyarrow", "datasets", "datasketch", "zstandard")
"""Packages that decide what these tools write."""


BESIDE: Final = frozenset(
    {name for pair in SCORES for name in pair}
    | {*CONTEXT, "input", "label", "labels", "strength", "annotator", "annotators", "margin", "score_ratio", "score_A"}
    | {"ranking", "scores", "gold", "tools", "preference_strength"}
    | {"score_B", "post_id", "three_most_similar_preferences", "individual_preference", "turn", "judge", "worker"}
)
"""Columns that formats read beside those by which they are known."""


@dataclass(kw_only=True)
class Reading:
    """One opened dataset, and the counts of its rows."""

    source: Source
    rules: Rules
    limit: int | None
    content: str | None
    """Its fingerprint before it was read."""
    stream: Stream | None = None
    """For a stream with a limit: its schema, the units that were drawn, and the counts of all units that were read."""
    tally: Tally = field(default_factory=Tally)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that it consists of; none for hub data."""
        return files_of(self.source)

    def chosen(self) -> Numbers:
        """Return the indices of the preferences that the limit leaves, in the order of the draw."""
        # The rows drawn from a stream are already limited.
        return chosen_by_limit(self.rules, self.tally.kept, None if self.stream else self.limit)

    def map(self, summarise: Callable[[Sequence[ReadRow]], Extract], crew: Crew, title: str) -> Iterator[Extract]:
        """Yield `summarise` of each chunk of rows. Raises DataError as `map_rows` does."""
        opened = open_units(self.source, self.rules) if self.stream is None else self.stream[:2]
        self.tally.format = opened[0].label
        yield from map_rows(
            self.source, self.rules, summarise, crew, title=f"{title} {self.source.label}", opened=opened
        )

    def require_unchanged(self) -> None:
        """Raise DataError if the dataset is not the one that was counted."""
        if self.content is not None and self.content != fingerprint(self.source):
            raise DataError(f"{self.source.label} changed while it was read. Start again when it is complete.")

    def report(self, used: int) -> SourceReport:
        """Return the report on the rows: read, kept, dropped, and used."""
        return self.tally.report(self.source, used=used, sha256=None if self.source.is_on_hub else self.content)

    def require_usable(self) -> None:
        """Raise DataError if too many rows cannot be used, and log the counts."""
        report = self.report(self.tally.kept)
        report.require_usable(self.source.label, self.rules.reading.max_drop_fraction)
        dropped = ", ".join(f"{cause} {count}" for cause, count in report.dropped.items()) or "none"
        logger.info("data: %s: format: %s", self.source.label, report.format)
        rows = plural(report.rows_read, unit_of(report.format))
        told = (self.source.label, report.rows_read, rows, report.kept, dropped)
        logger.info("data: %s: %d %s read, %d kept, dropped: %s", *told)
        tell_oddities(report)
        first = first_of(self.source)
        tell_other_winners(self.source, self.rules.reading, first)
        known = {
            name
            for one in SCHEMAS
            if report.format.startswith(f"{one.name}, by ")
            for name in (*one.needed, *one.one_of)
        }
        if lost := not_written(first, self.rules.reading, known):
            logger.info(
                "data: %s: not written, since they are no part of a preference: the columns %s",
                self.source.label,
                listed(list(map(short, lost))),
            )


def not_written(rows: Sequence[Row], reading: ReadingConfig, known: Collection[str]) -> list[str]:
    """Return the columns of rows that hold something and that their format, which is `known` by some, does not read, so
    that they are not written; with them an `id`, but for rows of the project's own form, which keep theirs."""
    read = {*known, *BESIDE, *reading.own_columns.values(), *reading.attribute_weights, reading.margin_column}
    own = bool(rows) and {"replies", "comparisons"} <= rows[0].keys()
    read |= {"id", "source"} if own else set()
    entries = [entry for row in rows for entry in row.items()]
    return list(
        dict.fromkeys(
            name for name, value in entries if name not in read and not (is_absent(value) or value in ([], {}))
        )
    )


def open_all(config: RowsConfig, names: Sequence[str], seed: int) -> list[Reading]:
    """Return the datasets of these names, opened. Raises DataError for those that cannot be read."""
    opened = []
    for source in find_sources(names, config.hf_split, streaming=config.reading.streaming):
        rules = Rules(source=source.name, reading=config.reading, seed=seed)
        reading = Reading(source=source, rules=rules, limit=config.limit, content=fingerprint(source))
        reading.stream = open_streamed(source, rules, config.limit)
        opened.append(reading)
    return opened


@contextmanager
def crew_of(config: RowsConfig) -> Iterator[Crew]:
    """Yield the worker processes that the settings ask for."""
    workers = config.reading.num_workers
    with Crew(available_cores() if workers is None else workers) as crew:
        yield crew


@dataclass(frozen=True, kw_only=True)
class Chunk(Generic[Extract]):
    """The counts of some rows, and an extract of those that are preferences."""

    tally: Tally
    extract: Extract
    """The extract of the rows that are preferences."""


def tally_of(rows: Iterable[ReadRow]) -> Tally:
    """Return the counts of rows."""
    tally = Tally()
    for row in rows:
        if row.parsed is not None:
            tally.keep(row.parsed)
        else:
            assert row.cause is not None
            tally.drop(row.place, UnusableRowError(row.cause, row.detail or ""))
    return tally


def count_rows(reading: Reading, extract: Callable[[Sequence[Preference]], Extract], crew: Crew) -> list[Extract]:
    """Read a dataset, count its rows in `reading.tally`, and return `extract` of each chunk of preferences.

    `extract` must be picklable. Raises DataError if the dataset cannot be read, or too many rows cannot be used.
    """
    extracts = []
    for chunk in reading.map(partial(_count, extract), crew, "counting"):
        reading.tally.add(chunk.tally)
        extracts.append(chunk.extract)
    settle(reading)
    return extracts


def settle(reading: Reading) -> None:
    """Take the counts of a whole stream in place of those of the rows that were drawn, and check them."""
    if reading.stream is not None:
        reading.tally = reading.stream[2]
    reading.require_usable()


def _count(extract: Callable[[Sequence[Preference]], Extract], rows: Sequence[ReadRow]) -> Chunk[Extract]:
    preferences = [row.preference for row in rows if row.preference is not None]
    return Chunk(tally=tally_of(rows), extract=extract(preferences))


def nothing(preferences: Sequence[Preference]) -> None:
    """Extract nothing: the rows are only counted."""


def as_mask(chosen: Numbers, size: int) -> Mask:
    """Return [size] whether each index is among those chosen."""
    mask = np.zeros(size, dtype=bool)
    mask[chosen] = True
    return mask


def manifest(
    tool: str,
    config: Any,
    readings: Sequence[Reading],
    used: Sequence[int],
    outputs: Sequence[Mapping[str, object]],
    **entries: object,
) -> dict[str, object]:
    """Return the manifest that is written beside the output: command, settings, sources, counts, hashes, versions."""
    reports = [reading.report(count) for reading, count in zip(readings, used, strict=True)]
    return {
        "tool": f"rewardlab data {tool}",
        "seed": config.seed,
        "settings": to_mapping(config),
        "rows_read": sum(report.rows_read for report in reports),
        "kept": sum(report.kept for report in reports),
        "used": sum(used),
        "sources": [
            {**_source_dict(reading, report), "used": count}
            for reading, report, count in zip(readings, reports, used, strict=True)
        ],
        "outputs": list(outputs),
        **entries,
        "provenance": {**provenance(), "packages": versions_of(PACKAGES)},
    }


def _source_dict(reading: Reading, report: SourceReport) -> dict[str, object]:
    source = reading.source
    if source.is_on_hub:
        buffer = reading.rules.reading.shuffle_buffer if reading.stream else None
        report = replace(
            report, hub=hub_facts(source.name, source.split, streaming=source.streaming, shuffle_buffer=buffer)
        )
    return {**report.as_dict(), "label": source.label, "path": None if source.path is None else str(source.path)}
