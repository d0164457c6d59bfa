"""Render and tokenise many preferences at once, with exactly the tokens that `Renderer.group` gives for one.

Nearly all the time goes into the tokenizer. It is therefore called with lists, which costs less for each text and lets
it use its own threads, and every text is encoded once: replies to one prompt share the text before the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from rewardlab.core.errors import RenderError
from rewardlab.core.spec import CUT_MIDDLE
from rewardlab.core.types import Conversation, IntArray, Preference, TokenGroup
from rewardlab.data.chat import (
    EndsInPadding,
    Overlong,
    Renderer,
    ReplyTooLong,
    common_beginning,
    with_sentinel,
)
from rewardlab.data.layout import Rendered, common_prefix_length, common_text
from rewardlab.data.markers import RenderedText
from rewardlab.data.store import LeftOut

NOTHING: Final = RenderedText("")
CHARACTERS_AT_A_TIME: Final = 1 << 20
"""So many are rendered together: what the tokenizer returns for a text takes many times the memory of the text."""


@dataclass(slots=True)
class _Reply:
    """One reply on its way to tokens."""

    prompt: Conversation
    reply: Conversation
    text: str = ""
    rendered: RenderedText = NOTHING
    token_ids: IntArray | None = None
    before: RenderedText = NOTHING
    """The text before the reply's content."""
    result: Rendered | RenderError | None = None
    """The tokens, or the error for which there are none; None until one of them is known."""


def render_all(
    preferences: Sequence[Preference], renderer: Renderer, *, keep_identical: bool = False
) -> list[TokenGroup | LeftOut]:
    """Return for each preference its group, or the cause for which it has none. `keep_identical` is as in
    `build_group`.

    Causes: `template_refuses` (the chat template raises an error, for example for a role, or leaves out a turn),
    `ends_in_padding` (the last token of a reply is the padding token), and those of `Renderer.group`.

    Raises DataError, naming the row, if a conversation above the limit is to end the run.
    """
    replies = [[_Reply(preference.prompt, reply) for reply in preference.replies] for preference in preferences]
    _render([reply for siblings in replies for reply in siblings], renderer)
    return [
        _outcome(preference, siblings, renderer, keep_identical=keep_identical)
        for preference, siblings in zip(preferences, replies, strict=True)
    ]


def render_replies(preferences: Sequence[Preference], renderer: Renderer) -> list[list[Rendered | RenderError]]:
    """Return for every reply of each preference its tokens, or the error for which it has none."""
    replies = [[_Reply(preference.prompt, reply) for reply in preference.replies] for preference in preferences]
    _render([reply for siblings in replies for reply in siblings], renderer)
    return _results(replies)


def render_conversations(
    conversations: Iterable[Conversation], renderer: Renderer
) -> dict[Conversation, Rendered | RenderError]:
    """Return for each conversation, whose last turn is the reply, its tokens, or the error for which it has none.

    Equal ones are rendered once, and about `CHARACTERS_AT_A_TIME` characters together.
    """
    outcomes: dict[Conversation, Rendered | RenderError] = {}
    part: list[_Reply] = []
    num_characters = 0

    def finish() -> None:
        _render(part, renderer)
        (results,) = _results([part])
        outcomes.update(zip((one.prompt + one.reply for one in part), results, strict=True))
        part.clear()

    for turns in dict.fromkeys(conversations):
        part.append(_Reply(turns[:-1], turns[-1:]))
        num_characters += sum(len(message.content) for message in turns)
        if num_characters >= CHARACTERS_AT_A_TIME:
            finish()
            num_characters = 0
    finish()
    return outcomes


def render_uncut(preferences: Sequence[Preference], renderer: Renderer) -> list[list[Rendered | RenderError]]:
    """Return what `render_replies` does, but Overlong for a reply that would have to be cut.

    This is fast: nothing is cut by trial, a text is not encoded if it has too many characters for any tokens within the
    limit, and of the replies to a prompt that alone is above the limit only the first is looked at.
    """
    replies = [[_Reply(preference.prompt, reply) for reply in preference.replies] for preference in preferences]
    _render([siblings[0] for siblings in replies], renderer, cut=False)
    others: list[_Reply] = []
    for first, *siblings in replies:
        if isinstance(first.result, Overlong) and first.result.prompt:
            for reply in siblings:
                reply.result = first.result
        else:
            others += siblings
    _render(others, renderer, cut=False)
    return _results(replies)


def _results(replies: Sequence[Sequence[_Reply]]) -> list[list[Rendered | RenderError]]:
    results: list[list[Rendered | RenderError]] = []
    for siblings in replies:
        results.append([])
        for reply in siblings:
            assert reply.result is not None
            results[-1].append(reply.result)
    return results


