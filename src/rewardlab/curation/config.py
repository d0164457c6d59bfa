"""Settings that the data tools share. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from rewardlab.core.values import Section, require
from rewardlab.data.config import ReadingConfig, require_limits


@dataclass(frozen=True, kw_only=True)
class RowsConfig(Section):
    """Which rows are looked at."""

    dataset: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Files, folders or hub names, one or several."""
    hf_split: str = "train"
    """Split to read of folders and hub names."""
    limit: int | None = None
    """Rows used from each dataset, after a seeded shuffle; by default all."""
    reading: ReadingConfig = ReadingConfig()

    def __post_init__(self) -> None:
        require_limits(self, "limit")

    def require_named(self, command: str) -> None:
        """Raise ConfigError unless a dataset is named."""
        require(
            len(self.dataset) > 0,
            f"DATASET is missing: name a file, a folder or a hub dataset: `rewardlab data {command} pairs.jsonl`.",
        )
