"""What has to hold before the next phase, and which arm is chosen: by validation data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Estimate
from rewardlab.experiments.at_limits import weighed_sum
from rewardlab.experiments.claims import parse
from rewardlab.experiments.expressions import Claim, Term
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.plan import Phase, Plan, Run
from rewardlab.experiments.quantities import clamped, quantity_named
from rewardlab.experiments.records import undone
from rewardlab.experiments.study import SELECTED, Study
from rewardlab.experiments.sweeps import drawn_trials
from rewardlab.experiments.verdicts import Verdict, judge

GateState = Literal["open", "closed", "undecided", "passed by hand"]


@dataclass(frozen=True, kw_only=True)
class GateVerdict:
    """Whether the next phase may begin."""

    phase: str
    state: GateState
    """`closed` if any claim is refuted, `open` if all are supported, else `undecided`."""
    verdicts: tuple[Verdict, ...]
    reason: str = ""
    """Why it was passed by hand, or which runs it waits for."""

    @property
    def may_pass(self) -> bool:
        """Whether the next phase may begin."""
        return self.state in ("open", "passed by hand")

    @property
    def exit_status(self) -> int:
        """0 if the next phase may begin, 1 if the gate is closed, 2 if nothing is decided."""
        return 0 if self.may_pass else 1 if self.state == "closed" else 2


def gate_claim(text: str) -> Claim:
    """Return a claim of a gate, whose scores are of validation data. Raises ConfigError if it asks for test data."""
    claim = parse(text)
    if 'on="test"' in claim.text.replace(" ", ""):
        raise ConfigError(f"{text!r}: a gate reads validation data only; the test data are for the verdicts.")
    return claim.judged_on("validation")


def asked_of(plan: Plan, phase: Phase) -> dict[str, Claim]:
    """Return the claims of a gate, without those about arms that are not run at this scale, if others are left."""
    claims = {name: gate_claim(text) for name, text in phase.gate.items()}
    kept = {name: claim for name, claim in claims.items() if not {term.arm for term in claim.terms} & {*plan.left_out}}
    return kept or claims


def judge_gate(study: Study, phase: Phase) -> GateVerdict:
    """Return whether the gate of a phase is open. It stays undecided until every run that it asks about is done.

    Otherwise it could open because the runs that would have closed it failed.
    """
    claims = asked_of(study.plan, phase)
    found, missing = Outcomes(study, may_read="validation").observe(
        term for claim in claims.values() for term in claim.terms
    )
    verdicts = tuple(judge(claims, found, missing=missing))
    passed = next(
        (entry for entry in reversed(study.entries) if entry["kind"] == "gate passed" and entry["phase"] == phase.name),
        None,
    )
    said = {verdict.verdict for verdict in verdicts}
    arms = {term.arm for claim in claims.values() for term in claim.terms}
    left = undone(study, (run for run in study.runs if run.arm in arms))
    is_open = said <= {"supported"} and not left
    state: GateState = "closed" if "refuted" in said else "open" if is_open else "undecided"
    if state != "open" and passed is not None:
        return GateVerdict(phase=phase.name, state="passed by hand", verdicts=verdicts, reason=str(passed["reason"]))
    why = f"{len(left)} of the runs it asks about are not done, such as {left[0].name}" if left else ""
    return GateVerdict(phase=phase.name, state=state, verdicts=verdicts, reason=why)


def require_gates_passed(study: Study, run: Run) -> None:
    """Raise ConfigError if a run stands behind a gate that is not passed."""
    for phase in study.plan.phases:
        if phase.name == run.phase:
            return
        if phase.gate and not (found := judge_gate(study, phase)).may_pass:
            raise ConfigError(
                f"{run.name}: the gate of {phase.name} is {found.state}{f' ({found.reason})' if found.reason else ''}. "
                f"To pass all the same: rewardlab plan run {study.word} --past-gate {phase.name} --reason WHY."
            )


# --- choosing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An arm of a search."""

    arm: str
    estimate: Estimate
    """Mean of the metric that chooses, over seeds and prompts of the validation data."""


