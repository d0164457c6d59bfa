"""rewardlab: reward models you can trust.

The public API is the names in `__all__`; docs/api.md describes it. A name's module is imported when the name is first
used, so `import rewardlab` does not import torch.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rewardlab.core.terminal import OneLine

if TYPE_CHECKING:
    from rewardlab.analysis.metrics import evaluate as evaluate
    from rewardlab.artifact.load import load as load
    from rewardlab.core.errors import RewardlabError as RewardlabError
    from rewardlab.core.types import Comparison as Comparison
    from rewardlab.core.types import Estimate as Estimate
    from rewardlab.core.types import Message as Message
    from rewardlab.core.types import Preference as Preference
    from rewardlab.core.types import ScoreRow as ScoreRow
    from rewardlab.core.types import Sums as Sums
    from rewardlab.evaluation.config import EvalConfig as EvalConfig
    from rewardlab.evaluation.evaluate import evaluate_folder as evaluate_folder
    from rewardlab.probing.config import ProbeConfig as ProbeConfig
    from rewardlab.probing.run import ProbeResult as ProbeResult
    from rewardlab.probing.run import probe as probe
    from rewardlab.score import Scorer as Scorer
    from rewardlab.serve.verifying.folder import verify as verify
    from rewardlab.training.loop.losses import bradley_terry as bradley_terry
    from rewardlab.training.loop.losses import centering as centering
    from rewardlab.training.loop.losses import margin_regularizer as margin_regularizer
    from rewardlab.training.loop.losses import plackett_luce as plackett_luce
    from rewardlab.training.loop.losses import score_regularizer as score_regularizer
    from rewardlab.training.loop.reward_trainer import reward_trainer as reward_trainer
    from rewardlab.training.rehearsal import rehearse as rehearse
    from rewardlab.training.rehearsed import Rehearsal as Rehearsal
    from rewardlab.training.run import TrainResult as TrainResult
    from rewardlab.training.run import train as train
    from rewardlab.training.settings.config import RewardTrainerConfig as RewardTrainerConfig

# Public name -> the module that defines it. The same names stand in the imports above: a type checker has to see
# imports, and a run must not do them. A test holds the two together.
_HOME = {
    "Comparison": "core.types",
    "Estimate": "core.types",
    "EvalConfig": "evaluation.config",
    "Message": "core.types",
    "Preference": "core.types",
    "ProbeConfig": "probing.config",
    "ProbeResult": "probing.run",
    "Rehearsal": "training.rehearsed",
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
    "rehearse": "training.rehearsal",
    "reward_trainer": "training.loop.reward_trainer",
    "score_regularizer": "training.loop.losses",
    "train": "training.run",
    "verify": "serve.verifying.folder",
}

__all__ = list(_HOME)


# Names of files and data can hold line breaks and terminal codes; the filter keeps every record on one visible line.
logging.getLogger("rewardlab").addFilter(OneLine())


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name == "__version__":
        return import_module("importlib.metadata").version("rewardlab")
    if name not in _HOME:
        raise AttributeError(f"module 'rewardlab' has no attribute {name!r}")
    return getattr(import_module(f"rewardlab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, which `dir` would not show before they are used."""
    return sorted(__all__)
