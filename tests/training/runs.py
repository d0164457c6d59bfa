"""What tests of runs share: the settings of a short one on a tiny model, and its record."""

from __future__ import annotations

import csv
from pathlib import Path

from rewardlab.training.config import RewardTrainerConfig


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
    return RewardTrainerConfig(**{**settings, **changes})


def rows_of(folder: Path) -> list[dict[str, str]]:
    """metrics.csv."""
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))
