"""The arms of a study side by side: every quantity that is asked for, differences from the baseline, the waterfall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.analysis.ceiling import Ceiling, of_score_rows
from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import sha256_json
from rewardlab.core.terminal import number_of
from rewardlab.experiments.claims import parse
from rewardlab.experiments.plan import Plan
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.reporting.history import arms_judged
from rewardlab.experiments.reporting.numbers import Cell, Column, Difference, Reader, differences
from rewardlab.experiments.reporting.shared import shared_of
from rewardlab.experiments.study import Study

COSTS: Final = (
    "gap",
    "ece",
    "trainable_parameters",
    "trainable_share",
    "tokens_per_second",
    "pairs_per_second",
    "peak_memory",
    "seconds",
    "stopped_at",
    "best_step",
)
"""Quantities of cost and health that are shown for every arm."""


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """What the runs of one arm came to."""

    arm: str
    says: str
    phase: str
    seeds: int
    """Seeds that are done."""
    planned: int
    cells: tuple[Cell, ...]
    """One for each of the table's `columns`."""
    costs: tuple[Cell, ...]
    """One for each of the table's `costs`."""
    signs: Mapping[str, int]
    """Warning sign -> runs that had it."""
    last: int
    """Runs that judged the model of their last step, since no other was chosen."""
    unbeaten: int
    """Those of `last` that have validation data, on which no checkpoint beat the untrained model."""
    data: str
    """Data by which it was judged: comparisons and prompts, or why that is not known."""
    stopped: int = 0
    """Runs that ended before the last step of their settings."""


@dataclass(frozen=True, kw_only=True)
class Arms:
    """All arms that are judged, including those that lost."""

    columns: tuple[Column, ...]
    """The primary quantity, then what hypotheses ask for."""
    costs: tuple[Column, ...]
    rows: tuple[ArmRow, ...]
    left_out: Mapping[str, str]
    """Arm -> why it is not run at this scale."""
    data: tuple[str, ...]
    """Different data by which runs were judged: one, if the comparison is fair."""
    apart: tuple[str, ...] = ()
    """Arms in groups with the same test rows, and how many rows, if runs of one seed were judged on different ones."""
    shared: tuple[str, ...] = ()
    """Other data that test rows share prompts or replies with, a phrase each; empty if there are none."""
    ceilings: tuple[Ceiling, ...] = ()
    """What a perfect model would reach on each different set of test rows that shows it."""


def columns_of(plan: Plan) -> tuple[Column, ...]:
    """Return the primary quantity and those that hypotheses ask for, each once."""
    asked = [term for one in plan.hypotheses.values() for term in parse(one.claim).terms]
    columns = [natural(plan.primary), *(Column(quantity=one.quantity, step=one.step, on=one.on) for one in asked)]
    return tuple(dict.fromkeys(columns))


def natural(name: str) -> Column:
    """Return the column of a quantity on its default data: validation for curves, test for everything else."""
    quantity = quantity_named(name)
    return Column(quantity=quantity.name, on="validation" if quantity.source == "curve" else "test")


def arms_of(study: Study, reader: Reader) -> Arms:
    """Return all arms with what their finished runs came to."""
    columns = columns_of(study.plan)
    costs = tuple(natural(name) for name in COSTS)
    rows = tuple(_row(study, reader, arm, columns, costs) for arm in arms_judged(study.runs))
    return Arms(
        columns=columns,
        costs=costs,
        rows=rows,
        left_out=dict(study.plan.left_out),
        data=tuple(dict.fromkeys(row.data for row in rows if row.seeds)),
        apart=_apart(reader, [row.arm for row in rows]),
        shared=shared_of(reader, [row.arm for row in rows]),
        ceilings=_ceilings(reader, [row.arm for row in rows]),
    )


