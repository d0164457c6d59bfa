"""No measurement: counts cells of records of coverage below, within and above 93 to 97 %, by record and kind of data.

    scripts/bench coverage_count

prints the tables of docs/design/intervals-open.md and intervals.md, from the records that the first of them names.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from harness import results
from harness.simulation import WANTED

PAGE: Final = Path(__file__).resolve().parents[1] / "docs/design/intervals-open.md"
ROW: Final = re.compile(r"^\| \[(?P<label>[^]]+)\]\((?P<record>[^)]+)\.md\) \| \d+ \|")
SIZES: Final = (15, 40, 200)
ELSEWHERE: Final = (("comparisons", "gold"), ("rankings", "ECE"))
"""How labels begin whose record has cells that a later one has too, and a word of these cells' statistics."""
SEVERAL: Final = re.compile(r"(?<!\d)(?!1 )\d+ (pairs a prompt|each)|prompts of (?!1\b)\d|1 to 60|a third of all")
"""Words of cases with more than one row a prompt, in the records' forms."""


def count(coverages: Sequence[float]) -> tuple[int, int, int]:
    """How many are below, within and above what is wanted."""
    low, high = WANTED
    below, above = sum(value < low for value in coverages), sum(value > high for value in coverages)
    return below, len(coverages) - below - above, above


def records() -> Iterator[tuple[str, list[tuple[str, str, float]]]]:
    """Each row of the page's table: its label, and (statistic, case, coverage) of the cells that it counts.

    Matches and ECE by prompt are counted from records of their own; α and the noise ceiling are of one record.
    """
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if (row := ROW.match(line)) is None:
            continue
        record = PAGE.parent / f"{row['record']}.json"
        label, cells = row["label"], json.loads(record.read_text(encoding="utf-8"))["cells"]
        coverage = "alpha_coverage" if label.startswith("Krippendorff") else "coverage"
        yield (
            label,
            [
                (statistic, cell["case"], cell[coverage])
                for statistic, own in cells.items()
                for cell in own
                if not any(label.startswith(start) and word in statistic for start, word in ELSEWHERE)
            ],
        )


def kind_of(case: str) -> tuple[str, int] | None:
    """What kind of data a cell is of and how many prompts or pairs it has; None if it is of another number."""
    size = re.search(r"\bn (\d+)|(\d+) prompts", case)
    if size is None or (number := int(size[1] or size[2])) not in SIZES:
        return None
    ties = "ties" in case or "tied" in case
    return "ties" if ties else "several pairs a prompt" if SEVERAL.search(case) else "plain", number


def by_record() -> list[list[str]]:
    """Rows of the first table: record, cells, below, within, above."""
    rows = []
    for label, cells in records():
        below, within, above = count([coverage for _, _, coverage in cells])
        rows.append([label, str(len(cells)), *(str(number or "–") for number in (below, within, above))])
    return rows


def by_kind() -> list[list[str]]:
    """Rows of the second: kind and number, cells, within, below, above; without jumps of few levels and the ceiling."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for label, cells in records():
        if label != "noise ceiling":
            for statistic, case, coverage in cells:
                if "jump" not in statistic and (kind := kind_of(case)) is not None:
                    found[kind].append(coverage)
    rows = []
    for name in ("plain", "ties", "several pairs a prompt"):
        for size in SIZES:
            below, within, above = count(found[name, size])
            numbers = (str(number or "–") for number in (within, below, above))
            rows.append([f"{name}, {size}", str(len(found[name, size])), *numbers])
    return rows


def main() -> int:
    """Both tables, and the sum of the first."""
    rows = by_record()
    print(results.table(["record", "cells", "less", "within", "more"], rows))
    total, below, above = (sum(int(row[place].replace("–", "0")) for row in rows) for place in (1, 2, 4))
    print(f"{total:,} cells: {below} less, {above} more\n")
    print(results.table(["data", "cells", "93 to 97 %", "less", "more"], by_kind()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
