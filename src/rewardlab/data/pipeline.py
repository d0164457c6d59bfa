"""Rows -> preferences -> tokens, a chunk at a time, so that memory does not grow with the data.

Chunks of small data are processed in this process, since starting workers takes seconds; those of larger data by a crew
of worker processes. Both run `work` and give the same columns in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np

from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError
from rewardlab.core.types import Preference, TokenGroup
from rewardlab.data.bulk import render_all
from rewardlab.data.chat import Renderer
from rewardlab.data.config import Control
from rewardlab.data.controls import Gathered, changed_by, gather, in_place_of, length_matched, open_pool, pool_of
from rewardlab.data.finding import Source
from rewardlab.data.formats import schema_named
from rewardlab.data.judgements import Rules
from rewardlab.data.sources import Mask, Unit, chosen_by_limit, draw_streamed, open_units, parse_units
from rewardlab.data.store import Columns, LeftOut, StoreWriter, encode
from rewardlab.data.tally import Tally
from rewardlab.data.workers import Crew

CHUNK = 256
"""Units of a dataset in one piece of work."""
CHUNK_CHARACTERS = 8_000_000
"""Characters after which a chunk is closed even if it has fewer units."""
NOT_MATCHED = "not_length_matched"
"""Cause of preferences that the control `length_matched` leaves out. They are selected, and do not count as dropped."""
ALONE = 16
"""Chunks that this process handles before it starts workers: about two seconds, the time that starting them takes."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to do with the units of a dataset. It is the same for all of them, and is sent to each worker once."""

    source: Source
    schema: str
    """Name of the schema."""
    rules: Rules
    renderer: Renderer | None
    """None to only read and check the rows."""
    pool: Path | None = None
    """The folder with the replies from which a control draws; None if it draws none."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a chunk."""

    tally: Tally
    kept: Mask
    """[units] whether each became a preference."""
    columns: Columns | None


def work(job: Job, units: tuple[Unit, ...]) -> Done:
    """Return a chunk of units as columns. Raises DataError as `parse_units` and `render_all` do."""
    schema = schema_named(job.schema, job.rules.reading)
    preferences_or_none, tally = parse_units(units, source=job.source, schema=schema, rules=job.rules)
    columns = None
    if job.renderer is not None:
        preferences = [preference for preference in preferences_or_none if preference is not None]
        if job.rules.control is not None:
            columns = _with_control(preferences, job.rules.control, job, job.renderer)
        else:
            columns = encode(preferences, render_all(preferences, job.renderer))
    return Done(
        tally=tally, kept=np.array([preference is not None for preference in preferences_or_none]), columns=columns
    )


def _with_control(preferences: Sequence[Preference], control: Control, job: Job, renderer: Renderer) -> Columns:
    """Return preferences that a control has changed as columns, under the prompts and texts that they had before."""
    pool = open_pool(job.pool) if job.pool is not None else None
    made = [changed_by(control, preference, pool) for preference in preferences]
    outcomes = render_all(
        [shown for shown, _ in made],
        renderer,
        keep_identical=control.mode == "prompt_only",
    )
    own: list[Preference] = []
    changed: list[bool] = []
    kept: list[TokenGroup | LeftOut] = []
    for preference, (shown, is_changed), outcome in zip(preferences, made, outcomes, strict=True):
        itself = in_place_of(preference, shown)
        if isinstance(outcome, TokenGroup):
            outcome = replace(outcome, prompt_key=preference.key)
            if control.length_threshold is not None:
                whole = job.rules.kwise_loss == "plackett-luce" and outcome.ranking is not None
                matched = length_matched(outcome, threshold=control.length_threshold, whole=whole)
                is_changed = matched is not outcome
                # Comparisons that were not selected do not count as lost by rendering.
                itself = replace(itself, comparisons=(matched or outcome).comparisons)
                outcome = matched if matched is not None else LeftOut(NOT_MATCHED, preference.id)
        own.append(itself)
        changed.append(is_changed)
        kept.append(outcome)
    return encode(own, kept, changed)


