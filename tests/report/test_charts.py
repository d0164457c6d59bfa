"""Laws of axes and lines: nothing lies outside, ticks are round and different, spikes survive thinning."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewardlab.analysis.judgement import judge_rows
from rewardlab.analysis.slices import Slice
from rewardlab.core.types import Estimate
from rewardlab.report.charts import (
    BOTTOM,
    CHARACTER,
    HEIGHT,
    LEFT,
    MOST_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Chart,
    Dot,
    Line,
    Rule,
    axis,
    band,
    line,
)
from rewardlab.report.document import Beside, Charts, Document, Part, Section
from rewardlab.report.from_scores import calibration_section, length_section
from rewardlab.report.page import html_page
from score_rows import pair_rows, random_rows

numbers = st.floats(-1e6, 1e6)
anything = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(anything, max_size=8))
def test_an_axis_holds_all_finite_values_between_ticks_that_read_differently(values: list[float]) -> None:
    made = axis("x", values)
    held = [value for value in values if math.isfinite(value) and abs(value) < 1e300]
    slack = 1e-6 * (made.high - made.low)
    assert all(made.low - slack <= value <= made.high + slack for value in held)
    assert (made.ticks[0], made.ticks[-1]) == (made.low, made.high)
    assert 2 <= len(made.ticks) <= 9


@given(st.lists(numbers, min_size=1, max_size=8))
def test_ticks_read_as_they_are(values: list[float]) -> None:
    made = axis("x", values)
    if max(map(abs, values)) - min(map(abs, values)) < 1e-3:
        return
    read = [float(made.text(tick).replace("−", "-").replace(",", "")) for tick in made.ticks]
    assert read == pytest.approx(made.ticks, abs=0.02 * (made.ticks[1] - made.ticks[0]) + 0.01 * max(map(abs, read)))


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_everything_is_drawn_inside_the_plot(points: list[tuple[float, float]]) -> None:
    chart = Chart(
        title="t", words="w", x=axis("x", [x for x, _ in points]), y=axis("y", [y for _, y in points]),
    )  # fmt: skip
    for pair in chart.path(points).split():
        x, y = map(float, pair.split(","))
        assert LEFT - 0.1 <= x <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= y <= HEIGHT - BOTTOM + 0.1


@given(st.lists(numbers, min_size=1, max_size=8), st.floats(-5, 6))
def test_numbers_below_the_x_axis_stand_beside_each_other_and_inside(values: list[float], power: float) -> None:
    made = axis("x", [value * 10.0**power for value in values])
    texts = Chart(title="t", words="w", x=made, y=made).tick_texts()
    boxes = [
        (one.x - (1.0 if one.anchor == "end" else 0.5) * CHARACTER * len(one.text), CHARACTER * len(one.text))
        for one in texts
    ]
    assert boxes
    assert all(start >= 0 and start + width <= WIDTH + 0.1 for start, width in boxes)
    assert all(start + width <= following for (start, width), (following, _) in itertools.pairwise(boxes))
    assert {one.text for one in texts} <= {made.text(tick) for tick in made.ticks}


def test_numbers_that_fit_are_all_written() -> None:
    chart = Chart(title="t", words="w", x=axis("step", [0, 10_000], whole=True), y=axis("y", [0, 1]))
    assert [one.text for one in chart.tick_texts()] == ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]
    assert [one.anchor for one in chart.tick_texts()][-2:] == ["middle", "end"], "a wide last one ends at the edge"


def test_a_long_line_is_thinned_and_keeps_its_spikes() -> None:
    points = [(float(step), math.sin(step / 500)) for step in range(50_000)]
    points[31_234] = (31_234.0, 40.0)
    points[7] = (7.0, -40.0)
    kept = line(0, points).points
    assert len(kept) <= 1.1 * MOST_POINTS
    assert {points[31_234], points[7], points[0], points[-1]} <= set(kept)
    assert list(kept) == sorted(kept)


def test_what_is_not_finite_is_not_drawn() -> None:
    assert line(0, [(0.0, math.nan), (1.0, 2.0), (2.0, math.inf)]).points == ((1.0, 2.0),)
    assert band(0, [(0.0, math.nan, 1.0), (1.0, 0.0, 1.0)]) is None
    area = band(0, [(0.0, 0.0, 2.0), (1.0, 1.0, 3.0)])
    assert area is not None
    assert area.outline == ((0.0, 2.0), (1.0, 3.0), (1.0, 1.0), (0.0, 0.0))


def test_no_line_runs_through_the_words_at_a_rule() -> None:
    lines = (line(0, [(0.0, 0.4), (10.0, 0.6)], marked=True),)
    rules = (Rule(axis="y", at=0.5, label="chance"), Rule(axis="x", at=5.0, label="limit"))
    x, y = axis("step", [0.0, 10.0]), axis("accuracy", [0.4, 0.6])
    chart = Chart(title="t", words="", x=x, y=y, lines=lines, rules=rules, legend=((0, "a"),))
    part = Part(title="p", sections=(Section(title="s", blocks=(Charts(charts=(chart,)),)),))
    page = html_page(Document(title="t", made_by="m", parts=(part,)))
    assert page.rindex('class="dot') < page.index(">chance</text>") < page.index(">limit</text>")


@pytest.mark.parametrize(
    ("spans", "rows"),
    [
        (["-231 to -20", "-12 to 17", "25 to 40", "48 to 113", "116 to 312"], [0, 1, 0, 1, 0]),
        (["-31 to -20", "-12 to 17", "25 to 40", "48 to 113", "116 to 312"], [0, 0, 0, 0, 0]),
        (["-231 to -20", "-12 to 17"], [0, 0]),
    ],
    ids=["would touch", "apart", "few"],
)
def test_spans_of_length_that_would_touch_stand_in_two_rows_and_their_unit_below(spans, rows):
    sure = Estimate(value=0.5, low=0.4, high=0.6, n=20, method="", level=0.95)
    slices = tuple(Slice(label=span, num_comparisons=20, estimates={"eval_accuracy": sure}) for span in spans)
    judgement = replace(judge_rows(random_rows(20), beta=1.0, draws=10), slices={"length_difference": slices})
    chart = length_section(judgement).blocks[0].chart
    assert [text.row for text in chart.tick_texts()] == rows
    assert any("(tokens)" in note for note in chart.notes) == chart.x.staggered == (1 in rows)


@pytest.mark.parametrize(("beta", "ends"), [(1.0, True), (4.0, False)])
def test_an_interval_of_miscalibration_that_ends_at_its_value_says_why(beta: float, ends: bool) -> None:
    draw = np.random.default_rng(0)
    margins = draw.normal(1, 1.5, 400)
    labels = draw.random(400) < 1 / (1 + np.exp(-margins))
    judgement = judge_rows(
        pair_rows([(m, 0.0, float(y)) for m, y in zip(margins, labels, strict=True)]), beta=beta, draws=50
    )
    (block,) = calibration_section(judgement).blocks
    assert isinstance(block, Beside)
    assert ("ends at the value, which noise makes too high" in block.chart.words) is ends
    found = judgement["eval_brier_miscalibration"]
    assert (found.high == found.value) is ends


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ((), (WIDTH - RIGHT - 2, -4, "end")),
        ([(9.8, 0.53)], (WIDTH - RIGHT - 2, 12, "end")),
        ([(9.8, 0.53), (9.5, 0.47)], (LEFT + 4, -4, "start")),
        ([(9.8, 0.53), (9.5, 0.47), (0.3, 0.53)], (LEFT + 4, 12, "start")),
        ([(9.8, 0.5), (0.3, 0.5)], (WIDTH - RIGHT - 2, -4, "end")),
    ],
)
def test_the_words_of_a_rule_stand_where_no_point_is(at, expected):
    chart = Chart(
        title="",
        words="",
        x=Axis(label="", low=0, high=10, ticks=(0.0, 10.0)),
        y=Axis(label="", low=0.0, high=1.0, ticks=(0.0, 1.0)),
        dots=tuple(Dot(series=0, at=point, low=math.nan, high=math.nan) for point in [*at, (math.nan, math.nan)]),
        lines=(Line(series=0, points=((0.0, 0.9), (10.0, 0.7))),),
        rules=(Rule(axis="y", at=0.5, label="chance"),),
    )
    (rule,) = chart.rules
    x, below, anchor = expected
    assert chart.place_of(rule) == (x, chart.py(0.5) + below, anchor)


def test_the_words_of_a_rule_stand_beside_a_line_also_between_its_points():
    axes = {name: Axis(label="", low=0, high=1, ticks=(0.0, 1.0)) for name in ("x", "y")}
    falling = Line(series=0, points=((0.5, 1.0), (1.0, 0.45)))
    chart = Chart(title="", words="", **axes, lines=(falling,), rules=(Rule(axis="y", at=0.5, label="chance"),))
    assert chart.place_of(chart.rules[0]) == (LEFT + 4, chart.py(0.5) - 4, "start")


def test_lines_without_markers_differ_by_more_than_colour():
    def lines_of(*lines):
        chart = Chart(
            title="t",
            words="w",
            x=axis("x", [0, 1]),
            y=axis("y", [0, 1]),
            lines=lines,
            legend=tuple((own.series, f"name {own.series}") for own in lines),
        )
        part = Part(title="p", sections=(Section(title="s", blocks=(Charts(charts=(chart,)),)),))
        page = html_page(Document(title="t", made_by="m", parts=(part,)))
        in_plot = re.findall(r'<polyline class="([^"]*)"', page)
        in_legend = re.findall(r'<line class="(line [^"]*)"', page)
        assert in_plot == in_legend
        return [words.removeprefix(f"line s{own.series}") for words, own in zip(in_plot, lines, strict=True)]

    points = [(0.0, 0.0), (1.0, 1.0)]
    assert lines_of(*(line(series, points) for series in range(4))) == ["", " d1", " d2", " d3"]
    assert lines_of(line(1, points)) == [""]
    assert lines_of(line(0, points, marked=True), line(1, points, dashed=True)) == ["", " dashed"]
