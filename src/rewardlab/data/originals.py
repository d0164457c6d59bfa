"""The preferences behind token groups, read again from their datasets: for their texts, and for columns of their rows.

Stored groups hold tokens and no texts. What needs texts (the worst mistakes, perturbations, slices by a column) reads
the rows a second time, by the same rules, so that ids are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewardlab.core.files import parse_line
from rewardlab.core.types import Preference
from rewardlab.data.config import ReadingConfig
from rewardlab.data.dataset_names import Named
from rewardlab.data.finding import Source
from rewardlab.data.formats import read_rows
from rewardlab.data.judgements import Rules
from rewardlab.data.rows import Row, UnusableRowError
from rewardlab.data.sources import Unit, open_units

Key = tuple[str, str]
"""Source and id of a preference."""


@dataclass(frozen=True, kw_only=True)
class Original:
    """A preference with its texts, and the row that it was read from."""

    preference: Preference
    columns: Mapping[str, object]
    """Its row; in long-form data, the rows of both sides, of which the first to hold a column counts."""

    @property
    def key(self) -> Key:
        """Source and id."""
        return self.preference.source, self.preference.id

    @property
    def num_turns(self) -> int:
        """Turns of the prompt, and the replies' own most: as many as the longest of the conversations has."""
        return len(self.preference.prompt) + max(map(len, self.preference.replies))


def read_originals(
    named: Named, reading: ReadingConfig, *, seed: int, bare: bool = False, wanted: Collection[Key] | None = None
) -> Iterator[Original]:
    """Yield the preferences of datasets with their texts, in the order of the rows; only those `wanted`, if given.

    `reading`, `seed` and `bare` are those with which the groups were prepared (`reading.read_named`). Rows that become
    no preference are left out: preparing has counted them.

    Raises DataError if a dataset cannot be read.
    """
    for source in named.sources():
        yield from originals_in(source, Rules(source=source.name, reading=reading, seed=seed, bare=bare), wanted)


def originals_in(source: Source, rules: Rules, wanted: Collection[Key] | None = None) -> Iterator[Original]:
    """Yield the preferences of one source, as `read_originals` does."""
    schema, units = open_units(source, rules)
    for number, content in units:
        place = f"{source.label}:{number}"
        if wanted is not None and (source.name, place) not in wanted:
            continue
        rows = _rows(source, number, content)
        try:
            parsed = read_rows(rows, schema=schema, place=place, rules=rules)
        except UnusableRowError:
            continue
        yield Original(preference=parsed.preference, columns=_joined(rows))


def _rows(source: Source, number: int, content: Unit | str | tuple[Row, ...]) -> Sequence[Row]:
    if isinstance(content, str):
        assert source.path is not None, "only files have lines"
        return (parse_line(source.path, number, content),)
    return tuple(row for row in content if isinstance(row, Mapping))


def _joined(rows: Sequence[Row]) -> dict[str, object]:
    columns: dict[str, object] = {}
    for row in rows:
        columns |= {name: value for name, value in row.items() if columns.get(name) is None}
    return columns
