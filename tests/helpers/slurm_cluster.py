"""A study on a stand-in for Slurm: what it submits, and what its tasks are asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from fake_slurm import FakeSlurm
from rewardlab.experiments.records import begin_record, end_record
from rewardlab.experiments.slurm.submitting import Submission
from rewardlab.experiments.study import Study, freeze

PHASES = [
    {"name": "first", "arms": ["a", "b"], "seeds": [0, 1], "gate": {"ready": "accuracy(a) > 0.5"}},
    {"name": "second", "arms": ["c"], "seeds": [0]},
    {"name": "third", "arms": ["d"], "seeds": [0]},
]
FAKE_PYTHON = """\
#!/usr/bin/env bash
# `python -m rewardlab plan …`: notes what it was asked, and ends as the file of that name says.
if [ "$5" = task ]; then name=${8//\\//:}; else name=$5${8:+:$8}; fi
said="$name restart=${SLURM_RESTART_COUNT:-0} rank=${RANK:-} world=${WORLD_SIZE:-} job=$SLURM_JOB_ID"
echo "$said" >> "$FAKE_TASKS/log"
file="$FAKE_TASKS/$name.${SLURM_RESTART_COUNT:-0}"
[ ! -e "$file" ] || exit "$(cat "$file")"
"""


class Cluster:
    """A study, the queue, and what its tasks were asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.slurm = FakeSlurm(folder / "slurm")
        self.tasks = folder / "tasks"
        self.tasks.mkdir()
        python = folder / "python"
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)
        self.python = str(python)
        monkeypatch.setenv("PATH", f"{self.slurm.bin}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_TASKS", str(self.tasks))
        monkeypatch.chdir(folder)

    def study(self, *, phases: Any = PHASES, base: Mapping[str, Any] = MappingProxyType({}), **slurm: Any) -> Study:
        data = {"dataset": "rows.jsonl", "eval_dataset": "eval.jsonl", "test_dataset": "test.jsonl"}
        plan = {
            "title": "Trial",
            "question": "Does it run?",
            "base": {"model": "m", **data, **base},
            "arms": {name: {} for phase in phases for name in phase.get("arms", ()) if name != "winner"},
            "phases": phases,
            "slurm": {"gpus_per_node": 0, "python": self.python, **slurm},
        }
        path = self.folder / "trial.yaml"
        path.write_text(yaml.safe_dump(plan))
        return freeze(path, self.folder / "study")

    def ends(self, name: str, *statuses: int) -> None:
        """How a task ends at its first, second … start; 0 after these."""
        for number, status in enumerate(statuses):
            (self.tasks / f"{name}.{number}").write_text(str(status))

    @property
    def log(self) -> list[str]:
        path = self.tasks / "log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def done(self) -> list[str]:
        return [line.split()[0] for line in self.log]


def numbers(submission: Submission) -> dict[str, str]:
    return {job.name: job.id for job in submission.jobs}


def finish(study: Study, *names: str, state: Any = "done") -> None:
    for name in names:
        begin_record(study, study.run_named(name))
        end_record(study, study.run_named(name), state)
