"""The content of a report, before it is HTML or Markdown: sections of texts, tables, charts and conversations.

Every text here is plain. The templates escape it, so that text of the data cannot become markup. Only backticks mean
something in a sentence, a note and the words of a chart: what stands between two is code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rewardlab.core.types import Estimate
from rewardlab.report.charts import Axis, Chart, axis
from rewardlab.report.tables import format_estimate

_NUMBER: Final = re.compile(r"|—|<?[-−+]?(\d[\d,]*(\.\d+)?(e[+-]\d+)?|inf)( ?%)?( \[.*\])?")
CODE: Final = re.compile(r"`([^`\s<>&|](?:[^`\n<>&|]*[^`\s<>&|])?)`")
"""What a sentence names between backticks, such as a command: shown as code, and never the text of a row."""
Tone = Literal["plain", "note", "warning", "alarm", "good"]


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """A text of one or several sentences."""

    text: str
    tone: Tone = "plain"
    kind: str = "paragraph"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts; where `intervals` are given, every row is drawn as a point with its interval too."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    notes_folded: bool = False
    """Whether the notes are folded away, because there are many."""
    intervals: tuple[Estimate | None, ...] = ()
    """The interval of each row, drawn beside it; empty if the table has none."""
    scale: Axis | None = None
    """The axis on which the intervals are drawn."""
    mark: float | None = None
    """A value of the scale at which a line is drawn, such as chance."""
    kind: str = "table"

    def at(self, value: float) -> float:
        """Return where a value lies on the scale, in per cent of its width."""
        assert self.scale is not None
        share = (value - self.scale.low) / (self.scale.high - self.scale.low)
        return round(100 * min(max(share, 0.0), 1.0), 1)


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts that stand beside each other where there is room."""

    charts: tuple[Chart, ...]
    kind: str = "charts"


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A chart with a table of its numbers, which stands beside it where there is room."""

    chart: Chart
    table: Table
    kind: str = "beside"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names with their values, such as settings; folded away where there are many."""

    caption: str
    pairs: tuple[tuple[str, str], ...]
    folded: bool = False
    kind: str = "facts"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of a conversation."""

    role: str
    text: str
    left_out: int = 0
    """Number of characters at the end that are not shown."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A comparison that the model got wrong, as a conversation; without texts if they were not found."""

    title: str
    facts: tuple[str, ...]
    prompt: tuple[Turn, ...]
    preferred: tuple[Turn, ...]
    other: tuple[Turn, ...]
    missing: str = ""
    """The reason why there are no texts; empty if there are."""
    kind: str = "mistake"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A row of preference data as a conversation with all its replies."""

    title: str
    facts: tuple[str, ...]
    prompt: tuple[Turn, ...]
    replies: tuple[tuple[str, tuple[Turn, ...]], ...]
    """(heading, turns) of each reply."""
    kind: str = "shown"


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A text whose lines stay as they are, such as a file; folded away if it is long."""

    caption: str
    text: str
    folded: bool = False
    kind: str = "lines"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A question of the checklist, its answer, and the numbers behind it."""

    question: str
    answer: Literal["yes", "no", "look", "not known"]
    numbers: str


@dataclass(frozen=True, kw_only=True)
class Checklist:
    """Questions with answers."""

    checks: tuple[Check, ...]
    kind: str = "checklist"


Block = Paragraph | Table | Charts | Beside | Facts | Mistake | Shown | Lines | Checklist


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report with a heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """All sections about one run, or about several side by side."""

    title: str
    sections: tuple[Section, ...]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    made_by: str
    parts: tuple[Part, ...]
    generator: str = "rewardlab"
    """The name of what wrote it, which marks a page as one that may be replaced."""


def number_columns(table: Table) -> frozenset[int]:
    """Return the columns whose body holds only numbers, which are aligned to the right."""
    return frozenset(
        column
        for column in range(1, len(table.header))
        if any(row[column] for row in table.rows) and all(_NUMBER.fullmatch(row[column]) for row in table.rows)
    )


def with_intervals(
    *,
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    estimates: Sequence[Estimate | None],
    label: str,
    mark: float | None = None,
    notes: Sequence[str] = (),
    notes_folded: bool = False,
) -> Table:
    """Return a table whose rows are also drawn, on one scale over all their intervals."""
    ends = [
        end
        for estimate in estimates
        if estimate is not None
        for end in (estimate.value, estimate.low, estimate.high)
        if math.isfinite(end)
    ]
    scale = axis(label, ends, include=() if mark is None else (mark,), num_ticks=3) if ends else None
    return Table(
        caption=caption,
        header=tuple(header),
        rows=tuple(map(tuple, rows)),
        notes=tuple(notes),
        notes_folded=notes_folded,
        intervals=tuple(estimates) if scale is not None else (),
        scale=scale,
        mark=mark,
    )


def shown(estimate: Estimate | None, *, digits: int = 3) -> str:
    """Return an estimate as a cell; an empty cell if there is none."""
    return "" if estimate is None else format_estimate(estimate, digits=digits)
