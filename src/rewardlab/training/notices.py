"""Says which settings of a run do nothing, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rewardlab.core.config import to_mapping
from rewardlab.core.terminal import short
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Datasets
from rewardlab.training.settings.config import RewardTrainerConfig, RunConfig

FEATURES: Final = {
    "diagnostic_": "diagnostic_mode",
    "lora_": "lora",
    "profile_steps": "profile",
    "publish_": "publish_to",
    "shuffle_buffer": "streaming",
}
"""Beginning of the names of settings -> the setting without which they do nothing."""
IDLE: Final = {
    **FEATURES,
    "checkpoint_": "checkpoints",
    "gpu_sample_interval_ms": "track_gpu",
    "regularization_type": "regularization_lambda",
}
"""FEATURES, and settings that are shown all the same."""


def idle_notices(config: RewardTrainerConfig) -> list[str]:
    """Return a line for each feature that is off though settings of it are given."""
    values, usual = to_mapping(config), to_mapping(RewardTrainerConfig.of(model=config.model.model))
    lines = []
    for start, switch in IDLE.items():
        if values[switch] not in (None, False, "none", 0):
            continue
        given = [name for name in values if name.startswith(start) and name != switch and values[name] != usual[name]]
        if given:
            told = " ".join(f"--{name.replace('_', '-')} {short(str(values[name]))}" for name in given)
            does = "does" if len(given) == 1 else "do"
            lines.append(f"{told} {does} nothing without --{switch.replace('_', '-')}. Add it, or leave this out.")
    return lines


def unjudged_notices(config: RewardTrainerConfig, data: Datasets, test: Sequence[TokenGroup]) -> list[str]:
    """Return a line for each setting that does nothing, since the data that it is about are missing."""
    if data.eval:
        return []
    metric, rows = config.run.early_stopping_metric, config.data.selection.train_eval_limit
    unused = {
        f"--train-eval-limit {rows}: training rows are compared with evaluation data": rows > 0,
        f"--early-stopping-metric {metric}: it chooses among evaluations": metric != RunConfig.early_stopping_metric,
        "--precision-card always: the card is made on evaluation or test data": (
            config.monitor.precision_card == "always" and not test
        ),
    }
    remedy = "Name some with --eval-dataset, --eval-split or --eval-fraction, or leave it out."
    return [f"{said}, and there are none. {remedy}" for said, is_unused in unused.items() if is_unused]
