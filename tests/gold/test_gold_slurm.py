"""The batch script that divides a stage over an array, as far as a machine without a cluster can tell."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rewardlab.gold.files.parts import Shard

SBATCH = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "gold.sbatch"


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def submitted(folder: Path, words: list[str], *, status: int = 0, first: int = 1, count: int = 64):
    """What a task of the array 1-64 does that has the third part."""
    stand_in(folder, "scontrol", f'echo "$*" >> {folder}/queued')
    stand_in(folder, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
    stand_in(folder, "python", f'printf "%s\\n" "$@"; exit {status}')
    array = {"ID": first + 2, "MIN": first, "MAX": first + 63, "COUNT": count}
    slurm = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in array.items()}
    return subprocess.run(
        ["bash", str(SBATCH), *words],
        env={
            **os.environ,
            **slurm,
            "SLURM_JOB_ID": "4711",
            "SLURM_ARRAY_JOB_ID": "4711",
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("first", [0, 1, 100])
def test_a_task_reads_and_writes_the_parts_of_its_number(tmp_path, first) -> None:
    words = ["label", "--input", "in/samples{part}.jsonl", "--output", "labelled{part}.jsonl", "--system", "Be kind."]
    found = submitted(tmp_path, words, first=first)
    assert found.returncode == 0, found.stderr
    shard = Shard.parse("3/64")
    inputs, output = (str(shard.path(Path(name))) for name in ("in/samples.jsonl", "labelled.jsonl"))
    wanted = ["-P", "-m", "rewardlab", "gold", "label", "--input", inputs, "--output", output, "--system", "Be kind."]
    assert found.stdout.splitlines() == wanted


@pytest.mark.parametrize(("status", "queued"), [(75, True), (138, True), (0, False), (1, False), (137, False)])
def test_a_task_is_queued_again_if_work_is_left_and_only_then(tmp_path, status, queued) -> None:
    found = submitted(tmp_path, ["sample", "--shard", "slurm"], status=status)
    told = tmp_path / "queued"
    assert (told.read_text().split() if told.exists() else None) == (["requeue", "4711_3"] if queued else None)
    assert found.returncode == (0 if queued else status)


def test_an_array_with_gaps_is_refused(tmp_path) -> None:
    found = submitted(tmp_path, ["sample"], count=32)
    assert found.returncode == 2
    assert "gaps" in found.stderr
    assert not found.stdout
