"""A conversation as tokens, each with its kind: prompt, header, reply or ending; shared, control, typed or cut."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Literal

from rewardlab.core.errors import RenderError
from rewardlab.core.types import Conversation, IntArray, Message
from rewardlab.data.chat import Renderer, with_sentinel
from rewardlab.data.layout import Rendered, common_prefix_length, common_text

Part = Literal["prompt", "header", "reply", "ending"]
ENDS: Final = ("yes", "12 )", "No")
"""Replies that end in different tokens, which show which tokens the template writes after any reply."""
PARTIAL: Final = "\N{REPLACEMENT CHARACTER}"
"""The character to which a tokenizer decodes an incomplete character of several bytes."""
MOST_BYTES: Final = 4
"""Most tokens of one character in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class ShownToken:
    """One token."""

    id: int
    text: str
    """Its text. If several tokens together are one character, the first has the character and the others are empty."""
    part: Part
    """Where it stands: in the prompt, in what the template writes between the prompt and the reply, in the reply, or in
    what the template writes after it."""
    is_control: bool
    """Whether it is a control token: of the template, or typed and read as one (`typed`)."""
    is_typed: bool
    """Whether it is part of a control token that somebody typed in a message."""
    is_bos: bool


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The part of the conversation that was cut."""

    at: int
    """How many of the tokens shown come before it."""
    num_tokens: int
    """How many tokens shorter the conversation has become."""
    text: str
    """The text of the missing tokens."""


@dataclass(frozen=True, kw_only=True)
class ShownReply:
    """A conversation as the model reads it. The score is read at its last token."""

    reply: int
    tokens: tuple[ShownToken, ...]
    num_shared: int
    """Tokens at the beginning that all replies of the row share; they are computed once."""
    prompt_tokens: int
    truncated_tokens: int
    truncated_reply_tokens: int
    cut: Cut | None


def shown_reply(
    renderer: Renderer, prompt: Conversation, reply: Conversation, rendered: Rendered, *, number: int, num_shared: int
) -> ShownReply:
    """Return a reply with the kind of each of its tokens. `rendered` is its rendering by `renderer`."""
    ids = rendered.token_ids
    texts = texts_of(renderer.tokenizer, [int(token) for token in ids])
    whole = renderer.token_ids(prompt + reply)
    cut = _cut(renderer, whole, ids) if len(whole) > len(ids) else None
    control = [renderer.markers.num_control_tokens([int(token)]) > 0 for token in ids]
    typed = _typed(renderer, prompt + reply, whole, texts, control, before_cut=len(ids) if cut is None else cut.at)
    header = max(0, rendered.prompt_tokens - _header_tokens(renderer, prompt, reply))
    ending = max(rendered.prompt_tokens, len(ids) - _ending_tokens(renderer, prompt, reply))
    tokens = tuple(
        ShownToken(
            id=int(token),
            text=text,
            part=_part(place, header, rendered.prompt_tokens, ending),
            is_control=control[place],
            is_typed=place in typed,
            is_bos=place == 0 and int(token) == renderer.spec.bos_token_id,
        )
        for place, (token, text) in enumerate(zip(ids, texts, strict=True))
    )
    return ShownReply(
        reply=number,
        tokens=tokens,
        num_shared=num_shared,
        prompt_tokens=rendered.prompt_tokens,
        truncated_tokens=rendered.truncated_tokens,
        truncated_reply_tokens=rendered.truncated_reply_tokens,
        cut=cut,
    )


def _part(place: int, header: int, reply: int, ending: int) -> Part:
    if place < header:
        return "prompt"
    if place < reply:
        return "header"
    return "reply" if place < ending else "ending"


def texts_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. If several tokens together are one character, the first gets all of it."""
    texts = [text_of(tokenizer, token) for token in ids]
    place = 0
    while place < len(ids):
        size = 1
        if PARTIAL in texts[place]:
            for tried in range(2, MOST_BYTES + 1):
                together = str(tokenizer.decode(list(ids[place : place + tried]), clean_up_tokenization_spaces=False))
                if PARTIAL not in together:
                    size = min(tried, len(ids) - place)
                    texts[place : place + size] = [together, *[""] * (size - 1)]
                    break
        place += size
    return texts


