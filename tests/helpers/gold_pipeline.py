"""Plans of `rewardlab gold run`, and stages that only write what they would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rewardlab.gold.pipeline.config import RunConfig
from rewardlab.gold.pipeline.plan import read_plan
from rewardlab.gold.pipeline.run import run

ALL = ["sample", "label", "build", "train", "match", "curve", "check"]
PROMPTS = [f"Question {n} about {word}?" for n, word in enumerate(["basil", "light", "water", "frost", "soil"] * 8)]


def write_plan(folder: Path, models: Path, url: str, **changes: Any) -> Path:
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    plan: dict[str, Any] = {
        "folder": str(folder / "out"),
        "sample": {
            "prompts": str(folder / "prompts.json"),
            "backend": "http",
            "url": [url],
            "num-responses": 4,
            "max_tokens": 16,
            "concurrency": 4,
        },
        "label": {"model": str(models / "gold")},
        "build": {"test_fraction": 0.3, "near": "none"},
        "train": {
            "model": str(models / "base"),
            "steps": 2,
            "batch_size": 4,
            "max_seq_len": 128,
            "baselines": False,
        },
        "match": None,
        "curve": {},
        "check": {"num_samples": 1},
    }
    for stage, section in changes.items():
        plan[stage] = {**(plan[stage] or {}), **section} if isinstance(section, dict) else section
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan))
    return path


def words(path: Path, *more: str) -> list[str]:
    return ["gold", "run", str(path), *more]


class Tools:
    """Stages that only write what they would."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.called = folder, list[tuple[str, list[str]]]()

    def by_name(self) -> dict[str, Callable[[Sequence[str]], None]]:
        return {name: lambda arguments, name=name: self._do(name, list(arguments)) for name in ALL}

    def _do(self, name: str, arguments: list[str]) -> None:
        self.called.append((name, arguments))
        files = {
            "sample": ["samples.jsonl"],
            "label": ["labels.jsonl"],
            "build": ["pairs/train.jsonl", "pairs/test.jsonl", "pairs/labels.train.jsonl", "pairs/labels.test.jsonl"],
            "train": ["proxy/best/reward_spec.json"],
            "match": ["match/match.json"],
            "curve": ["curve/curve.json"],
            "check": ["check/check.json"],
        }
        for file in files[name]:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name} {arguments}")
        if name in ("match", "check"):
            raise SystemExit(1 if name == "match" else 0)


def go(path: Path, tools: Tools, **settings: Any) -> tuple[list[str], list[str]]:
    """(stages that were done, what was said)."""
    tools.called.clear()
    said: list[str] = []
    with suppress(SystemExit):
        run(read_plan(path), RunConfig(plan=path, **settings), tools.by_name(), say=said.append)
    return [name for name, _ in tools.called], said
