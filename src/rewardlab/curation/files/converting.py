"""Write datasets as one file in the project's form or in TRL's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rewardlab.core.errors import DataError
from rewardlab.core.files import to_json, write_json
from rewardlab.curation.files.config import ConvertConfig
from rewardlab.curation.files.forms import LOST, PairCounts, Pairs, as_own_row, as_pairs, provenance_of
from rewardlab.curation.files.reading import (
    Chunk,
    Mask,
    Reading,
    as_mask,
    count_rows,
    crew_of,
    manifest,
    nothing,
    open_all,
    settle,
    tally_of,
)
from rewardlab.curation.files.writing import (
    facts_of,
    manifest_beside,
    own_columns,
    pair_columns,
    require_output,
    writing,
)
from rewardlab.curation.rows import ReadRow
from rewardlab.data.workers import Crew

logger = logging.getLogger("rewardlab")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion."""

    output: Path
    rows: int
    preferences: int
    """Number of preferences written; a K-wise one becomes several pairs."""
    pairs: PairCounts | None
    """Counts of the pairs; None in the project's own form, which holds everything."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """The lines of each preference of a chunk, and the counts of its pairs in TRL's forms."""

    lines: list[tuple[str, ...]]
    counts: list[PairCounts]


def convert(config: ConvertConfig) -> Converted:
    """Write the rows of the datasets to one file, and a manifest beside it.

    Raises ConfigError for an output that may not be written, DataError for datasets that cannot be read, and for
    judgements that the form cannot hold unless the settings say what to do with them. Then nothing is written.
    """
    config.require_named("convert")
    readings = open_all(config, config.dataset, config.seed)
    require_output(config.output, [path for one in readings for path in one.files], overwrite=config.overwrite)
    pairs = _pairs_of(config)
    counts = PairCounts()
    used = []
    columns = own_columns if pairs is None else partial(
        pair_columns, implicit=pairs.implicit, with_margin=pairs.with_margin
    )  # fmt: skip
    with crew_of(config) as crew, writing(config.output, columns) as file:
        for reading in readings:
            preferences = 0
            for lines, chunk_counts in lines_of(reading, pairs, crew):
                preferences += 1
                counts.add(chunk_counts)
                for line in lines:
                    file.write(line)
            used.append(preferences)
            reading.require_unchanged()
        if pairs is not None:
            _require_expressed(counts, pairs, config.output)
        num_rows = file.num_rows
    entries = {} if pairs is None else {"judgements": counts.as_dict()}
    told = manifest("convert", config, readings, used, [facts_of(config.output, num_rows)], **entries)
    write_json(manifest_beside(config.output), told)
    return Converted(
        output=config.output, rows=num_rows, preferences=sum(used), pairs=None if pairs is None else counts
    )


def _pairs_of(config: ConvertConfig) -> Pairs | None:
    if config.to == "rewardlab":
        return None
    with_margin = config.reading.margin_column is not None or config.reading.strength_as == "margin"
    return Pairs(implicit=config.to == "trl-implicit", with_margin=with_margin, inexpressible=config.inexpressible)


def lines_of(reading: Reading, pairs: Pairs | None, crew: Crew) -> Iterator[tuple[tuple[str, ...], PairCounts]]:
    """Yield (lines, counts of pairs) for each preference that the limit leaves, in the order of the rows.

    It also counts the rows in `reading.tally`. Raises DataError as `count_rows` does.
    """
    wanted = None
    if reading.limit is not None and reading.stream is None:
        count_rows(reading, nothing, crew)
        wanted = as_mask(reading.chosen(), reading.tally.kept)
    number = 0
    for chunk in render_all(reading, pairs, crew):
        if wanted is None:
            reading.tally.add(chunk.tally)
        for lines, counts in zip(chunk.extract.lines, chunk.extract.counts, strict=True):
            if wanted is None or (number < len(wanted) and wanted[number]):
                yield lines, counts
            number += 1
    if wanted is None:
        settle(reading)


def lines_again(reading: Reading, crew: Crew, wanted: Mask) -> Iterator[str]:
    """Read a dataset again, and yield the wanted preferences as lines in the project's form.

    Raises DataError if the dataset has changed since.
    """
    number = 0
    for chunk in render_all(reading, None, crew):
        for (line,) in chunk.extract.lines:
            if number < len(wanted) and wanted[number]:
                yield line
            number += 1
    reading.require_unchanged()
    if number != len(wanted):
        raise DataError(f"{reading.source.label} gave other rows when it was read again. Start again.")


def render_all(reading: Reading, pairs: Pairs | None, crew: Crew) -> Iterator[Chunk[Lines]]:
    """Yield the lines of all preferences of a dataset, by chunks. Raises DataError if it cannot be read."""
    yield from reading.map(partial(_render, pairs), crew, "writing")


def _render(pairs: Pairs | None, rows: Sequence[ReadRow]) -> Chunk[Lines]:
    """Return the lines of the rows that are preferences."""
    lines: list[tuple[str, ...]] = []
    counts: list[PairCounts] = []
    for row in rows:
        if row.preference is None:
            continue
        row_id, source = provenance_of(row)
        own = PairCounts()
        if pairs is None:
            made: Sequence[dict[str, object]] = [as_own_row(row.preference, row_id, source)]
        else:
            made = as_pairs(row.preference, row_id, source, pairs, own)
        lines.append(tuple(to_json(one, indent=None) for one in made))
        counts.append(own)
    return Chunk(tally=tally_of(rows), extract=Lines(lines=lines, counts=counts))


def _require_expressed(counts: PairCounts, pairs: Pairs, output: Path) -> None:
    """Raise DataError if judgements were left out without `--inexpressible`, or if all were."""
    causes = "\n".join(
        f"  {LOST[cause]}: {count}, for example in {counts.examples[cause]}"
        for cause, count in counts.left_out.most_common()
    )
    if pairs.inexpressible == "error" and counts.left_out:
        raise DataError(
            f"--output {output}: pairs cannot hold {counts.left_out.total()} of {counts.judgements} judgements:\n"
            f"{causes}\nLeave them out with --inexpressible drop, write them as certain ones of weight 1 with "
            f"--inexpressible harden, or keep everything with --to rewardlab."
        )
    if not counts.pairs:
        raise DataError(f"--output {output}: none of the {counts.judgements} judgements can be a pair:\n{causes}")