def text_of(tokenizer: Any, token: int) -> str:
    """Return the text of one token, with the leading space that some tokenizers drop when they decode it alone."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    name = tokenizer.convert_ids_to_tokens(token)
    return f" {text}" if isinstance(name, str) and name.startswith("▁") and not text.startswith(" ") else text


def _cut(renderer: Renderer, whole: IntArray, kept: IntArray) -> Cut:
    """Return where two renderings of a conversation differ, and what only the whole one has there."""
    start = common_prefix_length([whole, kept])
    behind = common_prefix_length([whole[start:][::-1], kept[start:][::-1]])
    missing = whole[start : len(whole) - behind]
    return Cut(
        at=start,
        num_tokens=len(whole) - len(kept),
        text=str(renderer.tokenizer.decode([int(token) for token in missing], clean_up_tokenization_spaces=False)),
    )


def _header_tokens(renderer: Renderer, prompt: Conversation, reply: Conversation) -> int:
    """Return how many tokens the template writes between prompt and reply; 0 if it refuses a prompt alone."""
    try:
        (outcome,) = renderer.encode_all([prompt + reply], renderer.texts([prompt + reply]))
        if isinstance(outcome, RenderError):
            raise outcome
        text, _ = outcome
        others = renderer.text(prompt) if prompt else "", renderer.text(with_sentinel(prompt, reply))
        ends = [text.beginning(_num_shared(text.text, other)) for other in others]
    except RenderError:
        return 0
    of_prompt, before_reply = renderer.encode_beginnings(ends)
    return max(0, len(before_reply) - common_prefix_length([of_prompt, before_reply]))


def _num_shared(text: str, other: str) -> int:
    return len(other) if text.startswith(other) else len(common_text(text, other))


def _ending_tokens(renderer: Renderer, prompt: Conversation, reply: Conversation) -> int:
    """Return how many tokens the template writes after a reply: those with which renderings of `ENDS` end as well."""
    last = reply[-1]
    try:
        ends = [
            renderer.token_ids((*prompt, *reply[:-1], Message(last.role, text)))[::-1] for text in (last.content, *ENDS)
        ]
    except RenderError:
        return 0
    return common_prefix_length(ends)


def _typed(
    renderer: Renderer,
    conversation: Conversation,
    whole: IntArray,
    texts: Sequence[str],
    control: Sequence[bool],
    *,
    before_cut: int,
) -> set[int]:
    """Return the places of tokens that spell or are a control token that the template did not write.

    `texts` and `control` are of the tokens shown, of which the first `before_cut` stand before what was cut from the
    `whole` conversation.
    """
    names = renderer.markers.names
    if not names:
        return set()
    pattern = re.compile("|".join(map(re.escape, names)))
    own = [place for place, is_control in enumerate(control) if is_control]
    typed: set[int] = set()
    if renderer.spec.special_tokens_in_text == "keep":
        # Typed ones became the same tokens as the template's own: tell them apart by their order in the text.
        told = renderer.markers.tell_apart(conversation, [int(token) for token in whole])
        if told is not None:
            starts = {start for start, _ in told.own or ()}
            flags = [found.start() not in starts for found in pattern.finditer(told.text)]
            num_before = sum(control[:before_cut])
            kept = flags[:num_before] + flags[len(flags) - (len(own) - num_before) :]
            typed = {place for place, is_typed in zip(own, kept, strict=False) if is_typed}
        return typed
    begins = list(accumulate(map(len, texts), initial=0))
    for found in pattern.finditer("".join(texts)):
        first, last = bisect_right(begins, found.start()) - 1, bisect_left(begins, found.end())
        # A single control token is the template's own; several tokens that spell it were typed.
        if not all(control[first:last]):
            typed |= set(range(first, last))
    return typed
