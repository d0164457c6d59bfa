"""The charts of a study's report: arms with every seed, the waterfall, learning curves, sensitivity."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.experiments.reporting.arms import ArmRow
from rewardlab.experiments.reporting.curves import CURVES, ArmCurve
from rewardlab.experiments.reporting.numbers import interval, intervals
from rewardlab.experiments.reporting.sensitivity import Effect, Sensitivity
from rewardlab.experiments.reporting.summary import Summary
from rewardlab.report.charts import NUM_SERIES, Axis, Band, Chart, Dot, Line, Rule, axis, band, line

MOST_ARMS: Final = 10
"""Most arms of a chart; more are drawn in several."""
PLOT_LETTERS: Final = 50
"""Letters that fit below a chart."""
EDGE_LETTERS: Final = (8, 2)
"""Letters by which a name may stand out on the left and on the right of the plot."""
ASIDE: Final = 0.22
"""How far beside the mean of an arm its seeds are drawn."""
HALF_BLOCK: Final = 0.3
"""Half the width of a step of the ablation, and of the range in which an arm was expected."""
WORSE, BETTER, NEITHER = 1, 2, 3
"""Colours of steps."""
CHANCE: Final = {"accuracy": 0.5, "eval_accuracy": 0.5}
"""What a coin toss reaches. Losses have no such level, since a model without skill may lose any amount."""
TITLES: Final = {"eval_accuracy": "Accuracy on validation data", "eval_loss": "Loss on validation data"}


def arm_charts(summary: Summary) -> Iterator[Chart]:
    """Yield every quantity of the arms: the mean with its interval, and every seed beside it."""
    ranges = {
        one.verdict.term: one.expected for one in summary.bands if one.verdict is not None and one.expected is not None
    }
    for number, column in enumerate(summary.arms.columns):
        shown = [row for row in summary.arms.rows if row.cells[number].estimate is not None]
        parts = list(_divided(shown, MOST_ARMS))
        for part, rows in enumerate(parts, start=1):
            found = _arms_chart(column.title, column.quantity, rows, number, ranges, of=shown)
            yield replace(found, title=f"{found.title}, {part} of {len(parts)}") if len(parts) > 1 else found


def _arms_chart(
    title: str,
    quantity: str,
    rows: Sequence[ArmRow],
    number: int,
    ranges: Mapping[str, tuple[float, float]],
    *,
    of: Sequence[ArmRow],
) -> Chart:
    """Return one quantity of some arms, numbered and on the scale of all arms that are drawn (`of`).

    `ranges` are the terms of which the plan expected something.
    """
    dots, expected = [], {}
    for place, row in enumerate(rows, start=1):
        cell = row.cells[number]
        assert cell.estimate is not None
        own = cell.estimate
        if cell.term in ranges:
            expected[place] = ranges[cell.term]
        text = f"{row.arm}: {interval(own)}"
        dots.append(Dot(series=0, at=(place - ASIDE / 2, own.value), low=own.low, high=own.high, text=text))
        for seed, value in cell.by_seed.items():
            text = f"{row.arm}, seed {seed}: {value:.4g}"
            dots.append(Dot(series=1, at=(place + ASIDE / 2, value), low=math.nan, high=math.nan, text=text))
    x, names = _places([row.arm for row in rows], "arm", first=list(of).index(rows[0]) + 1)
    cells = intervals([row.cells[number].estimate for row in rows])
    drawn = [row.cells[number] for row in of]
    values = [end for cell in drawn for end in _ends(cell.estimate, cell.by_seed.values())]
    values += [end for cell in drawn for end in ranges.get(cell.term, ())]
    chance = CHANCE.get(quantity)
    told = [f"{names[place - 1]} {low:g} to {high:g}" for place, (low, high) in expected.items()]
    return Chart(
        title=f"{_capital(title)} of every arm",
        words=f"{'; '.join(f'{name} {cell}' for name, cell in zip(names, cells, strict=True))}."
        + (f" Expected: {'; '.join(told)}." if told else ""),
        x=x,
        y=axis(title, values, include=() if chance is None or chance < min(values) - 0.25 else (chance,)),
        bands=tuple(replace(_block(0, place, *ends), null=True) for place, ends in expected.items()),
        dots=tuple(dots),
        rules=() if chance is None or chance < min(values) - 0.25 else (Rule(axis="y", at=chance, label="chance"),),
        legend=((0, "mean over seeds, 95% interval"), (1, "each seed")),
        notes=("Grey areas are the ranges that the plan expected.",) if expected else (),
    )


def waterfall_chart(summary: Summary) -> Chart | None:
    """Return the ablation as steps, each from where the one before ended; None if no step is known.

    The first arm stands at its level. A step without a value is a gap, and the arm behind it stands at its own level.
    """
    if not any(step.estimate is not None for step in summary.steps):
        return None
    levels = {row.arm: row.cells[0].estimate for row in summary.arms.rows}
    x, names = _places(summary.waterfall, "arm, each the one before with one change")
    series = _series_of_steps(summary.primary.better)
    dots, bands, lines, told, at = list[Dot](), list[Band](), list[Line](), list[str](), math.nan
    for place, arm in enumerate(summary.waterfall, start=1):
        step = summary.steps[place - 2].estimate if place > 1 else None
        level = levels.get(arm)
        if step is not None and math.isfinite(at):
            color = series[step.value > 0] if step.value else NEITHER
            lines.append(line(0, [(place - 1, at), (place, at)], dashed=True))
            bands.append(_block(color, place, at, at + step.value))
            text = f"{arm} − {summary.waterfall[place - 2]}: {interval(step)}"
            dots.append(_dot(color, place, step, text, begin=at))
            told.append(f"{names[place - 1]} {step.value:+.3g} {_limits(step)}")
            at += step.value
        elif level is not None:
            dots.append(_dot(0, place, level, f"{arm}: {interval(level)}", begin=0.0))
            told.append(f"{names[place - 1]} {interval(level)}")
            at = level.value
        else:
            told.append(f"{names[place - 1]} not known")
            at = math.nan
    values = [end for dot in dots for end in (dot.at[1], dot.low, dot.high)]
    return Chart(
        title="Ablation, step after step",
        words=f"{'; '.join(told)}. The first arm is at its level, the others at their changes against the one before, "
        "paired by seed and prompt, with the intervals of these changes.",
        x=x,
        y=axis(summary.primary.title, values),
        lines=tuple(lines),
        bands=tuple(bands),
        dots=tuple(dots),
        legend=_legend_of_steps(summary.primary.better, {dot.series for dot in dots}),
    )


def _series_of_steps(better: str) -> dict[bool, int]:
    """Return whether a step goes up -> its colour."""
    if better == "neither":
        return {True: NEITHER, False: NEITHER}
    return {True: BETTER if better == "higher" else WORSE, False: WORSE if better == "higher" else BETTER}


def _legend_of_steps(better: str, series: Collection[int]) -> tuple[tuple[int, str], ...]:
    of = {BETTER: f"better ({better})", WORSE: "worse", NEITHER: "neither"}
    changes = tuple((number, f"{said}: change, 95% interval") for number, said in of.items() if number in series)
    return ((0, "level, 95% interval"), *changes)


def _block(series: int, place: int, low: float, high: float) -> Band:
    left, right = place - HALF_BLOCK, place + HALF_BLOCK
    return Band(series=series, outline=((left, low), (right, low), (right, high), (left, high)))


def _dot(series: int, place: int, own: Estimate, text: str, *, begin: float) -> Dot:
    return Dot(series=series, at=(place, begin + own.value), low=begin + own.low, high=begin + own.high, text=text)


def _limits(own: Estimate) -> str:
    return f"[{own.low:+.3g}, {own.high:+.3g}]" if math.isfinite(own.low) else "[—]"


def curve_charts(summary: Summary) -> Iterator[Chart]:
    """Yield the learning curves, a line an arm with the range of its seeds as a band.

    With more arms than a chart can hold, several charts are drawn on the same axes, each with the baseline. An arm has
    the same line in all of them, and no other arm has it, as far as there are lines.
    """
    for column in CURVES:
        curves = [curve for curve in summary.curves if curve.column == column]
        base = [curve for curve in curves if curve.arm == summary.baseline]
        lines = _lines_of([curve.arm for curve in curves], summary.baseline)
        if len(curves) <= NUM_SERIES:
            parts = [curves] if curves else []
        else:
            others = [curve for curve in curves if curve not in base]
            parts = [[*base, *few] for few in _divided(others, NUM_SERIES - len(base))]
        for number, few in enumerate(parts, start=1):
            title = f"{TITLES[column]}{f', {number} of {len(parts)}' if len(parts) > 1 else ''}"
            yield _curve_chart(title, column, few, lines, of=curves)


def _lines_of(arms: Sequence[str], baseline: str) -> dict[str, int]:
    """Return arm -> the number of its line: colours, then the same dashed. The baseline shares its colour with none."""
    if baseline not in arms:
        return {arm: number for number, arm in enumerate(arms)}
    free = (number for number in itertools.count() if number % NUM_SERIES)
    return {arm: 0 if arm == baseline else next(free) for arm in arms}


def _curve_chart(
    title: str, column: str, curves: Sequence[ArmCurve], lines: Mapping[str, int], *, of: Sequence[ArmCurve]
) -> Chart:
    bands = [
        band(lines[curve.arm], [(point.step, point.least, point.most) for point in curve.points])
        for curve in curves
        if curve.seeds > 1
    ]
    values = [end for curve in of for point in curve.points for end in (point.least, point.most)]
    steps = [float(point.step) for curve in of for point in curve.points]
    cut = [curve for curve in curves if len(set(curve.ends)) > 1]
    said = f" A line ends where the first of its seeds does ({', '.join(curve.arm for curve in cut)})." if cut else ""
    chance = CHANCE.get(column)
    return Chart(
        title=title,
        words=" ".join(map(_curve_words, curves)) + " Lines are means over seeds, bands reach from the lowest to the "
        f"highest seed; they are not intervals.{said}",
        x=axis("optimiser step", steps, include=(0.0,), whole=True),
        y=axis(
            "share ranked as labelled" if "accuracy" in column else "loss (nats)",
            values,
            include=() if chance is None else (chance,),
        ),
        lines=tuple(
            line(lines[curve.arm], [(point.step, point.mean) for point in curve.points], marked=True)
            for curve in curves
        ),
        bands=tuple(area for area in bands if area is not None),
        rules=() if chance is None else (Rule(axis="y", at=chance, label="chance"),),
        legend=tuple((lines[curve.arm], f"{curve.arm} ({number_of(curve.seeds, 'seed')})") for curve in curves),
    )


def _curve_words(curve: ArmCurve) -> str:
    if not curve.points:
        return f"{curve.arm}: its seeds have no step in common."
    first, last = curve.points[0], curve.points[-1]
    return (
        f"{curve.arm}: from {first.mean:.3f} ({first.least:.3f} to {first.most:.3f}) at step {first.step} to "
        f"{last.mean:.3f} ({last.least:.3f} to {last.most:.3f}) at step {last.step}."
    )


def effect_chart(found: Sensitivity, effect: Effect) -> Chart:
    """Return the mean at each value of a setting."""
    x, names = _places([one.value for one in effect.values], effect.setting)
    cells = intervals([one.estimate for one in effect.values])
    values = [end for one in effect.values for end in _ends(one.estimate, ())]
    points = [(float(place), one.estimate.value) for place, one in enumerate(effect.values, start=1)]
    return Chart(
        title=f"{_capital(found.column.title)} by {effect.setting}",
        words=f"{'; '.join(f'{name}: {cell}' for name, cell in zip(names, cells, strict=True))}.",
        x=x,
        y=axis(found.column.title, values),
        lines=(line(0, points, dashed=True),) if effect.is_ordered else (),
        dots=tuple(
            Dot(
                series=0,
                at=(float(place), one.estimate.value),
                low=one.estimate.low,
                high=one.estimate.high,
                text=f"{one.value}: {interval(one.estimate)}",
            )
            for place, one in enumerate(effect.values, start=1)
        ),
    )


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def _divided(many: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Yield parts of about the same size, of at most `most`."""
    parts = max(math.ceil(len(many) / most), 1)
    ends = [round(len(many) * part / parts) for part in range(parts + 1)]
    yield from (many[start:end] for start, end in itertools.pairwise(ends) if end > start)


