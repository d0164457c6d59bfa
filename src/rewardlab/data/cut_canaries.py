"""Conversations that prove that a folder's rule of truncation still gives the tokens that it gave when it was saved.

A conversation above the length limit of a model has thousands of tokens, and canaries are computed whenever a folder
is loaded. So these have a small limit of their own. They have tokens but no score, since the rule does not depend on
the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rewardlab.core.errors import RenderError
from rewardlab.core.spec import CUT_MIDDLE, CutCanary
from rewardlab.core.types import Conversation, Message
from rewardlab.data.chat import Renderer, to_messages

# Two exchanges: by the rules that cut at the left one goes as a whole, and the other loses its start.
TALK: Final[Conversation] = (
    Message("user", "My sourdough is flat, dense and pale. I feed the starter once a week. What should I change?"),
    Message("assistant", "Feed the starter every day for a week, and bake when it doubles within six hours."),
    Message("user", "It doubles in ten hours now. The kitchen is at about 18 degrees, and the flour is wholemeal rye."),
    Message(
        "assistant",
        "Then it is nearly there. Keep it somewhere warmer, between 24 and 26 degrees, and give it a little more flour "
        "than water. Wholemeal rye ferments fast, so judge by the volume and not by the clock. A pale crust wants "
        "steam at first, then dry heat: take the lid off after twenty minutes, and bake until the loaf sounds hollow.",
    ),
)
SHORT_BY: Final = 5
"""Tokens by which the last exchange of a conversation is above the limit to which it is cut."""


def make_cut_canaries(renderer: Renderer) -> list[CutCanary]:
    """Return the conversation by which the renderer's rule of truncation is checked.

    The list is empty if its template refuses it. A template for one exchange gets only the last exchange.
    """
    cutting = renderer.that_cuts
    for messages in (TALK, TALK[2:]):
        try:
            limit = _limit(cutting, messages)
            token_ids = _cut(cutting, messages, limit)
        except RenderError:
            continue
        if token_ids:
            told = [message.as_dict() for message in messages]
            return [CutCanary(name="cut", messages=told, max_length=limit, token_ids=token_ids)]
    return []


def _limit(renderer: Renderer, messages: Conversation) -> int:
    """Return a limit under which the rule removes a part of the conversation, but not all that it may remove."""
    if renderer.spec.truncation == CUT_MIDDLE:
        num_tokens = len(renderer.token_ids(messages))
        without_reply = len(renderer.token_ids((*messages[:-1], Message("assistant", "Yes"))))
        return (num_tokens + without_reply) // 2
    return len(renderer.token_ids(messages[-2:])) - SHORT_BY


def faults_of_cuts(renderer: Renderer, canaries: Sequence[CutCanary]) -> Iterator[str]:
    """Yield a sentence for each conversation for which the renderer's rule gives other tokens than were saved."""
    for canary in canaries:
        try:
            messages = to_messages(canary.messages)
            got = _cut(renderer.that_cuts, messages, canary.max_length)
        except RenderError as error:
            yield f"canary {canary.name!r} cannot be cut to {canary.max_length} tokens: {error}"
            continue
        if got != canary.token_ids:
            yield (
                f"canary {canary.name!r} is cut to {len(got)} tokens that are not the {len(canary.token_ids)} that "
                f"were saved. The rule of truncation, the tokenizer or the chat template differs."
            )


def _cut(renderer: Renderer, messages: Conversation, limit: int) -> list[int]:
    """Return the tokens of a conversation that is cut to a limit; none if it is not above it."""
    rendered = renderer.by(max_length=limit).render(messages[:-1], messages[-1:])
    is_cut = rendered.full_length > len(rendered.token_ids)
    return [int(token) for token in rendered.token_ids] if is_cut else []
