"""The batch scripts for those who come from a script of their own: flags that exist, and steps in order."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rewardlab.commands.training import parse_train
from rewardlab.core.config import to_mapping

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "reward_model"


def run(
    name: str, words: list[str], folder: Path, *, status: int = 0, restarts: int = 0
) -> tuple[int, list[list[str]]]:
    """Status of a script whose programs only note what they are asked, and what that was."""
    for program, does in {
        "srun": 'exec "$@"',
        "python": f'printf "%s\\n" "$@" end >> {folder}/asked; exit {status}',
        "scontrol": f'echo "$*" >> {folder}/queued',
    }.items():
        path = folder / program
        path.write_text(f"#!/usr/bin/env bash\n{does}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restarts)}
    environment = {**os.environ, **slurm, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    answer = subprocess.run(
        ["bash", str(FOLDER / name), *words], env=environment, cwd=folder, capture_output=True, check=False
    )
    calls = (folder / "asked").read_text().split("end\n")[:-1]
    return answer.returncode, [call.splitlines() for call in calls]


def test_the_flags_of_a_training_job_are_those_of_rewardlab_and_given_ones_win(tmp_path):
    words = ["--model", "Qwen/Qwen2.5-3B", "--lora", "--lora-rank", "4", "--lr", "5e-5"]
    status, (asked,) = run("train_rm.slurm", words, tmp_path)
    assert status == 0
    assert asked[:4] == ["-P", "-m", "rewardlab", "train"]
    settings = to_mapping(parse_train(asked[4:]))
    assert (settings["model"], settings["lr"], settings["resume"]) == ("Qwen/Qwen2.5-3B", 5e-5, "auto")
    assert (settings["eval_split"], settings["test_split"]) == ("validation", "test")


@pytest.mark.parametrize(
    ("status", "restarts", "queued"),
    [(75, 0, True), (75, 19, True), (75, 20, False), (140, 0, True), (1, 0, False), (0, 0, False)],
)
def test_a_training_job_is_queued_again_if_work_is_left_and_so_often(status, restarts, queued, tmp_path):
    ended, _ = run("train_rm.slurm", [], tmp_path, status=status, restarts=restarts)
    assert (tmp_path / "queued").exists() is queued
    assert ended == (0 if queued else status)


def test_a_plan_is_frozen_once_and_submitted_each_time(tmp_path):
    _, asked = run("run_rm_experiments.slurm", ["plans/lora.yaml"], tmp_path)
    study = ["studies/lora"]
    assert asked == [
        ["-P", "-m", "rewardlab", "plan", "freeze", "plans/lora.yaml", "--output-dir", *study],
        ["-P", "-m", "rewardlab", "plan", "submit", *study],
    ]
    (tmp_path / "studies/lora").mkdir(parents=True)
    (tmp_path / "studies/lora/log.jsonl").touch()
    (tmp_path / "asked").unlink()
    _, asked = run("run_rm_experiments.slurm", ["plans/lora.yaml"], tmp_path)
    assert asked == [["-P", "-m", "rewardlab", "plan", "submit", *study]]


def test_the_plan_that_is_taken_by_default_is_there(tmp_path):
    _, asked = run("run_rm_experiments.slurm", [], tmp_path)
    assert (FOLDER.parents[1] / asked[0][5]).is_file()
