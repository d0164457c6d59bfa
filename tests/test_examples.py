"""The examples do what they say, as far as a machine without a cluster can tell."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rewardlab
from conftest import write_base_model, write_pairs

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"


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


# --- programs ------------------------------------------------------------------------------------------------


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the first example leaves, on a tiny model."""
    folder = tmp_path_factory.mktemp("examples")
    base = write_base_model(folder / "base")
    arguments = ["--model", str(base), "--output-dir", str(folder / "run"), "--steps", "12", "--lr", "1e-2"]
    return load("train_from_memory").main(arguments)


def test_every_program_among_the_examples_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"train_from_memory", "best_of_n", "compare_models"}


def test_a_model_trained_from_memory_learns_on_what_it_was_given(trained):
    assert trained.test.overall.sums.comparisons == 60
    assert trained.test.overall.estimates["eval_accuracy"].low > 0.5
    assert (trained.model / "reward_spec.json").is_file()


def test_best_of_n_ranks_replies_by_their_score(trained, capsys):
    replies = ["No idea.", "Certainly: basil wants light, and water once the soil is dry.", "No idea..."]
    ranked = load("best_of_n").main([str(trained.model), "How do I keep basil alive?", *replies])
    assert ranked == sorted(ranked, reverse=True)
    assert {reply for _, reply in ranked} == set(replies)
    assert ranked[0][1] == replies[1]
    assert f"{ranked[0][0]:+8.3f}  {replies[1]}" in capsys.readouterr().out


def test_two_models_are_compared_pair_by_pair(trained, tmp_path, capsys):
    data = write_pairs(tmp_path / "pairs.jsonl", 40)
    compare = load("compare_models")
    arguments = [str(data), "--output-dir", str(tmp_path / "compared")]
    same = compare.main([str(trained.model), str(trained.model), *arguments])
    assert (same.value, same.n) == (0.0, 40)
    assert same.low < 0 < same.high
    assert "paired" in capsys.readouterr().out


def test_the_paired_difference_is_that_of_the_accuracies_and_narrower_than_both():
    """Of 40 pairs the models agree on all but four, which the second gets right."""
    compare = load("compare_models")

    def rows(wrong: Collection[int]) -> list[rewardlab.ScoreRow]:
        return [
            rewardlab.ScoreRow(
                preference_id=f"pair {number}",
                source="made up",
                prompt_key=f"prompt {number}",
                reply=reply,
                score=float((reply == 0) != (number in wrong)),
                num_tokens=2,
                prompt_tokens=1,
                truncated_tokens=0,
                comparisons=(rewardlab.Comparison(first=0, second=1),) if reply == 0 else (),
            )
            for number in range(40)
            for reply in range(2)
        ]

    first, second = rows(range(14)), rows(range(10))
    change = compare.paired_difference(first, second)
    accuracies = [rewardlab.evaluate(some, beta=1.0).estimates["eval_accuracy"] for some in (first, second)]
    assert change.value == pytest.approx(accuracies[1].value - accuracies[0].value)
    assert change.high - change.low < min(one.high - one.low for one in accuracies)
