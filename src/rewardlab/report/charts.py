"""Charts as geometry: axes with ticks, and lines, bands, bars and points in the units of the drawing.

The template `chart.html.j2` draws them as SVG; nothing here makes markup, and no statistic is computed here. Every
chart has the same width, so that its text stays readable on a phone, where one chart fills the screen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

WIDTH: Final = 380
HEIGHT: Final = 250
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 46
"""Margins around the plot, which hold the ticks and the names of the axes."""
CHARACTER: Final = 6.6
"""Width of a digit in a tick's text in common fonts; other characters of numbers are narrower."""
NEAR: Final = 4
"""Half the size of a marker: words that are nearer to its middle would be covered."""
MOST_POINTS: Final = 300
"""Most points of a line. Of longer lines the lowest and the highest point of each stretch are kept, so that no spike is
lost."""
NUM_SERIES: Final = 4
"""Number of colours, which differ also for colour-blind readers; a fifth line has the first colour again, dashed."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: what it measures, in which unit, and from where to where."""

    label: str
    """The label, with the unit if there is one."""
    low: float
    high: float
    ticks: tuple[float, ...]
    names: tuple[str, ...] = ()
    """Texts at the ticks in place of numbers, such as the names of slices."""
    staggered: bool = False
    """Whether every second name is in a second row, because one row is too narrow; the label then makes room."""

    def text(self, tick: float) -> str:
        """Return a tick as it is printed, with as many decimals as the ticks of the axis need."""
        if self.names:
            return self.names[self.ticks.index(tick)]
        size = max(map(abs, self.ticks))
        if size >= 100_000 or size < 0.01:
            mantissa, _, exponent = f"{tick:.2e}".partition("e")
            digits = mantissa.rstrip("0").rstrip(".")
            return "0" if not tick else f"{digits}e{int(exponent)}".replace("-", "−")
        decimals = next((d for d in range(6) if all(abs(round(t, d) - t) < 1e-9 * size for t in self.ticks)), 6)
        text = f"{tick:,.{decimals}f}"
        return text.removeprefix("-") if not text.strip("-0.,") else text.replace("-", "−")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line through points, perhaps with a marker at each."""

    series: int
    """Number of its colour and marker, from 0."""
    points: tuple[Point, ...]
    dashed: bool = False
    marked: bool = False


@dataclass(frozen=True, kw_only=True)
class Band:
    """An area between two limits, such as an interval at every point."""

    series: int
    outline: tuple[Point, ...]
    null: bool = False
    """Whether it shows where values would lie by chance, rather than the uncertainty of a line."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a histogram, from 0 up."""

    series: int
    left: float
    right: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point with its interval, and a text that a pointer shows."""

    series: int
    at: Point
    low: float
    high: float
    """NaN limits are not drawn."""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A straight line across the plot: at one value of an axis, from corner to corner, or where x and y are equal."""

    axis: str
    """`x`, `y`, `diagonal`, or `segment`: x = y from `at` to the end of the x axis."""
    at: float = 0.0
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class TickText:
    """The text of a tick of the x axis, and where it stands."""

    text: str
    x: float
    anchor: Literal["middle", "end"]
    row: int
    """0, or 1 for names that stand in a second row."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart: axes, what is drawn between them, and the same in words."""

    title: str
    words: str
    """The content of the chart in words, for readers who do not see it."""
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    bands: tuple[Band, ...] = ()
    bars: tuple[Bar, ...] = ()
    dots: tuple[Dot, ...] = ()
    rules: tuple[Rule, ...] = ()
    legend: tuple[tuple[int, str], ...] = ()
    """(series, name), in the order in which they are listed."""
    notes: tuple[str, ...] = ()

    def marked(self, series: int) -> bool:
        """Return whether the points of a series have markers, so that its legend shows one."""
        return any(own.marked for own in self.lines if own.series == series % NUM_SERIES) or any(
            dot.series == series for dot in self.dots
        )

    def dashed(self, series: int) -> bool:
        """Return whether the line of a series is dashed, so that its legend is too."""
        own = [line for line in self.lines if line.series == series % NUM_SERIES]
        return series >= NUM_SERIES or bool(own and own[0].dashed)

    def pattern(self, series: int) -> int:
        """Return the number of the dashes of a line, 0 for none: lines without markers differ by more than colour where
        there are several, for readers in grey."""
        plain = {own.series for own in self.lines if not own.marked and not own.dashed}
        return series % NUM_SERIES if len(plain) > 1 and series in plain else 0

    def barred(self, series: int) -> bool:
        """Return whether a series is drawn as filled bars."""
        return any(bar.series == series for bar in self.bars)

    def px(self, value: float) -> float:
        """Return where a value of the x axis lies in the drawing."""
        return round(LEFT + (WIDTH - LEFT - RIGHT) * _share(value, self.x), 1)

    def py(self, value: float) -> float:
        """Return where a value of the y axis lies in the drawing."""
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(value, self.y), 1)

    def path(self, points: Iterable[Point]) -> str:
        """Return points as the value of an SVG `points` attribute."""
        return " ".join(f"{self.px(x):g},{self.py(y):g}" for x, y in points)

    def place_of(self, rule: Rule) -> tuple[float, float, str]:
        """Return where the words of a horizontal rule stand, x, y and anchor: at an end, above or below, where nothing
        else is drawn; above its right end where something is everywhere."""
        wide, at = CHARACTER * len(rule.label), self.py(rule.at)
        ends = ((WIDTH - RIGHT - 2.0, "end"), (LEFT + 4.0, "start"))
        places = [(x, y, anchor) for x, anchor in ends for y in (at - 4, at + 12) if TOP + 8 <= y <= HEIGHT - BOTTOM]

        def is_free(place: tuple[float, float, str]) -> bool:
            x, y, anchor = place
            left = x - wide if anchor == "end" else x
            return not any(
                left - NEAR < across < left + wide + NEAR and y - 10 - NEAR < down < y + NEAR
                for across, down in self._drawn()
            )

        return next(filter(is_free, places), places[0])

    def _drawn(self) -> Iterator[Point]:
        """Yield points of the drawing that lines, dots and their intervals cover, close enough to see words by."""
        ends = [pair for own in self.lines for pair in itertools.pairwise((*own.points[:1], *own.points))]
        ends += [
            ((dot.at[0], dot.low), (dot.at[0], dot.high)) for dot in self.dots if math.isfinite(dot.high - dot.low)
        ]
        ends += [(dot.at, dot.at) for dot in self.dots if all(map(math.isfinite, dot.at))]
        for begin, end in ends:
            (x, y), (to_x, to_y) = ((self.px(across), self.py(up)) for across, up in (begin, end))
            steps = max(1, math.ceil(max(abs(to_x - x), abs(to_y - y)) / NEAR))
            yield from ((x + (to_x - x) * step / steps, y + (to_y - y) * step / steps) for step in range(steps + 1))

    def tick_texts(self) -> list[TickText]:
        """Return the texts below the x axis: every name, or as many numbers as fit side by side.

        A number that would extend beyond the right edge is aligned to that edge.
        """
        names = [(self.px(tick), self.x.text(tick)) for tick in self.x.ticks]
        if self.x.names:
            return [
                TickText(text=text, x=x, anchor="middle", row=int(self.x.staggered and number % 2))
                for number, (x, text) in enumerate(names)
            ]
        widest = CHARACTER * max(len(text) for _, text in names)
        between = (names[-1][0] - names[0][0]) / max(len(names) - 1, 1)
        stride = max(1, math.ceil((widest + CHARACTER) / between)) if between else 1
        texts: list[TickText] = []
        for x, text in names[::stride]:
            if x + CHARACTER * len(text) / 2 <= WIDTH:
                texts.append(TickText(text=text, x=x, anchor="middle", row=0))
            elif not texts or texts[-1].x + CHARACTER * (len(texts[-1].text) / 2 + 1 + len(text)) <= WIDTH:
                texts.append(TickText(text=text, x=float(WIDTH), anchor="end", row=0))
        return texts


