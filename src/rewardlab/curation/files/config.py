"""Settings of the tools that write datasets. Needs nothing but the standard library and tyro."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import short
from rewardlab.core.values import require
from rewardlab.curation.config import RowsConfig


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(RowsConfig):
    """Which rows are written, where to, and in which form."""

    output: Path
    """File to write: `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.parquet`."""
    to: Literal["rewardlab", "trl", "trl-implicit"] = "rewardlab"
    """Form of the rows: the project's own, which keeps everything, or TRL's pairs of messages, with the prompt in a
    column or at the beginning of both sides."""
    inexpressible: Literal["error", "drop", "harden"] = "error"
    """Judgements that TRL's pairs cannot hold (ties, soft labels, weights, margins): stop, leave them out, or write
    them as if they were certain and of weight 1 (ties are left out all the same). All are counted."""
    join: Literal["none", "pairs", "prompts"] = "none"
    """Make one row of all rows of a dataset that judge the same replies to a prompt (such as a row each of several
    annotators), or of all rows of a prompt, whose replies are then computed with it together. Judgements stay."""
    seed: int = 0
    """Draws rows (`--limit`) and replies (`--max-replies`)."""
    overwrite: bool = False
    """Replace the file if it exists."""

    def __post_init__(self) -> None:
        """Raises ConfigError for joined rows in TRL's form, which holds one judgement a row."""
        super().__post_init__()
        require(
            self.join == "none" or self.to == "rewardlab",
            f"--join {self.join} needs --to rewardlab: a row of TRL's pairs holds one judgement.",
        )


@dataclass(frozen=True, kw_only=True)
class SplitConfig(RowsConfig):
    """Which rows are divided, into which splits, and what stays together."""

    output_dir: Path
    """Folder to write: a file a split, named for it."""
    fractions: tuple[str, ...] = ("train=0.9", "validation=0.05", "test=0.05")
    """Splits and their shares, which sum to 1."""
    near: float | Literal["none"] = 0.8
    """Similarity from which prompts are near duplicates and stay together; `none` looks at equal texts alone."""
    ending: Literal["jsonl", "jsonl.gz", "jsonl.zst", "parquet"] = "jsonl"
    """Kind of the files."""
    seed: int = 0
    """Which conversations go where."""
    overwrite: bool = False
    """Replace the splits that an earlier call wrote into the folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.near == "none" or 0 < self.near <= 1, f"--near {self.near}: must be above 0 and at most 1, or none."
        )
        _ = self.shares

    @property
    def shares(self) -> dict[str, float]:
        """Split -> its share. Raises ConfigError for shares that cannot be read or do not sum to 1."""
        shares: dict[str, float] = {}
        for word in self.fractions:
            name, equals, number = word.partition("=")
            try:
                share = float(number)
            except ValueError:
                share = math.nan
            if not equals or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) or not 0 < share <= 1:
                raise ConfigError(f"--fractions {short(word)}: wanted a split and its share, such as train=0.9.")
            if name in shares:
                raise ConfigError(f"--fractions: {name} is named twice.")
            shares[name] = share
        require(len(shares) > 1, "--fractions: name at least two splits, such as train=0.9 test=0.1.")
        total = math.fsum(shares.values())
        require(abs(total - 1) < 1e-6, f"--fractions: the shares sum to {total:.6g} and must sum to 1.")
        return shares


@dataclass(frozen=True, kw_only=True)
class MixConfig(RowsConfig):
    """Which rows of which datasets are mixed, and where they are written."""

    output: Path
    """File to write: `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.parquet`."""
    rows: int | None = None
    """Rows in total; by default as many as the weights allow."""
    seed: int = 0
    """Draws the rows and their order."""
    overwrite: bool = False
    """Replace the file if it exists."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows is None or self.rows > 0, f"--rows {self.rows}: must be at least 1.")
