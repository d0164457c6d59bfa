"""Do a study on this machine: phase after phase, each gate before the next phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import brief
from rewardlab.core.values import did_you_mean
from rewardlab.experiments.config import RunConfig
from rewardlab.experiments.gates import GateVerdict, after_choice, judge_gate, not_searched, select
from rewardlab.experiments.local import run_all
from rewardlab.experiments.plan import Phase, Run
from rewardlab.experiments.records import record_of, undone
from rewardlab.experiments.searching import search_by_optuna
from rewardlab.experiments.study import Study, open_study, require_same_data

STUCK: Final = ("outdated", "damaged")
"""States of runs that are left alone until somebody asks for them with --redo."""
FAILED: Final = 1


def run_study(config: RunConfig, *, say: Callable[[str], None], redo: Callable[[Study, Run], None]) -> int:
    """Do the runs of a study that are not done, and return the exit status.

    It is 0 if all that was asked for is done, 1 if a run failed or a gate is closed, 2 if a gate is undecided. Raises
    ConfigError for names that the study does not have, DataError if data have changed.
    """
    study = open_study(config.study)
    _require_known(study, config)
    require_same_data(study)
    for run in _to_redo(study, config.redo):
        redo(study, run)
    failed = False
    last = max(index for index, one in enumerate(study.plan.phases) if one.name in (config.phases or [one.name]))
    for phase in study.plan.phases[: last + 1]:
        study = open_study(config.study)
        if config.phases and phase.name not in config.phases:
            # Its runs are not asked for, and its gate stands before those that are.
            if phase.gate and (status := _pass(study, phase, config, say)):
                return FAILED if failed else status
            continue
        left = _do(study, phase, config, say)
        failed = failed or bool(left)
        study = open_study(config.study)
        phase = phase_named(study, phase.name)
        if phase.search is not None and not left and not not_searched(study, phase):
            say(chosen_line(select(study, phase), after_choice(study, phase)))
        if phase.gate and (status := _pass(study, phase, config, say)):
            return FAILED if failed else status
    return FAILED if failed else 0


def _to_redo(study: Study, names: Sequence[str]) -> list[Run]:
    """Return runs that are named, or whose arms are. Raises ConfigError for a name that is neither."""
    found: dict[str, Run] = {}
    for name in names:
        of_arm = [run for run in study.runs if run.arm == name]
        for run in of_arm or [study.run_named(name)]:
            found[run.name] = run
    return list(found.values())


def _do(study: Study, phase: Phase, config: RunConfig, say: Callable[[str], None]) -> list[Run]:
    """Do the runs of a phase that are not done, and return those that failed."""

    def do(study: Study, runs: Sequence[Run]) -> list[Run]:
        return run_all(study, runs, jobs=config.jobs, gpus=config.gpus, say=say)

    if phase.search is None or phase.search.optuna is None or config.arms or study.winner is not None:
        pending = _pending(study, phase, config)
        stuck = [run for run in pending if record_of(study, run).state in STUCK]
        for run in stuck:
            said = record_of(study, run)
            say(f"{run.name}: {said.state}: {said.message}; do it again with --redo {run.name}, or --redo {run.arm}")
        return stuck + do(study, [run for run in pending if run not in stuck])
    left = search_by_optuna(study.folder, phase.name, do, say=say)
    study = open_study(study.folder)
    # Runs of the search that are left are those of trials that failed.
    return left + do(study, [run for run in _pending(study, phase, config) if run.reads_test])


def _pending(study: Study, phase: Phase, config: RunConfig) -> Sequence[Run]:
    runs = [run for run in study.runs if run.phase == phase.name and (not config.arms or run.arm in config.arms)]
    return undone(study, runs)


def _pass(study: Study, phase: Phase, config: RunConfig, say: Callable[[str], None]) -> int:
    """Return 0 if the gate of a phase may be passed, else the exit status."""
    gate = judge_gate(study, phase)
    if not gate.may_pass and config.past_gate == phase.name:
        study.note("gate passed", phase=phase.name, reason=" ".join(config.reason.split()), state=gate.state)
        gate = judge_gate(open_study(study.folder), phase)
    for line in gate_lines(gate):
        say(line)
    if not gate.may_pass and phase != study.plan.phases[-1]:
        say(f"the runs after {phase.name} are not begun. To pass all the same: --past-gate {phase.name} --reason WHY")
    return gate.exit_status


def phase_named(study: Study, name: str) -> Phase:
    """Return a phase. Raises ConfigError if the study has none of that name."""
    phases = {phase.name: phase for phase in study.plan.phases}
    if name not in phases:
        near = did_you_mean(name, phases)
        raise ConfigError(f"--phase: the study has no {brief(name)}.{near} It has: {', '.join(phases)}.")
    return phases[name]


def chosen_line(chosen: Mapping[str, Any], late: Sequence[str]) -> str:
    """Return what a search chose, as a line, with what was run after the choice (`after_choice`)."""
    line = f"{chosen['phase']}: chosen on validation data: {chosen['arm']}, of {chosen['tried']} arms"
    if not late:
        return line
    return f"{line}. {' '.join(late)} It is made once; to choose among all of them, freeze another study"


def gate_lines(gate: GateVerdict) -> list[str]:
    """Return a gate and its claims as lines."""
    lines = [f"gate of {gate.phase}: {gate.state}{f' ({gate.reason})' if gate.reason else ''}"]
    return lines + [f"  {verdict.name}: {verdict.verdict}: {verdict.sentence}" for verdict in gate.verdicts]


def _require_known(study: Study, config: RunConfig) -> None:
    phases = [phase.name for phase in study.plan.phases]
    arms = list(dict.fromkeys(run.arm for run in study.runs))
    for flag, given, known in (
        ("--phases", config.phases, phases),
        ("--past-gate", [config.past_gate] if config.past_gate else [], phases),
        ("--arms", config.arms, list(dict.fromkeys([*arms, "winner"]))),
    ):
        if unknown := [name for name in given if name not in known]:
            near = did_you_mean(unknown[0], known)
            raise ConfigError(f"{flag}: the study has no {brief(unknown[0])}.{near} It has: {', '.join(known)}.")
