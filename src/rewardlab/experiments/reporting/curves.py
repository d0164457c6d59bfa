"""Learning curves of the arms: accuracy and loss on validation data by step, over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rewardlab.experiments.outcomes import Outcome
from rewardlab.experiments.reporting.history import arms_judged
from rewardlab.experiments.reporting.numbers import Reader
from rewardlab.experiments.study import Study

CURVES: Final = ("eval_accuracy", "eval_loss")
"""Columns of metrics.csv that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A column at a step, over the seeds that have it there."""

    step: int
    mean: float
    least: float
    most: float


@dataclass(frozen=True, kw_only=True)
class ArmCurve:
    """A column of one arm, by step."""

    arm: str
    column: str
    seeds: int
    points: tuple[Point, ...]
    """Up to the last step that every seed has, so that one seed never speaks for all."""
    ends: tuple[int, ...]
    """The last step of each seed, in order of seeds."""


def curves_of(study: Study, reader: Reader) -> tuple[ArmCurve, ...]:
    """Return the curves of all arms that are judged and have some."""
    found = []
    for column in CURVES:
        for arm in arms_judged(study.runs):
            curve = _curve(arm, column, reader.done(arm))
            if curve is not None:
                found.append(curve)
    return tuple(found)


def _curve(arm: str, column: str, done: Sequence[Outcome]) -> ArmCurve | None:
    curves = [outcome.curves[column] for outcome in done if column in outcome.curves]
    by_seed = [dict(zip(own.steps_N.tolist(), own.values_N.tolist(), strict=True)) for own in curves]
    if not by_seed:
        return None
    shared = sorted(set.intersection(*(set(own) for own in by_seed)))
    points = []
    for step in shared:
        values = [own[step] for own in by_seed]
        points.append(Point(step=step, mean=sum(values) / len(values), least=min(values), most=max(values)))
    return ArmCurve(
        arm=arm, column=column, seeds=len(by_seed), points=tuple(points), ends=tuple(max(own) for own in by_seed)
    )
