"""Settings of `rewardlab gold build`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewardlab.core.config import require_between, require_seed
from rewardlab.core.values import Section, require
from rewardlab.gold.files.inputs import NO_INPUT, InputConfig


@dataclass(frozen=True, kw_only=True)
class BuildConfig(Section):
    """Which replies are compared, how, and where the preferences go."""

    output_dir: Path
    """Folder to write: preferences of both sides, the gold rows that they are from, and a manifest."""
    pairs: Literal["all", "best-worst", "random", "adjacent"] = "all"
    """Pairs of a prompt's replies: all, the best against the worst, one drawn with the seed, or neighbours by score.
    With two replies all of these are the same."""
    rows_as: Literal["pairs", "kwise"] = "pairs"
    """Rows of our form: one for each pair, or one for each prompt with all its judged replies."""
    min_margin: float = 0.0
    """Pairs whose gold scores differ by less are left out."""
    soft_tau: float | None = None
    """Soft labels: the probability that the better reply is preferred is σ(difference / this). By default labels are
    1."""
    drop_cut: bool = False
    """Leave out replies that ended at the token limit."""
    test_fraction: float = 0.05
    """Share of the rows held out, whole prompts and what belongs to them; 0 for none."""
    near: float | Literal["none"] = 0.8
    """Similarity from which prompts are near duplicates and stay on one side; `none` looks at equal texts alone."""
    seed: int = 0
    """Decides which prompts are held out, and which pairs are drawn."""
    overwrite: bool = False
    """Replace what an earlier call wrote into the folder."""
    inputs: InputConfig = NO_INPUT

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, min_margin=(0.0, 1e300), test_fraction=(0.0, 0.9))
        require(
            self.soft_tau is None or 1e-9 <= self.soft_tau <= 1e9,
            f"--soft-tau {self.soft_tau}: must be from 1e-09 to 1e+09: the difference of gold scores at which the "
            f"better reply is preferred with the probability 0.73.",
        )
        require(
            self.near == "none" or 0 < self.near <= 1, f"--near {self.near}: must be above 0 and at most 1, or none."
        )
