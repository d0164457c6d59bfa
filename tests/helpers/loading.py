"""What tests of loading share: plain pairs, files of them, and what was loaded in short."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from common import make_tokenizer
from harness.in_memory import LoadedPreferences, load_preferences
from rewardlab.core.config import from_mapping
from rewardlab.core.types import Preference
from rewardlab.data.config import ReadingConfig
from rewardlab.data.prepare import Prepared, load_data
from rewardlab.data.templates import build_renderer
from rewardlab.training.settings.config import RewardTrainerConfig

ALLOW_DROPS = {"max_drop_fraction": 1.0}
Row = Mapping[str, object]


def pair(k: int) -> dict[str, object]:
    """A row of texts, told apart from others by `k`."""
    return {"prompt": f"question {k}", "chosen": f"good {k}", "rejected": f"bad {k}"}


def write(path: Path, rows: Sequence[Row]) -> Path:
    """JSONL, compressed if it is called so; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def load(
    *names: Path | str, split: str = "train", seed: int = 0, limit: int | None = None, **settings: Any
) -> LoadedPreferences:
    """`load_preferences` with what is not in `settings` at its default."""
    reading = ReadingConfig(**settings)
    return load_preferences([str(name) for name in names], split=split, reading=reading, seed=seed, limit=limit)


def settings_of_run(*names: Path | str, **settings: Any) -> RewardTrainerConfig:
    """Settings of a training run that holds nothing out. Nothing is run."""
    values = {"dataset": [*map(str, names)], "output_dir": "run", "model": "m", "eval_fraction": 0, **settings}
    return from_mapping(RewardTrainerConfig, values, where="the test")


def prepared(*names: Path | str, seed: int = 0, **settings: Any) -> Prepared:
    """Training data as a run prepares them."""
    config = settings_of_run(*names, **settings)
    return load_data(config.data, build_renderer(make_tokenizer(), config.data.rendering), seed=seed)


def places(done: Prepared) -> list[str]:
    """Ids of the training preferences, in order."""
    return [group.preference_id for group in done.train.groups()]


def contents(loaded: LoadedPreferences) -> list[tuple[str, str, str]]:
    """(prompt, first reply, second reply) of every row, each of one turn."""
    return [(row.prompt[0].content, row.replies[0][0].content, row.replies[1][0].content) for row in loaded.preferences]


def ids(preferences: Sequence[Preference]) -> list[str]:
    """Their ids, in order."""
    return [preference.id for preference in preferences]


THREE = [pair(k) for k in range(3)]
THREE_CONTENTS = [(f"question {k}", f"good {k}", f"bad {k}") for k in range(3)]
