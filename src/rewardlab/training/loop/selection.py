"""Decides which evaluation is the best so far: one rule for `best/` and for early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rewardlab.analysis.metrics import column_of
from rewardlab.core.errors import ConfigError
from rewardlab.core.values import did_you_mean
from rewardlab.training.monitoring.records import COLUMNS
from rewardlab.training.settings.config import RewardTrainerConfig

RISING: Final = ("accuracy", "margin", "auc")
FALLING: Final = ("loss", "nll", "ece", "rate")
"""Last words of metrics for which it is clear whether higher (RISING) or lower (FALLING) is better."""
NOT_CHOSEN_BY: Final = ("_low", "_high", "_pairs", "_seconds")
"""Ends of the names of columns that a message does not offer."""
OF_TRAINING_ROWS: Final = ("train_eval_", "gap_")
"""Beginnings of the names of metrics that only runs with `--train-eval-limit` measure."""


def direction(metric: str, mode: str) -> Literal["max", "min"]:
    """Return whether higher ("max") or lower ("min") is better. Raises ConfigError if `auto` cannot tell."""
    if mode in ("max", "min"):
        return "max" if mode == "max" else "min"
    name = column_of(metric)
    word = name.rsplit("_", 1)[-1]
    if not name.startswith("gap_") and word in (*RISING, *FALLING):
        return "max" if word in RISING else "min"
    raise ConfigError(
        f"--early-stopping-metric {metric}: the name does not say whether higher or lower is better. Add "
        f"--early-stopping-mode max or min."
    )


@dataclass(kw_only=True)
class Selection:
    """The best evaluation so far. The first one is of the untrained model: it sets the bar and is never the best."""

    metric: str
    mode: Literal["max", "min"]
    min_delta: float = 0.0
    """By how much a value must exceed the bar to be better."""
    bar: float = math.nan
    bar_loss: float = math.nan
    best_step: int | None = None
    lost_step: int | None = None
    """The step that set the bar, where no folder holds its model any more: a run went back to an earlier checkpoint."""
    evaluations: int = 0
    since_best: int = 0
    """Evaluations since the best one, or since the first if none was better."""

    def offer(self, step: int, values: Mapping[str, float], *, sound: bool = True) -> bool:
        """Update with the evaluation of a step; return whether it is the best so far.

        `values` are columns of metrics.csv. With equal accuracies the lower loss is better, unless a `min_delta` is
        set. A value that is not finite, or not `sound` because some scores were not finite, is never the best. Any
        finite value beats a bar that is not finite.
        """
        # Scores that are not finite are left out of the metric, which could look better for it.
        value = values.get(self.metric, math.nan) if sound else math.nan
        loss = values.get("eval_loss", math.nan)
        first = self.evaluations == 0
        better = not first and self._beats(value, loss)
        self.evaluations += 1
        if first or better:
            self.bar, self.bar_loss = value, loss
        if better:
            self.best_step, self.lost_step = step, None
        self.since_best = 0 if first or better else self.since_best + 1
        return better

    def _beats(self, value: float, loss: float) -> bool:
        if not math.isfinite(value):
            return False
        if not math.isfinite(self.bar):
            return True
        # Accuracies on a few hundred pairs are often equal, and the loss still tells such models apart.
        if value == self.bar and self.metric == "eval_accuracy" and self.min_delta == 0:
            return loss < self.bar_loss or (math.isnan(self.bar_loss) and not math.isnan(loss))
        gained = value - self.bar if self.mode == "max" else self.bar - value
        return gained > self.min_delta

    def lose(self) -> None:
        """Note that the best model was not kept. Its value stays the bar."""
        self.best_step, self.lost_step = None, self.lost_step if self.best_step is None else self.best_step

    @property
    def holder(self) -> str:
        """Whose value the bar is, in words."""
        step = self.lost_step if self.best_step is None else self.best_step
        return "the untrained model" if step is None else f"step {step}"

    def why_none(self) -> str:
        """Return why there is no best evaluation, as a clause."""
        if not math.isfinite(self.bar):
            return f"no evaluation had a finite {self.metric} to choose by"
        kept = "" if self.lost_step is None else " that is kept"
        return f"no checkpoint{kept} beat {self.holder} on the evaluation data"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return asdict(self)


def selection_of(config: RewardTrainerConfig) -> Selection:
    """Return the rule that a configuration asks for.

    Raises ConfigError for a metric that is not a column of metrics.csv, whose better direction is not known, or that
    the run would never measure.
    """
    metric = column_of(config.run.early_stopping_metric)
    logged = [name for name in COLUMNS if name != "step"]
    if metric not in logged:
        known = [name for name in logged if name.startswith("eval_") and not name.endswith(NOT_CHOSEN_BY)]
        hint = did_you_mean(metric, logged) or f" Those of evaluations: {', '.join(known)}."
        raise ConfigError(
            f"--early-stopping-metric {config.run.early_stopping_metric}: not a column of metrics.csv.{hint}"
        )
    # No evaluation would have a value, so none could be the best, and any patience would end the run.
    if metric.startswith(OF_TRAINING_ROWS) and not config.data.selection.train_eval_limit:
        raise ConfigError(
            f"--early-stopping-metric {config.run.early_stopping_metric}: it is measured on training rows, and none "
            f"are evaluated. Say how many with --train-eval-limit, or choose another metric."
        )
    return Selection(
        metric=metric,
        mode=direction(config.run.early_stopping_metric, config.run.early_stopping_mode),
        min_delta=config.run.early_stopping_min_delta,
    )