def candidates(study: Study, phase: Phase) -> list[Candidate]:
    """Return the arms of a search with runs that are done, the best first, by the mean over their seeds.

    Arms that the search dropped are not among them: they have fewer seeds.
    """
    assert phase.search is not None
    quantity = quantity_named(phase.search.metric)
    terms = {
        arm.name: Term(quantity.name, arm.name, on="validation")
        for arm in phase.search.arms
        if arm.name not in phase.search.pruned
    }
    found, _ = Outcomes(study, may_read="validation").observe(terms.values())
    sign = -1.0 if quantity.better == "lower" else 1.0
    listed = [
        Candidate(
            arm=name,
            estimate=clamped(
                weighed_sum([(term.quantity, found[term], 1.0)], found[term].mean).interval(0.95), quantity.name
            ),
        )
        for name, term in terms.items()
        if term in found
    ]
    return sorted(listed, key=lambda one: -sign * one.estimate.value)


def select(study: Study, phase: Phase) -> Mapping[str, Any]:
    """Choose the best arm of a search, note it in the log, and return the entry.

    Raises DataError while runs of the search are not done, or Optuna has arms left to draw: the choice is made once,
    from all of them.
    """
    assert phase.search is not None
    if study.winner is not None:
        return study.winner
    if why := not_searched(study, phase):
        raise DataError(
            f"{phase.name}: {why}. The winner is chosen once, from all of them: do them with `rewardlab plan run "
            f"{study.folder} --phases {phase.name}`."
        )
    ranked = candidates(study, phase)
    if not ranked:
        raise DataError(f"{phase.name}: no run of the search is done, so nothing can be chosen.")
    best = next(arm for arm in phase.search.arms if arm.name == ranked[0].arm)
    shown = [{"arm": one.arm, **to_mapping(one.estimate)} for one in ranked[:20]]
    values = {
        "phase": phase.name,
        "arm": best.name,
        "settings": dict(best.settings),
        "metric": phase.search.metric,
        "on": "validation",
        "tried": len(phase.search.arms),
        "arms": [arm.name for arm in phase.search.arms],
        "pruned": sorted(phase.search.pruned),
        "ranked": shown,
    }
    study.note(SELECTED, **values)
    return values


def after_choice(study: Study, phase: Phase) -> tuple[str, ...]:
    """Return in sentences which arms of a search have runs from after the choice: those that were added by an
    amendment, and those that were done again."""
    chosen = study.winner
    if chosen is None or phase.search is None:
        return ()
    arms = [arm.name for arm in phase.search.arms]
    told = [*(one["arm"] for one in chosen["ranked"]), *chosen["pruned"]]
    # Earlier versions noted the best arms alone; where these are not all of them, nothing is known.
    known = chosen.get("arms", told if len(told) == chosen["tried"] else arms)
    after = study.entries[next(place for place, entry in enumerate(study.entries) if entry is chosen) :]
    redone = {entry["run"].rpartition("/")[0] for entry in after if entry["kind"] == "redone"}
    added, again = [arm for arm in arms if arm not in known], [arm for arm in arms if arm in known and arm in redone]
    return (
        *([f"Run after the choice, and no part of it: {', '.join(added)}."] if added else []),
        *([f"Done again after the choice, which went by the runs before: {', '.join(again)}."] if again else []),
    )


def not_searched(study: Study, phase: Phase) -> str:
    """Return why a search cannot choose yet; empty if all its trials are drawn, and all their runs done."""
    assert phase.search is not None
    searched = [run for run in study.runs if run.phase == phase.name and not run.reads_test]
    left, trials = undone(study, searched), phase.search.optuna.trials if phase.search.optuna is not None else 0
    why = []
    if (drawn := len(drawn_trials(study.entries, phase.name))) < trials:
        why.append(f"{drawn} of {trials} trials are drawn")
    if left:
        why.append(f"{len(left)} of the {len(searched)} runs of its search are not done, such as {left[0].name}")
    return ", and ".join(why)
