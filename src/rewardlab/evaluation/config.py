"""Settings of `rewardlab eval`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewardlab.core.config import convert_fields, require, require_between, require_seed, settings
from rewardlab.data.config import DataConfig
from rewardlab.model.config import BUDGETS, ComputeConfig, ScoringPrecision


@settings
@dataclass(frozen=True, kw_only=True)
class EvalConfig(ComputeConfig):
    """Every setting of `rewardlab eval`. Template, length limit and β come with the model."""

    model: str = ""
    """Reward-model folder, such as `runs/…/best`."""
    dataset: tuple[str, ...] = ()
    """Data to evaluate on: files, folders or hub names, one or several (also `--hf-dataset`)."""
    hf_split: str = "test"
    """Split to evaluate on."""
    limit: int | None = None
    """Rows used from each dataset, after a seeded shuffle."""
    output_dir: Path = Path("runs/eval")
    """Where score rows and metrics are written."""
    overwrite: bool = False
    """Replace an earlier evaluation in `--output-dir`."""
    precision: ScoringPrecision = "fp32"
    """Arithmetic; fp32 gives the canonical scores."""
    precision_card: bool = False
    """Also compare float32, half precision and weights rounded to the nearest on up to 200 of the rows."""
    attention: Literal["auto", "shared", "padded"] = "auto"
    """As in `rewardlab train`."""
    micro_token_budget: int = 8192
    """Tokens computed at a time; changes no number."""
    max_drop_fraction: float = 0.05
    """Stop if more than this share of a dataset's rows cannot be used."""
    incomplete_pairs: Literal["drop", "error"] = "drop"
    """Long-form rows whose pair lacks a side."""
    ties: Literal["auto", "skip", "half", "error"] = "auto"
    """Equal scores in a K-wise row, as in `rewardlab train`."""
    max_replies: int | None = None
    """Replies kept of a K-wise row, drawn with the seed."""
    margin_column: str | None = None
    """Column with a margin, as in `rewardlab train`; rows without one are dropped, metrics ignore it."""
    strength_as: Literal["none", "weight", "margin", "soft"] = "none"
    """What the `strength` of a row does, as in `rewardlab train`: `soft` makes it the label that metrics use."""
    seed: int = 0
    """Decides which rows `--limit` keeps."""

    def require_complete(self) -> None:
        """Raise ConfigError unless model and data are named."""
        require(self.model != "", "--model is missing: name a reward-model folder, such as runs/…/best.")
        require(len(self.dataset) > 0, "--dataset is missing: name a file, a folder or a hub dataset.")

    def __post_init__(self) -> None:
        convert_fields(self, where="EvalConfig")
        require(
            self.limit is None or self.limit > 0,
            f"--limit {self.limit}: must be at least 1; leave it out to use every row.",
        )
        DataConfig(  # which checks what both have
            max_drop_fraction=self.max_drop_fraction,
            max_replies=self.max_replies,
            margin_column=self.margin_column,
            strength_as=self.strength_as,
        )
        require_seed(self.seed)
        require_between(self, micro_token_budget=BUDGETS)