def _row(study: Study, reader: Reader, arm: str, columns: tuple[Column, ...], costs: tuple[Column, ...]) -> ArmRow:
    done = reader.done(arm)
    runs = [run for run in study.runs if run.arm == arm]
    signs: dict[str, int] = {}
    for outcome in done:
        for name in dict.fromkeys(sign.name for sign in outcome.record.signs):
            signs[name] = signs.get(name, 0) + 1
    last = [outcome.record for outcome in done if (own := outcome.record.model_folder) and own.name != "best"]
    known = study.plan.arms.get(arm)
    winner = study.winner
    return ArmRow(
        arm=arm,
        says=known.says if known is not None else f"chosen: {winner['arm']}" if winner is not None else "",
        phase=runs[0].phase,
        seeds=len(done),
        planned=len(runs),
        cells=tuple(reader.cell(column.term(arm)) for column in columns),
        costs=tuple(reader.cell(column.term(arm)) for column in costs),
        signs=signs,
        last=len(last),
        unbeaten=sum("selection" in record.evaluations for record in last),
        data="; ".join(dict.fromkeys(_data(reader, arm))) or "no run is done",
        stopped=sum(outcome.stopped_early for outcome in done),
    )


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """The test rows that a run was judged on."""

    comparisons: int
    prompts: int
    rows: str
    """A hash of the prompts and of how many comparisons each has."""

    def __str__(self) -> str:
        return f"{number_of(self.comparisons, 'comparison')} of {number_of(self.prompts, 'prompt')}"


def _judged(reader: Reader, arm: str) -> dict[int, _Judged]:
    """Return seed -> what its run was judged on; runs whose scores cannot be read are left out."""
    found = {}
    for outcome in reader.done(arm):
        try:
            table = outcome.table("test")
        except RewardlabError:
            continue
        numbers, counts = np.unique(table.pairs.prompt, return_counts=True)
        rows = sha256_json([[str(table.prompts[n]), int(count)] for n, count in zip(numbers, counts, strict=True)])
        found[outcome.run.seed] = _Judged(comparisons=int(counts.sum()), prompts=len(numbers), rows=rows)
    return found


def _data(reader: Reader, arm: str) -> Iterator[str]:
    """Yield what the runs of an arm were judged by."""
    found = _judged(reader, arm)
    drawn = ", others for each seed" if len({one.rows for one in found.values()}) > 1 else ""
    for said in dict.fromkeys(map(str, found.values())):
        yield f"{said}{drawn}"
    if len(found) < len(reader.done(arm)):
        yield "test scores that cannot be read"


def _apart(reader: Reader, arms: Sequence[str]) -> tuple[str, ...]:
    """Return arms with the same test rows, group by group, for the first seed with more than one group."""
    by_arm = {arm: _judged(reader, arm) for arm in arms}
    for seed in sorted({seed for found in by_arm.values() for seed in found}):
        groups: dict[str, list[str]] = {}
        for arm, found in by_arm.items():
            if seed in found:
                groups.setdefault(found[seed].rows, []).append(arm)
        if len(groups) > 1:
            return tuple(f"{', '.join(members)}: {by_arm[members[0]][seed]}" for members in groups.values())
    return ()


def _ceilings(reader: Reader, arms: Sequence[str]) -> tuple[Ceiling, ...]:
    """Return the different ceilings of the test rows of all finished runs, each set of rows read once."""
    read: dict[str, Ceiling | None] = {}
    for arm in arms:
        judged = _judged(reader, arm)
        for outcome in reader.done(arm):
            own = judged.get(outcome.run.seed)
            if own is not None and own.rows not in read:
                read[own.rows] = of_score_rows(outcome.rows("test"))
    return tuple(dict.fromkeys(one for one in read.values() if one is not None))


def against_baseline(study: Study, reader: Reader) -> tuple[Difference, ...]:
    """Return every other arm minus the baseline, by the primary quantity; none without a baseline."""
    base = study.plan.baseline
    if base is None:
        return ()
    others = [arm for arm in arms_judged(study.runs) if arm != base]
    return differences(reader, natural(study.plan.primary), [(arm, base) for arm in others])


def waterfall_of(study: Study, reader: Reader) -> tuple[Difference, ...]:
    """Return every step of the ablation: an arm minus the one before, by the primary quantity."""
    arms = study.plan.waterfall
    return differences(reader, natural(study.plan.primary), list(zip(arms[1:], arms, strict=False)))
