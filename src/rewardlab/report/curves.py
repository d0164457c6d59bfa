"""Charts of a run's record (metrics.csv): loss, accuracy, margin and calibration with intervals, learning rate, speed.

A value is drawn at the step where it was measured. Training values are means since the row before; evaluation values
have a band for their 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from rewardlab.core.types import Estimate
from rewardlab.report.charts import NUM_SERIES, Axis, Chart, Dot, Line, Point, Rule, axis, band, line
from rewardlab.report.document import Charts
from rewardlab.report.folder import Record
from rewardlab.report.tables import format_estimate

EVALUATED: Final = {
    "eval_accuracy": ("Accuracy", "share ranked as labelled"),
    "eval_loss": ("Loss", "negative log-likelihood (nats)"),
    "eval_margin": ("Margin", "score difference"),
    "eval_roc_auc": ("Area under the ROC curve", "AUC (share)"),
    "eval_ece": ("Calibration error", "ECE (share)"),
}
"""Column -> (title, axis) of the curves that have intervals."""
PARTNERS: Final = {
    "eval_accuracy": (("train_accuracy", "training batches"), ("train_eval_accuracy", "training rows, evaluated")),
    "eval_loss": (("train_nll", "training batches"), ("train_eval_loss", "training rows, evaluated")),
    "eval_margin": (("train_margin", "training batches"),),
}
CHANCE: Final = {"eval_accuracy": 0.5, "eval_loss": math.log(2), "eval_margin": 0.0, "eval_roc_auc": 0.5}
SINGLE: Final = {
    "lr": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm", "norm before clipping"),
    "pairs_per_second": ("Speed", "comparisons per second"),
    "peak_memory_gib": ("Memory", "most so far (GiB)"),
}
"""Column -> (title, axis) of the curves without an interval."""


def training_curves(record: Record) -> Charts:
    """Return the charts of one run; columns that were never measured have none."""
    steps = _steps([record])
    found = [_evaluated(record, column, steps) for column in EVALUATED]
    found += [_score_spread(record, steps)]
    found += [_single(record, column, steps) for column in SINGLE]
    return Charts(charts=tuple(chart for chart in found if chart is not None))


def curves_side_by_side(records: Sequence[Record], names: Sequence[str]) -> Charts:
    """Return charts of what is measured on evaluation data, with one line for each run."""
    steps = _steps(records)
    found = []
    for column, (title, label) in EVALUATED.items():
        points = [_points(record, column) for record in records]
        if not any(points):
            continue
        limits = [_limits(record, column) for record in records]
        # The bands of many runs would hide each other.
        areas = [band(number, limit) for number, limit in enumerate(limits)] if len(records) <= NUM_SERIES else []
        bands = tuple(area for area in areas if area is not None)
        last = "; ".join(
            f"{name} ends at {_said(*own[-1], {step: (low, high) for step, low, high in limit})}"
            for name, own, limit in zip(names, points, limits, strict=True)
            if own
        )
        found.append(
            Chart(
                title=f"{title} on evaluation data",
                words=f"{last}. Bands are 95% intervals.",
                x=steps,
                y=axis(label, _heights(points, limits), include=_chance(column)),
                lines=tuple(line(number, own, marked=True) for number, own in enumerate(points) if own),
                bands=bands,
                rules=_chance_rule(column),
                legend=tuple(
                    (number, name) for number, (name, own) in enumerate(zip(names, points, strict=True)) if own
                ),
            )
        )
    return Charts(charts=tuple(found))


def _evaluated(record: Record, column: str, steps: Axis) -> Chart | None:
    title, label = EVALUATED[column]
    own, limits = _points(record, column), _limits(record, column)
    partners = [(name, _points(record, other)) for other, name in PARTNERS.get(column, ())]
    if not own and not any(points for _, points in partners):
        return None
    lines: list[Line] = []
    legend: list[tuple[int, str]] = []
    for series, (name, points) in enumerate(partners, start=1):
        if points:
            lines.append(line(series, points, dashed=series == 1))
            legend.append((series, name))
    area, at = band(0, limits), dict(own)
    ends = [((step, at[step]), low, high) for step, low, high in limits if step in at]
    if own:
        lines.append(line(0, own, marked=True))
        legend.insert(0, (0, "evaluation data, 95% interval" if limits else "evaluation data"))
    heights = _heights([own, *(points for _, points in partners)], [limits])
    return Chart(
        title=title,
        words=_words(own, limits, "on evaluation data") or _words(partners[0][1], [], "in training batches"),
        x=steps,
        y=axis(label, heights, include=_chance(column)),
        lines=tuple(lines),
        # A band needs two evaluations: the interval of a single one is drawn at its point.
        dots=() if area is not None else tuple(Dot(series=0, at=at, low=low, high=high) for at, low, high in ends),
        bands=() if area is None else (area,),
        rules=_chance_rule(column),
        legend=tuple(legend),
    )


def _score_spread(record: Record, steps: Axis) -> Chart | None:
    """Return the chart of mean and standard deviation of all scores."""
    mean, std = _points(record, "eval_score_mean"), _points(record, "eval_score_std")
    if not mean:
        return None
    return Chart(
        title="Scores of evaluation data",
        words=f"Mean: {_inside(_words(mean, [], ''))} Standard deviation: {_inside(_words(std, [], ''))}".strip(),
        x=steps,
        y=axis("score", _heights([mean, std], []), include=(0.0,)),
        lines=(line(0, mean, marked=True), line(1, std, dashed=True, marked=True)),
        rules=(Rule(axis="y", at=0.0),),
        legend=((0, "mean"), (1, "standard deviation")),
    )


def _single(record: Record, column: str, steps: Axis) -> Chart | None:
    title, label = SINGLE[column]
    points = _points(record, column)
    if not points:
        return None
    return Chart(
        title=title,
        words=_words(points, [], ""),
        x=steps,
        y=axis(label, _heights([points], []), include=(0.0,)),
        lines=(line(0, points),),
    )


def _words(points: Sequence[Point], limits: Sequence[tuple[float, float, float]], where: str) -> str:
    """Return where a curve begins and ends, as a sentence."""
    if not points:
        return ""
    (first, begins), (last, ends) = points[0], points[-1]
    of = f" {where}" if where else ""
    intervals = {step: (low, high) for step, low, high in limits}
    if len(points) == 1:
        return f"{_said(last, ends, intervals)}{of}."
    return f"From {_said(first, begins, intervals)} to {_said(last, ends, intervals)}{of}."


def _inside(sentence: str) -> str:
    """Return a sentence as it stands after a colon."""
    return f"{sentence[:1].lower()}{sentence[1:]}"


def _said(step: float, value: float, intervals: Mapping[float, tuple[float, float]]) -> str:
    """Return a value with its interval, if there is one at its step, and the step."""
    if step not in intervals:
        return f"{value:.4g} at step {step:,.0f}"
    low, high = intervals[step]
    estimate = Estimate(value=value, low=low, high=high, n=0, method="")
    return f"{format_estimate(estimate)} at step {step:,.0f}"


def _points(record: Record, column: str) -> list[Point]:
    return [(row["step"], row[column]) for row in record.rows if column in row]


def _limits(record: Record, column: str) -> list[tuple[float, float, float]]:
    low, high = f"{column}_low", f"{column}_high"
    return [(row["step"], row[low], row[high]) for row in record.rows if low in row and high in row]


def _heights(points: Sequence[Sequence[Point]], limits: Sequence[Sequence[tuple[float, float, float]]]) -> list[float]:
    """Return every value that the y axis of a chart has to include."""
    ends = [end for own in limits for _, low, high in own for end in (low, high)]
    return [height for own in points for _, height in own] + ends


def _steps(records: Sequence[Record]) -> Axis:
    steps = [row["step"] for record in records for row in record.rows]
    return axis("optimiser step", steps, include=(0.0,), whole=True)


def _chance(column: str) -> tuple[float, ...]:
    return (CHANCE.get(column, 0.0),)


def _chance_rule(column: str) -> tuple[Rule, ...]:
    return (Rule(axis="y", at=CHANCE[column], label="chance"),) if column in CHANCE else ()
