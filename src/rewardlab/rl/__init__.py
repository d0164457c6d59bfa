"""Reward models in reinforcement learning: scores of rollouts, credit, TRL and verl, and an audit for reward hacking.

Names are imported when they are first used. Neither torch nor a training library is imported, except by
`rewardlab.rl.trl` and `rewardlab.rl.verl`, which are for programs that have theirs, and by a local model, which
needs torch to compute.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewardlab.rl.config import ScorerConfig as ScorerConfig
    from rewardlab.rl.credit import RULES as RULES
    from rewardlab.rl.credit import AdvantageRule as AdvantageRule
    from rewardlab.rl.credit import Credit as Credit
    from rewardlab.rl.credit import advantages as advantages
    from rewardlab.rl.credit import combine as combine
    from rewardlab.rl.loops import BlockingScorer as BlockingScorer
    from rewardlab.rl.noise import Floored as Floored
    from rewardlab.rl.noise import Noise as Noise
    from rewardlab.rl.noise import floored as floored
    from rewardlab.rl.rollout_log import RolloutLog as RolloutLog
    from rewardlab.rl.rollout_log import RolloutRow as RolloutRow
    from rewardlab.rl.rollout_log import read_rollouts as read_rollouts
    from rewardlab.rl.rollouts import Rollout as Rollout
    from rewardlab.rl.rollouts import RolloutError as RolloutError
    from rewardlab.rl.scorer import RewardScorer as RewardScorer
    from rewardlab.rl.scorer import Scored as Scored

# Public name -> the module that defines it. The same names stand in the imports above: a type checker has to see
# imports, and a run must not do them. A test holds the two together.
_HOME = {
    "AdvantageRule": "rl.credit",
    "BlockingScorer": "rl.loops",
    "Credit": "rl.credit",
    "Floored": "rl.noise",
    "Noise": "rl.noise",
    "RULES": "rl.credit",
    "RewardScorer": "rl.scorer",
    "Rollout": "rl.rollouts",
    "RolloutError": "rl.rollouts",
    "RolloutLog": "rl.rollout_log",
    "RolloutRow": "rl.rollout_log",
    "Scored": "rl.scorer",
    "ScorerConfig": "rl.config",
    "advantages": "rl.credit",
    "combine": "rl.credit",
    "floored": "rl.noise",
    "read_rollouts": "rl.rollout_log",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'rewardlab.rl' has no attribute {name!r}")
    return getattr(import_module(f"rewardlab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, which `dir` would not show before they are used."""
    return sorted(__all__)
