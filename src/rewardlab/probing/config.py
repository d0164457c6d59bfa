"""The settings of `rewardlab probe`. Needs nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rewardlab.core.config import Composed, composed, require_between, require_seed
from rewardlab.core.values import Section
from rewardlab.data.config import DataConfig
from rewardlab.model.config import BUDGETS, BackboneConfig, ComputeConfig, require_model


@dataclass(frozen=True, kw_only=True)
class ProbeRunConfig(Section):
    """Which heads are fitted and how they are judged, and where the results go."""

    output_dir: Path = Path("runs/probe")
    """Run folder: configuration, score rows, bootstrap heads and the saved model."""
    overwrite: bool = False
    """Replace an existing run in `--output-dir`."""
    layers: tuple[str, ...] = ("last",)
    """Layers to fit a head on: `last`, `all`, or numbers from 1; the best one by cross-validation is saved, the
    model cut off after it."""
    folds: int = 5
    """Parts into which the training prompts are divided, each held out once."""
    bootstrap: int = 1000
    """Heads fitted to samples of the prompts drawn with replacement, for the uncertainty; 0 turns it off. Fewer than
    100 give no range of the accuracy."""
    kwise_weight: Literal["prompt", "comparison"] = "prompt"
    """Where a prompt has several comparisons: whether each prompt counts once, or each comparison."""
    cache: bool = True
    """Keep the states on disk ($REWARDLAB_CACHE/states), so that another probe of the same data needs no model."""
    precision_card: bool = True
    """Compare float32, half precision and weights rounded to the nearest on up to 200 of the test preferences, and say
    which the model may be served in."""
    micro_token_budget: int | None = None
    """Tokens computed at a time; changes numbers by rounding alone. By default 8192, on a GPU 32768."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of saved weights; `auto` is float32."""
    seed: int = 0
    """Decides folds, bootstrap samples and which rows a limit keeps."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        require_seed(self.seed)
        require_between(self, folds=(2, 1_000_000), bootstrap=(0, 1_000_000), micro_token_budget=BUDGETS)


@composed
@dataclass(frozen=True, kw_only=True)
class ProbeConfig(Composed):
    """Every setting of `rewardlab probe`, by the names of its flags."""

    data: DataConfig = DataConfig()
    model: BackboneConfig = BackboneConfig()
    compute: ComputeConfig = ComputeConfig()
    run: ProbeRunConfig = ProbeRunConfig()

    def __post_init__(self) -> None:
        """Raises ConfigError unless a model is named."""
        require_model(self.model.model, model_is="a hub model, a folder, or smollm2-135m-instruct")
