"""Settings of `rewardlab gold curve`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.terminal import short
from rewardlab.core.values import Section, require
from rewardlab.gold.files.inputs import NO_INPUT, InputConfig
from rewardlab.gold.scoring import DEFAULT_SCORING, ScoringConfig

MOST_WEIGHTS: Final = 10**15
"""Largest size of a proxy."""


@dataclass(frozen=True, kw_only=True)
class CurvingConfig(Section):
    """Whose picks are followed, how far, on which prompts, and where the results go."""

    proxies: tuple[str, ...] = ()
    """`[NAME=]WHAT` for each proxy: a reward-model folder, a plain sequence-classification model of another project (a
    folder or a hub name), or a file with its scores of the rows of --input."""
    ood: tuple[Path, ...] = ()
    """Rows with gold scores of prompts unlike those that the proxies were trained on: a second set, judged beside
    --input."""
    ood_proxies: tuple[str, ...] = ()
    """`NAME=FILE` with the scores of a proxy for the rows of --ood, where it is a file; a proxy that is a folder scores
    them itself."""
    sizes: tuple[str, ...] = ()
    """`NAME=NUMBER`, the trained weights of a proxy, by which the results are ordered; by default those that its run
    recorded, else all weights of its model. A file of scores has no size."""
    most: int | None = None
    """Largest n; by default as many as nine in ten prompts of every set have scored replies."""
    ensemble: tuple[str, ...] = ()
    """Names of proxies that are judged as one too: by the mean, the minimum, and the mean less `--penalty` standard
    deviations over them."""
    penalty: float = 1.0
    """λ, the number of standard deviations that the last of these subtracts."""

    output_dir: Path | None = None
    """Folder for curve.json, curve.csv, curve.md and curve.html, and for scores that are computed; by default `curve`
    beside the first file that is read."""
    overwrite: bool = False
    """Replace files of these names that `gold curve` did not write."""
    seed: int = 0
    """Decides the draws of the tests."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, penalty=(0.0, 100.0), most=(2, 10_000))
        for value in self.ood_proxies:
            require("=" in value, f"--ood-proxies {short(value)}: wanted NAME=FILE.")
        for value in self.sizes:
            told = f"--sizes {value:.80}: wanted NAME=NUMBER, a number of weights from 1 to {MOST_WEIGHTS:,}."
            require(_is_size(value.partition("=")[2]), told)
        sized = [value.partition("=")[0] for value in self.sizes]
        twice = [name for name in sized if sized.count(name) > 1]
        require(not twice, f"--sizes {', '.join(dict.fromkeys(twice))}: is given twice. Give each proxy one size.")
        require(not self.ood_proxies or bool(self.ood), "--ood-proxies: only with --ood, the rows that they score.")
        require(len(self.ensemble) != 1, "--ensemble: name two proxies or more, by the names in --proxies.")
        require(len(set(self.ensemble)) == len(self.ensemble), "--ensemble: a proxy is named twice.")


def _is_size(text: str) -> bool:
    """Return whether a text is a number of weights. Too many digits are refused before they are read as a number."""
    return text.isdecimal() and len(text) <= len(str(MOST_WEIGHTS)) and 1 <= int(text) <= MOST_WEIGHTS


@composed
@dataclass(frozen=True, kw_only=True)
class CurveConfig(Composed):
    """The settings of `rewardlab gold curve`."""

    curving: CurvingConfig = CurvingConfig()
    rows: InputConfig = NO_INPUT
    scoring: ScoringConfig = DEFAULT_SCORING

    def __post_init__(self) -> None:
        """Raise ConfigError if there is nothing to draw a curve of."""
        require(
            self.rows.is_given,
            "--input is missing: name a file with gold scores, as `rewardlab gold label` writes, or in its place "
            "--prompts-path, --responses-path and --rewards-path.",
        )
        require(bool(self.curving.proxies), "--proxies is missing: name a reward-model folder or a file with scores.")

    @property
    def output_dir(self) -> Path:
        """The folder of the results."""
        if self.curving.output_dir is not None:
            return self.curving.output_dir
        first = self.rows.input[0] if self.rows.input else self.rows.responses_path
        assert first is not None
        return first.parent / "curve"
