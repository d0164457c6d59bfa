"""A run on a stand-in for Slurm that is told to end, then killed, and queued again each time: the same results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from common import write_pairs
from fake_slurm import FakeSlurm
from rewardlab.commands.training import train
from rewardlab.experiments.one_run import do
from rewardlab.experiments.records import record_of
from rewardlab.experiments.slurm import submitting
from rewardlab.experiments.slurm.submitting import submit
from rewardlab.experiments.study import freeze

PYTHON = f"""\
#!{sys.executable}
# `python -m rewardlab plan …` that gets USR2 in the fourth step of its first start, and is killed in its second.
import os, signal, sys

if sys.argv[5] != "task":
    sys.exit(0)
import rewardlab
from rewardlab.training import run
from rewardlab.training.loop.trainer import Trainer

run.verify_in_clean_process = rewardlab.verify  # here, where it is quick

start = os.environ.get("SLURM_RESTART_COUNT", "0")
at, how = {{"0": (3, signal.SIGUSR2), "1": (5, signal.SIGKILL)}}.get(start, (-1, 0))
train_step = Trainer.train_step


def interrupted(trainer, batches):
    if trainer.step == at:
        os.kill(os.getpid(), how)
    return train_step(trainer, batches)


Trainer.train_step = interrupted
sys.argv[1:] = sys.argv[4:]
from rewardlab.cli import main

sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
@pytest.mark.timeout(1800)  # three starts of the real command, of a few seconds each where the machine is free
def test_a_run_that_is_interrupted_and_killed_and_queued_again_gives_the_same_results(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    (slurm.state / "kills_are_of_nodes").touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    for number, name in enumerate(("train", "eval", "test")):
        write_pairs(tmp_path / f"{name}.jsonl", 24, offset=100 * number)
    plan = {
        "title": "Trial",
        "question": "Does a restart change anything?",
        "base": {
            "model": str(base_model),
            "dataset": "train.jsonl",
            "eval_dataset": "eval.jsonl",
            "test_dataset": "test.jsonl",
            "steps": 8,
            "batch_size": 4,
            "lr": 1e-3,
            "eval_every": 4,
            "num_workers": 0,
            "max_seq_len": 256,
            "precision": "fp32",
            "attention_backend": "segments",
            "linear_backend": "torch",
            "baselines": False,
        },
        "arms": {"full": {}},
        "seeds": [0],
        "slurm": {"gpus_per_node": 0, "python": str(python)},
    }
    (tmp_path / "trial.yaml").write_text(yaml.safe_dump(plan))
    # The stand-in trains before it answers.
    monkeypatch.setattr(submitting, "SBATCH_TIMEOUT_S", 3600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{slurm.bin}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    studies = {name: freeze(tmp_path / "trial.yaml", tmp_path / name) for name in ("killed", "undisturbed")}
    submit(studies["killed"])
    do(studies["undisturbed"], studies["undisturbed"].runs[0], train)
    logs = "".join(path.read_text() for path in tmp_path.glob("*/slurm/logs/*"))
    assert slurm.tasks("killed-main")["0"] == {"state": "COMPLETED", "status": 0, "restarts": 2}, logs
    assert len(slurm.asked("scontrol")) == 1, "the failure of a node is Slurm's own business"
    records = {name: record_of(study, study.runs[0]) for name, study in studies.items()}
    assert [record.attempts for record in records.values()] == [3, 1]
    assert records["killed"].slurm_job
    for record in records.values():
        assert (record.state, len(record.test_reads)) == ("done", 1)
    scores = [study.run_folder(study.runs[0]) / "evals/test.scores.jsonl" for study in studies.values()]
    assert scores[0].read_bytes() == scores[1].read_bytes()
