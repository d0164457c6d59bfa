"""What trainers hand to reward functions, as conversations: pure functions, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from rewardlab.rl.reading import Reading
from rewardlab.rl.rollouts import Rollout, RolloutError

PromptAs = Literal["messages", "text"]
"""What a dataset's label is: the messages of the prompt, or the text of its only turn."""


_READING: Final = Reading(joins_texts=False)


def rollout_of(prompt: Any, reply: str, *, name: str) -> Rollout:
    """Return the rollout of a prompt, its messages in any sequence, and a reply, which becomes the last turn.

    Raises RolloutError naming the rollout for messages that are none, an empty prompt, and one that ends with an
    assistant's turn, which the reply would go on with.
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
    """Say what a label is without repeating it."""
    if value is None or (isinstance(value, str) and not value):
        return "empty"
    if isinstance(value, str):
        return f"a text of {len(value):,} characters that is no JSON list"
    if isinstance(value, Mapping):
        return "a mapping"
    return f"a {type(value).__name__}"


def require_same_prompt(rollout: Rollout, rendered: str) -> None:
    """Raise RolloutError if a policy's rendered prompt does not hold the last message of the prompt, and so is another.

    Templates may trim a message, so white space around it does not count.
    """
    last = rollout.conversation[-2].content.strip()
    if last not in rendered:
        raise RolloutError(
            f"{rollout.name}: the last message of the prompt is not in the text that the policy was given. The column "
            f"with the messages belongs to other prompts, or the prompt was cut from its beginning."
        )


def without_end(reply: str, ends: Sequence[str]) -> str:
    """Return a reply without the text with which the policy ended its turn; the longest of `ends` that fits."""
    for end in sorted(ends, key=len, reverse=True):
        if end and reply.endswith(end):
            return reply[: -len(end)]
    return reply
