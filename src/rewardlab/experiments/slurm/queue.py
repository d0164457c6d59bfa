"""What Slurm says about the jobs of a study: `squeue` about those that wait or run, `sacct` about those that ended.

Either may be missing or refuse: a study's own records say what was done, Slurm only adds what waits and what was killed
without a word.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from rewardlab.experiments.slurm.jobs import Job, read_jobs

ENDED: Final = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "SPECIAL_EXIT", "TIMEOUT"),
    )
)
"""States of jobs that will not go on by themselves."""
LIVING: Final = frozenset(("RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STOPPED", "SUSPENDED"))
"""States of jobs whose processes may live."""
CHOOSING: Final = ("SQUEUE_", "SACCT_", "SCANCEL_")
"""Beginnings of the variables by which users choose what these programs show and ask."""
TIMEOUT_S: Final = 60
"""Longest wait for an answer of squeue or sacct."""
UNKNOWN_JOB: Final = "invalid job id"
"""What squeue says when it has forgotten a job, some minutes after its end."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What Slurm says about a job, or about a task of an array."""

    job: str
    """Its number, such as `4711_3`."""
    state: str
    """In Slurm's words, such as `PENDING`, `RUNNING`, `COMPLETED`, `OUT_OF_MEMORY`."""
    detail: str = ""
    """Why it waits, such as `Dependency`; or its exit status and signal, such as `1:0`."""
    is_queued: bool
    """Whether it waits, runs or will run."""

    @property
    def may_live(self) -> bool:
        """Whether it may have processes now. One that waits has none, also if it was queued again while it ran."""
        return self.state in LIVING

    @property
    def words(self) -> str:
        """State and detail."""
        return f"{self.state}: {self.detail}" if self.detail else self.state


@dataclass(frozen=True, kw_only=True)
class Queue:
    """What Slurm says about a study."""

    runs: Mapping[str, JobState]
    """Name of a run -> its task, in the newest submission that Slurm knows; one that is queued takes precedence."""
    others: Mapping[str, JobState]
    """Name of a gate or report -> its job."""
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Number of a job, or of a task such as `4711_3` -> its state, of all submissions."""
    problems: Sequence[str] = ()
    """What could not be asked, in words."""

    @property
    def queued(self) -> list[str]:
        """Numbers of what waits or runs."""
        return [one.job for one in (*self.runs.values(), *self.others.values()) if one.is_queued]


def ask_slurm(folder: Path) -> Queue:
    """Return what Slurm says about the jobs of a study's folder. Raises DataError if the list of jobs was changed."""
    submissions = read_jobs(folder)
    jobs = [job for one in submissions for job in one.jobs if job.id]
    if not jobs:
        return Queue(runs={}, others={})
    waiting, squeue_problem = _squeue(jobs)
    ended, sacct_problem = _sacct(jobs, submissions[0].time, gone=not squeue_problem)
    runs: dict[str, JobState] = {}
    others: dict[str, JobState] = {}
    known: dict[str, JobState] = {}
    for job in jobs:
        for index, name in enumerate(job.runs) if job.kind == "runs" else [(None, job.name)]:
            number = job.id if index is None else f"{job.id}_{index}"
            found = waiting.get(number) or ended.get(number)
            if found is None and sacct_problem and not squeue_problem:
                # Nobody tells how it ended, but that it has.
                found = JobState(job=number, state="UNKNOWN", detail="squeue has it no more", is_queued=False)
            if found is None:
                continue
            known[number] = found
            kept = runs if job.kind == "runs" else others
            if not (name in kept and kept[name].is_queued and not found.is_queued):
                kept[name] = found
    problems = [text for text in (squeue_problem, sacct_problem) if text]
    return Queue(runs=runs, others=others, jobs=known, problems=problems)


def _squeue(jobs: Sequence[Job]) -> tuple[dict[str, JobState], str]:
    words = ["--noheader", "--array", f"--jobs={','.join(job.id for job in jobs)}", "--format=%F|%K|%T|%r"]
    output, problem = _ask("squeue", words)
    found = {}
    for line in output.splitlines():
        number, _, rest = line.strip().partition("|")
        index, _, rest = rest.partition("|")
        state, _, reason = rest.partition("|")
        if state:
            name = f"{number}_{index}" if index.isdecimal() else number
            reason = "" if reason == "None" else reason
            found[name] = JobState(job=name, state=state, detail=reason, is_queued=state not in ENDED)
    return found, problem


def _sacct(jobs: Sequence[Job], since: str, *, gone: bool) -> tuple[dict[str, JobState], str]:
    """Return what sacct says, and its problem. `gone`: squeue answered, so what it does not list is not queued."""
    # Numbers are used again on large clusters, and the accounting keeps jobs for years. So a job counts only if it is
    # newer than the first submission and has the right name.
    begin = datetime.fromisoformat(since.replace("Z", "+00:00")).astimezone() - timedelta(days=1)
    shown = {job.id: job.shown for job in jobs}
    words = ["--noheader", "--parsable2", "--allocations", f"--jobs={','.join(shown)}"]
    words += [f"--starttime={begin:%Y-%m-%dT%H:%M:%S}", "--format=JobID,State,ExitCode,JobName"]
    output, problem = _ask("sacct", words)
    found = {}
    for line in output.splitlines():
        number, state, status, name = ([*line.strip().split("|", 3), "", "", ""])[:4]
        if state and shown.get(number.partition("_")[0]) == name:
            for one in _tasks(number):
                found[one] = _of_sacct(one, state.split()[0], status, gone=gone)  # `CANCELLED by 1000`
    return found, problem


def _of_sacct(job: str, state: str, status: str, *, gone: bool) -> JobState:
    if state in ENDED:
        return JobState(job=job, state=state, detail=status, is_queued=False)
    if gone:
        # sacct says RUNNING for ever of a job that died with its controller.
        return JobState(job=job, state="UNKNOWN", detail=f"sacct says {state}, squeue has none", is_queued=False)
    return JobState(job=job, state=state, is_queued=True)


def _tasks(number: str) -> Iterator[str]:
    """Yield the tasks of `4711_[0-2,5%2]`, as sacct writes what waits; anything else as it is."""
    array = re.fullmatch(r"(\d+)_\[([\d,-]+)(?:%\d+)?\]", number)
    if array is None:
        yield number
        return
    for part in array[2].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            for index in range(int(first), int(last or first) + 1):
                yield f"{array[1]}_{index}"


def unfiltered() -> dict[str, str]:
    """Return the environment without the variables by which users choose what squeue, sacct and scancel show and ask
    them, such as `SQUEUE_PARTITION`: with these a job that waits would not be seen."""
    return {name: value for name, value in os.environ.items() if not name.startswith(CHOOSING)}


def _ask(program: str, words: Sequence[str]) -> tuple[str, str]:
    """Return the answer of a program, and in words why there is none."""
    if shutil.which(program) is None:
        return "", f"{program} is not there"
    try:
        answer = subprocess.run(
            [program, *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            env=unfiltered(),
        )
    except subprocess.TimeoutExpired:
        return "", f"{program} did not answer within {TIMEOUT_S} seconds"
    except OSError as error:
        return "", f"{program} cannot be started: {error.strerror or error}"
    if answer.returncode and UNKNOWN_JOB not in answer.stderr.lower():
        said = (answer.stderr.strip() or f"exit status {answer.returncode}").splitlines()[-1]
        return "", f"{program}: {said}"
    return answer.stdout, ""
