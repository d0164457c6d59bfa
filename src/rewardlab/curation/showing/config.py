"""Settings of `rewardlab data show`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from rewardlab.core.config import Composed, composed, require_seed
from rewardlab.core.values import Section, require
from rewardlab.data.config import ReadingConfig, RenderingConfig


@dataclass(frozen=True, kw_only=True)
class ShownConfig(Section):
    """Which rows are shown, and as what."""

    dataset: Annotated[str, tyro.conf.Positional] = ""
    """File, folder or hub name."""
    row: tuple[str, ...] = ()
    """Rows, each by its line number (`file:line` too) or, where no line has this number, by the value of its column
    `id`, `pair_id` or `preference_id`; by default the first."""
    model: str = ""
    """Show tokens as this model reads them: a reward-model folder, which has its own template, limit and truncation, or
    a folder or hub name to train from. Without it the row is shown as it is read."""
    hf_split: str = "train"
    """Split to read of a folder or hub name."""
    json: bool = False
    """Print JSON instead."""
    seed: int = 0
    """Seed of a run that drew replies (`--max-replies`)."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that names nothing."""
        require_seed(self.seed)
        require("" not in self.row, "--row: name at least one row, such as --row 3 17.")

    def require_named(self) -> None:
        """Raise ConfigError unless a dataset is named."""
        require(
            self.dataset != "",
            "DATASET is missing: name a file, a folder or a hub dataset: `rewardlab data show pairs.jsonl --row 3`.",
        )


@composed
@dataclass(frozen=True, kw_only=True)
class ShowConfig(Composed):
    """Every setting of `rewardlab data show`."""

    shown: ShownConfig = ShownConfig()
    reading: ReadingConfig = ReadingConfig()
    rendering: RenderingConfig = RenderingConfig()
