"""How far a study is: from the records of its runs and what their folders hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, Final

from rewardlab.core.terminal import number_of
from rewardlab.experiments.gates import GateVerdict, judge_gate
from rewardlab.experiments.plan import Run
from rewardlab.experiments.records import RunRecord, State, record_of, undone
from rewardlab.experiments.slurm.queue import Queue
from rewardlab.experiments.study import Study
from rewardlab.report.folder import read_progress
from rewardlab.report.tables import format_count, text_table

ORDER: Final[tuple[State, ...]] = ("done", "running", "interrupted", "waiting", "outdated", "damaged", "failed")
TO_MEND: Final = frozenset(("failed", "outdated", "damaged"))
"""States of runs that do not go on by themselves."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How far a run is."""

    run: Run
    state: str
    """That of its record, or what the queue says of one that has not begun."""
    message: str = ""
    step: int | None = None
    num_steps: int | None = None
    seconds: float | None = None
    """Seconds from begin to end, of a run that was done in one go."""
    signs: tuple[str, ...] = ()
    """Names of warning signs."""
    job_ended: bool = False
    """Whether it has not begun, and its job in Slurm has ended, so that nothing will begin it."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a study is."""

    study: Study
    runs: Sequence[RunStatus]
    problems: Sequence[str] = ()
    """What could not be asked of Slurm."""
    closed: Sequence[GateVerdict] = ()
    """Gates that are not passed though all runs before them are done, so that the study does not go on."""

    @property
    def exit_status(self) -> int:
        """0 if all runs are done, 1 if one failed, 2 if some are not done yet."""
        states = {one.state for one in self.runs}
        is_over = states <= {"done"} and not self.study.not_drawn
        return 0 if is_over else 1 if states & TO_MEND else 2

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the rest takes if runs go on as before; None before the first is done."""
        done = [one.seconds for one in self.runs if one.seconds is not None]
        if self.closed:
            return None
        left = sum(1.0 - _share(one) for one in self.runs if one.state not in {"done", *TO_MEND})
        at_once = max(1, sum(one.state == "running" for one in self.runs))
        return median(done) * left / at_once if done and left else 0.0 if not left else None

    def as_dict(self) -> dict[str, Any]:
        """Return the state of the study as JSON values."""
        return {
            "study": str(self.study.folder),
            "title": self.study.plan.title,
            "version": self.study.version,
            "exit_status": self.exit_status,
            "seconds_left": self.seconds_left,
            "closed_gates": {gate.phase: gate.state for gate in self.closed},
            "runs": [
                {
                    "run": one.run.name,
                    "phase": one.run.phase,
                    "state": one.state,
                    "message": one.message,
                    "step": one.step,
                    "num_steps": one.num_steps,
                    "seconds": one.seconds,
                    "warnings": list(one.signs),
                }
                for one in self.runs
            ],
        }


def status_of(study: Study, queue: Queue) -> Status:
    """Return how far a study is, by its records and by what Slurm says."""
    runs = [_status(study, run, queue) for run in study.runs]
    return Status(study=study, runs=runs, problems=queue.problems, closed=_closed(study))


def _closed(study: Study) -> list[GateVerdict]:
    """Return the first gate that is not passed though the runs of its phase are done."""
    for phase in study.plan.phases[:-1]:
        if undone(study, (run for run in study.runs if run.phase == phase.name)):
            return []
        if phase.gate and not (gate := judge_gate(study, phase)).may_pass:
            return [gate]
    return []


def _status(study: Study, run: Run, queue: Queue) -> RunStatus:
    record, queued = record_of(study, run), queue.runs.get(run.name)
    state, message = str(record.state), record.message
    if record.state in ("running", "interrupted") and record.values["state"] == "running":
        # Its process did not say how it ended. The job that it belongs to need not be the newest of the run.
        own = queue.jobs.get(record.slurm_job)
        if own is not None and not own.may_live:
            state, message = "interrupted", f"Slurm says of job {own.job}: {own.words}"
    if state in ("waiting", "interrupted") and queued is not None and queued.is_queued:
        # Nobody has to start it again: what the record advises does not hold.
        state, message = f"{state} ({queued.words})", message if state == "waiting" else ""
    if record.state == "waiting" and not record.values and queued is not None and not queued.is_queued:
        # The shell of the job, its environment or a node failed before the run could say anything.
        message = f"it did not begin. Slurm says of job {queued.job}: {queued.words}"
        return RunStatus(run=run, state=state, message=message, job_ended=True)
    if record.state == "waiting":
        return RunStatus(run=run, state=state, message=message)
    if (found := read_progress(study.run_folder(run))) is None:
        return RunStatus(run=run, state=state, message=message)
    return RunStatus(
        run=run,
        state=state,
        message=message,
        step=found.step,
        num_steps=found.num_steps,
        seconds=_seconds(record),
        signs=tuple(dict.fromkeys(sign.name for sign in found.signs)),
    )


def _share(one: RunStatus) -> float:
    return min(1.0, one.step / one.num_steps) if one.step and one.num_steps else 0.0


def _seconds(record: RunRecord) -> float | None:
    if record.state != "done" or record.attempts > 1 or not record.started or not record.ended:
        return None
    began, ended = (datetime.fromisoformat(one) for one in (record.started, record.ended))
    return max((ended - began).total_seconds(), 1.0)


def text_report(status: Status) -> str:
    """Return the state of a study for a terminal."""
    counts = Counter(one.state.partition(" ")[0] for one in status.runs)
    states_told = ", ".join(f"{format_count(counts[state])} {state}" for state in ORDER if counts[state])
    left = status.seconds_left
    ending = "" if not left else f"; about {_duration(left)} left" if math.isfinite(left) else ""
    rows = []
    for arm in dict.fromkeys(one.run.arm for one in status.runs):
        mine = [one for one in status.runs if one.run.arm == arm]
        states = Counter(one.state for one in mine)
        signs = Counter(name for one in mine for name in one.signs)
        rows.append(
            (
                mine[0].run.phase,
                arm,
                f"{states['done']} of {len(mine)}",
                ", ".join(f"{count} {state}" for state, count in states.items() if state != "done"),
                ", ".join(
                    f"seed {one.run.seed}: {one.step}/{one.num_steps or '?'}"
                    for one in mine
                    if one.state == "running" and one.step is not None
                ),
                ", ".join(f"{name} ({count})" for name, count in signs.items()),
            )
        )
    lines = [
        "",
        f"{status.study.plan.title}: {states_told} of {number_of(len(status.runs), 'run')}{ending}",
        text_table(("phase", "arm", "done", "others", "steps", "warning signs"), rows),
    ]
    failed = [one for one in status.runs if one.state in {"interrupted", *TO_MEND} and one.message]
    # Behind a gate that is closed, Slurm has taken the jobs out of the queue.
    unbegun = [] if status.closed else [one for one in status.runs if one.job_ended]
    if study_left := status.study.not_drawn:
        lines += ["", f"{study_left} trials of a search by Optuna are not drawn yet, and have no runs so far."]
    lines += [
        f"the gate of {gate.phase} is {gate.state}, so the runs behind it are not begun: rewardlab plan gate "
        f"{status.study.word} --phase {gate.phase}"
        for gate in status.closed
    ]
    lines += [f"Slurm: {problem}" for problem in status.problems]
    told = [*failed, *unbegun]
    lines += ["", *(f"{one.run.name}: {one.state}: {one.message}" for one in told)] if told else []
    if unbegun:
        where = status.study.plan.slurm.get("log_folder") or f"{status.study.folder}/slurm/logs"
        lines.append(
            f"What jobs printed is in {where}; `rewardlab plan submit {status.study.word}` submits them again."
        )
    # `rewardlab train` speaks of its own flag, which a study does not have.
    if any("--resume" in one.message for one in failed):
        word = status.study.word
        lines.append(f"In a study that is `rewardlab plan run {word}`, or `rewardlab plan submit {word}` on Slurm.")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
