"""rewardlab: reward models you can trust.

The public API is what `__all__` names; docs/api.md describes it. Names are imported when first used, so
`import rewardlab` needs no torch.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rewardlab.core.terminal import OneLine

if TYPE_CHECKING:
    from rewardlab.analysis.metrics import evaluate
    from rewardlab.artifact.load import load
    from rewardlab.core.errors import RewardlabError
    from rewardlab.core.types import Comparison, Estimate, Message, Preference, ScoreRow, Sums
    from rewardlab.evaluation.config import EvalConfig
    from rewardlab.evaluation.evaluate import evaluate_folder
    from rewardlab.probing.config import ProbeConfig
    from rewardlab.probing.run import ProbeResult, probe
    from rewardlab.score import Scorer
    from rewardlab.serve.verify import verify
    from rewardlab.training.loop.losses import (
        bradley_terry,
        centering,
        margin_regularizer,
        plackett_luce,
        score_regularizer,
    )
    from rewardlab.training.loop.reward_trainer import reward_trainer
    from rewardlab.training.run import TrainResult, train
    from rewardlab.training.settings.config import RewardTrainerConfig

_HOME = {
    "Comparison": "core.types",
    "Estimate": "core.types",
    "EvalConfig": "evaluation.config",
    "Message": "core.types",
    "Preference": "core.types",
    "ProbeConfig": "probing.config",
    "ProbeResult": "probing.run",
    "RewardTrainerConfig": "training.settings.config",
    "RewardlabError": "core.errors",
    "ScoreRow": "core.types",
    "Scorer": "score",
    "Sums": "core.types",
    "TrainResult": "training.run",
    "bradley_terry": "training.loop.losses",
    "centering": "training.loop.losses",
    "evaluate": "analysis.metrics",
    "evaluate_folder": "evaluation.evaluate",
    "load": "artifact.load",
    "margin_regularizer": "training.loop.losses",
    "plackett_luce": "training.loop.losses",
    "probe": "probing.run",
    "reward_trainer": "training.loop.reward_trainer",
    "score_regularizer": "training.loop.losses",
    "train": "training.run",
    "verify": "serve.verify",
}

__all__ = [
    "Comparison",
    "Estimate",
    "EvalConfig",
    "Message",
    "Preference",
    "ProbeConfig",
    "ProbeResult",
    "RewardTrainerConfig",
    "RewardlabError",
    "ScoreRow",
    "Scorer",
    "Sums",
    "TrainResult",
    "bradley_terry",
    "centering",
    "evaluate",
    "evaluate_folder",
    "load",
    "margin_regularizer",
    "plackett_luce",
    "probe",
    "reward_trainer",
    "score_regularizer",
    "train",
    "verify",
]


logging.getLogger("rewardlab").addFilter(OneLine())


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rewardlab' has no attribute {name!r}")
    return getattr(import_module(f"rewardlab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
