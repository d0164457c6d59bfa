"""Settings of `rewardlab rl audit`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rewardlab.core.config import require_between, require_seed
from rewardlab.core.values import Section, require


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Section):
    """Which run is audited, what its reward is held against, and where the results go."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run with its rollouts*.jsonl, or one such file."""
    evidence: tuple[str, ...] = ()
    """Names of the `evidence` in the record that are judged; by default all."""
    gold: str = ""
    """A second or gold reward model, as a folder or the address of a server, that scores logged replies now."""
    gold_rows: int = 32
    """Most replies of a step that `--gold` scores: whole prompts, drawn with the seed."""
    heldout: Path | None = None
    """Results of a held-out suite at checkpoints: JSONL or CSV with `step`, `value` and `item`, or `low` and `high`."""
    windows: int = 4
    """Windows of equally many steps into which the run is divided; the first is the reference."""
    least_change: float = 0.1
    """A fall of the evidence, or a rise of the reward, that is smaller than this is not a finding, in standard
    deviations of the first window; and the least that the evidence has to rise for each standard deviation of the
    reward."""
    least_rise: float = 0.5
    """Rise of the reward, in standard deviations, from which on the evidence has to rise too."""
    share: float = 0.25
    """Share of the rise that the reward predicts for the evidence which has to be there."""

    output_dir: Path | None = None
    """Folder for audit.json, audit.md and audit.html; by default `audit` in the folder of the run."""
    overwrite: bool = False
    """Replace files of these names that an audit did not write."""
    seed: int = 0
    """Decides which replies `--gold` scores."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, windows=(2, 20), gold_rows=(2, 1_000_000))
        require_between(self, least_change=(0.0, 10.0), least_rise=(0.0, 100.0), share=(0.0, 1.0))
        require(
            self.least_rise >= self.least_change,
            "--least-rise: must be at least --least-change, which is the smallest rise that counts at all.",
        )
