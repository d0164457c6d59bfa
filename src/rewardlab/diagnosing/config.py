"""The settings of `rewardlab diagnose`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.values import Section, require
from rewardlab.data.config import DataConfig, DiagnosticConfig, require_share
from rewardlab.model.config import BUDGETS, BackboneConfig, ComputeConfig, require_model


@dataclass(frozen=True, kw_only=True)
class DiagnoseRunConfig(Section):
    """How often each control is run, what makes it fail, and where the results go."""

    output_dir: Path = Path("runs/diagnose")
    """Folder for diagnose.json, diagnose.md and, with `--train`, the runs."""
    overwrite: bool = False
    """Replace the results of another configuration in `--output-dir`."""
    seeds: int = 5
    """Times that each control is run: each with new draws and a new division of conversations into those that are
    fitted and those that are held out."""
    layers: tuple[str, ...] = ("last",)
    """Layers to fit a head on, as for `rewardlab probe`; the one with the smallest held-out loss is diagnosed."""
    folds: int = 5
    """Parts into which the conversations are divided, each held out once."""
    kwise_weight: Literal["prompt", "comparison"] = "prompt"
    """Where a prompt has several comparisons: whether each prompt counts once, or each comparison."""
    most_from_length: float = 0.5
    """Share of the accuracy above chance that may be there from length alone; more fails."""
    most_from_shortcut: float = 0.9
    """Share that may be there without the prompt, from words alone, or from telling replies to other prompts apart."""
    train: bool = False
    """Run every control as a training run, instead of fitting heads on frozen states; runs that are done are kept."""
    train_config: Path | None = None
    """Settings of these runs, as `rewardlab train --config` reads them, presets and TRL's files too. Flags given here
    win over it."""
    cache: bool = True
    """Keep states on disk ($REWARDLAB_CACHE/states), where the probe keeps its own."""
    micro_token_budget: int | None = None
    """Tokens computed at a time; changes numbers by rounding alone. By default 8192, on a GPU 32768."""
    seed: int = 0
    """The first seed; the others follow."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, folds=(2, 1_000_000), seeds=(5, 1000), micro_token_budget=BUDGETS)
        require_share(self.most_from_length, "--most-from-length")
        require_between(self, most_from_shortcut=(0.0, 100.0))
        require(
            self.train or self.train_config is None,
            "--train-config: says how runs are trained, and none is without --train.",
        )
        for name, default in (("layers", ("last",)), ("folds", 5), ("kwise_weight", "prompt")):
            require(
                not self.train or getattr(self, name) == default,
                f"--{name.replace('_', '-')}: is of heads on frozen states, and --train fits none. Leave it out"
                + ("; runs take kwise_weight from --train-config." if name == "kwise_weight" else "."),
            )


@composed
@dataclass(frozen=True, kw_only=True)
class DiagnoseConfig(Composed):
    """Every setting of `rewardlab diagnose`, by the names of its flags."""

    data: DataConfig = DataConfig()
    model: BackboneConfig = BackboneConfig()
    compute: ComputeConfig = ComputeConfig()
    run: DiagnoseRunConfig = DiagnoseRunConfig()

    def __post_init__(self) -> None:
        """Raises ConfigError unless a model is named, and for a control that is asked for by itself."""
        require_model(self.model.model, model_is="a hub model, a folder, or smollm2-135m-instruct")
        require(
            self.data.diagnostic.diagnostic_mode == "none",
            "--diagnostic-mode: diagnose runs all controls. Leave it out, or run one with `rewardlab train`.",
        )
        own = self.data.diagnostic
        require(
            own.diagnostic_seed is None,
            "--diagnostic-seed: diagnose draws anew for each of its seeds. Say where they begin with --seed.",
        )
        require(
            own.diagnostic_shuffle_rate == DiagnosticConfig().diagnostic_shuffle_rate,
            "--diagnostic-shuffle-rate: diagnose shuffles with 0.5, where labels say nothing. Leave it out.",
        )
