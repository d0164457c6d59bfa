"""Rewards for OpenRLHF, from a Python file with one line: `from rewardlab.rl.openrlhf import reward_func`.

Facts of OpenRLHF 3c3be62 (0.11.0), `utils/agent.py`: the file of `--reward.remote_url` is run in each vLLM engine, its
`reward_func(queries, prompts, labels)` is called in a thread with lists of one, and every `Exception` of it is caught,
logged at level info, and leaves the reward None. So the error that is raised here is not an `Exception`: `RewardStop`
passes, and Ray gives it to the trainer, which ends.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from rewardlab.core.errors import RewardlabError
from rewardlab.rl.configured import Configured, from_environment
from rewardlab.rl.loops import Scorer, WaitingScorer
from rewardlab.rl.rollouts import Rollout, RolloutError
from rewardlab.rl.turns import ReplyEnds, messages_in, require_same_prompt, rollout_of

TAKES: Final = ("reply_ends", "prompt_as")
_MAKING: Final = threading.Lock()
"""The first samples of a batch come in many threads at once, and make one reward.

Of the process, as the reward is: OpenRLHF calls a function by its name and hands nothing over from call to call.
"""


class RewardStop(BaseException):
    """Ends training, since a rollout has no reward. OpenRLHF would catch an `Exception` and go on, so it is not one."""


class OpenRLHFReward:
    """Scores OpenRLHF's samples."""

    def __init__(self, configured: Configured, *, scorer: Scorer | None = None) -> None:
        """Score with `scorer`, or else as configured. Raises ConfigError if `reply_ends` is not given."""
        self._configured = configured
        self._ends = ReplyEnds(configured.reply_ends())
        self._scorer = WaitingScorer(configured.make_scorer if scorer is None else lambda: scorer)

    def __call__(self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **more: Any) -> Any:
        """Return `rewards` (trained on), `scores` (for dynamic filtering) and `extra_logs` of a single sample.

        OpenRLHF asks for one sample at a time, in lists of one. Raises RewardStop with the name of the rollout and the
        cause.
        """
        try:
            (query,), (prompt,), (label,) = queries, prompts, labels
        except ValueError as error:
            raise RewardStop(f"OpenRLHF gave {len(queries)} samples at a time; wanted one, as 0.11 does.") from error
        with _stopping():
            (scored,) = self._scorer.details([self._rollout(query, prompt, label)])
        logs = {"rewardlab_score": scored.score, "rewardlab_noise": scored.noise}
        return {"rewards": scored.score, "scores": scored.score, "extra_logs": logs}

    def close(self) -> None:
        """Close connections and end the thread of the scorer."""
        self._scorer.close()

    def _rollout(self, query: str, prompt: str, label: Any) -> Rollout:
        # OpenRLHF does not number samples, and the prompt itself does not belong in messages. So a hash names it.
        digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()
        name = f"OpenRLHF's rollout (prompt of {len(prompt):,} characters, SHA-256 {digest[:16]})"
        if not query.startswith(prompt):
            raise RolloutError(
                f"{name}: the query does not begin with the prompt, so the prompt was cut (--data.max_len), or the "
                f"tokenizer does not give back the text that it was given. The reply cannot be told from it."
            )
        column = "the label (--data.label_key)"
        messages = messages_in(label, prompt_as=self._configured.loop.prompt_as, name=name, column=column)
        rollout = rollout_of(messages, self._ends.cut(query[len(prompt) :], name=name), name=name)
        require_same_prompt(rollout, prompt)
        return rollout


@contextmanager
def _stopping() -> Iterator[None]:
    """Raise RewardStop in place of every error within the block."""
    try:
        yield
    except RewardlabError as error:
        raise RewardStop(str(error)) from error
    except Exception as error:
        # OpenRLHF would catch it, whatever it is, and go on without the reward. Its words may quote a text.
        raise RewardStop(f"the reward of a rollout failed with {type(error).__name__}; see above where.") from error


@cache
def _configured_reward() -> OpenRLHFReward:
    return OpenRLHFReward(from_environment(takes=TAKES))


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **more: Any) -> Any:
    """Return the rewards of a batch; OpenRLHF looks for this name. See `OpenRLHFReward`.

    Raises RewardStop, which ends the run, if the reward cannot be made or a reply cannot be scored.
    """
    with _stopping(), _MAKING:
        made = _configured_reward()
    return made(queries, prompts, labels, **more)
