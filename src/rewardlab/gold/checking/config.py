"""Settings of `rewardlab gold check`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rewardlab.core.config import require_between, require_seed
from rewardlab.core.values import Section, require


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Section):
    """Which files are held against each other, and what is shown of them."""

    folder: Path | None = None
    """Folder in which all stages wrote: its samples.jsonl, labels.jsonl, and the folder with train.jsonl are found."""
    samples: Path | None = None
    """What `rewardlab gold sample` wrote."""
    labels: Path | None = None
    """What `rewardlab gold label` wrote."""
    pairs: Path | None = None
    """The folder that `rewardlab gold build` wrote."""
    prompts_path: Path | None = None
    """A file of prompts: those that were sampled from, or those of the layout with one JSON file a fact. Without it the
    prompts of --responses-path are those of the pairs of --data-path with the same replies."""
    responses_path: Path | None = None
    """`[{"response_1": …, "response_2": …}]`, a row for each prompt."""
    rewards_path: Path | None = None
    """`[[r1, r2]]`, the gold scores of each row."""
    data_path: Path | None = None
    """A file of pairs: `{"chosen": […], "rejected": […]}` as one object, or one object a line."""
    num_responses: int | None = None
    """Replies of each row that the layout with one JSON file a fact has; by default as many as there are."""
    system: str | None = None
    """System turn of prompts that have none, as it was given to the stages."""
    num_samples: int = 5
    """Rows that are shown as text, drawn with the seed."""
    output_dir: Path | None = None
    """Folder for check.json, check.md and check.html; by default none are written."""
    overwrite: bool = False
    """Replace files of these names that `gold check` did not write."""
    seed: int = 0
    """Decides which rows are shown, and how texts are divided for fitting."""

    def __post_init__(self) -> None:
        """Raise ConfigError if nothing, or not enough, is named."""
        require_seed(self.seed)
        require_between(self, num_samples=(0, 1000), num_responses=(1, 100_000))
        ours = (self.folder, self.samples, self.labels, self.pairs)
        require(
            any(ours) or self.responses_path is not None or self.data_path is not None,
            "nothing to check. Name --folder, or files: --samples, --labels and --pairs, or --prompts-path, "
            "--responses-path, --rewards-path and --data-path.",
        )
        require(
            self.folder is None or not any(ours[1:]),
            "--folder finds the files of all stages itself. Leave --samples, --labels and --pairs out, or --folder.",
        )
        require(
            not (any(ours) and (self.responses_path or self.rewards_path)),
            "--responses-path and --rewards-path are of the layout with one JSON file a fact, in place of --samples "
            "and --labels.",
        )
        require(
            self.responses_path is None or self.prompts_path is not None or self.data_path is not None,
            "--prompts-path is missing: responses belong to prompts by place. In its place --data-path can name pairs, "
            "whose prompts are found by their replies.",
        )
        require(
            self.rewards_path is None or self.responses_path is not None,
            "--responses-path is missing: scores belong to responses by place.",
        )