def axis(
    label: str, values: Iterable[float], *, include: Sequence[float] = (), num_ticks: int = 5, whole: bool = False
) -> Axis:
    """Return an axis over all finite values and those to `include`, that begins and ends at ticks.

    Ticks are 1, 2 or 5 times a power of ten apart; for counts (`whole`) at least 1.
    """
    # Differences of values near the largest float would be infinite, so such values are left out.
    finite = [value for value in (*values, *include) if math.isfinite(value) and abs(value) < 1e300]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    # Values that are equal but for rounding would give ticks that do not differ: widen the axis around them.
    if not high - low > 1e-12 * max(abs(low), abs(high)):
        reach = max(abs(low) / 2, 0.5)
        # Counts, such as steps, do not begin below 0.
        low, high = max(low - reach, 0.0 if whole and low >= 0 else -math.inf), high + reach
    rough = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(number * step for number in range(first, last + 1))
    return Axis(label=label, low=ticks[0], high=ticks[-1], ticks=ticks)


def share_axis(label: str) -> Axis:
    """Return an axis of shares and probabilities, from 0 to 1."""
    return Axis(label=label, low=0.0, high=1.0, ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))


def line(series: int, points: Iterable[Point], *, dashed: bool = False, marked: bool = False) -> Line:
    """Return a line through the finite points, thinned if there are very many."""
    finite = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    kept = _thinned(finite)
    return Line(
        series=series % NUM_SERIES,
        points=tuple(kept),
        dashed=dashed or series >= NUM_SERIES,
        marked=marked and len(kept) <= MOST_POINTS // 5,
    )


def band(series: int, limits: Iterable[tuple[float, float, float]], *, null: bool = False) -> Band | None:
    """Return the area between (x, low, high); None if fewer than two of them are finite."""
    finite = [each for each in limits if all(map(math.isfinite, each))]
    if len(finite) < 2:
        return None
    stride = -(-len(finite) // MOST_POINTS)
    kept = [*finite[:-1:stride], finite[-1]]
    outline = [(x, high) for x, _, high in kept] + [(x, low) for x, low, _ in reversed(kept)]
    return Band(series=series % NUM_SERIES, outline=tuple(outline), null=null)


def cut_bands(heights: Axis, bands: Iterable[Band | None]) -> str:
    """Return the sentence that a chart owes where its axis ends before a band does; empty if every band is whole."""
    ends = [y for area in bands if area is not None for _, y in area.outline]
    slack = 1e-9 * (heights.high - heights.low)
    whole = all(heights.low - slack <= end <= heights.high + slack for end in ends)
    return "" if whole else " A band that reaches the upper or lower edge goes on beyond it."


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most about MOST_POINTS points: the lowest and the highest of each stretch, in order."""
    if len(points) <= MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / MOST_POINTS)
    kept: dict[int, Point] = {0: points[0], len(points) - 1: points[-1]}
    for start in range(0, len(points), size):
        numbers = range(start, min(start + size, len(points)))
        for number in (min(numbers, key=lambda n: points[n][1]), max(numbers, key=lambda n: points[n][1])):
            kept[number] = points[number]
    return [kept[number] for number in sorted(kept)]


def _share(value: float, axis: Axis) -> float:
    """Return how far along an axis a value lies, from 0 to 1; values beyond the axis are drawn at its end."""
    return min(max((value - axis.low) / (axis.high - axis.low), 0.0), 1.0)
