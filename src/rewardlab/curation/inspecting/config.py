"""Settings of `rewardlab data inspect`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.values import Section, require
from rewardlab.curation.config import RowsConfig
from rewardlab.data.config import RenderingConfig


@dataclass(frozen=True, kw_only=True)
class InspectionConfig(Section):
    """What is counted, and where it is written."""

    model: str = ""
    """Count tokens, and show samples, as this model reads them: a folder, a hub name or a reward-model folder. Without
    it and `--tokenizer`, lengths are in words."""
    tokenizer: str = ""
    """Count tokens of this tokenizer, without showing samples as tokens."""
    samples: int = 3
    """Rows that are shown, drawn with the seed."""
    languages: int = 2000
    """Replies whose language is guessed (extra `data`), drawn with the seed; 0 for none."""
    json: Path | None = None
    """File for everything that was found, as JSON."""
    html: Path | None = None
    """File for a page with histograms."""
    output_dir: Path | None = None
    """Folder for both: inspection.json and inspection.html."""
    texts: bool = True
    """Show texts of the data; `--no-texts` leaves samples and examples out, where they may not be passed on."""
    overwrite: bool = False
    """Replace files of these names that an inspection did not write."""
    seed: int = 0
    """Decides which rows `--limit` keeps, which are shown, and on which baselines are fitted."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, samples=(0, 100), languages=(0, 1_000_000))
        require(not (self.model and self.tokenizer), "--model and --tokenizer: give one of the two.")


@composed
@dataclass(frozen=True, kw_only=True)
class InspectConfig(Composed):
    """Every setting of `rewardlab data inspect`."""

    rows: RowsConfig = RowsConfig()
    rendering: RenderingConfig = RenderingConfig()
    inspection: InspectionConfig = InspectionConfig()
