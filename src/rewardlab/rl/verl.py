"""A reward manager for verl that scores the messages of a rollout, loaded by verl's configuration.

    reward.reward_manager.source=importlib
    reward.reward_manager.module.path=pkg://rewardlab.rl.verl
    reward.reward_manager.name=RewardlabRewardManager
    +reward.rewardlab.source=http://rm-host:8000

Importing this module needs verl. What it does with verl's data is in `verl_rollouts.py`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from rewardlab.core.errors import ConfigError
from rewardlab.rl.credit import combine
from rewardlab.rl.loops import LoopScorer, require_finite
from rewardlab.rl.scorer import Scored
from rewardlab.rl.turns import rollout_of
from rewardlab.rl.verl_rollouts import VerlRollout, configured_by, read_rollout, rule_arguments, special_ids

try:
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
except ImportError as error:
    raise ConfigError(
        f"rewardlab.rl.verl is loaded by verl (0.9 or later), which cannot be imported here: {error}. Install "
        f"rewardlab[client] into verl's environment and name this module in verl's configuration, "
        f"reward.reward_manager.module.path=pkg://rewardlab.rl.verl; without verl, use rewardlab.rl.RewardScorer."
    ) from error


class Rewarding:
    """The part of the manager that is ours; the base class, verl's, is mixed in below."""

    tokenizer: Any
    compute_score: Any

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        """Take the arguments that verl gives to every manager. Raises ConfigError for settings that cannot be used."""
        base: Any = super()
        base.__init__(config, tokenizer, compute_score)
        self._configured = configured_by(config)
        # Settings that do not fit together are an error before the first rollout.
        self._combined(Scored(score=0.0, noise=0.0), 0.0)
        self._router = (
            {}
            if reward_router_address is None
            else {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
        )
        self._scorer = LoopScorer(self._configured.make_scorer)

    @cached_property
    def _special(self) -> set[int]:
        """The special tokens of the policy, looked up once: a tokenizer may have thousands."""
        return special_ids(self.tokenizer)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return `reward_score` and `reward_extra_info` of a trajectory.

        Raises RolloutError naming the rollout if it has no finite score; nothing is put in its place.
        """
        read = read_rollout(data, self.tokenizer, self._special)
        rollout = rollout_of(read.messages, read.reply, name=read.name)
        if self._configured.loop.how == "replace":
            rule, said = None, dict[str, Any]()
        else:
            rule, said = await self._rule(read)
            said["rewardlab_rule"] = rule
        (scored,) = await self._scorer.details([rollout])
        reward = require_finite(self._combined(scored, rule), read.name)
        return {"reward_score": reward, "reward_extra_info": {**said, **known_of(scored)}}

    def _combined(self, scored: Scored, rule: float | None) -> float:
        """Return the reward of a rollout. Raises ConfigError for settings that do not fit together."""
        loop = self._configured.loop
        if loop.how == "replace" and loop.coefficient is None:
            return scored.score
        given: dict[str, Any] = {} if loop.coefficient is None else {"coefficient": loop.coefficient}
        environment = None if rule is None else [rule]
        return float(combine([scored.score], environment, how=loop.how, **given).rewards_R[0])

    async def _rule(self, read: VerlRollout) -> tuple[float, dict[str, Any]]:
        """Return (score, everything else) of verl's own reward function, called as verl's `naive` manager calls it."""
        arguments = {**rule_arguments(read), **self._router}
        if inspect.iscoroutinefunction(self.compute_score):
            result = await self.compute_score(**arguments)
        else:
            result = await asyncio.to_thread(self.compute_score, **arguments)
        value, said = (result.get("score"), dict(result)) if isinstance(result, Mapping) else (result, {"acc": result})
        return require_finite(plain_number(value), f"{read.name}, verl's own score"), said


def plain_number(value: Any) -> Any:
    """Return what a reward function gave as verl reads it: booleans and arrays of one number become numbers."""
    count = value.numel() if hasattr(value, "numel") else getattr(value, "size", None)
    single = value.item() if count == 1 else value
    return float(single) if isinstance(single, bool) else single


def known_of(scored: Scored) -> dict[str, float]:
    """Return what is known about a score, under names of our own; verl logs their means in validation."""
    known = {
        "rewardlab_score": scored.score,
        "rewardlab_noise": scored.noise,
        "rewardlab_spread": scored.spread,
        "rewardlab_truncated_tokens": scored.truncated_tokens,
        "rewardlab_truncated_reply_tokens": scored.truncated_reply_tokens,
    }
    return {name: float(value) for name, value in known.items() if value is not None}


# The class is made by a call, since a type checker does not know the type of verl's class where verl is not installed.
RewardlabRewardManager = type(
    "RewardlabRewardManager",
    (Rewarding, RewardManagerBase),
    {"__doc__": "verl's reward manager with the scores of a reward model.", "__module__": __name__},
)
