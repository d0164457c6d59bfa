"""Tables for terminals and for Markdown.

Cells are text. A cell with a number is made by `format_estimate` or `format_count`: a measured value comes with its
interval, and a count is exact. Nothing here takes a bare float, so no measured value is shown without its interval.
"""

from __future__ import annotations

import math
import re
import shutil
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rewardlab.core.terminal import visible
from rewardlab.core.types import Estimate

_GAP = "  "
_MIN_TEXT_WIDTH = 8
_WORD_SHARE = 4
"""A column is not narrowed below its longest word, unless that takes more than one in so many of all columns."""
_MOST_KEYS = 3
"""Most columns that stand again in a table below."""
_NARROWEST, _WIDEST = 40, 100
_LARGE, _HUGE = 1e3, 1e9
"""Numbers from which on digits are left out, and powers of ten are written."""
_MOST_DIGITS = 5
MOST_DECIMALS = 9
"""Most decimals of small numbers."""
_SAME = 1e-12
"""Numbers that are nearer than this are not told apart."""
_NUMBER = re.compile(r"—|<?[-−+]?(\d[\d,]*(\.\d+)?(e[+-]\d+)?|inf)( ?%)?( \[.*\])?")
_PIECES = re.compile(r"[^-_/.,:]*[-_/.,:]?")
"""Parts of a long word, after which it may be broken."""


def format_estimate(estimate: Estimate, *, percent: bool = False, digits: int = 3) -> str:
    """Return ``0.734 [0.695, 0.771]``, or ``73.4% [69.5, 77.1]`` as a percentage.

    `digits` counts decimals of the value as a fraction, so 3 shows one decimal of a per cent. Without an interval the
    brackets hold a dash (``0.734 [—]``), and without data the cell is a dash. Numbers of a thousand and more have
    `_MOST_DIGITS` digits, and separators: ``-1,316.5 [-1,437.5, -1,195.2]``.
    """
    if math.isnan(estimate.value):
        return "—"
    factor, decimals = (100.0, max(digits - 2, 0)) if percent else (1.0, digits)

    ends = (estimate.value, estimate.low, estimate.high)
    largest = max(abs(end) for end in ends if math.isfinite(end)) if any(map(math.isfinite, ends)) else 0.0
    if largest >= _LARGE:
        decimals = max(min(decimals, _MOST_DIGITS - 1 - math.floor(math.log10(largest))), 0)

    def number(value: float) -> str:
        text = f"{value:.{_MOST_DIGITS}g}" if largest >= _HUGE else f"{value * factor:,.{decimals}f}"
        # A small negative number is rounded to "-0.000", which looks like a mistake.
        return text.removeprefix("-") if not text.strip("-0.") else text

    unit = "%" if percent else ""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return f"{number(estimate.value)}{unit} [—]"
    return f"{number(estimate.value)}{unit} [{number(estimate.low)}, {number(estimate.high)}]"


def digits_of(estimate: Estimate | None, *, least: int) -> int:
    """Return the decimals of an estimate: `least`, or as many more as tell its numbers apart.

    A value is to be told from both ends of its interval. From 0 it is to be told where it is at least a twentieth of
    the interval's width away, and an end where it is a tenth, so that it is seen on which side of 0 all of it lies.
    """
    if estimate is None:
        return least
    fit = (digits for digits in range(least, MOST_DECIMALS) if not _runs_together(estimate, digits))
    return next(fit, max(least, MOST_DECIMALS))


def _runs_together(estimate: Estimate, digits: int) -> bool:
    ends = [end for end in (estimate.low, estimate.high) if not math.isnan(end)]
    value, width = estimate.value, max(ends, default=0.0) - min(ends, default=0.0)
    if not math.isfinite(value) or not math.isfinite(width):
        return False
    apart = [*((value, other, width / 20) for other in (0.0, *ends)), *((end, 0.0, width / 10) for end in ends)]
    return any(
        abs(one - other) > max(least, _SAME) and float(f"{one:.{digits}f}") == float(f"{other:.{digits}f}")
        for one, other, least in apart
    )


