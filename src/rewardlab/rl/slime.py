"""Rewards for slime: `--custom-rm-path rewardlab.rl.slime.reward`, configured by environment or file.

Facts of slime 624b824, `rollout/rm_hub/__init__.py` and `utils/types.py`: the function is awaited with the arguments
of the run and a sample, or with a list of samples (`--group-rm`, and generation that gives several). What it raises
ends the rollout and the run. A sample's `prompt` is the text that the policy's template rendered, so the messages come
from the dataset: `metadata["messages"]`, or the label.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from rewardlab.rl.configured import Configured, from_environment
from rewardlab.rl.loops import LoopScorer, Scorer
from rewardlab.rl.rollouts import Rollout, RolloutError
from rewardlab.rl.turns import ReplyEnds, messages_in, require_same_prompt, rollout_of

TAKES: Final = ("reply_ends", "prompt_as")
MESSAGES: Final = "messages"
"""Key of a sample's metadata with the messages of its prompt."""


class SlimeReward:
    """Scores slime's samples."""

    def __init__(self, configured: Configured, *, scorer: Scorer | None = None) -> None:
        """Score with `scorer`, or else as configured. Raises ConfigError if `reply_ends` is not given."""
        self._configured = configured
        self._ends = ReplyEnds(configured.reply_ends())
        self._scorer = LoopScorer(configured.make_scorer if scorer is None else lambda: scorer)

    async def __call__(self, args: Any, sample: Any, **kwargs: Any) -> float | list[float]:
        """Return the reward of a sample, or those of a list of samples, in order.

        Raises RolloutError naming the sample that has no finite score.
        """
        if isinstance(sample, list | tuple):
            return [one.score for one in await self._scorer.details([self._rollout(one) for one in sample])]
        (scored,) = await self._scorer.details([self._rollout(sample)])
        return scored.score

    def _rollout(self, sample: Any) -> Rollout:
        if isinstance(sample, list | tuple):
            raise RolloutError(
                "slime gave a list of lists of samples: the generation makes several samples of one rollout, and slime "
                "cannot give each of them a reward of the group. Leave --group-rm out."
            )
        name = f"slime's sample {sample.index} of group {sample.group_index}"
        _require_one_turn(sample, name)
        rendered = isinstance(sample.prompt, str)
        prompt = self._messages(sample, name) if rendered else sample.prompt
        rollout = rollout_of(prompt, self._ends.cut(sample.response, name=name), name=name)
        if rendered:
            require_same_prompt(rollout, sample.prompt)
        return rollout

    def _messages(self, sample: Any, name: str) -> Any:
        metadata = sample.metadata
        if isinstance(metadata, Mapping) and MESSAGES in metadata:
            return messages_in(metadata[MESSAGES], prompt_as="messages", name=name, column=f"metadata[{MESSAGES!r}]")
        return messages_in(
            sample.label, prompt_as=self._configured.loop.prompt_as, name=name, column="the label (--label-key)"
        )


def _require_one_turn(sample: Any, name: str) -> None:
    """Raise RolloutError if a response holds texts that the policy did not write.

    They show as tokens that are not trained on after tokens that are. Tokens that are not trained on at the beginning
    may be those of an earlier policy (`--mask-offpolicy-in-partial-rollout`).
    """
    mask = list(sample.loss_mask or [])
    if 1 in mask and 0 in mask[mask.index(1) :]:
        raise RolloutError(
            f"{name}: its response holds texts that the policy did not write (loss_mask), such as those of tools, "
            f"rendered by its template. They cannot be turned back into messages without guessing. Score such samples "
            f"in a function of your own that keeps the messages."
        )


@cache
def _configured_reward() -> SlimeReward:
    return SlimeReward(from_environment(takes=TAKES))


async def reward(args: Any, sample: Any, **kwargs: Any) -> float | list[float]:
    """Return the reward of a sample, or those of a list of samples, for slime's `--custom-rm-path`.

    Raises ConfigError for settings that cannot be used, and as `SlimeReward` does.
    """
    return await _configured_reward()(args, sample, **kwargs)
