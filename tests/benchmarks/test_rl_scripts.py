"""Benchmarks of reinforcement learning run on a tiny model and compare what they promise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import grpo_parity
import rl_scorer
from harness import workload
from reward_models import save_tiny, served

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def test_rollouts_are_those_of_all_prompts_and_are_shuffled() -> None:
    rows = workload.read_rows(workload.GENERATED, 6, folder=Path())
    talks = rl_scorer.rollouts_of(rows, prompts=3, replies=4, seed=0)
    prompts = [json.dumps(talk[:-1]) for talk in talks]
    assert sorted(prompts.count(prompt) for prompt in set(prompts)) == [4, 4, 4]
    assert prompts != sorted(prompts, key=prompts.index), "no two replies of a prompt need lie beside each other"
    for prompt in set(prompts):
        replies = [talk[-1]["content"] for talk, own in zip(talks, prompts, strict=True) if own == prompt]
        assert len(set(replies)) > 2


@pytest.mark.slow
def test_every_way_to_reward_a_step_gives_the_same_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path / "rm")

    @contextmanager
    def running(model: str, **how: Any) -> Iterator[Any]:
        with served(Path(model)) as url:
            yield SimpleNamespace(url=url)

    monkeypatch.setattr(rl_scorer, "trained", lambda *arguments, **how: ("", folder))
    monkeypatch.setattr(rl_scorer.engine_process, "ours", running)
    flags = ["--data", "generated", "--prompts", "3", "--replies", "3", "--repeats", "1", "--threads", "1"]
    assert rl_scorer.main([*flags, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("rl_scorer.*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found["differences"]) == {"grouped", "tasks", "one by one", "server", "TRL"}
    assert found["differences"]["grouped"] == 0
    assert max(found["differences"].values()) < rl_scorer.TOLERANCE
    assert "| TRL → grouped |" in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.soak
def test_trl_sees_the_scores_of_the_command_however_it_is_rewarded(tmp_path: Path) -> None:
    flags = ["--model", "tiny-llama", "--max-seq-len", "512", "--threads", "1"]
    assert grpo_parity.main([*flags, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("grpo_parity.*.json")
    for name, one in json.loads(path.read_text(encoding="utf-8"))["ways"].items():
        assert one["rollouts"] == 2 * 2 * grpo_parity.GROUP, name
        assert max(one["reward"], one["mean"]) < grpo_parity.TOLERANCE, name
