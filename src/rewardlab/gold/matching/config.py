"""Settings of `rewardlab gold match`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.terminal import short
from rewardlab.core.values import Section, require
from rewardlab.gold.files.inputs import NO_INPUT, InputConfig
from rewardlab.gold.scoring import DEFAULT_SCORING, ScoringConfig


@dataclass(frozen=True, kw_only=True)
class MatchingConfig(Section):
    """Which proxies are held against gold, on what, and where the results go."""

    proxies: tuple[str, ...] = ()
    """`[NAME=]WHAT` for each proxy: a reward-model folder, a plain sequence-classification model of another project (a
    folder or a hub name), or a file with its scores of the rows of --input."""
    train_input: tuple[Path, ...] = ()
    """Rows with gold scores that the proxies were trained on: their match there says what they learned. Without --input
    nothing else is judged, and files of --proxies are scores of these rows."""
    train_prompts_path: Path | None = None
    """In place of --train-input: a file of prompts, as --prompts-path."""
    train_responses_path: Path | None = None
    """As --responses-path, of the training rows."""
    train_rewards_path: Path | None = None
    """As --rewards-path, of the training rows."""
    train_proxies: tuple[str, ...] = ()
    """`NAME=FILE` with the scores of a proxy for the training rows; a proxy that is a model is scored there anyway."""
    runs: tuple[str, ...] = ()
    """`NAME=FOLDER` of the training run of a proxy; by default that in which its folder lies."""
    num_samples: int | None = None
    """Rows of each part that are judged, from the first; by default all. Files of scores cover all rows."""
    num_rescored: int = 200
    """Rows that a proxy which is a model scores once more with another system turn, to see whether it agrees better
    with gold so; 0 scores none."""
    num_examples: int = 2
    """Pairs that are shown as text for each proxy: those that it orders against gold, where gold's scores differ
    most; 0 shows none."""
    good_match: float = 0.8
    """Match rate from which on a proxy, and its training, count as good."""
    least_spread: float = 0.25
    """Size of the proxy's margins beside gold's below which its scores count as compressed."""

    output_dir: Path | None = None
    """Folder for match.json, match.md and match.html, and for scores that are computed; by default `match` beside the
    first file that is read."""
    overwrite: bool = False
    """Replace files of these names that `gold match` did not write."""
    seed: int = 0
    """Decides the signs that tests draw."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, num_rescored=(0, 1_000_000_000), num_examples=(0, 1_000))
        require_between(self, good_match=(0.5, 1.0), least_spread=(0.0, 1.0))
        if self.num_samples is not None:
            require_between(self, num_samples=(1, 1_000_000_000))
        named = ("--train-proxies", self.train_proxies), ("--runs", self.runs)
        for flag, values in named:
            for value in values:
                require("=" in value, f"{flag} {short(value)}: wanted NAME={'FILE' if flag != '--runs' else 'FOLDER'}.")


@composed
@dataclass(frozen=True, kw_only=True)
class MatchConfig(Composed):
    """The settings of `rewardlab gold match`."""

    matching: MatchingConfig = MatchingConfig()
    rows: InputConfig = NO_INPUT
    scoring: ScoringConfig = DEFAULT_SCORING

    def __post_init__(self) -> None:
        """Raise ConfigError if there is nothing to match."""
        require(
            self.rows.is_given or self.train.is_given,
            "--input is missing: name a file with gold scores, as `rewardlab gold label` writes, or in its place "
            "--prompts-path, --responses-path and --rewards-path. It is the held-out rows that the proxies are matched "
            "on. To see only what a proxy learned, name the rows that it was trained on with --train-input, or with "
            "--train-prompts-path, --train-responses-path and --train-rewards-path.",
        )
        require(bool(self.matching.proxies), "--proxies is missing: name a reward-model folder or a file with scores.")
        require(
            self.rows.is_given or not self.matching.train_proxies,
            "--train-proxies: without --input the files of --proxies are scores of the training rows. Name them there.",
        )

    @property
    def output_dir(self) -> Path:
        """The folder of the results."""
        if self.matching.output_dir is not None:
            return self.matching.output_dir
        rows = self.rows if self.rows.is_given else self.train
        first = rows.input[0] if rows.input else rows.responses_path
        assert first is not None
        return first.parent / "match"

    @property
    def train(self) -> InputConfig:
        """The training part, read as the test part is; it names nothing if none was given."""
        own = self.matching
        return InputConfig(
            input=own.train_input,
            prompts_path=own.train_prompts_path,
            responses_path=own.train_responses_path,
            rewards_path=own.train_rewards_path,
            num_responses=self.rows.num_responses,
            system=self.rows.system,
        )