def _places(names: Sequence[str], label: str, *, first: int = 1) -> tuple[Axis, list[str]]:
    """Return an axis with names at its ticks and the names: in one row or in two where they fit, else by numbers, which
    begin with `first`."""
    count = len(names)
    ticks = tuple(float(number) for number in range(1, count + 1))
    rows = next((rows for rows in (1, 2) if _fit(names, rows)), 0)
    if rows:
        shown, told = tuple(names), list(names)
    else:
        shown = tuple(f"{number}" for number in range(first, first + count))
        told = [f"{number}: {name}" for number, name in enumerate(names, start=first)]
    return Axis(label=label, low=0.5, high=count + 0.5, ticks=ticks, names=shown, staggered=rows == 2), told


def _fit(names: Sequence[str], rows: int) -> bool:
    """Return whether names fit below a chart in one row, or in two rows, every second one in the second."""
    room = PLOT_LETTERS / len(names)
    inside = all(
        (len(one) + len(other)) / 2 + 1 <= rows * room for one, other in zip(names, names[rows:], strict=False)
    )
    edges = all(
        len(name) / 2 <= (place + 0.5) * room + beyond
        for of, beyond in ((names, EDGE_LETTERS[0]), (names[::-1], EDGE_LETTERS[1]))
        for place, name in enumerate(of)
    )
    return inside and edges


def _ends(estimate: Estimate | None, values: Iterable[float]) -> list[float]:
    """Return what an axis has to hold."""
    assert estimate is not None
    return [estimate.value, *values, *(end for end in (estimate.low, estimate.high) if math.isfinite(end))]
