"""The settings of `rewardlab compare`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewardlab.core.config import require_between
from rewardlab.core.values import Section, require


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Section):
    """What is compared, how, and where it is written."""

    names: tuple[str, ...] = ()
    """A name for each model; by default the shortest ends of the paths that differ."""
    on: str | None = None
    """Which evaluation of a run: `test`, `selection`, `step_100` …; by default `test`, else `selection`."""
    metric: Literal["accuracy", "nll", "margin"] = "accuracy"
    """Metric of `--margin`, the slices and the set of best models."""
    margin: float | None = None
    """Ask whether each model is less than this worse than the first, in units of `--metric` (0.03: three points)."""
    slice: tuple[str, ...] = ()
    """Columns to slice by: `source`, `longer`, `truncated`, or any column of a score file or of `--columns`."""
    columns: Path | None = None
    """File with `id` (and `source`) and columns to slice by, or the data that were judged; texts in it are shown."""
    gold: Path | None = None
    """Scores of a gold model for the same replies: match rate and correlations."""
    outcome: str | None = None
    """Column, metric or scorer that holds verdicts in files of others (lm-eval, inspect)."""
    beta: tuple[float, ...] = ()
    """β of the NLL where it is not known: one for all models, or one each."""
    common: bool = False
    """Compare the rows that all models have, and count the others, where some are missing."""
    examples: int = 3
    """Disagreements printed of each kind; `disagreements.jsonl` has all."""
    output_dir: Path | None = None
    """Folder for `compare.json` and `disagreements.jsonl`; nothing is written without it."""
    overwrite: bool = False
    """Replace an earlier comparison in `--output-dir`."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require(
            self.margin is None or self.margin > 0,
            f"--margin {self.margin}: must be above 0: how much worse is still good enough.",
        )
        require_between(self, examples=(0, 1000))
