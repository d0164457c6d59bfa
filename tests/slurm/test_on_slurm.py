"""Studies on a real Slurm cluster, which the stand-in of the other tests cannot vouch for.

    REWARDLAB_SLURM=FOLDER scripts/test tests/slurm -m slurm

FOLDER is seen by all nodes under this name. REWARDLAB_SLURM_KEYS has keys of the section `slurm` of a plan, such as
'{partition: debug, gpus_per_node: 1}'; by default jobs ask for a CPU alone. A job that is queued again waits for two
minutes in Slurm's queue, so all of it takes some five.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = os.environ.get("REWARDLAB_SLURM")
SLURM: Final = {"time": "00:10:00", "gpus_per_node": 0, "cpus_per_task": 1, "mem": "4G"}
PATIENCE_S: Final = 1200
"""Longest wait for jobs."""
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(PATIENCE_S + 300),
    pytest.mark.skipif(
        not FOLDER or shutil.which("sbatch") is None, reason="needs a Slurm cluster, and REWARDLAB_SLURM=FOLDER"
    ),
]


class Trial:
    """A study in a folder of its own that every node sees."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.study = folder / "study"
        script = ROOT / "examples" / "first_study" / "make_files.py"
        subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)

    def rewardlab(self, *words: str, status: int | None = 0) -> str:
        """Run a command in the folder, and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "rewardlab", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def submit(self, arms: Mapping[str, Any], *, steps: int, slurm: Mapping[str, Any], **sections: Any) -> None:
        """Freeze a plan and submit it."""
        own = yaml.safe_load(os.environ.get("REWARDLAB_SLURM_KEYS", "{}"))
        plan = {
            "title": "On Slurm",
            "question": "Does it run?",
            "base": {
                "model": "tiny-model",
                "dataset": ["pairs.train.jsonl"],
                "test_dataset": ["pairs.test.jsonl"],
                "eval_fraction": 0.2,
                "steps": steps,
                "lr": 1e-3,
                "precision": "fp32",
                "report_to": ["none"],
            },
            "arms": arms,
            "seeds": [0],
            "slurm": {**SLURM, **slurm, **own},
            **sections,
        }
        (self.folder / "plan.yaml").write_text(yaml.safe_dump(plan))
        self.rewardlab("plan", "freeze", "plan.yaml", "--output-dir", "study")
        self.rewardlab("plan", "submit", "study")

    def status(self) -> dict[str, Any]:
        """The state of the study, as JSON."""
        found: dict[str, Any] = json.loads(self.rewardlab("plan", "status", "study", "--json", status=None))
        return found

    def states(self) -> dict[str, str]:
        """Name of a run -> its state."""
        return {run["run"]: run["state"] for run in self.status()["runs"]}

    def jobs(self) -> dict[str, str]:
        """Name of a job -> its number."""
        (submission,) = json.loads((self.study / "slurm" / "jobs.json").read_text())["submissions"]
        return {job["name"]: job["id"] for job in submission["jobs"]}

    def is_over(self) -> bool:
        """Whether the queue has no job of this study."""
        words = ["squeue", "--noheader", f"--jobs={','.join(self.jobs().values())}"]
        queue = subprocess.run(words, capture_output=True, text=True, check=False)
        return not queue.stdout.strip()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something is so."""
        tick = threading.Event()
        for _ in itertools.takewhile(lambda waited: waited < PATIENCE_S, itertools.count()):
            if until():
                return
            tick.wait(1)
        logs = [f"{path.name}:\n{path.read_text()}" for path in (self.study / "slurm" / "logs").iterdir()]
        raise AssertionError("\n".join(["waited in vain", *logs]))

    def record(self, run: str) -> dict[str, Any]:
        """What is noted of a run."""
        found: dict[str, Any] = json.loads((self.study / "records" / f"{run}.json").read_text())
        return found


@pytest.fixture
def trial(request: pytest.FixtureRequest) -> Trial:
    # A blank and a percent sign are in the names of folders of some users, and mean something to sbatch.
    folder = Path(str(FOLDER)) / f"{request.node.name} 50% {os.getpid()}"
    folder.mkdir(parents=True)
    return Trial(folder)


