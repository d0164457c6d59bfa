"""What to try next: plain rules, each with the numbers that speak for it (docs/guidelines.md says where they are from).

A rule speaks where the numbers leave no doubt (the whole interval is beyond its limit) or says that it is not sure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

from rewardlab.analysis.health import ADVICE
from rewardlab.core.config import Setting, settings_of
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Estimate
from rewardlab.experiments.gates import GateVerdict
from rewardlab.experiments.part_verdict import brief
from rewardlab.experiments.reporting.arms import ArmRow, Arms
from rewardlab.experiments.reporting.history import Progress, by_arm
from rewardlab.experiments.reporting.hypotheses import Judged
from rewardlab.experiments.reporting.numbers import Cell, interval
from rewardlab.experiments.reporting.sensitivity import Sensitivity
from rewardlab.experiments.reporting.tried import PATIENCE, Settings, advised, controls, idle_patience, named
from rewardlab.training.settings.config import RewardTrainerConfig

LARGE_GAP: Final = 0.10
"""Accuracy on training minus validation rows from which on a model learns by heart."""
LARGE_ECE: Final = 0.10
"""Expected calibration error from which on probabilities mislead."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Something to try, and why."""

    do: str
    because: str


def advice_of(
    arms: Arms,
    judged: Sequence[Judged],
    sensitivities: Sequence[Sensitivity],
    gates: Sequence[GateVerdict],
    progress: Progress,
    *,
    settings: Settings,
    base: str,
) -> tuple[Advice, ...]:
    """Return what to try next, the most urgent first; nothing where no rule applies.

    `settings` are those of every arm, `base` the arm from which the others depart. Controls, whose data were spoilt on
    purpose, need no advice.
    """
    spoilt = controls(settings)
    healthy = replace(arms, rows=tuple(row for row in arms.rows if row.arm not in spoilt))
    idle = idle_patience(settings, {row.arm: row.stopped for row in healthy.rows if row.seeds})
    settings = {arm: {**own, PATIENCE: None} if arm in idle else own for arm, own in settings.items()}
    found = _Study(arms=healthy, settings=settings, base=base, idle=idle)
    return (
        *_unfinished(progress),
        *_gates(gates),
        *_too_large(
            found,
            "gap",
            LARGE_GAP,
            "Less of everything: fewer --steps or --epochs, a lower --lr, --early-stopping-patience 3, "
            "--score-regularization-lambda 0.1, or more data (docs/presets.md in rewardlab's repository, when it "
            "overfits).",
        ),
        *_too_large(
            found,
            "ece",
            LARGE_ECE,
            "Train with --label-smoothing 0.05 or more, choose the checkpoint by "
            "--early-stopping-metric eval_loss, or fit a temperature afterwards: `rewardlab calibrate`.",
        ),
        *_undecided(judged),
        *_edges(sensitivities),
        *_no_better(found),
        *_best_at_the_end(found),
        *_signs(found),
        *_few_seeds(arms),
    )


@dataclass(frozen=True, kw_only=True)
class _Study:
    """The arms that advice is for, with all settings."""

    arms: Arms
    settings: Settings
    base: str
    idle: Mapping[str, int]
    """Arms whose early stopping stopped no run -> their patience; their settings are here without it."""

    def advised(self, do: str, concerned: Sequence[str], others: Mapping[str, str], shown: str) -> str:
        told = advised(do, self.settings, base=self.base, concerned=concerned, others=others, shown=shown)
        flag = f"--{PATIENCE.replace('_', '-')}"
        vain = [f"{arm} ({self.idle[arm]})" for arm in concerned if arm in self.idle] if flag in told else []
        return f"{told} {flag} stopped no run of {named(vain)}." if vain else told


def _unfinished(progress: Progress) -> Iterator[Advice]:
    failed = [one for one in progress.unfinished if one.state in ("failed", "damaged")]
    if failed:
        yield Advice(
            do="Look at what failed (logs/ in the folder of the study) and do it again with `rewardlab plan run`; "
            "failures that depend on what is measured would bias what is left.",
            because=f"failed: {named(by_arm([one.run for one in failed]))}",
        )
    elif progress.unfinished:
        yield Advice(
            do="Finish the runs before anything is concluded: `rewardlab plan run` goes on where it ended.",
            because=f"{progress.done} of {progress.total} runs are done",
        )


def _gates(gates: Sequence[GateVerdict]) -> Iterator[Advice]:
    for gate in gates:
        if gate.state == "closed":
            failed = "; ".join(one.sentence for one in gate.verdicts if one.verdict == "refuted")
            yield Advice(
                do=f"Mend what the gate of {gate.phase} measures before larger runs: `rewardlab diagnose` tells what a "
                f"model really learned.",
                because=failed,
            )


