"""The charts of over-optimisation curves: gold and proxies against n, and against the bound of the KL divergence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rewardlab.analysis.best_of_n import Point
from rewardlab.analysis.overoptimisation import KL_LABEL, Overoptimisation
from rewardlab.core.types import Estimate
from rewardlab.gold.curving.run import PromptSet, Result
from rewardlab.gold.curving.words import interval, number, sizes
from rewardlab.report.charts import NUM_SERIES, Axis, Chart, Dot, Rule, axis, band, cut_bands, line

MOST_BANDS: Final = 3
"""Most lines of a chart that get bands; more would hide each other."""
GOLD: Final = "gain of gold over a single reply"
PROXY: Final = "gain of the proxy, in its own SD"
DOUBT: Final = (
    " The vertical one is at n = {enough}, half of the replies to a prompt: right of it each point depends on the one "
    "or two best of each."
)
Gain = Callable[[Overoptimisation, int], Estimate]
"""(curve, place) -> what is drawn there."""
Place = Callable[[Point], float]


def gold_of(one: Overoptimisation, place: int) -> Estimate:
    """Return the gain of gold at a place of the curve."""
    found = one.points[place].gold_gain
    assert found is not None
    return found


def proxy_of(one: Overoptimisation, place: int) -> Estimate:
    """Return the gain of the proxy, in its standard deviations within prompts."""
    return one.scaled[place]


def charts_of(result: Result, one: PromptSet) -> Iterator[Chart]:
    """Yield the four charts of a set of prompts; with more proxies than colours, four for each group of proxies."""
    curves = result.of(one.name)
    for start in range(0, len(curves), NUM_SERIES):
        few = curves[start : start + NUM_SERIES]
        for title, gain in (("Gold", gold_of), ("Proxy", proxy_of)):
            label = GOLD if gain is gold_of else PROXY
            names, enough = [result.label(own.proxy) for own in few], int(one.replies // 2)
            yield _chart(f"{title} against n", few, gain, label, names=names, by_size=True, enough=enough)
            yield _chart(f"{title} against the KL bound", few, gain, label, names=names, by_size=False, enough=enough)


def both_sets(result: Result) -> Iterator[Chart]:
    """Yield gold of each proxy over all sets of prompts, where there are several."""
    if len(result.sets) < 2:
        return
    for name in dict.fromkeys(one.proxy for one in result.curves):
        few = [one for one in result.curves if one.proxy == name]
        enough = int(min(one.replies for one in result.sets) // 2)
        names, title = [one.prompts for one in few], f"Gold by the picks of {result.label(name)}"
        yield _chart(title, few, gold_of, GOLD, names=names, by_size=True, enough=enough)


def _chart(
    title: str,
    curves: Sequence[Overoptimisation],
    gain: Gain,
    label: str,
    *,
    names: Sequence[str],
    by_size: bool,
    enough: int,
) -> Chart:
    """Return a chart of curves, with `names` in the legend."""
    place: Place = _log_size if by_size else _bound
    most = curves[0].most
    estimates = [[gain(one, k) for k in range(most)] for one in curves]
    xs = [place(point) for point in curves[0].points]
    bands = [
        band(series, [(x, own.low, own.high) for x, own in zip(xs, row, strict=True)])
        for series, row in enumerate(estimates)
    ]
    dots = [_peak(series, one, estimates[series], xs) for series, one in enumerate(curves) if gain is gold_of]
    rules = _doubt(curves[0], enough, place)
    shown = len(curves) <= MOST_BANDS
    heights = axis(label, _heights(estimates, with_limits=shown), include=(0.0,))
    cut = cut_bands(heights, bands)
    said = f"Bands are 95% intervals, by prompt.{cut}" if shown else "Intervals are in the table."
    return Chart(
        title=title,
        words=" ".join(_words(name, row, most) for name, row in zip(names, estimates, strict=True))
        + f" {said}"
        + (" A marker shows where gold is highest on a curve that turns over." if any(dots) else "")
        + " The horizontal dotted line marks no gain."
        + (DOUBT.format(enough=enough) if rules else ""),
        x=_sizes(most) if by_size else axis(KL_LABEL, xs, include=(0.0,)),
        y=heights,
        lines=tuple(
            line(series, [(x, own.value) for x, own in zip(xs, row, strict=True)])
            for series, row in enumerate(estimates)
        ),
        bands=tuple(area for area in bands if area is not None) if shown else (),
        dots=tuple(dot for dot in dots if dot is not None),
        rules=(Rule(axis="y", at=0.0), *rules),
        legend=tuple(enumerate(names)),
    )


def _peak(series: int, one: Overoptimisation, row: Sequence[Estimate], xs: Sequence[float]) -> Dot | None:
    if one.verdict != "turns over":
        return None
    place = round(one.turn.peak.value) - 1
    text = f"{one.proxy}, {one.prompts}: highest at n = {place + 1} ({sizes(one)})"
    return Dot(series=series, at=(xs[place], row[place].value), low=math.nan, high=math.nan, text=text)


def _doubt(one: Overoptimisation, enough: int, place: Place) -> list[Rule]:
    """Return the line beyond which too few replies stand behind a point."""
    if not 1 <= enough < one.most:
        return []
    return [
        Rule(
            axis="x",
            at=place(one.points[enough - 1]),
        )
    ]


def _log_size(point: Point) -> float:
    return math.log2(point.n)


def _bound(point: Point) -> float:
    return point.kl_bound


def _sizes(most: int) -> Axis:
    """Return an axis of n whose steps are equal ratios."""
    power = math.ceil(math.log2(most) - 1e-9)
    step = max(1, math.ceil(power / 8))
    ticks = tuple(float(k) for k in range(0, power + step, step))
    return Axis(
        label="n, best of n replies (log scale)",
        low=0.0,
        high=ticks[-1],
        ticks=ticks,
        names=tuple(f"{2 ** round(tick):,}" for tick in ticks),
    )


def _heights(rows: Sequence[Sequence[Estimate]], *, with_limits: bool) -> list[float]:
    """Return what an axis has to hold: values, and limits that do not dwarf them."""
    values = [own.value for row in rows for own in row if math.isfinite(own.value)]
    if not values or not with_limits:
        return values
    reach = max(*values, 0.0) - min(*values, 0.0)
    low, high = min(*values, 0.0) - reach, max(*values, 0.0) + reach
    ends = [end for row in rows for own in row for end in (own.low, own.high) if math.isfinite(end)]
    return [*values, *(min(max(end, low), high) for end in ends)]


def _words(name: str, row: Sequence[Estimate], most: int) -> str:
    """Return where a line begins, is highest and ends, as a sentence."""
    best = max(range(len(row)), key=lambda place: row[place].value)
    if best == most - 1:
        return f"{name}: highest at the largest n, {most}, with {interval(row[-1])}."
    return f"{name}: highest at n = {best + 1} with {number(row[best].value)}; at n = {most} it is {interval(row[-1])}."