def _gather(job: Job, units: tuple[Unit, ...]) -> Gathered:
    """Return what a chunk of units adds to a pool. Raises DataError as `parse_units` does."""
    schema = schema_named(job.schema, job.rules.reading)
    preferences, _ = parse_units(units, source=job.source, schema=schema, rules=job.rules)
    return gather([preference for preference in preferences if preference is not None])


def _pooled(job: Job, source: Source, drawn: Sequence[Unit] | None, crew: Crew, held: ExitStack) -> Job:
    """Return the job with a pool of all replies of the dataset, if its control draws any, until `held` closes.

    Of a stream with a limit these are the replies of the units that were `drawn`, since the rest is not read.
    """
    if job.rules.control is None or job.rules.control.mode != "random_negatives":
        return job
    units = open_units(source, job.rules)[1] if drawn is None else drawn
    gathered = crew.map(partial(_gather, replace(job, renderer=None)), chunked(units), alone=ALONE)
    return replace(job, pool=held.enter_context(pool_of(gathered)))


def write_store(
    folder: Path,
    source: Source,
    *,
    rules: Rules,
    limit: int | None,
    renderer: Renderer,
    crew: Crew,
) -> None:
    """Read a dataset, tokenise the rows that the limit leaves, and write them to an empty folder as a store.

    With a limit the rows are read twice. The draw is among usable rows, so all rows must be checked first. Of a stream
    only as many are read as the limit needs.

    Raises DataError if the dataset cannot be read, if too many rows cannot be used, or if one is above the length
    limit and that is to end the run.
    """
    schema, opened = open_units(source, rules)
    units: Iterable[Unit] = opened
    job = Job(source=replace(source, rows=None), schema=schema.name, rules=rules, renderer=renderer)
    tally = Tally(format=schema.label)
    drawn: Sequence[Unit] | None = None
    if limit is not None and source.streaming:
        drawn, tally = draw_streamed(source, schema, units, rules=rules, limit=limit)
        units = iter(drawn)
        if not drawn:
            tally.report(source, used=0, sha256=None).require_usable(source.label, rules.reading.max_drop_fraction)
    elif limit is not None:
        kept = []
        for done in _chunks(replace(job, renderer=None), units, crew, f"reading {source.label}"):
            tally.add(done.tally)
            kept.append(done.kept)
        report = tally.report(source, used=0, sha256=None)
        report.require_usable(source.label, rules.reading.max_drop_fraction)
        chosen = chosen_by_limit(rules, tally.kept, limit)
        units = _chosen(open_units(source, rules)[1], np.concatenate(kept), chosen, source.label)
    with ExitStack() as held, StoreWriter(folder) as writer:
        job = _pooled(job, source, drawn, crew, held)
        for done in _chunks(job, units, crew, f"preparing {source.label}"):
            if limit is None:
                tally.add(done.tally)
            assert done.columns is not None
            writer.append(done.columns)
        writer.finish(source=source.name, facts={"dataset": source.label, **tally.as_dict()})


def _chunks(job: Job, units: Iterable[Unit], crew: Crew, title: str) -> Iterator[Done]:
    """Yield the results of all chunks, in order, under a progress bar."""
    with bar(title=title, unit=" rows") as shown:
        for done in crew.map(partial(work, job), chunked(units), alone=ALONE):
            shown.update(len(done.kept))
            yield done


def chunked(units: Iterable[Unit]) -> Iterator[tuple[Unit, ...]]:
    """Yield units in chunks of at most `CHUNK`, closed after `CHUNK_CHARACTERS`."""
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
    """Yield the units that were kept and then chosen. Raises DataError if there are more or fewer than before.

    `kept` has an entry for each unit, and `chosen` holds indices among the kept ones.
    """
    wanted = np.zeros(len(kept), dtype=bool)
    wanted[np.flatnonzero(kept)[chosen]] = True
    for unit, is_wanted in zip_longest(units, wanted):
        if unit is None or is_wanted is None:
            raise DataError(f"{label} changed while it was read. Start again when it is complete.")
        if is_wanted:
            yield unit
