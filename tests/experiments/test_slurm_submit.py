"""Studies on a stand-in for Slurm: what is submitted, once, twice or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.experiments.slurm.jobs import read_jobs
from rewardlab.experiments.slurm.submitting import submission_lines, submit
from rewardlab.experiments.study import open_study
from slurm_cluster import Cluster, finish


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    return Cluster(tmp_path, monkeypatch)


# --- what is submitted ---------------------------------------------------------------------------------------------


def test_what_is_done_is_left_out_and_what_failed_is_submitted_again(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    finish(study, "a/seed_0", "c/seed_0")
    finish(study, "a/seed_1", state="failed")
    submission = submit(study)
    assert submission.left_out == {"a/seed_0": "done", "c/seed_0": "done"}
    assert [job.runs for job in submission.jobs] == [
        ("a/seed_1", "b/seed_0", "b/seed_1"),
        (),
        ("d/seed_0",),
        (),
    ]
    assert {job.name: job.needs for job in submission.jobs}["third"] == ("first.gate",), "the gate still holds"


def test_nothing_left_to_do_is_said(cluster):
    study = cluster.study()
    finish(study, *(run.name for run in study.runs))
    with pytest.raises(ConfigError, match="no run is left to submit"):
        submit(study)
    assert cluster.slurm.jobs == {}
    assert not (study.folder / "slurm").exists()


def test_without_the_data_or_with_others_nothing_is_submitted(cluster):
    for name in ("rows", "eval", "test"):
        (cluster.folder / f"{name}.jsonl").write_text(name)
    study = cluster.study()
    (cluster.folder / "other").mkdir()
    cluster.monkeypatch.chdir(cluster.folder / "other")
    with pytest.raises(DataError, match="eval.jsonl: is not there, .* folder in which the plan was frozen"):
        submit(study)
    assert cluster.slurm.jobs == {}
    cluster.monkeypatch.chdir(cluster.folder)
    (cluster.folder / "test.jsonl").write_text("another")
    with pytest.raises(DataError, match="test.jsonl: is not the file that the plan was frozen with"):
        submit(study)
    (cluster.folder / "test.jsonl").write_text("test")
    cluster.slurm.hold()
    assert submit(study).is_submitted


@pytest.mark.slow
def test_an_outdated_run_is_not_submitted_and_said(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    finish(study, "a/seed_0")
    path = study.folder / "plan.yaml"
    path.write_text(path.read_text().replace("model: m", "model: n"))
    from rewardlab.experiments.study import amend

    study = amend(study.folder, reason="other model", seen="results", begun=True, judged=True)
    submission = submit(study)
    assert "--redo a/seed_0" in submission.left_out["a/seed_0"]
    assert "a/seed_0" not in submission.jobs[0].runs


def test_a_phase_alone_still_asks_the_gates_before_it(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submission = submit(study, ["third"])
    assert [(job.name, job.needs, job.waits_for) for job in submission.jobs] == [
        ("first.gate", (), ()),
        ("third", ("first.gate",), ()),
    ]
    assert any("no report: other phases are left to do" in line for line in submission_lines(study, submission))


def test_the_last_phase_that_was_left_brings_the_report(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    finish(study, *(run.name for run in study.runs if run.phase != "third"))
    assert [job.name for job in submit(study, ["third"]).jobs] == ["first.gate", "third", "report"]


def test_a_container_sees_data_and_models_outside_of_the_working_folder(cluster):
    for name in ("far/data", "far/model", "near/real"):
        (cluster.folder / name).mkdir(parents=True)
    for name in ("far/data/rows.jsonl", "near/real/test.jsonl", "near/eval.jsonl"):
        (cluster.folder / name).write_text(name)
    work = cluster.folder / "work"
    work.mkdir()
    (work / "test.jsonl").symlink_to("../near/real/test.jsonl")
    cluster.monkeypatch.chdir(work)
    base = {"model": "../far/model", "dataset": f"{cluster.folder}/far/data/rows.jsonl:0.5"}
    base |= {"eval_dataset": "../near/eval.jsonl"}
    study = cluster.study(base=base, container="x.sif", mounts=[f"{cluster.folder}/near"])
    submit(study, dry_run=True)
    script = (study.folder / "slurm" / "first.sbatch").read_text()
    for folder in ("work", "study", "far/data", "far/model", "near"):
        assert f"--bind {cluster.folder}/{folder} " in script, folder
    assert f"--bind {cluster.folder}/near/real" not in script, "it is within what the plan mounts"


def test_a_phase_that_the_plan_does_not_have_is_refused(cluster):
    with pytest.raises(ConfigError, match="--phases 'thrid': the plan has no such phase. Did you mean 'third'"):
        submit(cluster.study(), ["thrid"])


def test_two_jobs_of_one_name_are_refused(cluster):
    phases = [{"name": "a", "arms": ["a"], "gate": {"g": "accuracy(a) > 0"}}, {"name": "a.gate", "arms": ["b"]}]
    with pytest.raises(ConfigError, match="two jobs would be called a.gate"):
        submit(cluster.study(phases=phases))


@pytest.mark.slow
def test_a_phase_with_more_runs_than_an_array_may_have_is_divided(cluster, monkeypatch):
    monkeypatch.setattr("rewardlab.experiments.slurm.submitting.MOST_TASKS", 3)
    submission = submit(cluster.study())
    assert [(job.name, len(job.runs)) for job in submission.jobs[:2]] == [("first", 3), ("first.2", 1)]
    assert submission.jobs[2].waits_for == ("first", "first.2")
    assert cluster.done[:5] == ["a:seed_0", "a:seed_1", "b:seed_0", "b:seed_1", "gate:first"]


def test_phases_that_wait_for_a_search_are_left_for_later_and_said(cluster):
    cluster.slurm.hold()
    phases = [
        {"name": "search", "seeds": [0], "search": {"grid": {"lr": [1e-5, 1e-6]}}},
        {"name": "confirm", "arms": ["winner"], "seeds": [1]},
        {"name": "more", "arms": ["a"], "seeds": [1]},
    ]
    study = cluster.study(phases=phases)
    submission = submit(study)
    assert [job.name for job in submission.jobs] == ["search"], "a report before the end is a look at results"
    assert list(submission.later) == ["confirm", "more"]
    assert "rewardlab plan run" in submission.later["confirm"]


def test_a_section_that_cannot_be_used_submits_nothing(cluster):
    with pytest.raises(ConfigError, match="slurm: unknown key 'partiton'"):
        submit(cluster.study(partiton="gpu"))
    assert cluster.slurm.jobs == {}


def test_runs_for_one_process_are_not_submitted_with_several(cluster):
    study = cluster.study(base={"cache_states": True, "train_head_only": True}, nodes=2)
    with pytest.raises(ConfigError, match=r"slurm: 2 processes a run .*: arm a: cache_states is for one process"):
        submit(study)
    assert cluster.slurm.jobs == {}


def test_variables_of_sbatch_do_not_overrule_the_plan_but_fill_what_it_leaves_open(cluster, monkeypatch):
    cluster.slurm.hold()
    sbatch = cluster.slurm.bin / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("exec ", f'env | grep ^SBATCH_ >> "{cluster.tasks}/seen"; exec '))
    for name in ("SBATCH_ARRAY_INX", "SBATCH_TIMELIMIT", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_NO_REQUEUE"):
        monkeypatch.setenv(name, "x")
    submit(cluster.study(partition="gpu", phases=[{"name": "main", "arms": ["a"], "seeds": [0]}]))
    # The report is no array.
    seen = Counter((cluster.tasks / "seen").read_text().split())
    assert seen["SBATCH_ACCOUNT=x"] == 2
    assert seen["SBATCH_ARRAY_INX=x"] == 1
    assert not seen.keys() & {"SBATCH_TIMELIMIT=x", "SBATCH_PARTITION=x", "SBATCH_NO_REQUEUE=x"}


def test_what_describes_the_job_that_submits_is_not_passed_on(cluster, monkeypatch):
    cluster.slurm.hold()
    sbatch = cluster.slurm.bin / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("exec ", f'env | grep ^SLURM_ >> "{cluster.tasks}/seen"; exec '))
    own = {"SLURM_MEM_PER_CPU": "300", "SLURM_CPU_BIND": "quiet,mask_cpu:0x3", "SLURM_RESTART_COUNT": "19"}
    for name, value in {"SLURM_CONF": "/etc/mine.conf", **own}.items():
        monkeypatch.setenv(name, value)
    study = cluster.study(phases=[{"name": "main", "arms": ["a"], "seeds": [0]}])
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    script = submit(study).script
    subprocess.run(["bash", str(script)], check=True, capture_output=True)
    assert len(cluster.slurm.jobs) == 4, "the array and the report, twice"
    assert {*(cluster.tasks / "seen").read_text().split()} == {"SLURM_CONF=/etc/mine.conf"}


# --- once, twice, not at all ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_study_whose_jobs_are_queued_is_not_submitted_twice_unless_asked(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    with pytest.raises(ConfigError, match=r"8 of its jobs wait or run \(100_0, .* …\).*`scancel 100 200 300.*--again"):
        submit(study)
    assert len(read_jobs(study.folder)) == 1
    submit(study, again=True)
    assert len(read_jobs(study.folder)) == 2


@pytest.mark.slow
def test_a_queue_that_cannot_be_asked_is_no_empty_queue(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    cluster.slurm.answer("squeue", "", status=1, error="slurm_load_jobs error: Unable to contact slurm controller\n")
    with pytest.raises(ConfigError, match=r"cannot be told: squeue: slurm_load_jobs error: Unable .*--again"):
        submit(study)
    cluster.slurm.answer("squeue", "", status=1, error="slurm_load_jobs error: Invalid job id specified\n")
    submit(study)


def test_a_job_that_is_refused_takes_back_those_before_it(cluster):
    cluster.slurm.refuse("second.sbatch")
    cluster.slurm.hold()
    study = cluster.study()
    with pytest.raises(
        ConfigError, match=r"second\.sbatch: sbatch refuses it: .*Invalid account.*\(100 200\) were cancel"
    ):
        submit(study)
    assert cluster.slurm.asked("scancel") == [["100", "200"]]
    assert read_jobs(study.folder) == []


def test_an_sbatch_that_does_not_answer_may_have_queued_the_job(cluster):
    (cluster.slurm.bin / "sbatch").write_text(
        f"#!/usr/bin/env bash\nexec {sys.executable} -c 'import signal; signal.pause()'\n"
    )
    cluster.monkeypatch.setattr("rewardlab.experiments.slurm.submitting.SBATCH_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=r"did not answer within 0.1 seconds.*squeue --me --name study-first"):
        submit(cluster.study())


def test_the_number_of_a_job_on_one_of_several_clusters_is_read(cluster):
    cluster.slurm.hold()
    (cluster.slurm.state / "clusters").touch()
    submission = submit(cluster.study())
    assert [job.id for job in submission.jobs] == ["100", "200", "300", "400", "500"]


def test_a_dry_run_writes_and_submits_nothing(cluster):
    study = cluster.study()
    submission = submit(study, dry_run=True)
    assert not submission.is_submitted
    assert {path.name for path in (study.folder / "slurm").glob("*.sbatch")} == {
        f"{name}.sbatch" for name in ("first", "first.gate", "second", "third", "report")
    }
    assert cluster.slurm.asked("sbatch") == []
    assert read_jobs(study.folder) == []


@pytest.mark.slow
def test_without_sbatch_the_script_that_is_left_submits_the_same_by_hand(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    path = os.environ["PATH"]
    cluster.monkeypatch.setenv("PATH", "")
    submission = submit(study)
    assert not submission.is_submitted
    cluster.monkeypatch.setenv("PATH", path)
    subprocess.run(["bash", str(submission.script)], check=True, capture_output=True, cwd="/")
    by_hand = [(job["name"], job["dependency"]) for job in cluster.slurm.jobs.values()]
    assert len(by_hand) == 5
    cluster.slurm.answer("squeue", "")
    submit(study)
    ours = [(job["name"], job["dependency"]) for job in list(cluster.slurm.jobs.values())[5:]]

    def shifted(number: str) -> str:
        return str(int(number) + 500) if number.isdecimal() else number

    assert [(name, [[shifted(word) for word in one] for one in before]) for name, before in by_hand] == ours


@pytest.mark.slow
def test_scripts_of_an_earlier_submission_are_not_left_about(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    finish(study, "c/seed_0")
    submit(study, again=True)
    assert not (study.folder / "slurm" / "second.sbatch").exists()


def test_the_list_of_jobs_that_was_changed_is_said(cluster):
    cluster.slurm.hold()
    study = cluster.study()
    submit(study)
    (study.folder / "slurm" / "jobs.json").write_text('{"submissions": [{"time": "x"}]}')
    with pytest.raises(DataError, match="cannot be read as the list of jobs"):
        submit(study)


@pytest.mark.slow
def test_submitting_imports_no_torch(cluster):
    study = cluster.study()
    code = (
        "import sys; from pathlib import Path; from rewardlab.experiments.study import open_study; "
        "from rewardlab.experiments.slurm.submitting import submit; submit(open_study(Path(sys.argv[1]))); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(study.folder)], check=False).returncode == 0
    assert len(read_jobs(open_study(study.folder).folder)) == 1
