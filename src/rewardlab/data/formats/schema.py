"""A format of preference data: the columns by which it is recognised, and the reader of its rows."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from rewardlab.data.judgements import ParsedRow, Rules
from rewardlab.data.rows import Row, UnusableRowError, is_absent


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Columns by which a dataset is recognised, and the reader of its rows."""

    name: str
    needed: tuple[str, ...]
    one_of: tuple[str, ...] = ()
    """Columns of which at least one is needed as well; empty if none is."""
    nullable: tuple[str, ...] = ()
    """Needed columns that may be null in a row."""
    read: Callable[[Row, str, Rules], ParsedRow]
    suits: Callable[[Row], bool] | None = None
    """Whether the first row is of this format, where columns alone do not say so."""
    group_by: tuple[str, ...] = ()
    """For formats in which several rows make one preference: rows of one value in the first of these columns that they
    have. Empty where each row is a preference."""
    key: Callable[[Row], object] | None = None
    """What the rows of one preference share, in place of `group_by`, where that is more than a column. It returns None
    for a row that is a group by itself."""
    join: Callable[[Sequence[Row], str, Rules], Row] | None = None
    """Makes one row, which `read` takes, of the rows of a group."""
    of_replies: bool = False
    """Whether each row of a group is a reply, so that one which cannot be used is left out alone."""
    own_strength: bool = False
    """Whether the strength is made of votes or ratings, or there is none, so that no column can hold it."""
    unit: str = "row"
    """What is counted, in messages: `prompt` where all rows of a prompt make one preference."""
    found: str = ""
    """The columns by which a dataset was recognised, in words; set when it is opened."""

    @property
    def columns(self) -> str:
        """The columns as text, for messages."""
        return ", ".join(self.needed) + (f" and one of {'/'.join(self.one_of)}" if self.one_of else "")

    @property
    def label(self) -> str:
        """Name and reason in one line, for logs and reports."""
        return f"{self.name}, by the columns {self.found or self.columns}"

    def fits(self, columns: Iterable[str]) -> bool:
        """Return whether rows with these columns match this schema."""
        return not self.lacks(columns)

    def lacks(self, columns: Iterable[str]) -> list[str]:
        """Return the needed columns that are not there, those of which one is enough as one entry."""
        present = set(columns)
        missing = [repr(column) for column in self.needed if column not in present]
        if self.one_of and present.isdisjoint(self.one_of):
            missing.append(" or ".join(map(repr, self.one_of)))
        return missing

    def require_fields(self, row: Row) -> None:
        """Raise UnusableRowError if a column that the schema needs is absent, or null and not `nullable`."""
        for column in self.needed:
            if row.get(column) is None and not (column in self.nullable and column in row):
                raise UnusableRowError("missing_field", f"no {column!r}")
        if self.one_of and all(row.get(column) is None for column in self.one_of):
            raise UnusableRowError("missing_field", f"none of {', '.join(map(repr, self.one_of))}")

    def group_of(self, row: Row) -> object:
        """Return the value that the rows of one group share; None for a row without one, which is a group by itself."""
        if self.key is not None:
            return self.key(row)
        return next((row[name] for name in self.group_by if not is_absent(row.get(name))), None)


def resembling(name: str, columns: Iterable[str], present: Collection[str]) -> str | None:
    """Return the column that a misspelt name resembles; None if it is one of them, or resembles none.

    Columns that are present are not suggested.
    """
    columns = list(columns)
    if name in columns:
        return None
    words = set(re.split(r"[^a-z]+", name.casefold()))
    # `prompt_id` holds no prompt, and `edited_response` is not the rejected one.
    by_case = {column.casefold(): column for column in columns if column not in present and _may_be(words, column)}
    near = difflib.get_close_matches(name.strip().casefold(), by_case, n=1, cutoff=0.75)
    return by_case[near[0]] if near else None


def _may_be(words: Collection[str], column: str) -> bool:
    """Return whether a name with these words may be a column misspelt: it says which side it is, and is a number of
    something, where the column is."""
    own = column.casefold().split("_")
    sides = [side for side in ("chosen", "rejected") if side in own]
    return ("id" in words) <= ("id" in own) and all(
        difflib.get_close_matches(side, words, n=1, cutoff=0.75) for side in sides
    )
