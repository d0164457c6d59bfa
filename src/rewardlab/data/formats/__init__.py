"""What the rows of preference datasets mean: a schema a format, recognised by its columns, and the reader of its rows.

`known` lists the schemas, `reading` reads a row by one of them, `shown` prints what was read. `mapping` renames columns
first. The other modules hold the readers, one a family.
"""

from __future__ import annotations

from rewardlab.data.formats.known import (
    SCHEMAS,
    meant_column,
    nearest,
    recognise,
    recognise_rows,
    schema_named,
    unit_of,
)
from rewardlab.data.formats.plain import LONG_FORM
from rewardlab.data.formats.reading import read_rows
from rewardlab.data.formats.schema import Schema
from rewardlab.data.formats.shown import described

__all__ = [
    "LONG_FORM",
    "SCHEMAS",
    "Schema",
    "described",
    "meant_column",
    "nearest",
    "read_rows",
    "recognise",
    "recognise_rows",
    "schema_named",
    "unit_of",
]
