"""Write one dataset from several: rows drawn by weights, shuffled, the same bytes for the same seed."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rewardlab.core.errors import DataError
from rewardlab.core.files import write_json
from rewardlab.core.together import together
from rewardlab.curation.files.config import MixConfig
from rewardlab.curation.files.converting import lines_again
from rewardlab.curation.files.reading import Numbers, Reading, as_mask, count_rows, crew_of, manifest, nothing, open_all
from rewardlab.curation.files.writing import (
    RowFile,
    facts_of,
    manifest_beside,
    own_columns,
    require_output,
    require_place,
    writing,
)
from rewardlab.data.judgements import seeded_generator
from rewardlab.data.weights import Weighted, counts_by_share, report_shares, shares_in_words, split_weights
from rewardlab.data.workers import Crew

logger = logging.getLogger("rewardlab")
ORDER = "order of a mix"
"""The name of the random draw of the order, which makes it independent of the draws of rows."""


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """The result of a mix."""

    output: Path
    rows: int
    weights: dict[str, object] | None
    """The shares wanted and got; None without weights."""


def mix(config: MixConfig) -> Mixed:
    """Draw rows of the datasets by their weights, shuffle them, and write them to one file with a manifest beside it.

    Without weights all rows are used, or `config.rows` drawn from all together. Raises ConfigError for an output that
    may not be written and for weights that do not fit, DataError for datasets that cannot be read or are too small.
    """
    config.require_named("mix")
    weighted = split_weights(config.dataset, "DATASET")
    readings = open_all(config, config.dataset if weighted is None else weighted.names, config.seed)
    inputs = [path for one in readings for path in one.files]
    require_output(config.output, inputs, overwrite=config.overwrite)
    require_place(config.output, "--output")
    # A manifest without its file hinders nobody, so that the file gets its name last.
    with crew_of(config) as crew, together(last=config.output) as waiting:
        for reading in readings:
            count_rows(reading, nothing, crew)
        chosen, told = _choose(readings, weighted, config)
        with writing(config.output, own_columns) as file:
            _write_shuffled(file, readings, chosen, config.seed, crew, config.output.parent)
        used = [len(some) for some in chosen]
        entries: dict[str, object] = {} if told is None else {"weights": told}
        outputs = [facts_of(config.output, sum(used), now=waiting.where(config.output))]
        write_json(manifest_beside(config.output), manifest("mix", config, readings, used, outputs, **entries))
        require_output(config.output, inputs, overwrite=config.overwrite)  # another may have made it meanwhile
    return Mixed(output=config.output, rows=sum(used), weights=told)


def _choose(
    readings: Sequence[Reading], weighted: Weighted | None, config: MixConfig
) -> tuple[list[Numbers], dict[str, object] | None]:
    """Return (for each dataset the indices of the preferences that are used, the report on the shares).

    Raises DataError if there are fewer rows than were asked for.
    """
    drawn = []
    for reading in readings:
        chosen = reading.chosen()
        # Draw as training does: rows that a limit left are in the random order of its draw already.
        in_order = reading.limit is not None and reading.stream is None
        order = chosen if in_order else seeded_generator(config.seed, reading.source.name).permutation(len(chosen))
        drawn.append(order)
    available = [len(some) for some in drawn]
    if weighted is None:
        _require_enough(config, sum(available), "the datasets have")
        together = np.concatenate([np.full(count, k) for k, count in enumerate(available)])
        of_R = seeded_generator(config.seed, "rows of a mix").permutation(together)[: config.rows]
        counts = np.bincount(of_R, minlength=len(drawn)).tolist()
        return [some[:count] for some, count in zip(drawn, counts, strict=True)], None
    counts = counts_by_share(available, weighted.shares, weighted.names, config.rows)
    _require_enough(config, sum(counts), "these weights allow")
    told = report_shares(weighted, [reading.source.name for reading in readings], available, counts)
    logger.info(shares_in_words(told))
    return [some[:count] for some, count in zip(drawn, counts, strict=True)], told


def _require_enough(config: MixConfig, there: int, what: str) -> None:
    if config.rows is not None and config.rows > there:
        raise DataError(f"--rows {config.rows}: {what} {there} rows. Ask for at most {there}, or leave it out.")


def _write_shuffled(
    file: RowFile, readings: Sequence[Reading], chosen: Sequence[Numbers], seed: int, crew: Crew, folder: Path
) -> None:
    """Write the chosen rows in a random order. They wait in a temporary file, so that memory does not grow with them.

    Raises DataError if a dataset changes while it is read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as waiting:
        ends = [0]
        for reading, some in zip(readings, chosen, strict=True):
            wanted = as_mask(some, reading.tally.kept)
            for line in lines_again(reading, crew, wanted):
                ends.append(ends[-1] + waiting.write(line.encode()))
        for k in seeded_generator(seed, ORDER).permutation(len(ends) - 1).tolist():
            waiting.seek(ends[k])
            file.write(waiting.read(ends[k + 1] - ends[k]).decode())
