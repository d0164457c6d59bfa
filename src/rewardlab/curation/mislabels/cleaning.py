"""Writing of a dataset without the flagged rows, or with their labels flipped, and a trace of each of these rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import write_jsonl
from rewardlab.curation.rewriting import (
    ENDINGS,
    Stamp,
    also_rows,
    ending_of,
    files_of,
    require_package,
    require_unchanged,
    trace_beside,
    write_without,
)
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source
from rewardlab.data.formats.mapping import unpacked
from rewardlab.data.judgements import Rules
from rewardlab.data.readers import read_source
from rewardlab.data.rows import Row, UnreadRow
from rewardlab.data.sources import open_units, rows_of_units

Done = Literal["removed", "flipped"]
"""What is done to a row; also a part of the name of the trace, the file with the reason for each of these rows."""
FLAGS: Final[Mapping[Done, str]] = {"removed": "--remove", "flipped": "--flip"}


def require_cleanable(source: Source, rules: Rules, target: Path, done: Done, *, overwrite: bool) -> None:
    """Raise ConfigError or DataError, before anything is computed, unless this dataset can be written to `target`."""
    flag = FLAGS[done]
    if ending_of(target) is None:
        raise ConfigError(f"{flag} {target}: rows are written as JSON Lines. Name it …{' or …'.join(ENDINGS)}.")
    if any(target.resolve() == path.resolve() for path in files_of(source)):
        raise ConfigError(f"{flag} {target}: is the dataset itself, which stays as it is. Choose another file.")
    trace = trace_of(target, done)
    if target.exists() and not (overwrite and trace.is_file()):
        why = (
            "replace it with --overwrite" if trace.is_file() else f"it has no {trace.name} beside it, so it is not ours"
        )
        raise ConfigError(f"{flag} {target}: is there already; {why}, or choose another file.")
    if not target.parent.is_dir():
        raise ConfigError(f"{flag} {target}: there is no folder {target.parent}. Make it first.")
    require_package(target, f"{flag} {target}: writing .zst")
    schema, _ = open_units(source, rules)
    if done == "flipped":
        if schema.join is not None:
            raise DataError(
                f"{flag}: {source.label} has several rows a preference ({schema.name}), whose label cannot be turned "
                f"round in one of them. Use --remove, or convert it with `rewardlab data convert` first."
            )
        for number, row in islice((each for each in read_source(source) if not isinstance(each[1], UnreadRow)), 1):
            if not row.keys() >= set(_sides(rules.reading)):
                raise _without_sides(f"{source.label}:{number}", rules.reading)


def trace_of(target: Path, done: Done) -> Path:
    """Return the file of the trace of a cleaned file: `clean.removed.jsonl` of `clean.jsonl`."""
    return trace_beside(target, f"{done}.jsonl")


def turned_round(row: Row, place: str, reading: ReadingConfig) -> dict[str, object]:
    """Return a row with its label flipped: `label` if it is a probability, else the two sides exchanged. With labels of
    several annotators the sides are exchanged, whatever `label` says, which is not read then.

    With `chosen` and `rejected`, columns about them (`score_chosen`, `rejected-model`) are exchanged too. Columns may
    have the names that `reading` gives them.

    Raises DataError for a row without both sides.
    """
    names = reading.own_columns
    sides = _sides(reading)
    if any(row.get(side) is None for side in sides):
        raise _without_sides(place, reading)
    column = names.get("label", "label")
    label = row.get(column)
    # The values of a label with --map-label may be any numbers, not probabilities.
    read = not reading.map_label and not isinstance(unpacked(row.get("labels")), (list, Mapping))
    if read and isinstance(label, (int, float)) and not isinstance(label, bool) and 0 <= label <= 1:
        # By its digits: of 0.9 it leaves 0.1, and of that 0.9 again.
        return {**row, column: 1 - label if isinstance(label, int) else float(1 - Decimal(repr(float(label))))}
    other_of = dict(zip(sides, sides[::-1], strict=True))
    for name in row:
        for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
            own = re.sub(rf"^{side}(?=[_-])|(?<=[_-]){side}$", other, name)
            if own != name and own in row:
                other_of[name] = own
    return {name: row[other_of.get(name, name)] for name in row}


def _sides(reading: ReadingConfig) -> tuple[str, str]:
    """Return the columns of the two sides."""
    return reading.own_columns.get("chosen", "chosen"), reading.own_columns.get("rejected", "rejected")


def _without_sides(place: str, reading: ReadingConfig) -> DataError:
    sides = " and ".join(_sides(reading))
    return DataError(f"--flip: {place} has no {sides} whose label could be turned round. Use --remove.")


def write_cleaned(
    source: Source,
    rules: Rules,
    target: Path,
    touched: Mapping[int, Mapping[str, object]],
    *,
    done: Done,
    since: Stamp,
) -> int:
    """Write a dataset without the preferences of these numbers, or with their labels flipped, and the trace of each.

    Return how many rows it then has. `since` is the dataset's `stamp` from before it was searched. Raises DataError if
    the dataset cannot be read or has changed, or if a row has no label that can be flipped.
    """
    require_unchanged(source, since)
    members = rows_of_units(source, rules, touched)
    # The trace is written first: a process killed in between leaves no cleaned file without one.
    trace = ({**touched[number], **also_rows(members[number]), "done": done} for number in sorted(touched))
    write_jsonl(trace_of(target, done), trace)
    turn = partial(turned_round, reading=rules.reading) if done == "flipped" else None
    rows = {row for own in members.values() for row in own}
    return write_without(source, target, rows, since=since, turn=turn)
