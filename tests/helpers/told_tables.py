"""The tables of a page, and those that say nothing of how their intervals were made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from rewardlab.report.document import Beside, Block, Document, Table

INTERVAL = re.compile(r"\[-?\d")


def tables(document: Document) -> Iterator[Table]:
    """All tables of a page."""
    for part in document.parts:
        for section in part.sections:
            yield from tables_of(section.blocks)


def tables_of(blocks: Sequence[Block]) -> Iterator[Table]:
    """All tables of a section."""
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Beside):
            yield block.table


def without_method(found: Iterable[Table]) -> list[str]:
    """The captions of tables that have intervals and say nothing of how these were made."""
    return [
        table.caption
        for table in found
        if any(INTERVAL.search(cell) for row in table.rows for cell in row)
        and not any("% intervals: " in note for note in table.notes)
    ]