def format_points(estimate: Estimate) -> str:
    """Return a difference of shares in percentage points, for a column that names them: ``1.7 [-10.4, 13.7]``."""
    return format_estimate(estimate, percent=True).replace("%", "")


def format_p(p: float) -> str:
    """Return a p-value for a cell: ``0.031``, ``<0.001`` below that, a dash for NaN."""
    return "—" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def over_seeds(estimate: Estimate) -> Estimate:
    """Return a mean over seeds; without an interval where every seed gives the same, which no seed could move."""
    if estimate.low < estimate.high:
        return estimate
    return replace(estimate, low=math.nan, high=math.nan, method=f"the same with all {estimate.n} seeds")


def format_count(count: int) -> str:
    """Return a count with separators: ``12,345``."""
    return f"{count:,}"


def count_of(value: object) -> str:
    """Return a count that was read from a file; a dash for what is not one."""
    return format_count(value) if isinstance(value, int) else "—"


def interval_note(estimates: Iterable[Estimate]) -> str:
    """Return a note with level and method of each kind of interval in a table, in order of appearance."""
    kinds = dict.fromkeys((f"{100 * estimate.level:g}%", estimate.method) for estimate in estimates)
    levels = dict.fromkeys(level for level, _ in kinds)
    lines = [f"{level} intervals: {'; '.join(method for own, method in kinds if own == level)}" for level in levels]
    return "\n".join(lines)


def column_notes(columns: Mapping[str, Iterable[Estimate]]) -> list[str]:
    """Return the `interval_note`s of the columns of a table, equal ones together: ``accuracy, NLL: 95% …``."""
    named: dict[str, list[str]] = {}
    for column, estimates in columns.items():
        named.setdefault(interval_note(estimates), []).append(column)
    # A name with a comma of its own would look like two.
    return [
        f"{('; ' if any(',' in name for name in names) else ', ').join(names)}: {note}"
        for note, names in named.items()
        if note
    ]


def missing_intervals(named: Mapping[str, Iterable[Estimate]]) -> list[str]:
    """Return why values have no interval, equal reasons together: ``[—] p5; p95: too few values``; empty if none lacks
    one."""
    reasons: dict[str, dict[str, None]] = {}
    for name, estimates in named.items():
        for estimate in estimates:
            if not math.isnan(estimate.value) and math.isnan(estimate.low):
                reasons.setdefault(estimate.method, {})[name] = None
    return [f"[—] {'; '.join(names)}: {reason}" for reason, names in reasons.items()]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, max_width: int | None = None) -> str:
    """Return a table as aligned plain text. Columns of numbers (see the module text) are aligned to the right.

    If a table is wider than `max_width` terminal columns, by default `report_width`, text is wrapped inside the widest
    text columns, between words. Columns that still do not fit follow in a second table below, with the first column
    repeated, and as many more as tell the rows apart. Numbers are never broken: if a single one needs more, the table
    is wider than `max_width`.
    """
    max_width = report_width() if max_width is None else max_width
    cells = _clean([header, *rows])
    numeric = _numeric_columns(cells)
    columns = list(zip(*cells, strict=True))
    widths = _fit([max(map(_width, column)) for column in columns], _floors(columns, max_width), numeric, max_width)
    if (fitting := _num_fitting(widths, max_width)) < len(widths):
        above = text_table(cells[0][:fitting], [row[:fitting] for row in cells[1:]], max_width=max_width)
        keys = _num_keys(cells[1:], fitting)
        left = [[*row[:keys], *row[fitting:]] for row in cells]
        return f"{above}\n\n{text_table(left[0], left[1:], max_width=max_width)}"
    lines = []
    for row in cells:
        parts = [
            [cell] if is_number else _wrap(cell, width)
            for cell, width, is_number in zip(row, widths, numeric, strict=True)
        ]
        for level in range(max(map(len, parts))):
            line = [part[level] if level < len(part) else "" for part in parts]
            lines.append(_GAP.join(map(_pad, line, widths, numeric)).rstrip())
        if row is cells[0]:
            lines.append(_GAP.join("-" * width for width in widths))
    return "\n".join(lines)


