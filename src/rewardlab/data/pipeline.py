"""Rows -> preferences -> tokens, a chunk at a time: what is in memory does not grow with the data.

Chunks of small data are worked on in this process, since starting workers takes seconds; those of larger data by a crew
of worker processes. Both run `work`, and both give the same columns in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np

from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError
from rewardlab.data.bulk import render_all
from rewardlab.data.chat import Renderer
from rewardlab.data.formats import SCHEMAS, Rules
from rewardlab.data.readers import Source
from rewardlab.data.sources import Mask, Tally, Unit, chosen_by_limit, open_units, parse_units
from rewardlab.data.store import Columns, StoreWriter, encode
from rewardlab.data.workers import Crew

CHUNK = 256
"""Units of a dataset in one piece of work."""
CHUNK_CHARACTERS = 8_000_000
"""Fewer units, if their lines have more than this."""
ALONE = 16
"""Chunks that this process works on before it starts workers: about two seconds, which is what starting them takes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done with the units of a dataset, the same for all of them."""

    source: Source
    schema: str
    """Name of the schema."""
    rules: Rules
    renderer: Renderer | None
    """None: the rows are read and checked, and nothing more."""
    overlong: str


@dataclass(frozen=True, kw_only=True)
class Done:
    """What came of a chunk."""

    tally: Tally
    kept: Mask
    """For each unit, whether it became a preference."""
    columns: Columns | None


def work(job: Job, units: tuple[Unit, ...]) -> Done:
    """A chunk of units as columns. Raises DataError as `parse_units` does."""
    schema = next(schema for schema in SCHEMAS if schema.name == job.schema)
    found, tally = parse_units(units, source=job.source, schema=schema, rules=job.rules)
    columns = None
    if job.renderer is not None:
        preferences = [preference for preference in found if preference is not None]
        columns = encode(preferences, render_all(preferences, job.renderer, overlong=job.overlong))
    return Done(tally=tally, kept=np.array([preference is not None for preference in found]), columns=columns)


def write_store(
    folder: Path,
    source: Source,
    *,
    rules: Rules,
    limit: int | None,
    renderer: Renderer,
    overlong: str,
    crew: Crew,
) -> None:
    """Read a dataset, tokenise what a limit leaves of it, and write it to an empty folder as a store.

    With a limit the rows are read twice: all of them have to be checked before it is known which are used.

    Raises DataError for what cannot be read or used.
    """
    schema, units = open_units(source)
    job = Job(source=replace(source, rows=None), schema=schema.name, rules=rules, renderer=renderer, overlong=overlong)
    tally = Tally()
    if limit is not None:
        kept = []
        for done in _chunks(replace(job, renderer=None), units, crew, f"reading {source.label}"):
            tally.add(done.tally)
            kept.append(done.kept)
        report = tally.report(source, used=0, sha256=None)
        report.require_usable(source.label, rules.reading.max_drop_fraction)
        chosen = chosen_by_limit(rules, tally.kept, limit)
        units = _chosen(open_units(source)[1], np.concatenate(kept), chosen, source.label)
    with StoreWriter(folder) as writer:
        for done in _chunks(job, units, crew, f"preparing {source.label}"):
            if limit is None:
                tally.add(done.tally)
            assert done.columns is not None
            writer.append(done.columns)
        writer.finish(source=source.name, facts={"dataset": source.label, **tally.as_dict()})


def _chunks(job: Job, units: Iterable[Unit], crew: Crew, title: str) -> Iterator[Done]:
    with bar(title=title, unit=" rows") as shown:
        for done in crew.map(partial(work, job), _chunked(units), alone=ALONE):
            shown.update(len(done.kept))
            yield done


def _chunked(units: Iterable[Unit]) -> Iterator[tuple[Unit, ...]]:
    chunk: list[Unit] = []
    size = 0
    for unit in units:
        chunk.append(unit)
        size += len(unit[1]) if isinstance(unit[1], str) else 0
        if len(chunk) == CHUNK or size > CHUNK_CHARACTERS:
            yield tuple(chunk)
            chunk, size = [], 0
    if chunk:
        yield tuple(chunk)


def _chosen(units: Iterator[Unit], kept: Mask, chosen: np.ndarray, label: str) -> Iterator[Unit]:
    """Those of the units that were kept and then chosen; DataError if there are more or fewer than before."""
    wanted = np.zeros(len(kept), dtype=bool)
    wanted[np.flatnonzero(kept)[chosen]] = True
    for unit, is_wanted in zip_longest(units, wanted):
        if unit is None or is_wanted is None:
            raise DataError(f"{label} changed while it was read. Start again when it is complete.")
        if is_wanted:
            yield unit
