"""Read the rows of one preference by their schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rewardlab.data.formats.known import SCHEMAS, nearest
from rewardlab.data.formats.mapping import mapped
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import ParsedRow, Rules
from rewardlab.data.rows import CappedRow, Row, UnusableRowError, media_of, require_bounded, require_no_tools

ONE: Final = "a dataset is read by the format of its first row: rows of another belong into a file of their own"


def read_rows(rows: Sequence[Row], *, schema: Schema, place: str, rules: Rules) -> ParsedRow:
    """Return the preference in one row (where several rows make one, in all of them). `place` becomes its id.

    Raises UnusableRowError for rows to drop, DataError if a flag forbids dropping them.
    """
    known: list[Row] = []
    left_out: list[UnusableRowError] = []
    for row in rows:
        try:
            known.append(_known(row, schema, rules))
        except UnusableRowError as unusable:
            left_out.append(unusable)
            if not schema.of_replies:
                raise
    if left_out and len(known) < 2:
        raise left_out[0]
    if schema.join is None:
        (row,) = known
        return schema.read(row, place, rules)
    parsed = schema.read(schema.join(known, place, rules), place, rules)
    return replace(parsed, left_out=(*((one.cause, one.detail) for one in left_out), *parsed.left_out))


def _known(row: Row, schema: Schema, rules: Rules) -> Row:
    """Return a row as its schema reads it. Raises UnusableRowError for one that cannot be read."""
    require_bounded(row)
    if media := media_of(row):
        raise UnusableRowError(
            "media",
            f"a row with {media}, of which the texts alone would be judged; if they "
            "stand alone, take the column out or rename it",
        )
    require_no_tools(row)
    if isinstance(row, CappedRow):
        raise UnusableRowError("over_post_cap", f"more than {rules.reading.max_per_post} judgements of its post")
    known = mapped(row, rules.reading)
    _require_fields(known, schema)
    return known


def _require_fields(row: Row, schema: Schema) -> None:
    """Raise UnusableRowError if a column that the schema needs is absent or null.

    If it is absent, the row may be of another format: the one that it fits is named, or the nearest ones.
    """
    try:
        schema.require_fields(row)
    except UnusableRowError as unusable:
        if not schema.lacks(row):
            raise
        fits = next((known.name for known in SCHEMAS if known is not schema and not known.lacks(row)), None)
        other = (
            f"its nearest formats: {nearest(row)}" if fits is None else f"its columns are those of {fits}, and {ONE}"
        )
        raise UnusableRowError(unusable.cause, f"{unusable.detail}; {other}") from None