def _render(replies: Sequence[_Reply], renderer: Renderer, *, cut: bool = True) -> None:
    """Set `result` of every reply to what `Renderer.render` would return or raise; to Overlong if it is not to cut."""
    texts = _texts([reply.prompt + reply.reply for reply in replies], renderer)
    for reply, text in zip(replies, texts, strict=True):
        if isinstance(text, RenderError):
            reply.result = text
        else:
            reply.text = text
    refuse = _refuse_long_replies if cut else _refuse_by_characters
    refuse([reply for reply in replies if reply.result is None], renderer)
    limit = renderer.spec.max_length
    pending = [reply for reply in replies if reply.result is None]
    conversations = [reply.prompt + reply.reply for reply in pending]
    encoded = renderer.encode_all(conversations, [reply.text for reply in pending])
    for reply, outcome in zip(pending, encoded, strict=True):
        try:
            if isinstance(outcome, RenderError):
                raise outcome
            reply.rendered, token_ids = outcome
            reply.token_ids = token_ids
            if len(token_ids) <= limit:
                renderer.require_known_end(token_ids)
            elif cut:
                reply.result = renderer.render_cut(reply.prompt, reply.reply, full_length=len(token_ids))
        except RenderError as error:
            reply.result = error
    _count_prompt_tokens([reply for reply in pending if reply.result is None], renderer)
    if not cut:
        _refuse_by_tokens(pending, limit)


def _refuse_by_tokens(replies: Sequence[_Reply], limit: int) -> None:
    """Set the `result` of replies whose conversation has more tokens than the limit."""
    for reply in replies:
        whole = reply.result
        if isinstance(whole, Rendered) and len(whole.token_ids) > limit:
            prompt = whole.prompt_tokens > limit
            num_tokens = whole.prompt_tokens if prompt else len(whole.token_ids)
            reply.result = Overlong(f"takes {num_tokens} tokens, above the model's limit of {limit}.", prompt=prompt)


def _refuse_long_replies(replies: Sequence[_Reply], renderer: Renderer) -> None:
    """Set the `result` of replies whose last turn, which is not cut, has more characters than any tokens within the
    limit. Encoding a text of millions of characters to count its tokens would take seconds."""
    limit, most = renderer.spec.max_length, renderer.most_characters
    if renderer.refuses or renderer.spec.truncation == CUT_MIDDLE:
        return
    for reply in replies:
        if most is not None and len(reply.text) > most:
            turns = reply.prompt + reply.reply
            (other,) = _texts([with_sentinel(turns[:-1], turns[-1:])], renderer)
            before = len(reply.text) if isinstance(other, RenderError) else len(common_text(reply.text, other))
            if (num_characters := len(reply.text) - before) > most:
                reply.result = ReplyTooLong(
                    f"a reply has {num_characters} characters with what ends it, too many for the limit of {limit} "
                    f"tokens (--max-seq-len when the model was trained)."
                )


def _refuse_by_characters(replies: Sequence[_Reply], renderer: Renderer) -> None:
    """Set the `result` of replies whose text has more characters than any tokens within the limit."""
    limit, most = renderer.spec.max_length, renderer.most_characters
    for reply in replies:
        if most is not None and len(reply.text) > most:
            (other,) = _texts([with_sentinel(reply.prompt, reply.reply)], renderer)
            shared = 0 if isinstance(other, RenderError) else len(common_text(reply.text, other))
            num_characters = shared if shared > most else len(reply.text)
            said = f"has {num_characters} characters, too many for the model's limit of {limit} tokens."
            reply.result = Overlong(said, prompt=shared > most)


def _count_prompt_tokens(replies: Sequence[_Reply], renderer: Renderer) -> None:
    """Find where the content of each reply that fits the limit begins, and set its `result`."""
    others = [with_sentinel(reply.prompt, reply.reply) for reply in replies]
    distinct = list(dict.fromkeys(others))
    text_of = dict(zip(distinct, _texts(distinct, renderer), strict=True))
    for reply, other in zip(replies, others, strict=True):
        text = text_of[other]
        if isinstance(text, RenderError):
            reply.result = text
        else:
            reply.before = common_beginning(reply.rendered, text)
    pending = [reply for reply in replies if reply.result is None]
    beginnings = list(dict.fromkeys(reply.before for reply in pending))
    tokens_of = dict(zip(beginnings, renderer.encode_beginnings(beginnings), strict=True))
    for reply in pending:
        assert reply.token_ids is not None
        reply.result = Rendered(
            token_ids=reply.token_ids,
            prompt_tokens=common_prefix_length([tokens_of[reply.before], reply.token_ids]),
            truncated_tokens=0,
            num_typed=renderer.num_typed(reply.prompt + reply.reply),
        )


def _texts(conversations: Sequence[Conversation], renderer: Renderer) -> list[str | RenderError]:
    """Return the rendered text of each conversation, or the error of the template for it."""
    try:
        return list(renderer.texts(conversations))
    except RenderError:
        # The template refuses at least one of them and does not say which, so each is rendered alone.
        pass
    texts: list[str | RenderError] = []
    for conversation in conversations:
        try:
            texts += renderer.texts([conversation])
        except RenderError as error:
            texts.append(error)
    return texts


def _outcome(
    preference: Preference, siblings: Sequence[_Reply], renderer: Renderer, *, keep_identical: bool
) -> TokenGroup | LeftOut:
    """Return the group of a preference whose replies are rendered, or the cause for which it has none.

    Raises DataError if a conversation above the limit should end the run.
    """
    (results,) = _results([siblings])
    try:
        group = renderer.build_group(preference, results, keep_identical=keep_identical)
    except RenderError as error:
        return LeftOut("ends_in_padding" if isinstance(error, EndsInPadding) else "template_refuses", str(error))
    return LeftOut(group, preference.id) if isinstance(group, str) else group
