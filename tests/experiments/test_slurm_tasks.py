"""Studies on a stand-in for Slurm: in which order tasks run, and what becomes of those that are killed."""

from __future__ import annotations

from collections import Counter

import pytest

from fake_slurm import NODE_FAILED
from rewardlab.experiments.slurm.jobs import read_jobs
from rewardlab.experiments.slurm.queue import ask_slurm
from rewardlab.experiments.slurm.submitting import submit
from slurm_cluster import Cluster, numbers


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    return Cluster(tmp_path, monkeypatch)


# --- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_phases_follow_each_other_and_gates_go_before_what_they_guard(cluster):
    study = cluster.study()
    submission = submit(study)
    assert submission.is_submitted
    assert [job.name for job in submission.jobs] == ["first", "first.gate", "second", "third", "report"]
    number = numbers(submission)
    waits = {job["name"].removeprefix("study-"): job["dependency"] for job in cluster.slurm.jobs.values()}
    assert waits == {
        "first": [],
        "first.gate": [["afterany", number["first"]]],
        "second": [["afterok", number["first.gate"]]],
        "third": [["afterok", number["first.gate"]], ["afterany", number["second"]]],
        "report": [["afterany", *(number[name] for name in ("first", "first.gate", "second", "third"))]],
    }
    assert cluster.done == [
        "a:seed_0",
        "a:seed_1",
        "b:seed_0",
        "b:seed_1",
        "gate:first",
        "c:seed_0",
        "d:seed_0",
        "report",
    ]
    assert [job.id for job in read_jobs(study.folder)[0].jobs] == list(number.values())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("status", [1, 2])
def test_behind_a_gate_that_is_not_open_only_the_report_is_made(status, cluster):
    cluster.ends("gate:first", status)
    study = cluster.study()
    submit(study)
    assert cluster.done == ["a:seed_0", "a:seed_1", "b:seed_0", "b:seed_1", "gate:first", "report"]
    assert [cluster.slurm.tasks(f"study-{name}")["0"]["state"] for name in ("second", "third")] == ["CANCELLED"] * 2
    queue = ask_slurm(study.folder)
    assert queue.others["first.gate"].detail == f"{status}:0"
    assert queue.runs["c/seed_0"].state == "CANCELLED"
    assert queue.queued == []


@pytest.mark.slow
def test_a_task_that_fails_ends_no_other_and_its_status_is_that_of_the_job(cluster):
    cluster.ends("a:seed_1", 3)
    study = cluster.study()
    submit(study)
    assert [task["status"] for task in cluster.slurm.tasks("study-first").values()] == [0, 3, 0, 0]
    assert cluster.done.count("a:seed_1") == 1
    assert "gate:first" in cluster.done
    assert ask_slurm(study.folder).runs["a/seed_1"].state == "FAILED"


# --- queued again --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_that_has_work_left_is_queued_again_alone(cluster):
    cluster.ends("a:seed_0", 75)
    cluster.ends("b:seed_1", 75, 140)
    submit(cluster.study())
    counts = Counter(cluster.done)
    assert (counts["a:seed_0"], counts["b:seed_1"], counts["a:seed_1"], counts["b:seed_0"]) == (2, 3, 1, 1)
    assert [task["status"] for task in cluster.slurm.tasks("study-first").values()] == [0, 0, 0, 0]
    # b:seed_1 is the last of its array, whose own number is that of the whole array.
    array = cluster.slurm.asked("scontrol")[-1][1].partition("_")[0]
    assert [words[1] for words in cluster.slurm.asked("scontrol")] == [f"{array}_0", f"{array}_3", f"{array}_3"]
    assert f"b:seed_1 restart=0 rank= world= job={array}" in cluster.log


@pytest.mark.slow
def test_a_task_whose_node_fails_is_queued_again(cluster):
    cluster.ends("a:seed_1", NODE_FAILED)
    submit(cluster.study())
    assert Counter(cluster.done)["a:seed_1"] == 2
    assert cluster.slurm.asked("scontrol") == []


@pytest.mark.slow
def test_a_task_is_queued_again_so_often_and_then_fails_with_its_status(cluster):
    cluster.ends("a:seed_0", 75, 75, 75, 75)
    study = cluster.study(max_restarts=2)
    submit(study)
    assert [line.split()[1] for line in cluster.log if line.startswith("a:seed_0")] == [
        "restart=0",
        "restart=1",
        "restart=2",
    ]
    assert cluster.slurm.tasks("study-first")["0"] == {"state": "FAILED", "status": 75, "restarts": 2}
    log = next((study.folder / "slurm" / "logs").glob("first-*_0.log")).read_text()
    assert "a/seed_0: has work left after 2 restarts (slurm.max_restarts); submit the study again" in log
    assert log.count("queued again") == 2, "what was printed before a restart is kept"


@pytest.mark.slow
def test_a_failure_is_never_queued_again(cluster):
    cluster.ends("a:seed_0", 1)
    cluster.ends("a:seed_1", 137)
    submit(cluster.study())
    assert cluster.slurm.asked("scontrol") == []
    assert [task["status"] for task in cluster.slurm.tasks("study-first").values()] == [1, 137, 0, 0]


def test_every_process_of_a_run_knows_its_rank(cluster):
    phases = [{"name": "main", "arms": ["a"], "seeds": [0]}]
    submit(cluster.study(phases=phases, nodes=2, gpus_per_node=2))
    ranks = sorted(line.split()[2:4] for line in cluster.log if line.startswith("a:"))
    assert ranks == [[f"rank={rank}", "world=4"] for rank in range(4)]
    assert next(line for line in cluster.log if line.startswith("report")).split()[2] == "rank="


def test_one_process_does_not_take_the_ranks_of_the_shell_for_its_own(cluster):
    cluster.monkeypatch.setenv("RANK", "3")
    cluster.monkeypatch.setenv("WORLD_SIZE", "8")
    submit(cluster.study(phases=[{"name": "main", "arms": ["a"], "seeds": [0]}]))
    assert cluster.log[0].split()[2:4] == ["rank=", "world="]
