"""The chart of `gold match`: each dot is a pair, above the line where the proxy orders it as gold does."""

from __future__ import annotations

import numpy as np
import pytest

from gold_matched import drawn, part, scored
from harness.gold_rows import gold_of, with_gold
from rewardlab.gold.matching.pictures import MOST, drawn_of, margins_chart
from rewardlab.gold.matching.report import page
from rewardlab.gold.matching.run import match_parts
from rewardlab.report.document import Charts


def test_the_share_of_dots_above_the_line_is_the_match() -> None:
    rows = drawn(rows=100)
    gold = gold_of(rows)
    gold[:10, 1] = gold[:10, 0]
    rows = with_gold(rows, gold)
    read = part(rows, scored(rows, 0.8))
    (name,) = read.scores
    found = drawn_of(read.replies, read.scores[name])
    assert len(found) == 90
    assert all(x > 0 for x, _ in found)
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    match = match_parts(read).test.matches[name]
    assert np.mean([y > 0 for _, y in found]) == pytest.approx(match.agreement.match.value)
    chart = margins_chart(name, found, match, num_pairs=90)
    assert [dot.at for dot in chart.dots] == list(found)
    assert chart.words.startswith("90 pairs: ")


def test_of_many_pairs_some_are_drawn_from_the_smallest_to_the_largest() -> None:
    rows = drawn(rows=150, replies=4)
    read = part(rows, gold_of(rows) / 3)
    (name,) = read.scores
    found = drawn_of(read.replies, read.scores[name])
    sizes = np.abs(read.replies.gold_N)
    assert len(sizes) == 900
    assert len(found) == MOST
    assert (found[0][0], found[-1][0]) == (sizes.min(), sizes.max())
    assert all(y == pytest.approx(x / 3) for x, y in found)
    matched = match_parts(read)
    (charts,) = [block for section in page(matched).parts[0].sections for block in section.blocks
                 if isinstance(block, Charts)]  # fmt: skip
    assert charts.charts[0].words.startswith(f"900 pairs, {MOST} of which are drawn")
