"""Submit a study to Slurm: an array a phase, its gate, the report; then nothing of ours has to stay alive."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError, words_of
from rewardlab.core.files import write_text
from rewardlab.core.lock import only_process
from rewardlab.core.terminal import brief
from rewardlab.core.values import did_you_mean
from rewardlab.experiments.pitfalls import too_many_processes
from rewardlab.experiments.plan import WINNER, Phase
from rewardlab.experiments.records import record_of
from rewardlab.experiments.slurm.jobs import Job, Kind, dependency, note_jobs, read_jobs, with_id
from rewardlab.experiments.slurm.queue import ask_slurm, unfiltered
from rewardlab.experiments.slurm.script import (
    MOST_TASKS,
    Place,
    array_script,
    job_name,
    light_script,
    log_folder,
    options_of,
)
from rewardlab.experiments.slurm_config import SlurmConfig, slurm_config
from rewardlab.experiments.study import Study, read_by, require_data_here

REPORT: Final = "report"
DONE: Final = "done"
NUMBER: Final = re.compile(r"(\d+)(?:;\S*)?")
"""What `sbatch --parsable` prints: the number of the job, and the cluster where there are several."""
SBATCH_TIMEOUT_S: Final = 120
VARIABLES: Final = {"array": "ARRAY_INX", "mem": "MEM_PER_NODE", "time": "TIMELIMIT"}
"""Options whose environment variable has another name."""
KEPT: Final = "SLURM_CONF"
"""Variable that says where Slurm's own settings are, and not what a job is."""
SHOWN: Final = 5
"""Jobs that a message lists."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What was, or would be, submitted."""

    jobs: Sequence[Job]
    """In the order of submission; with their numbers if they were submitted."""
    is_submitted: bool
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Run -> why it is in no job: it is done, or outdated."""
    later: Mapping[str, str] = field(default_factory=dict)
    """Phase -> why it cannot be submitted yet."""
    script: Path
    """A shell script that submits the same jobs by hand."""


def submit(study: Study, phases: Sequence[str] = (), *, dry_run: bool = False, again: bool = False) -> Submission:
    """Write the batch scripts of a study, submit them where `sbatch` exists, note their numbers, and return.

    `phases` are names of phases, all by default; gates of phases before them are asked again. Runs that are done are
    left out. A dry run only writes. Raises ConfigError for a section `slurm` that cannot be used or that its runs
    cannot use, an unknown phase, if nothing is left to submit, if jobs of the study are queued (unless `again`), and
    for what sbatch refuses; then the jobs of this call are cancelled. Raises DataError if data are not there, seen from
    the present folder, in which jobs start, or were changed since the plan was frozen or amended.
    """
    config = slurm_config(study.plan.slurm)
    if why := too_many_processes(config, study.runs):
        raise ConfigError(why)
    if config.job_name is None:
        config = replace(config, job_name=study.folder.absolute().name)
    place = Place(study=study.folder.absolute(), work=Path.cwd(), python=sys.executable)
    if config.container is not None:
        place = replace(place, reads=read_by(study.runs))
    require_data_here(study)
    folder, wanted = place.study / "slurm", _wanted(study, phases)
    # Before anything is made in the study: with nothing to do it stays as it is.
    _Layout(study, config, place, wanted).require_work()
    folder.mkdir(exist_ok=True)
    with only_process(folder, "STUDY"):
        submits = not dry_run and shutil.which("sbatch") is not None
        if submits and not again:
            _require_idle(study)
        layout = _Layout(study, config, place, wanted)
        layout.require_work()
        _write(folder, layout)
        log_folder(config, place).mkdir(parents=True, exist_ok=True)
        jobs = _submit_all(study, layout.jobs) if submits else layout.jobs
    return Submission(
        jobs=jobs,
        is_submitted=submits,
        left_out=layout.left_out,
        later=layout.later,
        script=folder / "submit.sh",
    )


def submission_lines(study: Study, submission: Submission) -> list[str]:
    """Return what was, or would be, submitted, for a terminal."""
    lines = []
    for job in submission.jobs:
        what = f"{len(job.runs)} {'run' if len(job.runs) == 1 else 'runs'}" if job.runs else job.kind
        before = [*(f"{name} if it is open" for name in job.needs), *job.waits_for]
        after = f", after {' and '.join(before)}" if before and job.kind != "report" else ""
        lines.append(f"{job.id or 'not submitted':>13}  {job.name}: {what}{after}")
    counts = Counter(submission.left_out.values())
    lines += [f"left out: {count} run{'s' * (count > 1)}: {why}" for why, count in counts.items()]
    lines += [f"left for later: {phase}: {why}" for phase, why in submission.later.items()]
    if not any(job.kind == "report" for job in submission.jobs):
        lines.append("no report: other phases are left to do, and a report before them would be a look at results")
    if submission.is_submitted:
        return [
            *lines,
            "",
            f"rewardlab plan status {study.word} tells how far they are; nothing has to stay open.",
        ]
    return [*lines, "", f"written, not submitted. Where sbatch is: bash {shlex.quote(str(submission.script))}"]


def _wanted(study: Study, phases: Sequence[str]) -> set[str]:
    known = [phase.name for phase in study.plan.phases]
    for name in phases:
        if name not in known:
            raise ConfigError(f"--phases {brief(name)}: the plan has no such phase.{did_you_mean(name, known)}")
    return set(phases) or set(known)


def _require_idle(study: Study) -> None:
    if not read_jobs(study.folder):
        return
    queue = ask_slurm(study.folder)
    if queued := queue.queued:
        told = ", ".join(queued[:SHOWN]) + (" …" if len(queued) > SHOWN else "")
        arrays = " ".join(sorted({one.partition("_")[0] for one in queued}, key=int))
        raise ConfigError(
            f"{study.folder}: {len(queued)} of its jobs wait or run ({told}). Wait for them, end them with `scancel "
            f"{arrays}`, or submit all the same with --again."
        )
    if unasked := [problem for problem in queue.problems if problem.startswith("squeue")]:
        raise ConfigError(
            f"{study.folder}: it was submitted before, and whether its jobs still wait cannot be told: {unasked[0]}. "
            f"Try later, or submit all the same with --again."
        )


class _Layout:
    """The jobs of a study, each with its script, and the runs and phases that are in none."""

    def __init__(self, study: Study, config: SlurmConfig, place: Place, wanted: set[str]) -> None:
        self._study, self._config, self._place, self._wanted = study, config, place, wanted
        self.jobs: list[Job] = []
        self.scripts: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.later: dict[str, str] = {}
        needs: tuple[str, ...] = ()
        waits_for: tuple[str, ...] = ()
        last = max(index for index, phase in enumerate(study.plan.phases) if phase.name in wanted)
        for phase in study.plan.phases[: last + 1]:
            if why := self._why_later(phase):
                self.later[phase.name] = why
                continue
            waits_for = self._add_arrays(phase, needs, waits_for) or waits_for
            if phase.gate:
                self._add_gate(phase, needs, waits_for)
                # All that follows needs the gate, not only the next phase: a job that Slurm takes out of the queue has
                # ended, so `afterany` would let the phase after it begin. A gate needs the gate before it.
                needs, waits_for = (self.jobs[-1].name,), ()
        if not self._unfinished():
            self._add_report()

    def require_work(self) -> None:
        """Raise ConfigError if no run is left to do."""
        if any(job.runs for job in self.jobs):
            return
        told = [f"{phase}: {why}" for phase, why in self.later.items()]
        outdated = [name for name, why in self.left_out.items() if why != DONE]
        told += [f"{outdated[0]}: {self.left_out[outdated[0]]} (so are {len(outdated) - 1} more)"] if outdated else []
        raise ConfigError(f"{self._study.folder}: no run is left to submit. {' '.join(told)}".rstrip())

    def _unfinished(self) -> list[str]:
        """Return the phases that have runs left after these jobs. A report before them would be a look on the way."""
        phases = {run.phase for run in self._study.runs if not record_of(self._study, run).is_over}
        return [
            phase.name
            for phase in self._study.plan.phases
            if phase.name in self.later or (phase.name in phases and phase.name not in self._wanted)
        ]

    def _why_later(self, phase: Phase) -> str:
        if self.later:
            return f"it comes after {next(iter(self.later))}."
        if phase.name not in self._wanted:
            return ""
        if phase.search is not None and phase.search.optuna is not None and self._study.winner is None:
            return (
                f"Optuna chooses each arm when those before are known. Do it with `rewardlab plan run STUDY --phases "
                f"{phase.name}`."
            )
        if WINNER in phase.arms and self._study.winner is None:
            search = next((one.name for one in self._study.plan.phases if one.search is not None), "")
            return (
                f"the winner is not chosen yet. When the runs of {search} are done, `rewardlab plan run STUDY --phases "
                f"{search}` chooses it; then submit again."
            )
        return ""

    def _add_arrays(self, phase: Phase, needs: tuple[str, ...], waits_for: tuple[str, ...]) -> tuple[str, ...]:
        """Add the runs of a phase that are left to do, and return the names of their arrays."""
        runs = self._left(phase) if phase.name in self._wanted else []
        names = []
        for number, begin in enumerate(range(0, len(runs), MOST_TASKS), start=1):
            name = phase.name if number == 1 else f"{phase.name}.{number}"
            chunk = runs[begin : begin + MOST_TASKS]
            script = array_script(self._config, self._place, name=name, phase=phase.name, runs=chunk)
            self._add(name, "runs", script, phase=phase.name, needs=needs, waits_for=waits_for, runs=tuple(chunk))
            names.append(name)
        return tuple(names)

    def _left(self, phase: Phase) -> list[str]:
        left = []
        for run in self._study.runs:
            if run.phase != phase.name:
                continue
            record = record_of(self._study, run)
            if record.is_over:
                self.left_out[run.name] = DONE
            elif record.state in ("outdated", "damaged"):
                what = "other settings or data now" if record.state == "outdated" else "a record that cannot be read"
                self.left_out[run.name] = f"{what}; `rewardlab plan run STUDY --redo {run.name}`"
            else:
                left.append(run.name)
        return left

    def _add_gate(self, phase: Phase, needs: tuple[str, ...], waits_for: tuple[str, ...]) -> None:
        name = f"{phase.name}.gate"
        script = light_script(
            self._config,
            self._place,
            name=name,
            says=f"Gate of the phase {phase.name}: exit status 0 if it is open, 1 if closed, 2 if undecided.",
            words=["plan", "gate", str(self._place.study), "--phase", phase.name],
        )
        self._add(name, "gate", script, phase=phase.name, needs=needs, waits_for=waits_for)

    def _add_report(self) -> None:
        script = light_script(
            self._config,
            self._place,
            name=REPORT,
            says="Report of the study, whatever became of its runs.",
            words=["plan", "report", str(self._place.study)],
        )
        self._add(REPORT, "report", script, waits_for=tuple(job.name for job in self.jobs))

    def _add(
        self,
        name: str,
        kind: Kind,
        script: str,
        *,
        phase: str = "",
        needs: tuple[str, ...] = (),
        waits_for: tuple[str, ...] = (),
        runs: tuple[str, ...] = (),
    ) -> None:
        if name in self.scripts:
            raise ConfigError(f"phases: two jobs would be called {name}. Rename the phase {phase or name}.")
        self.scripts[name] = script
        self.jobs.append(
            Job(
                name=name,
                kind=kind,
                phase=phase,
                script=self._place.study / "slurm" / f"{name}.sbatch",
                shown=job_name(self._config, name),
                runs=runs,
                needs=needs,
                waits_for=waits_for,
            )
        )


def _write(folder: Path, layout: _Layout) -> None:
    # Slurm has copies of what it was given, so no job needs the scripts of an earlier submission.
    for path in folder.glob("*.sbatch"):
        path.unlink()
    for job in layout.jobs:
        write_text(job.script, layout.scripts[job.name])
    write_text(folder / "submit.sh", _by_hand(layout.jobs))


def _by_hand(jobs: Sequence[Job]) -> str:
    """Return a shell script that submits the jobs in order."""
    lines = [
        "#!/usr/bin/env bash",
        "# Submits what lies beside it, where sbatch is. Written by `rewardlab plan submit`.",
    ]
    lines += ["set -euo pipefail", 'cd "$(dirname "$0")"']
    lines += ["# In a job: what describes that one is not meant for these.", 'if [ -n "${SLURM_JOB_ID:-}" ]; then']
    lines += [
        '    for name in "${!SLURM_@}"; do',
        f'        [ "$name" = {KEPT} ] || unset "$name"',
        "    done",
        "fi",
        "",
    ]
    variables = {job.name: f"job{number}" for number, job in enumerate(jobs, start=1)}
    for job in jobs:
        before = dependency(job, {name: f"${{{variable}%;*}}" for name, variable in variables.items()})
        waits = f'--kill-on-invalid-dep=yes "--dependency={before}" ' if before else ""
        variable = variables[job.name]
        lines.append(f"{variable}=$(sbatch --parsable {waits}{shlex.quote(job.script.name)})")
        lines.append(f'echo "${variable}: {job.name}"')
    return "\n".join(lines) + "\n"


# --- sbatch --------------------------------------------------------------------------------------------------------


def _submit_all(study: Study, jobs: Sequence[Job]) -> list[Job]:
    """Submit jobs in order, note their numbers, and return them. If any of this fails, all jobs are cancelled."""
    done: list[Job] = []
    try:
        for job in jobs:
            done.append(with_id(job, _sbatch(job, dependency(job, {one.name: one.id for one in done}))))
        note_jobs(study.folder, done)
    except BaseException as error:
        told = _cancel([job.id for job in done])
        if isinstance(error, ConfigError | OSError):
            raise ConfigError(f"{words_of(error) if isinstance(error, OSError) else error}{told}") from None
        raise
    return done


def _sbatch(job: Job, before: str) -> str:
    words = ["sbatch", "--parsable"]
    if before:
        # Behind a closed gate nothing waits for ever: Slurm takes the jobs out of the queue.
        words += ["--kill-on-invalid-dep=yes", f"--dependency={before}"]
    try:
        answer = subprocess.run(
            [*words, str(job.script)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SBATCH_TIMEOUT_S,
            check=False,
            env=_environment(job.script.read_text(encoding="utf-8")),
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{job.script}: sbatch did not answer within {SBATCH_TIMEOUT_S} seconds, so whether it is queued cannot be "
            f"told: see `squeue --me --name {shlex.quote(job.shown)}`."
        ) from None
    except OSError as error:
        raise ConfigError(f"{job.script}: sbatch cannot be started: {error.strerror or error}.") from None
    lines = answer.stdout.strip().splitlines()
    number = NUMBER.fullmatch(lines[-1].strip()) if lines else None
    if answer.returncode or number is None:
        said = " ".join((answer.stderr.strip() or answer.stdout.strip() or "it says nothing").split())
        raise ConfigError(f"{job.script}: sbatch refuses it: {said}.")
    return number[1]


def _environment(script: str) -> dict[str, str]:
    """Return the environment without the variables that would override what a script tells sbatch.

    Within a job, also without those that describe this job, since sbatch passes them on to the new ones: srun refuses
    memory per core beside that of a node, binds to cores that another job had, and restarts would be counted on.
    """
    hidden = {f"SBATCH_{VARIABLES.get(option, option.replace('-', '_').upper())}" for option in options_of(script)}
    hidden |= {"SBATCH_NO_REQUEUE", "SBATCH_WAIT"}
    if "SLURM_JOB_ID" in os.environ:
        hidden |= {name for name in os.environ if name.startswith("SLURM_")} - {KEPT}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _cancel(numbers: Sequence[str]) -> str:
    if not numbers:
        return " Nothing was submitted before it."
    told = " ".join(numbers)
    try:
        cancelled = subprocess.run(
            ["scancel", *numbers], capture_output=True, timeout=SBATCH_TIMEOUT_S, check=False, env=unfiltered()
        )
    except (OSError, subprocess.TimeoutExpired):
        return f" Jobs were submitted before it; end them with `scancel {told}`."
    if cancelled.returncode:
        return f" Jobs were submitted before it; end them with `scancel {told}`."
    return f" The jobs that were submitted before it ({told}) were cancelled."
