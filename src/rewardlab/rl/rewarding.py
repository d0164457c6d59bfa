"""What a reward function makes of scores: one reward a rollout, by groups, with what is worth logging.

Legend: R rollouts of one call, in the trainer's order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rewardlab.core.errors import ConfigError, RenderError
from rewardlab.core.types import Message, prompt_key
from rewardlab.core.values import Section, require
from rewardlab.data.chat import to_messages
from rewardlab.rl.checking import FloatArray
from rewardlab.rl.credit import How, coefficient_of, combine
from rewardlab.rl.noise import Floored, floored
from rewardlab.rl.rollout_log import RolloutRow
from rewardlab.rl.rollouts import Rollout
from rewardlab.rl.scorer import Scored


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """How scores become rewards, in a trainer that makes groups of replies to one prompt."""

    how: How = "replace"
    """How the environment's reward and the score become one (`rl.credit.combine`)."""
    coefficient: float | None = None
    """Coefficient of `how`: a factor of the score, 1 if it is left out; `weighted` has to have one, from 0 to 1."""
    environment: str | None = None
    """Column of the dataset with the environment's reward of a rollout; needed by every `how` except `replace`."""
    noise_floor: bool = True
    """Whether differences within the noise of the scores are taken out of the rewards of a group."""
    group_size: int | None = None
    """Replies to one prompt that make a group (TRL's `num_generations`); None takes consecutive rollouts of equal
    prompts, which is right in one process unless the dataset has a prompt twice in a row."""
    log_dir: str | None = None
    """Folder for the record of all rollouts, which `rewardlab rl audit` reads; None keeps none."""
    evidence: tuple[str, ...] = ()
    """Columns that are kept in that record as evidence, such as a gold score: handed in by code, since they have to
    differ from reply to reply, and a column of the dataset does not."""

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that do not go together."""
        require(
            (self.how == "replace") == (self.environment is None),
            f"how='{self.how}' and environment={self.environment!r:.60}: an environment's reward is needed by every "
            f"`how` but 'replace', and followed by none other. Give both or neither.",
        )
        coefficient_of(self.how, self.coefficient)
        require(
            self.group_size is None or self.group_size >= 1,
            f"group_size: expected a whole number above 0, got {self.group_size!r:.40}.",
        )
        require(not self.evidence or self.log_dir is not None, "evidence is kept in the record: give log_dir.")


@dataclass(frozen=True, kw_only=True)
class Rewarded:
    """The rewards of one call."""

    rewards_R: FloatArray
    """Rewards that the trainer is given."""
    scores_R: FloatArray
    """Scores of the reward model: raw, unless the scorer was asked for others."""
    floor: Floored | None
    """What the noise floor did; None without one."""

    def metrics(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Return figures of this call by name, for the trainer's log."""
        count = len(self.scores_R)
        found = {"score/mean": float(self.scores_R.mean()), "score/std": float(self.scores_R.std())}
        if scored[0].spread is not None:
            found["score/ensemble_spread"] = float(np.mean([one.spread or 0.0 for one in scored]))
        cut = [bool(one.truncated_tokens or one.truncated_reply_tokens) for one in scored]
        if any(one.truncated_tokens is not None for one in scored):
            found["cut/share_of_rollouts"] = sum(cut) / count
        if self.floor is not None:
            found["noise_floor/groups"] = float(self.floor.num_groups)
            found["noise_floor/share_of_groups"] = self.floor.num_groups_below / self.floor.num_groups
            # Rollouts of groups that are within the noise as a whole count too.
            found["noise_floor/share_of_rollouts"] = float((self.floor.deviations_R == 0).mean())
        return found


def rewarded(
    scored: Sequence[Scored],
    groups_R: Sequence[int] | None,
    config: RewardConfig,
    environment_R: Sequence[float | None] | None = None,
) -> Rewarded:
    """Return the rewards of rollouts. `groups_R` numbers the group of each; None leaves the noise floor out.

    Raises RolloutError for a reward that is missing or not finite, naming the rollout.
    """
    scores = [one.score for one in scored]
    combined = combine(
        scores,
        environment_R,
        how=config.how,
        coefficient=config.coefficient,
        noise_R=[one.noise for one in scored],
    )
    floor = None if groups_R is None else floored(combined.rewards_R, groups_R, combined.noise_R)
    rewards_R = combined.rewards_R if floor is None else floor.rewards_R
    return Rewarded(rewards_R=rewards_R, scores_R=np.array(scores, dtype=np.float64), floor=floor)


