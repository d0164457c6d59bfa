"""Bands, gates and selection of a study: what its plan said would count, and which arm was chosen by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewardlab.core.errors import RewardlabError
from rewardlab.experiments.bands import Bands, BandVerdict, band_verdict
from rewardlab.experiments.checking import term_of
from rewardlab.experiments.gates import Candidate, GateVerdict, after_choice, candidates, judge_gate
from rewardlab.experiments.plan import WINNER, Phase
from rewardlab.experiments.quantities import quantity_named
from rewardlab.experiments.reporting.history import arms_judged
from rewardlab.experiments.reporting.numbers import Cell, Column, Reader
from rewardlab.experiments.study import Study


@dataclass(frozen=True, kw_only=True)
class BandFound:
    """A band of the plan, and where its quantity lies."""

    about: str
    failure: float | None
    success: float | None
    expected: tuple[float, float] | None
    verdict: BandVerdict | None
    why: str = ""
    """Why nothing is known; empty if something is."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A search: which arms were tried, which was chosen, and what became of the winner on fresh seeds."""

    phase: str
    metric: str
    chosen: str
    """Empty before anything is chosen."""
    time: str
    settings: Mapping[str, Any]
    tried: int
    ranked: tuple[Candidate, ...]
    """All arms with finished runs, the best first, on validation data: the first one is flattered, since it was chosen
    by this number."""
    untold: tuple[str, ...]
    """Arms without a finished run."""
    pruned: tuple[str, ...]
    """Arms that were dropped before their last seed, and could not be chosen."""
    late: tuple[str, ...]
    """Which arms have runs from after the choice, in sentences."""
    fresh: Cell | None
    """The same number over the winner's fresh seeds; None where the plan runs none."""
    test: Cell | None
    """The winner on test data, on fresh seeds."""


def bands_of(study: Study, reader: Reader) -> tuple[BandFound, ...]:
    """Return where the quantities of all bands lie."""
    found = []
    for band in study.plan.bands:
        term = term_of(band.about, [*arms_judged(study.runs), *study.plan.left_out, WINNER])
        observed = reader.get(term)
        edges = Bands(term=term, failure=band.failure, success=band.success, expected=band.expected)
        most = reader.most_steps([term.arm])
        found.append(
            BandFound(
                about=band.about,
                failure=band.failure,
                success=band.success,
                expected=band.expected,
                verdict=None if observed is None else band_verdict(edges, observed, max_steps=most),
                why=reader.why(term),
            )
        )
    return tuple(found)


def gates_of(study: Study) -> tuple[GateVerdict, ...]:
    """Return the gates of all phases that have one, judged on validation data."""
    return tuple(judge_gate(study, phase) for phase in study.plan.phases if phase.gate)


def selections_of(study: Study, reader: Reader) -> tuple[Selection, ...]:
    """Return the searches of the plan."""
    return tuple(_selection(study, reader, phase) for phase in study.plan.phases if phase.search is not None)


def _selection(study: Study, reader: Reader, phase: Phase) -> Selection:
    assert phase.search is not None
    winner = study.winner or {}
    try:
        ranked = tuple(candidates(study, phase))
    except RewardlabError:
        ranked = ()
    told = {one.arm for one in ranked}
    name = quantity_named(phase.search.metric).name
    judged = WINNER in arms_judged(study.runs)
    return Selection(
        phase=phase.name,
        metric=name,
        chosen=str(winner.get("arm", "")),
        time=str(winner.get("time", "")),
        settings=dict(winner.get("settings", {})),
        tried=int(winner.get("tried", len(phase.search.arms))),
        ranked=ranked,
        untold=tuple(arm.name for arm in phase.search.arms if arm.name not in {*told, *phase.search.pruned}),
        pruned=tuple(phase.search.pruned),
        late=after_choice(study, phase),
        fresh=reader.cell(Column(quantity=name, on="validation").term(WINNER)) if judged else None,
        test=reader.cell(Column(quantity=name).term(WINNER)) if judged else None,
    )
