"""All numbers of a study's report, in one tree; text, page, Markdown, CSV and JSON are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rewardlab.experiments.gates import GateVerdict
from rewardlab.experiments.reporting.advice import Advice, advice_of
from rewardlab.experiments.reporting.afterwards import afterwards_of
from rewardlab.experiments.reporting.arms import Arms, against_baseline, arms_of, natural, waterfall_of
from rewardlab.experiments.reporting.choices import BandFound, Selection, bands_of, gates_of, selections_of
from rewardlab.experiments.reporting.curves import ArmCurve, curves_of
from rewardlab.experiments.reporting.history import (
    Deviation,
    Frozen,
    Progress,
    deviations_of,
    frozen_of,
    progress_of,
    states_of,
)
from rewardlab.experiments.reporting.hypotheses import Judged, counted, exit_status, judged_of
from rewardlab.experiments.reporting.methods import methods_of
from rewardlab.experiments.reporting.numbers import Column, Difference, Reader
from rewardlab.experiments.reporting.sensitivity import Sensitivity, sensitivities_of
from rewardlab.experiments.study import Study


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a study came to."""

    title: str
    question: str
    headline: str
    exit_status: int
    """0 if every hypothesis, unchanged since results were seen, is supported by all its runs, 1 if any is refuted,
    else 2."""
    progress: Progress
    hypotheses: tuple[Judged, ...]
    removed: Mapping[str, str]
    """Hypothesis that was taken out of the plan after results had been seen -> its claim."""
    primary: Column
    arms: Arms
    baseline: str
    """The arm that others are compared with; empty if the plan names none."""
    against_baseline: tuple[Difference, ...]
    waterfall: tuple[str, ...]
    """Arms of the ablation."""
    steps: tuple[Difference, ...]
    """Steps of the ablation: each arm minus the one before."""
    curves: tuple[ArmCurve, ...]
    sensitivities: tuple[Sensitivity, ...]
    bands: tuple[BandFound, ...]
    gates: tuple[GateVerdict, ...]
    selections: tuple[Selection, ...]
    frozen: Frozen
    deviations: tuple[Deviation, ...]
    advice: tuple[Advice, ...]
    methods: str

    @property
    def amendments(self) -> list[Deviation]:
        """Changes of the plan after it was frozen."""
        return [one for one in self.deviations if one.kind == "amendment"]


def summarise(study: Study) -> Summary:
    """Return everything that the report of a study says.

    Whatever cannot be read is named where its number would stand. Raises ConfigError for a plan whose claims cannot be
    read, which `check` refuses before it is frozen.
    """
    reader = Reader(study)
    states = states_of(study)
    progress = progress_of(study, states)
    afterwards = afterwards_of(study)
    judged = judged_of(study, reader, afterwards)
    arms = arms_of(study, reader)
    sensitivities = sensitivities_of(study, reader)
    told = (run for run in reversed(study.runs) if run.reads_test and run.knows_settings)
    settings = {run.arm: reader.settings(run) for run in told}
    base = study.plan.baseline or next((row.arm for row in arms.rows), "")
    gates, selections = gates_of(study), selections_of(study, reader)
    deviations = deviations_of(study, states, progress)
    return Summary(
        title=study.plan.title,
        question=study.plan.question,
        headline=counted(judged, afterwards.removed),
        exit_status=exit_status(judged, afterwards.removed),
        progress=progress,
        hypotheses=judged,
        removed=afterwards.removed,
        primary=natural(study.plan.primary),
        arms=arms,
        baseline=study.plan.baseline or "",
        against_baseline=against_baseline(study, reader),
        waterfall=study.plan.waterfall,
        steps=waterfall_of(study, reader),
        curves=curves_of(study, reader),
        sensitivities=sensitivities,
        bands=bands_of(study, reader),
        gates=gates,
        selections=selections,
        frozen=frozen_of(study),
        deviations=deviations,
        advice=advice_of(arms, judged, sensitivities, gates, progress, settings=settings, base=base),
        methods=methods_of(
            study,
            reader,
            arms,
            gates,
            selections,
            deviations,
            progress,
            num_tested=judged[0].verdict.num_hypotheses if judged else 0,
        ),
    )