def groups_of(prompts: Sequence[Any], *, group_size: int | None, num_processes: int) -> list[int]:
    """Return the number of the group of each rollout: consecutive ones with equal prompts, `group_size` at a time.

    Raises ConfigError if a group may not be whole, since its other replies may be in another process.
    """
    if group_size is None and num_processes > 1:
        raise ConfigError(
            f"the run has {num_processes} processes, each of which sees its own rollouts, so it has to be said how "
            f"many make a group: group_size, the trainer's num_generations. Or leave the floor out: noise_floor=False."
        )
    groups: list[int] = []
    for start, stop in _runs(prompts):
        size = stop - start
        if group_size is None or (size < group_size and num_processes == 1):
            # In one process a run is whole; evaluation may make smaller groups than training.
            groups += [_next(groups)] * size
            continue
        if size % group_size:
            raise ConfigError(
                f"a process was given {size} rollouts of one prompt, which are not whole groups of {group_size}. Make "
                f"the number of rollouts of each process a multiple of num_generations (per_device_train_batch_size "
                f"times steps_per_generation), in evaluation too (num_generations_eval), or leave the floor out: "
                f"noise_floor=False."
            )
        first = _next(groups)
        groups += [first + place // group_size for place in range(size)]
    return groups


def _next(groups: Sequence[int]) -> int:
    """Return the number of the next group."""
    return groups[-1] + 1 if groups else 0


def _runs(prompts: Sequence[Any]) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive equal prompts."""
    starts = [n for n in range(len(prompts)) if n == 0 or prompts[n] != prompts[n - 1]]
    return list(pairwise([*starts, len(prompts)]))


def keys_of(
    rollouts: Sequence[Rollout], prompts: Sequence[Any], completions: Sequence[Any], *, is_remade: bool
) -> list[str]:
    """Return the `prompt_key` of each rollout, which all replies to one prompt share, those of several turns too.

    Where a rollout has no turns, or a function of the user made them (`is_remade`), the key is that of the prompt as
    the trainer gave it.
    """
    keys = []
    for rollout, prompt, completion in zip(rollouts, prompts, completions, strict=True):
        turns: Sequence[Message] = rollout.conversation
        if turns and not is_remade:
            turns = turns[: -1 if isinstance(completion, str) else -len(completion)]
        else:
            turns = _given_turns(prompt)
        keys.append(prompt_key(turns))
    return keys


def _given_turns(prompt: Any) -> Sequence[Message]:
    """Return a prompt of a trainer as turns: a text as one turn, and so the JSON of messages with more than a text."""
    if not isinstance(prompt, str):
        with suppress(RenderError):
            return to_messages(prompt)
        prompt = json.dumps(prompt, sort_keys=True, default=str)
    return (Message("user", prompt),)


def rows_of(
    rollouts: Sequence[Rollout],
    scored: Sequence[Scored],
    rewards: Rewarded,
    *,
    step: int,
    keys: Sequence[str],
    evidence: Mapping[str, Sequence[float]],
) -> list[RolloutRow]:
    """Return the rows of the record, with their `keys_of`. Text or tokens are kept as one turn of the assistant."""
    rows = []
    for number, (rollout, one) in enumerate(zip(rollouts, scored, strict=True)):
        turns = rollout.conversation or (Message("assistant", _as_text(rollout)),)
        rows.append(
            RolloutRow(
                step=step,
                prompt_key=keys[number],
                conversation=turns,
                reward=one.score,
                trained_on=float(rewards.rewards_R[number]),
                num_tokens=one.num_tokens,
                spread=one.spread,
                digest=one.digest,
                evidence={name: float(values[number]) for name, values in evidence.items()},
            )
        )
    return rows


def _as_text(rollout: Rollout) -> str:
    return rollout.rendered if isinstance(rollout.rendered, str) else json.dumps(rollout.rendered)
