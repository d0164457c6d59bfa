"""GRPOTrainer in two processes: whole groups in each, one record of both, and a resumed run with fewer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import grpo_rank
from rewardlab.artifact.load import load
from rewardlab.rl import read_rollouts
from trl_runs import GROUP

pytest_plugins = ["reward_fixtures"]
pytestmark = pytest.mark.slow


def trained(source: str, folder: Path, *arguments: object, processes: int) -> list[tuple[int, str]]:
    """Train in so many processes; return (exit status, what it wrote on stderr) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, grpo_rank.__file__, source, str(folder), *map(str, arguments)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **path, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, words) for process, words in zip(ranks, said, strict=True)]


def steps(record: Path) -> Counter[int]:
    """How many rollouts each step has."""
    return Counter(row.step for row in read_rollouts(record))


def test_each_process_rewards_its_groups_and_a_resumed_run_goes_on_with_one(
    url: str, folder: Path, tmp_path: Path
) -> None:
    assert [status for status, _ in trained(url, tmp_path, 2, GROUP, processes=2)] == [0, 0]
    record = tmp_path / "record"
    assert sorted(path.name for path in record.iterdir()) == ["rollouts-0.jsonl", "rollouts-1.jsonl"]
    rows = list(read_rollouts(record))
    assert steps(record) == {0: 2 * GROUP, 1: 2 * GROUP}
    prompts = Counter((row.step, row.prompt_key) for row in rows)
    assert set(prompts.values()) == {GROUP}
    scores = load(folder).score([row.conversation for row in rows])
    np.testing.assert_allclose([row.reward for row in rows], scores, atol=2e-5)

    assert [status for status, _ in trained(url, tmp_path, 4, GROUP, "resume", processes=1)] == [0]
    assert steps(record) == {0: 2 * GROUP, 1: 2 * GROUP, 2: GROUP, 3: GROUP}


def test_half_a_group_in_each_process_ends_the_run_before_a_step(url: str, tmp_path: Path) -> None:
    ended = trained(url, tmp_path, 2, GROUP // 2, processes=2)
    assert all(status for status, _ in ended)
    assert any("which are not whole groups of 4" in words for _, words in ended)
    assert not list((tmp_path / "run").glob("checkpoint-*"))
