"""The jobs of a study: what was submitted, when, and under which numbers (`STUDY/slurm/jobs.json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_json, write_json
from rewardlab.experiments.log import now

FORMAT: Final = 1
Kind = Literal["runs", "gate", "report"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or an array of them."""

    name: str
    """Its name, such as `main`, `main.gate` or `report`, which is that of its script too."""
    kind: Kind
    phase: str = ""
    script: Path
    shown: str
    """Its name in the queue."""
    runs: tuple[str, ...] = ()
    """Names of the runs of an array, in the order of its tasks."""
    needs: tuple[str, ...] = ()
    """Names of the jobs that must succeed before it begins: the gate before it."""
    waits_for: tuple[str, ...] = ()
    """Names of the jobs that must end before it begins."""
    id: str = ""
    """Its number in the queue; empty if it was not submitted."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """Jobs that were submitted together."""

    time: str
    """In UTC."""
    jobs: tuple[Job, ...]


def jobs_file(folder: Path) -> Path:
    """Return the file that lists the jobs of a study."""
    return folder / "slurm" / "jobs.json"


def read_jobs(folder: Path) -> list[Submitted]:
    """Return what was submitted for a study, oldest first. Raises DataError for a file that was changed."""
    path = jobs_file(folder)
    if not path.is_file():
        return []
    try:
        values: Any = read_json(path)
        return [
            Submitted(time=str(one["time"]), jobs=tuple(_job(job, path.parent) for job in one["jobs"]))
            for one in values["submissions"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read as the list of jobs ({error}). Move it away; what it told of the queue is lost, "
            f"the runs are not."
        ) from error


def note_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Add jobs that were submitted together to the list of a study."""
    submissions = [*read_jobs(folder), Submitted(time=now(), jobs=tuple(jobs))]
    write_json(
        jobs_file(folder),
        {
            "format": FORMAT,
            "submissions": [{"time": one.time, "jobs": [_values(job) for job in one.jobs]} for one in submissions],
        },
    )


def dependency(job: Job, numbers: Mapping[str, str]) -> str:
    """Return the dependency that sbatch is given for a job, from the `numbers` of jobs by name; empty without any."""
    kinds = (("afterok", job.needs), ("afterany", job.waits_for))
    return ",".join(":".join([kind, *(numbers[name] for name in names)]) for kind, names in kinds if names)


def with_id(job: Job, number: str) -> Job:
    """Return a job with its number in the queue."""
    return replace(job, id=number)


def _values(job: Job) -> dict[str, Any]:
    return {
        "name": job.name,
        "kind": job.kind,
        "phase": job.phase,
        "id": job.id,
        "shown": job.shown,
        "script": job.script.name,
        "needs": list(job.needs),
        "waits_for": list(job.waits_for),
        "runs": list(job.runs),
    }


def _job(values: Any, folder: Path) -> Job:
    return Job(
        name=str(values["name"]),
        kind=values["kind"],
        phase=str(values["phase"]),
        script=folder / str(values["script"]),
        shown=str(values["shown"]),
        runs=tuple(str(run) for run in values["runs"]),
        needs=tuple(str(name) for name in values["needs"]),
        waits_for=tuple(str(name) for name in values["waits_for"]),
        id=str(values["id"]),
    )
