"""Conversations from what trainers hand to reward functions: pure functions, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from rewardlab.rl.reading import Reading
from rewardlab.rl.rollouts import Rollout, RolloutError

PromptAs = Literal["messages", "text"]
"""What a dataset's label is: the messages of the prompt, or the text of its only turn."""
MOST_UNENDED: Final = 256
"""First replies of a run, of which at least one has to end with one of the configured texts."""
SHOWN: Final = 20
"""Characters of the end of a reply that a message shows."""


_READING: Final = Reading(joins_texts=False)


def rollout_of(prompt: Any, reply: str, *, name: str) -> Rollout:
    """Return the rollout of a prompt, its messages in any sequence, and a reply, which becomes the last turn.

    Raises RolloutError, naming the rollout, for values that are not messages, for an empty prompt, and for a prompt
    whose last turn is the assistant's, since the reply would continue that turn.
    """
    if isinstance(prompt, str):
        raise RolloutError(f"{name}: the prompt is a text; wanted a list of messages.")
    return _READING.rollout((prompt, reply), name=name)


def messages_in(label: Any, *, prompt_as: PromptAs, name: str, column: str) -> Any:
    """Return the messages of a prompt that the dataset's `column` holds.

    Raises RolloutError naming the rollout if it holds something else.
    """
    if prompt_as == "text":
        if not isinstance(label, str) or not label:
            raise RolloutError(f"{name}: {column} is {_what(label)}; wanted the text of the prompt (prompt_as: text).")
        return [{"role": "user", "content": label}]
    found = label
    if isinstance(label, str):
        try:
            found = json.loads(label)
        except ValueError:
            found = None
    if not isinstance(found, list | tuple) and not hasattr(found, "tolist"):
        raise RolloutError(
            f"{name}: {column} is {_what(label)}; wanted the messages of the prompt, as a list or as its JSON text. "
            f"Take a column that holds them; if it holds the text of the only turn, say prompt_as: text."
        )
    return found


def _what(value: Any) -> str:
    """Return, in words, what kind of value a label is, without repeating it."""
    if value is None or (isinstance(value, str) and not value):
        return "empty"
    if isinstance(value, str):
        return f"a text of {len(value):,} characters that is not a JSON list"
    if isinstance(value, Mapping):
        return "a mapping"
    return f"a {type(value).__name__}"


def require_same_prompt(rollout: Rollout, rendered: str) -> None:
    """Raise RolloutError if a policy's rendered prompt lacks the last message of the prompt, so that they differ.

    Templates may trim a message, so white space around it does not count.
    """
    last = rollout.conversation[-2].content.strip()
    if last not in rendered:
        raise RolloutError(
            f"{rollout.name}: the last message of the prompt is not in the text that the policy was given. The column "
            f"with the messages belongs to other prompts, or the prompt was cut from its beginning."
        )


class ReplyEnds:
    """The texts with which a policy ends its turn, taken off the ends of replies, which may come in many threads.

    A reply that was cut at the length limit ends with none of these texts, so a single one is not an error. If the
    first `MOST_UNENDED` replies all lack them, the texts are wrong for this policy, and that is an error.
    """

    def __init__(self, ends: Sequence[str]) -> None:
        self._ends = sorted(filter(None, ends), key=len, reverse=True)
        self._num_unended = 0
        self._has_ended = not self._ends

    def cut(self, reply: str, *, name: str) -> str:
        """Return a reply without the longest of the texts that it ends with.

        Raises RolloutError if none of the first `MOST_UNENDED` replies ended with any: the texts are then not those of
        the policy.
        """
        for end in self._ends:
            if reply.endswith(end):
                self._has_ended = True
                return reply[: -len(end)]
        if not self._has_ended:
            self._num_unended += 1
            if self._num_unended >= MOST_UNENDED:
                raise RolloutError(
                    f"{name}: none of the first {MOST_UNENDED} replies ends with any of reply_ends ({self._ends}); "
                    f"this one ends with {reply[-SHOWN:]!r}. Say how the policy ends its turn, or give [] if replies "
                    f"come without. If all were cut at their longest, allow longer ones."
                )
        return reply
