"""What tests of runs share: the settings of a short one on a tiny model, and its record."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path

from rewardlab.core.config import Composed, to_mapping
from rewardlab.core.config import settings_of as known_settings
from rewardlab.training.settings.config import RewardTrainerConfig


def config_for(base_model: Path, data: Path, folder: Path, **changes) -> RewardTrainerConfig:
    """Small batches of short replies in float32; how long it runs, and what else changes, is up to the caller."""
    settings = {
        "model": str(base_model),
        "dataset": (str(data),),
        "output_dir": folder,
        "batch_size": 8,
        "lr": 3e-3,
        "eval_fraction": 0.2,
        "max_seq_len": 128,
        "precision": "fp32",
        "micro_token_budget": 256,
        "report_to": ("none",),
    }
    return RewardTrainerConfig.of(**{**settings, **changes})


RANKS = {
    "max_seq_len": 256,
    "baselines": False,
    "precision_card": "never",
    "attention_backend": "segments",
    "linear_backend": "torch",
    "norm_backend": "torch",
}
"""Of runs on several ranks that are compared: kernels that no measurement chooses, and nothing judged besides."""
CLOCK = (
    "tokens_per_second",
    "pairs_per_second",
    "model_tflops_per_second",
    "mfu",
    "peak_memory_gib",
    "seconds",
    "eval_seconds",
)
"""Columns of metrics.csv that depend on the machine's mood."""


def settings_of(config: RewardTrainerConfig) -> dict[str, object]:
    """As in a configuration file."""
    return to_mapping(config)


def values_of(config: Composed, names: Iterable[str]) -> dict[str, object]:
    """Settings by their flat names."""
    known = known_settings(type(config))
    return {name: known[name].of(config) for name in names}


def words_of(config: RewardTrainerConfig) -> list[str]:
    """The flags of the settings that are not defaults."""
    words: list[str] = []
    for name, setting in known_settings(RewardTrainerConfig).items():
        value = setting.of(config)
        if value == setting.default or value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def history_of(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without the clock; metrics.jsonl must say the same."""
    rows = [{name: value for name, value in row.items() if name not in CLOCK} for row in rows_of(folder)]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [str(line["step"]) for line in lines] == [row["step"] for row in rows]
    return rows


def rows_of(folder: Path) -> list[dict[str, str]]:
    """metrics.csv."""
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))
