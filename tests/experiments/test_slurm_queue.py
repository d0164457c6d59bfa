"""What a stand-in for Slurm says of the jobs of a study."""

from __future__ import annotations

import json

import pytest

from rewardlab.core.errors import ConfigError
from rewardlab.experiments.slurm.jobs import read_jobs
from rewardlab.experiments.slurm.queue import ask_slurm
from rewardlab.experiments.slurm.submitting import submit
from slurm_cluster import Cluster


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    return Cluster(tmp_path, monkeypatch)


@pytest.mark.slow
def test_what_waits_and_why_is_told_by_run(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    queue = ask_slurm(study.folder)
    assert (queue.runs["a/seed_1"].job, queue.runs["a/seed_1"].state, queue.runs["a/seed_1"].detail) == (
        "100_1",
        "PENDING",
        "Priority",
    )
    assert queue.runs["c/seed_0"].detail == "Dependency"
    assert set(queue.others) == {"first.gate", "report"}
    assert queue.problems == []


@pytest.mark.slow
def test_an_earlier_job_of_the_same_number_is_not_taken_for_ours(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    cluster.slurm.answer("squeue", "")
    cluster.slurm.answer("sacct", "100_0|FAILED|1:0|somebody-else\n100_1|COMPLETED|0:0|study-first\n")
    queue = ask_slurm(study.folder)
    assert "a/seed_0" not in queue.runs
    assert queue.runs["a/seed_1"].state == "COMPLETED"
    (words,) = cluster.slurm.asked("sacct")
    (begin,) = [word for word in words if word.startswith("--starttime=")]
    assert begin[len("--starttime=") :][:4] == read_jobs(study.folder)[0].time[:4]


@pytest.mark.slow
def test_what_sacct_says_is_read_in_all_its_forms(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    cluster.slurm.answer("squeue", "", status=1, error="down\n")
    cluster.slurm.answer(
        "sacct",
        "100_0|CANCELLED by 1000|0:15|study-first\n100_[1-2,3%2]|PENDING|0:0|study-first\n"
        "200|OUT_OF_MEMORY|0:125|study-first.gate\n300_0|RUNNING|0:0|study-second\nrubbish\n",
    )
    queue = ask_slurm(study.folder)
    assert {name: state.state for name, state in queue.runs.items()} == {
        "a/seed_0": "CANCELLED",
        "a/seed_1": "PENDING",
        "b/seed_0": "PENDING",
        "b/seed_1": "PENDING",
        "c/seed_0": "RUNNING",
    }
    assert queue.others["first.gate"].state == "OUT_OF_MEMORY"
    assert queue.queued == ["100_1", "100_2", "100_3", "300_0"]
    assert queue.problems == ["squeue: down"]


@pytest.mark.slow
def test_what_sacct_believes_to_run_is_gone_if_squeue_knows_nothing_of_it(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    cluster.slurm.answer("squeue", "")
    cluster.slurm.answer("sacct", "100_0|RUNNING|0:0|study-first\n")
    found = ask_slurm(study.folder).runs["a/seed_0"]
    assert (found.state, found.is_queued) == ("UNKNOWN", False)
    assert "sacct says RUNNING" in found.detail


@pytest.mark.slow
def test_of_two_submissions_the_newer_counts_unless_the_older_is_queued(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    submit(study, again=True)
    cluster.slurm.answer("squeue", "100|0|RUNNING|None\n")
    cluster.slurm.answer(
        "sacct", "600_0|FAILED|1:0|study-first\n100_1|FAILED|1:0|study-first\n600_1|TIMEOUT|0:0|study-first\n"
    )
    queue = ask_slurm(study.folder)
    assert (queue.runs["a/seed_0"].job, queue.runs["a/seed_0"].state, queue.runs["a/seed_0"].detail) == (
        "100_0",
        "RUNNING",
        "",
    )
    assert queue.runs["a/seed_1"].state == "TIMEOUT"


def test_without_squeue_and_sacct_that_is_said(cluster, monkeypatch):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    monkeypatch.setenv("PATH", "")
    queue = ask_slurm(study.folder)
    assert (queue.runs, queue.others) == ({}, {})
    assert queue.problems == ["squeue is not there", "sacct is not there"]


def test_what_a_user_has_squeue_leave_out_is_seen_all_the_same(cluster, monkeypatch):
    cluster.slurm.hold()
    study = cluster.study(phases=[{"name": "main", "arms": ["a"], "seeds": [0]}])
    submit(study)
    for name in ("squeue", "scancel"):
        program = cluster.slurm.bin / name
        told = '[ -z "${SQUEUE_PARTITION:-}${SCANCEL_INTERACTIVE:-}" ] || exit 0\nexec '
        program.write_text(program.read_text().replace("exec ", told))
    monkeypatch.setenv("SQUEUE_PARTITION", "mine")
    monkeypatch.setenv("SCANCEL_INTERACTIVE", "1")
    assert ask_slurm(study.folder).queued == ["100_0", "200"]
    cluster.slurm.refuse("report.sbatch")
    with pytest.raises(ConfigError, match="were cancelled"):
        submit(study, again=True)
    assert cluster.slurm.asked("scancel") == [["300"]]


@pytest.mark.slow
def test_without_sacct_what_squeue_has_no_more_has_ended(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    cluster.slurm.answer("squeue", "100|1|RUNNING|None\n")
    cluster.slurm.answer("sacct", "", status=1, error="Slurm accounting storage is disabled\n")
    queue = ask_slurm(study.folder)
    assert {name: (one.state, one.is_queued) for name, one in queue.runs.items() if name.startswith("a")} == {
        "a/seed_0": ("UNKNOWN", False),
        "a/seed_1": ("RUNNING", True),
    }
    assert queue.jobs["100_0"].detail == "squeue has it no more"
    cluster.slurm.answer("squeue", "", status=1, error="down\n")
    assert not ask_slurm(study.folder).runs, "nobody can be asked"


def test_a_study_that_was_never_submitted_asks_nobody(cluster):
    assert ask_slurm(cluster.study().folder).problems == ()
    assert cluster.slurm.asked("squeue") == []


def test_the_list_of_jobs_can_be_read_by_others(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    values = json.loads((study.folder / "slurm" / "jobs.json").read_text())
    first = values["submissions"][0]["jobs"][0]
    assert (first["name"], first["id"], first["runs"][0], first["script"]) == (
        "first",
        "100",
        "a/seed_0",
        "first.sbatch",
    )
