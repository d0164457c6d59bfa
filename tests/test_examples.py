"""The examples do what they say, as far as a machine without a cluster can tell."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SBATCH = Path(__file__).resolve().parents[1] / "examples" / "slurm" / "train.sbatch"


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("status", "queued"), [(75, True), (0, False), (2, False), (137, False)])
def test_the_batch_script_queues_a_run_again_if_work_is_left_and_only_then(status, queued, tmp_path):
    stand_in(
        tmp_path,
        "scontrol",
        f'if [ "$1" = show ]; then echo node7; echo node8; else echo "$*" >> {tmp_path}/queued; fi',
    )
    stand_in(tmp_path, "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_PROCID=3 SLURM_LOCALID=1 exec "$@"')
    stand_in(
        tmp_path, "python", f'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $*"; exit {status}'
    )
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
    answer = subprocess.run(
        ["bash", str(SBATCH), "--model", "m", "--system-prompt", "Be kind."],
        env={**os.environ, **slurm, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    line = answer.stdout.splitlines()[0]
    assert line == "3 1 4 2 node7 -m rewardlab train --model m --system-prompt Be kind. --resume auto", answer.stderr
    told = tmp_path / "queued"
    assert (told.read_text().split() if told.exists() else None) == (["requeue", "4711"] if queued else None)
    assert answer.returncode == (0 if queued else status)