def test_phases_gates_and_the_report_follow_each_other(trial: Trial) -> None:
    trial.submit(
        {"plain": {}, "smoothed": {"label_smoothing": 0.2}},
        steps=20,
        slurm={"array_limit": 1},
        seeds=[0, 1],
        phases=[
            {"name": "first", "arms": ["plain"], "gate": {"learns": "accuracy(plain) > 0.1"}},
            {"name": "second", "arms": ["smoothed"]},
        ],
    )
    waiting = trial.states()
    assert waiting["smoothed/seed_0"].startswith("waiting (PENDING")
    assert "jobs wait or run" in _error_of_submitting(trial)
    trial.wait(trial.is_over)
    assert set(trial.states().values()) == {"done"}
    assert trial.status()["exit_status"] == 0
    assert (trial.study / "report" / "report.md").is_file()


def test_behind_a_closed_gate_only_the_report_is_made(trial: Trial) -> None:
    trial.submit(
        {"plain": {}, "smoothed": {"label_smoothing": 0.2}},
        steps=20,
        slurm={},
        seeds=[0, 1, 2],
        phases=[
            {"name": "first", "arms": ["plain"], "gate": {"learns": "accuracy(plain) > 0.999"}},
            {"name": "second", "arms": ["smoothed"]},
        ],
    )
    trial.wait(trial.is_over)
    states = trial.states()
    assert [states[f"plain/seed_{seed}"] for seed in range(3)] == ["done"] * 3
    assert [states[f"smoothed/seed_{seed}"] for seed in range(3)] == ["waiting"] * 3
    assert (trial.study / "report" / "report.md").is_file()


def test_a_run_that_is_told_to_end_is_queued_again_and_goes_on_from_its_checkpoint(trial: Trial) -> None:
    trial.submit({"long": {}}, steps=600, slurm={})
    (number,) = (number for name, number in trial.jobs().items() if name == "main")
    trial.wait(lambda: "step 10/" in "".join(path.read_text() for path in _logs(trial, "main")))
    subprocess.run(["scancel", "--signal=USR2", f"{number}_0"], check=True)
    trial.wait(lambda: trial.states()["long/seed_0"].startswith("interrupted (PENDING"))
    assert trial.record("long/seed_0")["attempts"] == 1
    trial.wait(trial.is_over)
    record = trial.record("long/seed_0")
    assert (record["state"], record["attempts"], record["restarts"]) == ("done", 2, 1)
    (log,) = _logs(trial, "main")
    assert "RESUME: " in log.read_text()


def test_a_run_gets_what_its_script_sets_and_nothing_of_the_job_that_submits_it(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    # srun takes no memory per core beside `mem`, and with `export: NONE` no variables of the script.
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "300", "SLURM_RESTART_COUNT": "19"}.items():
        monkeypatch.setenv(name, value)
    code = "import os; assert os.environ['REWARDLAB_TRIAL'] == 'a b'"
    slurm = {"environment": {"REWARDLAB_TRIAL": "a b"}, "extra": {"export": "NONE"}}
    trial.submit({"looks": {"program": ["{python}", "-c", code]}}, steps=1, slurm=slurm)
    trial.wait(trial.is_over)
    record = trial.record("looks/seed_0")
    assert "the run left no evals/test.scores.jsonl" in record["message"], "the program found its variable"
    assert record["restarts"] == 0


def test_ranks_on_two_nodes_are_one_run(trial: Trial) -> None:
    words = ["sinfo", "--noheader", "--responding", "--states=idle,mixed,allocated", "--format=%D"]
    if sum(map(int, subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())) < 2:
        pytest.skip("this cluster has one node")
    trial.submit({"plain": {"sharding": "none"}, "sharded": {"sharding": "full"}}, steps=20, slurm={"nodes": 2})
    trial.wait(trial.is_over)
    assert set(trial.states().values()) == {"done"}
    logs = "".join(path.read_text() for path in _logs(trial, "main"))
    assert "ranks: 2, the model sharded over all of them" in logs


def _logs(trial: Trial, name: str) -> list[Path]:
    """The logs of the tasks of an array, as far as they have begun."""
    return sorted((trial.study / "slurm" / "logs").glob(f"{name}-*.log"))


def _error_of_submitting(trial: Trial) -> str:
    """What a second submission says."""
    words = [sys.executable, "-P", "-m", "rewardlab", "plan", "submit", "study"]
    return subprocess.run(words, cwd=trial.folder, capture_output=True, text=True, check=False).stderr