def report_width() -> int:
    """Return the width of a report: that of the terminal, within limits, or a default without a terminal."""
    return min(max(shutil.get_terminal_size((_WIDEST, 24)).columns, _NARROWEST), _WIDEST)


def wrapped(text: str) -> str:
    """Return a text in lines as wide as a report."""
    return textwrap.fill(text, width=report_width())


def _num_fitting(widths: list[int], max_width: int) -> int:
    """Return how many of the first columns fit side by side; at least two, so that the table below has fewer
    columns."""
    for number in range(3, len(widths) + 1):
        if sum(widths[:number]) + len(_GAP) * (number - 1) > max_width:
            return number - 1
    return len(widths)


def _num_keys(rows: Sequence[Sequence[str]], fitting: int) -> int:
    """Return how many of the first columns tell the rows apart; one if that would take too many."""
    for number in range(1, min(_MOST_KEYS, fitting - 1) + 1):
        if len({tuple(row[:number]) for row in rows}) == len(rows):
            return number
    return 1


def _clean(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the cells, each on one line and with control characters escaped, since names come from data files."""
    assert rows[0], "a table has at least one column"
    assert all(len(row) == len(rows[0]) for row in rows), "every row has one cell a column"
    return [[" ".join(visible(cell).split()) for cell in row] for row in rows]


def _numeric_columns(cells: list[list[str]]) -> list[bool]:
    """Return for each column whether its body has cells that are not empty, and all of these are numbers."""
    body = [[row[column] for row in cells[1:] if row[column]] for column in range(len(cells[0]))]
    return [bool(column) and all(_NUMBER.fullmatch(cell) for cell in column) for column in body]


def _floors(columns: Sequence[Sequence[str]], max_width: int) -> list[int]:
    """Return the width of each column's longest word, within limits."""
    most = max(max_width // _WORD_SHARE, _MIN_TEXT_WIDTH)
    longest = [max(_width(word) for cell in column for word in [*cell.split(), ""]) for column in columns]
    return [min(max(width, _MIN_TEXT_WIDTH), most) for width in longest]


def _fit(widths: list[int], floors: list[int], numeric: list[bool], max_width: int) -> list[int]:
    """Return widths that fit: the widest text column is narrowed step by step until the table fits or no text column
    can be narrowed."""
    widths = list(widths)
    while sum(widths) + len(_GAP) * (len(widths) - 1) > max_width:
        text = [column for column, width in enumerate(widths) if not numeric[column] and width > floors[column]]
        if not text:
            break
        widths[max(text, key=widths.__getitem__)] -= 1
    return widths


def _wrap(cell: str, width: int) -> list[str]:
    """Return lines of at most `width` terminal columns, broken between words and inside words that are too long: after
    a hyphen and the like if there is one."""
    lines = [""]
    for word in cell.split(" "):
        candidate = f"{lines[-1]} {word}" if lines[-1] else word
        if _width(candidate) <= width:
            lines[-1] = candidate
            continue
        if lines[-1]:
            lines.append("")
        for piece in _PIECES.findall(word):
            if lines[-1] and _width(lines[-1] + piece) > width:
                lines.append("")
            for letter in piece:
                if _width(lines[-1] + letter) > width:
                    lines.append("")
                lines[-1] += letter
    return lines


def _width(text: str) -> int:
    """Return the terminal columns of a text: two for wide East Asian letters, none for combining marks."""
    return sum(_letter_width(letter) for letter in text)


def _letter_width(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _pad(cell: str, width: int, right: bool) -> str:
    fill = " " * (width - _width(cell))
    return fill + cell if right else cell + fill