def _too_large(study: _Study, quantity: str, limit: float, do: str) -> Iterator[Advice]:
    """Yield advice if some arm is above a limit; it says so if no arm is above it with its whole interval."""
    rows = study.arms.rows
    found = [(row.arm, cell.estimate) for row in rows for cell in _cost(study.arms, row, quantity)]
    above = [(arm, own) for arm, own in found if own is not None and own.value > limit]
    sure = [(arm, own) for arm, own in above if own.low > limit]
    if not above:
        return
    doubt = "" if sure else " (not sure: every interval reaches below it)"
    because = f"{quantity} above {limit:g}{doubt}: {_measured(sure or above)}"
    others = {arm: f"{quantity} {interval(own)}" for arm, own in found if own is not None and own.value <= limit}
    concerned = [arm for arm, _ in sure or above]
    yield Advice(do=study.advised(do, concerned, others, f"a large {quantity}"), because=because)


def _undecided(judged: Sequence[Judged]) -> Iterator[Advice]:
    for one in judged:
        if one.verdict.verdict == "undecided" and one.verdict.decide:
            yield Advice(do=f"To decide {one.verdict.name}, in a new study: {one.verdict.decide}", because=_seen(one))


def _seen(one: Judged) -> str:
    return "; ".join(map(brief, one.verdict.parts))


def _edges(sensitivities: Sequence[Sensitivity]) -> Iterator[Advice]:
    for found in sensitivities:
        for effect in found.effects:
            if not effect.best_at_edge:
                continue
            side = "below" if effect.best == effect.values[0].value else "above"
            if not _goes_on(effect.setting, float(effect.best), -math.inf if side == "below" else math.inf):
                continue
            told = "; ".join(f"{one.value}: {interval(one.estimate)}" for one in effect.values)
            yield Advice(
                do=f"Widen the grid of {effect.setting}: try values {side} {effect.best}. A best at the edge may not "
                f"be the best there is.",
                because=f"{found.column.title} by {effect.setting}: {told}",
            )


def _goes_on(name: str, value: float, towards: float) -> bool:
    """Return whether a setting may have values beyond this one; yes where its section alone cannot say so."""
    setting = settings_of(RewardTrainerConfig).get(name)
    if setting is None:
        return True
    kinds = {setting.hint, *get_args(setting.hint)}
    is_whole = int in kinds and float not in kinds and value.is_integer()
    beyond = value + math.copysign(1, towards) if is_whole else math.nextafter(value, towards)
    here, there = (int(value), int(beyond)) if is_whole else (value, beyond)
    return _is_allowed(setting, there) or not _is_allowed(setting, here)


def _is_allowed(setting: Setting, value: float) -> bool:
    try:
        setting.part(**{setting.name: value})
    except ConfigError:
        return False
    return True


def _best_at_the_end(study: _Study) -> Iterator[Advice]:
    arms, found, others = study.arms, list[str](), dict[str, str]()
    for row in arms.rows:
        (best,), (stopped,) = _cost(arms, row, "best_step"), _cost(arms, row, "stopped_at")
        if best.by_seed and best.by_seed == stopped.by_seed and row.seeds == row.planned and not row.last:
            found.append(row.arm)
        elif best.estimate is not None:
            others[row.arm] = f"chosen step {interval(best.estimate)}"
    if found:
        do = "Train longer: more --epochs or --steps. The last checkpoint was the best, so the curve may still rise."
        yield Advice(
            do=study.advised(do, found, others, "a best step that is the last"),
            because=f"the best step is the last in every seed of {named(found)}",
        )


def _no_better(study: _Study) -> Iterator[Advice]:
    rows = [row for row in study.arms.rows if row.unbeaten]
    if rows:
        yield Advice(
            do="Look at the learning curves before anything else: where no checkpoint beats the untrained model, the "
            "last one is judged. Another --lr, more --steps or more data may help.",
            because="no checkpoint beat the untrained model on validation data in "
            + ", ".join(f"{row.unbeaten} of {number_of(row.seeds, 'run')} of {row.arm}" for row in rows),
        )


def _signs(study: _Study) -> Iterator[Advice]:
    rows = study.arms.rows
    counts: dict[str, list[ArmRow]] = {}
    for row in rows:
        for name in row.signs:
            counts.setdefault(name, []).append(row)
    for name, where in counts.items():
        if name not in ADVICE:
            continue
        others = {
            row.arm: f"no such sign in {number_of(row.seeds, 'run')}" for row in rows if row.seeds and row not in where
        }
        told = [f"{row.arm} ({row.signs[name]} of {number_of(row.seeds, 'run')})" for row in where]
        yield Advice(
            do=study.advised(ADVICE[name], [row.arm for row in where], others, name),
            because=f"warning sign {name}: {named(told)}",
        )


def _few_seeds(arms: Arms) -> Iterator[Advice]:
    single = [row.arm for row in arms.rows if row.planned == 1]
    if single:
        yield Advice(
            do="Run two more seeds of arms that have one: nothing tells how far another run would be from it.",
            because=f"one seed: {named(single)}",
        )


def _cost(arms: Arms, row: ArmRow, quantity: str) -> list[Cell]:
    return [cell for column, cell in zip(arms.costs, row.costs, strict=True) if column.quantity == quantity]


def _measured(found: Sequence[tuple[str, Estimate | None]]) -> str:
    ordered = sorted(found, key=lambda one: -one[1].value if one[1] is not None else math.inf)
    return named([f"{arm} {interval(own)}" for arm, own in ordered])
