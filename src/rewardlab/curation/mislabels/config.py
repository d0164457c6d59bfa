"""The settings of `rewardlab data mislabels`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.values import Section, require
from rewardlab.curation.config import RowsConfig
from rewardlab.data.config import RenderingConfig
from rewardlab.model.config import BUDGETS, BackboneConfig, ComputeConfig


@dataclass(frozen=True, kw_only=True)
class FindConfig(Section):
    """Who testifies about each pair, from when on a pair is flagged, and what is made of it."""

    output_dir: Path = Path("runs/mislabels")
    """Where mislabels.jsonl, mislabels.md, mislabels.json and report.txt are written."""
    overwrite: bool = False
    """Replace an earlier search in `--output-dir`, and the files of `--remove` and `--flip`."""
    layers: tuple[str, ...] = ()
    """Layers of `--model` whose states a head each is fitted on; by default two, at one half and five sixths of its
    depth."""
    witness: tuple[str, ...] = ()
    """Further witnesses, none of which may have been trained on these rows: score files and folders of `rewardlab eval`
    or `score`, verdicts of a judge, or reward-model folders, which then score the data."""
    below: float = 0.3
    """A witness testifies against a label whose probability it puts below this."""
    agree: int | None = None
    """Witnesses that must testify against a label before it is flagged; by default all, and at least two."""
    folds: int = 5
    """Parts into which conversations are divided, near duplicates together; each is predicted by heads that saw nothing
    of it."""
    near_duplicates: bool = True
    """Join conversations with nearly the same prompt or replies before folds are made (needs `rewardlab[data]`)."""
    plant: float = 0.0
    """Share of the labels turned round in memory, to measure how many of them are found; 0 measures nothing."""
    plant_seeds: int = 5
    """Times that labels are planted, each time others."""
    worth: bool = False
    """Compare heads fitted with and without the flagged rows, on conversations that are never cleaned."""
    worth_seeds: int = 5
    """Divisions into folds over which `--worth` is repeated."""
    remove: Path | None = None
    """File for the dataset without the flagged rows; beside it a trace of each."""
    flip: Path | None = None
    """File for the dataset with the flagged labels turned round. In published comparisons removing does better."""
    examples: int = 50
    """Pairs whose texts mislabels.md shows: the flagged ones, and where they are fewer, the next most suspicious."""
    cache: bool = True
    """Keep the states of the model on disk, as `rewardlab probe` does, so that another search needs no model."""
    micro_token_budget: int | None = None
    """Tokens computed at a time; changes numbers by rounding alone. By default 8192, on a GPU 32768."""
    seed: int = 0
    """Decides folds, which way round pairs are turned, planted labels, and which rows a limit keeps."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(
            self,
            folds=(2, 1_000),
            plant_seeds=(1, 1_000),
            worth_seeds=(1, 1_000),
            examples=(0, 100_000),
            micro_token_budget=BUDGETS,
        )
        require(0 < self.below <= 0.5, f"--below {self.below}: must be above 0 and at most 0.5.")
        require(0 <= self.plant <= 0.4, f"--plant {self.plant}: must be between 0 (none) and 0.4.")
        require(
            self.agree is None or self.agree >= 1,
            f"--agree {self.agree}: must be at least 1; leave it out to ask for all witnesses.",
        )


@composed
@dataclass(frozen=True, kw_only=True)
class MislabelsConfig(Composed):
    """Every setting of `rewardlab data mislabels`."""

    rows: RowsConfig = RowsConfig()
    rendering: RenderingConfig = RenderingConfig()
    model: BackboneConfig = BackboneConfig()
    compute: ComputeConfig = ComputeConfig()
    run: FindConfig = FindConfig()

    def require_complete(self) -> None:
        """Raise ConfigError unless data are named, and witnesses enough."""
        self.rows.require_named("mislabels")
        run, heads = self.run, self.model.model != ""
        require(
            heads or len(run.witness) >= 2,
            "--model is missing: name a model whose states heads are fitted on, such as smollm2-135m-instruct, or at "
            "least two witnesses with --witness. One witness alone cannot tell a wrong label from its own mistake.",
        )
        require(heads or not run.layers, "--layers: there is no --model whose layers these could be.")
        require(
            heads or not run.worth,
            "--worth compares heads on the states of a model. Name one with --model.",
        )
        require(
            len(run.layers) != 1 or len(run.witness) >= 1 or run.layers[0] == "all",
            f"--layers {' '.join(run.layers)}: one head is one witness. Name two layers, or another --witness.",
        )
