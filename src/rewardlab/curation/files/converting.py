"""Write datasets as one file in the project's form or in TRL's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rewardlab.core.errors import DataError
from rewardlab.core.files import to_json, write_json
from rewardlab.core.together import together
from rewardlab.curation.files.config import ConvertConfig
from rewardlab.curation.files.forms import LOST, PairCounts, Pairs, as_own_row, as_pairs, provenance_of
from rewardlab.curation.files.joining import Join, JoinCounts, Joiner, Named
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
    RowFile,
    facts_of,
    manifest_beside,
    own_columns,
    pair_columns,
    require_output,
    require_place,
    writing,
)
from rewardlab.curation.rows import ReadRow
from rewardlab.data.workers import Crew


@dataclass(frozen=True, kw_only=True)
class Converted:
    """The result of a conversion."""

    output: Path
    rows: int
    preferences: int
    """Number of preferences written; a K-wise one becomes several pairs."""
    pairs: PairCounts | None
    """Counts of the pairs; None in the project's own form, which holds everything."""
    joined: JoinCounts | None
    """Counts of the joined rows; None if none were to be joined."""


Rendered = tuple[tuple[str, ...], PairCounts]
"""The lines of a preference, and the counts of its pairs in TRL's forms."""
Made = TypeVar("Made")
Make = Callable[[Sequence[ReadRow]], Chunk[list[Made]]]
"""Makes something of each preference among some rows, in a worker process."""


def convert(config: ConvertConfig) -> Converted:
    """Write the rows of the datasets to one file, and a manifest beside it.

    Raises ConfigError for an output that may not be written, DataError for datasets that cannot be read, and for
    judgements that the form cannot hold unless the settings say what to do with them. Then nothing is written.
    """
    config.require_named("convert")
    readings = open_all(config, config.dataset, config.seed)
    inputs = [path for one in readings for path in one.files]
    require_output(config.output, inputs, overwrite=config.overwrite)
    require_place(config.output, "--output")
    pairs = _pairs_of(config)
    counts = PairCounts()
    joined = JoinCounts()
    used = []
    columns = own_columns if pairs is None else partial(
        pair_columns, implicit=pairs.implicit, with_margin=pairs.with_margin
    )  # fmt: skip
    # A manifest without its file hinders nobody, so that the file gets its name last.
    with together(last=config.output) as waiting:
        with crew_of(config) as crew, writing(config.output, columns) as file:
            for reading in readings:
                if config.join == "none":
                    used.append(_write_each(file, reading, pairs, crew, counts))
                else:
                    used.append(_write_joined(file, reading, config.join, crew, joined))
                reading.require_unchanged()
            if pairs is not None:
                _require_expressed(counts, pairs, config.output)
            num_rows = file.num_rows
        entries: dict[str, object] = {} if pairs is None else {"judgements": counts.as_dict()}
        entries |= {} if config.join == "none" else {"joined": joined.as_dict()}
        outputs = [facts_of(config.output, num_rows, now=waiting.where(config.output))]
        write_json(manifest_beside(config.output), manifest("convert", config, readings, used, outputs, **entries))
        require_output(config.output, inputs, overwrite=config.overwrite)  # another process may have made it meanwhile
    return Converted(
        output=config.output,
        rows=num_rows,
        preferences=sum(used),
        pairs=None if pairs is None else counts,
        joined=None if config.join == "none" else joined,
    )


def _write_each(file: RowFile, reading: Reading, pairs: Pairs | None, crew: Crew, counts: PairCounts) -> int:
    """Write the preferences of a dataset, count their pairs, and return how many preferences there are."""
    number = 0
    for lines, own in each_of(reading, partial(_render, pairs), crew):
        number += 1
        counts.add(own)
        for line in lines:
            file.write(line)
    return number


def _write_joined(file: RowFile, reading: Reading, by: Join, crew: Crew, counts: JoinCounts) -> int:
    """Write the joined preferences of a dataset, count them, and return how many there were before."""
    joiner = Joiner(by)
    for named in each_of(reading, _named, crew):
        joiner.add(named)
    for named in joiner.joined():
        file.write(to_json(as_own_row(*named), indent=None))
    counts.add(joiner.counts)
    return joiner.counts.rows


def _pairs_of(config: ConvertConfig) -> Pairs | None:
    if config.to == "rewardlab":
        return None
    with_margin = config.reading.margin_column is not None or config.reading.strength_as == "margin"
    return Pairs(implicit=config.to == "trl-implicit", with_margin=with_margin, inexpressible=config.inexpressible)


def each_of(reading: Reading, make: Make[Made], crew: Crew) -> Iterator[Made]:
    """Yield what `make` makes of each preference that the limit leaves, in the order of the rows.

    It also counts the rows in `reading.tally`. Raises DataError as `count_rows` does.
    """
    wanted = None
    if reading.limit is not None and reading.stream is None:
        count_rows(reading, nothing, crew)
        wanted = as_mask(reading.chosen(), reading.tally.kept)
    number = 0
    for chunk in reading.map(make, crew, "writing"):
        if wanted is None:
            reading.tally.add(chunk.tally)
        for made in chunk.extract:
            if wanted is None or (number < len(wanted) and wanted[number]):
                yield made
            number += 1
    if wanted is None:
        settle(reading)


def lines_again(reading: Reading, crew: Crew, wanted: Mask) -> Iterator[str]:
    """Read a dataset again, and yield the wanted preferences as lines in the project's form.

    Raises DataError if the dataset has changed since.
    """
    number = 0
    for chunk in reading.map(partial(_render, None), crew, "writing"):
        for (line,), _ in chunk.extract:
            if number < len(wanted) and wanted[number]:
                yield line
            number += 1
    reading.require_unchanged()
    if number != len(wanted):
        raise DataError(f"{reading.source.label} gave other rows when it was read again. Start again.")


def _named(rows: Sequence[ReadRow]) -> Chunk[list[Named]]:
    """Return the rows that are preferences, with their ids and sources."""
    return Chunk(
        tally=tally_of(rows),
        extract=[(row.preference, *provenance_of(row)) for row in rows if row.preference is not None],
    )


def _render(pairs: Pairs | None, rows: Sequence[ReadRow]) -> Chunk[list[Rendered]]:
    """Return the lines of the rows that are preferences."""
    chunk = _named(rows)
    rendered: list[Rendered] = []
    for named in chunk.extract:
        own = PairCounts()
        made = [as_own_row(*named)] if pairs is None else as_pairs(*named, pairs, own)
        rendered.append((tuple(to_json(one, indent=None) for one in made), own))
    return Chunk(tally=chunk.tally, extract=rendered)


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
