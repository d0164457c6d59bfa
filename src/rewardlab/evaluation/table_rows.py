"""Reads the rows of a table of scores from a file of any type: lines, CSV, Parquet, columns, samples, an archive; and
finds cells and texts in a row."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_json
from rewardlab.core.terminal import short
from rewardlab.data.finding import ALL_ROWS, Source
from rewardlab.data.readers import holds_lines, read_source
from rewardlab.data.rows import UnreadRow

Row = Mapping[str, Any]


def read_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield numbered rows of a file of any type. Raises DataError if it cannot be read."""
    if file.suffix == ".eval":
        yield from enumerate(_inspect_archive(file), start=1)
        return
    if file.suffix == ".json" and not holds_lines(file):
        value = read_json(file)
        if isinstance(value, dict) and isinstance(value.get("samples"), list):
            yield from enumerate(_objects(file, value["samples"]), start=1)
            return
        if isinstance(value, dict):
            yield from enumerate(_of_columns(file, value), start=1)
            return
    source = Source(name=file.name, split=ALL_ROWS, label=file.name, path=file)
    for number, row in read_source(source):
        if isinstance(row, UnreadRow) or not isinstance(row, dict):
            raise DataError(f"{file}:{number}: this row is too long to be read. Take it out, or shorten its texts.")
        yield number, row


def _objects(file: Path, samples: Sequence[object]) -> Iterator[Row]:
    for number, sample in enumerate(samples, start=1):
        if not isinstance(sample, dict):
            raise DataError(f"{file}: sample {number} is {type(sample).__name__}, wanted a JSON object.")
        yield sample


def _of_columns(file: Path, value: Mapping[str, Any]) -> Iterator[Row]:
    """Yield rows from columns, as reward-bench writes them: lists of equal length, beside facts about the model."""
    lists = {name: cells for name, cells in value.items() if isinstance(cells, list)}
    lengths = {len(cells) for cells in lists.values()}
    if len(lengths) != 1:
        raise DataError(f"{file}: wanted a list of rows, or columns that are lists of equal length.")
    for cells in zip(*lists.values(), strict=True):
        yield dict(zip(lists, cells, strict=True))


DAMAGED_ARCHIVE: Final = (
    zipfile.BadZipFile,  # no archive, or a wrong checksum
    zlib.error,  # bytes that do not unpack
    OSError,
    EOFError,  # these two: a cut file, whose directory points outside it
    RuntimeError,  # an encrypted entry, or a compression that Python lacks
    ValueError,  # an entry that is not JSON
)
"""Errors that `zipfile` and `json` raise for an archive that cannot be read."""


def _inspect_archive(file: Path) -> Iterator[Row]:
    """Yield the samples of a log of inspect. Raises DataError if the archive cannot be read."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = sorted(
                name for name in archive.namelist() if name.startswith("samples/") and name.endswith(".json")
            )
            for name in names:
                sample = json.loads(archive.read(name))
                if isinstance(sample, dict):
                    yield sample
    except DAMAGED_ARCHIVE as error:
        raise DataError(
            f"{file}: cannot be read as a log of inspect ({short(str(error))}). Convert it with "
            f"`inspect log convert --to json` and name that file."
        ) from error


def first_of(row: Row, names: Sequence[str]) -> object:
    """Return the value of the first of these columns that is not empty; None if there is none."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def texts_of(row: Row, *, label: float) -> dict[str, str]:
    """Return prompt and replies as text, under our names, if the row has them.

    With a label below 0.5 the reply in the column for rejected replies is the preferred one.
    """
    sides = ("preferred", "other") if label >= 0.5 else ("other", "preferred")
    theirs = {
        "prompt": ("prompt",),
        sides[0]: ("text_chosen", "chosen"),
        sides[1]: ("text_rejected", "rejected"),
    }
    found = {name: first_of(row, columns) for name, columns in theirs.items()}
    return {name: _as_text(value) for name, value in found.items() if isinstance(value, (str, list)) and value}


def _as_text(value: str | list[Any]) -> str:
    if isinstance(value, str):
        return value
    turns = [f"{turn.get('role')}: {turn.get('content')}" for turn in value if isinstance(turn, dict)]
    return "\n\n".join(turns)
