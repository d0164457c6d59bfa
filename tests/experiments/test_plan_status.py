"""What `plan status` tells of runs, from their records and from Slurm's queue."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rewardlab.core.errors import DataError, RunInterrupted
from rewardlab.core.files import write_json, write_summed_json
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.one_run import do
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.records import begin_record, record_of
from rewardlab.experiments.slurm.queue import JobState, Queue
from rewardlab.experiments.status import status_of, text_report
from rewardlab.report import evaluations, folder
from rewardlab.report.evaluations import read_object
from study_folders import do_all, frozen_study


def test_status_tells_what_is_done_failed_and_lost(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    nothing = Queue(runs={}, others={})
    assert status_of(study, nothing).exit_status == 2
    do_all(study, study.runs[:4], sign="overfitting")
    told = text_report(status_of(study, nothing))
    assert "4 done, 5 waiting of 9 runs" in told
    assert "overfitting (3)" in told

    def fails(arguments: object) -> None:
        raise DataError("the disk is full")

    with pytest.raises(DataError):
        do(study, study.runs[4], fails)
    found = status_of(study, nothing)
    assert found.exit_status == 1
    assert "smooth/seed_1: failed: DataError: the disk is full" in text_report(found)
    queued = Queue(
        runs={study.runs[5].name: JobState(job="7_5", state="PENDING", is_queued=True)},
        others={},
        problems=["no sacct"],
    )
    told = text_report(status_of(study, queued))
    assert "waiting (PENDING)" in told
    assert "Slurm: no sacct" in told
    assert json.loads(json.dumps(found.as_dict()))["exit_status"] == 1


def test_a_study_is_told_without_the_scores_of_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are most of what a run writes, and a study may have hundreds of runs."""
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:4])
    for run in study.runs[:4]:
        write_json(study.run_folder(run) / "reward_distributions.json", {"100": {"chosen": [1.0], "rejected": [0.0]}})
    read: list[str] = []

    def note(path: Path) -> dict[str, object]:
        read.append(path.name)
        return read_object(path)

    monkeypatch.setattr(folder, "read_object", note)
    monkeypatch.setattr(folder, "read_judged", lambda path, problems: read.append(path.name))
    told = status_of(study, Queue(runs={}, others={}))
    assert [one.step for one in told.runs[:4]] == [400] * 4
    assert set(read) == {"config.json"}
    monkeypatch.setattr(folder, "read_judged", evaluations.read_judged)
    found, missing = Outcomes(study, may_read="test").observe([Term("accuracy", study.runs[0].arm)])
    assert found
    assert not missing
    assert "reward_distributions.json" not in read


def test_nobody_is_told_to_start_a_run_that_slurm_has_queued_again(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)

    def stops(arguments: object) -> None:
        raise RunInterrupted("stopped. Start the same command again with --resume auto", exit_status=75)

    with pytest.raises(RunInterrupted):
        do(study, study.runs[0], stops)
    told = text_report(status_of(study, Queue(runs={}, others={})))
    assert "Start the same command again" in told
    assert f"In a study that is `rewardlab plan run {study.word}`, or" in told.splitlines()[-1]
    again = JobState(job="7_0", state="PENDING", detail="BeginTime", is_queued=True)
    told = text_report(status_of(study, Queue(runs={study.runs[0].name: again}, others={})))
    assert "1 interrupted (PENDING: BeginTime)" in told
    assert "1 interrupted, 8 waiting of 9 runs" in told
    assert "again" not in told


def test_a_job_that_ended_before_its_run_began_is_told(tmp_path: Path) -> None:
    """The environment of a job may fail before the run writes a record, so that it would wait for ever."""
    study = frozen_study(tmp_path)
    first, second, third = study.runs[:3]
    do_all(study, [third])
    ended = {
        first.name: JobState(job="7_0", state="FAILED", detail="1:0", is_queued=False),
        second.name: JobState(job="7_1", state="PENDING", is_queued=True),
        third.name: JobState(job="7_2", state="COMPLETED", detail="0:0", is_queued=False),
    }
    found = status_of(study, Queue(runs=ended, others={}))
    assert (found.exit_status, found.runs[0].state) == (2, "waiting")
    *_, told, where = text_report(found).splitlines()
    assert told == f"{first.name}: waiting: it did not begin. Slurm says of job 7_0: FAILED: 1:0"
    assert where.startswith(f"What jobs printed is in {study.folder}/slurm/logs; `rewardlab plan submit ")
    assert text_report(found).count("did not begin") == 1


@pytest.mark.parametrize(
    ("job", "host", "states", "expected"),
    [
        # Killed on another machine, by a failed node or a preemption, and queued again.
        ("7_0", "node9", {"7_0": ("PENDING", "BeginTime")}, "1 interrupted (PENDING: BeginTime)"),
        ("7_0", "node9", {"7_0": ("RUNNING", "")}, "1 running"),
        # Killed, and submitted again.
        ("7_0", "node9", {"7_0": ("NODE_FAIL", "0:0"), "9_0": ("PENDING", "Priority")}, "(PENDING: Priority)"),
        # By hand in an allocation, after its own job had failed.
        ("4711", "node9", {"7_0": ("FAILED", "1:0")}, "1 running"),
        # On this machine, where one sees that its process is gone.
        ("7_0", "", {"7_0": ("OUT_OF_MEMORY", "0:125")}, "Slurm says of job 7_0: OUT_OF_MEMORY: 0:125"),
    ],
)
def test_a_run_is_as_its_own_job_is_and_waits_as_its_newest_job_does(
    job: str,
    host: str,
    states: dict[str, tuple[str, str]],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    if "_" in job:
        for name, value in zip(("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), job.split("_"), strict=True):
            monkeypatch.setenv(name, value)
    values = dict(begin_record(study, run).values)
    assert values["slurm_job"] == job
    place = {"host": host} if host else {"process": 2**22 - 1}
    values.pop("sha256", None)
    write_summed_json(study.folder / "records" / f"{run.name}.json", {**values, **place})
    jobs = {
        number: JobState(job=number, state=state, detail=detail, is_queued=state in ("PENDING", "RUNNING"))
        for number, (state, detail) in states.items()
    }
    told = text_report(status_of(study, Queue(runs={run.name: list(jobs.values())[-1]}, others={}, jobs=jobs)))
    assert expected in told
    assert "None/" not in told


def test_commands_that_are_printed_can_be_pasted(tmp_path: Path) -> None:
    study = replace(frozen_study(tmp_path), folder=Path("studies/half done"))
    assert study.word == "'studies/half done'"


def test_a_run_whose_process_died_is_interrupted(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]

    def stays(arguments: object) -> None:
        assert record_of(study, run).state == "running"
        path = study.folder / "records" / f"{run.name}.json"
        values = json.loads(path.read_text(encoding="utf-8"))

        del values["sha256"]
        write_summed_json(path, {**values, "process": 2**22 - 1})
        assert record_of(study, run).state == "interrupted"
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        do(study, run, stays)
