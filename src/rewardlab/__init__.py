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
    from rewardlab.score import Scorer
    from rewardlab.serve.verify import verify
    from rewardlab.training.config import EvalConfig, ProbeConfig, RewardTrainerConfig
    from rewardlab.training.evaluate import evaluate_folder
    from rewardlab.training.losses import bradley_terry, centering, margin_regularizer, plackett_luce, score_regularizer
    from rewardlab.training.probe import ProbeResult, probe
    from rewardlab.training.reward_trainer import reward_trainer
    from rewardlab.training.run import TrainResult, train

_HOME = {
    "Comparison": "core.types",
    "Estimate": "core.types",
    "EvalConfig": "training.config",
    "Message": "core.types",
    "Preference": "core.types",
    "ProbeConfig": "training.config",
    "ProbeResult": "training.probe",
    "RewardTrainerConfig": "training.config",
    "RewardlabError": "core.errors",
    "ScoreRow": "core.types",
    "Scorer": "score",
    "Sums": "core.types",
    "TrainResult": "training.run",
    "bradley_terry": "training.losses",
    "centering": "training.losses",
    "evaluate": "analysis.metrics",
    "evaluate_folder": "training.evaluate",
    "load": "artifact.load",
    "margin_regularizer": "training.losses",
    "plackett_luce": "training.losses",
    "probe": "training.probe",
    "reward_trainer": "training.reward_trainer",
    "score_regularizer": "training.losses",
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
