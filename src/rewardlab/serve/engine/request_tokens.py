"""A request as tokens: rendered by the one renderer, laid out in groups, every reply accounted for. Needs no model."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from rewardlab.client.protocol import ScoreRequest
from rewardlab.core.errors import RenderError
from rewardlab.core.spec import CUT_MIDDLE
from rewardlab.core.types import Conversation, IntArray, Preference, TokenGroup
from rewardlab.data.bulk import render_replies, render_uncut
from rewardlab.data.chat import EndsInPadding, Overlong, PromptTooLong, Renderer, ReplyTooLong, to_messages
from rewardlab.data.layout import Rendered, common_prefix_length, lay_out
from rewardlab.data.prompts import conversations_of
from rewardlab.data.rows import UnusableRowError, require_few_turns
from rewardlab.serve.engine.api import Refused, TooLongError, UnscorableError

MOST_CHARACTERS: Final = 1 << 18
"""Characters after which other requests have their turn with the tokenizer, unless a conversation has more."""
HEADER: Final = 32
"""How many characters the header of a message counts as."""
TRIALS: Final = 4
"""How many times more a character counts in a request that may be cut: cuts are found by trial encodings."""
MOST_TOGETHER: Final = 64
"""The largest number of conversations of token ids that are laid out as one group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """Conversations of a request that are computed together, with one copy of what they share."""

    group: TokenGroup
    places: tuple[int, ...]
    """The number of each reply of the group in the request."""


@dataclass(kw_only=True, eq=False)
class Reply:
    """One conversation of a request."""

    param: str
    """Its place in the request, such as `groups.3.replies.0`."""
    num_tokens: int = 0
    truncated_tokens: int = 0
    truncated_reply_tokens: int = 0
    error: Refused | None = None
    """Why it has no score."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestTokens:
    """What is to be computed for a request, and what is known about every reply before it is computed."""

    units: tuple[Unit, ...]
    replies: tuple[Reply, ...]
    """All replies, those of one answer after those of the other."""
    sizes: tuple[int, ...]
    """The number of replies of each answer."""


class Turns:
    """A lock that threads get in the order in which they asked for it.

    With an ordinary lock, a thread that releases it and asks again at once nearly always gets it back, and the others
    starve.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The first of these has the lock.
        self._asked: deque[object] = deque()

    def __enter__(self) -> None:
        mine = object()
        with self._changed:
            self._asked.append(mine)
            try:
                self._changed.wait_for(lambda: self._asked[0] is mine)
            except BaseException:
                # Interrupted while waiting: leave the line, so that nobody waits for a thread that has gone.
                self._asked.remove(mine)
                self._changed.notify_all()
                raise

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._asked.popleft()
            self._changed.notify_all()


def request_tokens(
    request: ScoreRequest, renderer: Renderer, *, vocabulary: int, turns: Turns, max_characters: int
) -> RequestTokens:
    """Render and tokenise a request. `vocabulary` is the number of tokens that the model knows.

    `turns` is held while a part of the request is rendered. `max_characters` are the most that all conversations may
    have, each with its own prompt; a quarter of it if they may be cut.

    Raises TooLongError or UnscorableError with the `param` of the first reply that cannot be scored, unless the request
    says `on_error="null"`; such replies then have an `error`.
    """
    if request.token_ids is not None:
        replies, units = _of_token_ids(request.token_ids, renderer, vocabulary)
        sizes = [1] * len(replies)
    else:
        replies, conversations, sizes = _conversations(request, renderer)
        num_characters = sum(map(_num_characters, conversations.values()))
        most = max_characters // TRIALS if request.truncate else max_characters
        if num_characters > most:
            raise TooLongError(
                f"the request has {num_characters} characters, each reply with its own prompt and each message with "
                f"{HEADER} more, and at most {most} are rendered{' if they may be cut' * request.truncate}. Split it, "
                f"or serve with more --max-waiting-tokens."
            )
        units = list(_rendered(replies, conversations, renderer, truncate=request.truncate, turns=turns))
    if request.on_error == "refuse":
        for reply in replies:
            if reply.error is not None:
                raise reply.error
    return RequestTokens(units=tuple(units), replies=tuple(replies), sizes=tuple(sizes))


def _conversations(request: ScoreRequest, renderer: Renderer) -> tuple[list[Reply], dict[int, Conversation], list[int]]:
    """Return (all replies, number of a reply -> its conversation if it has one, how many replies each answer has)."""
    if request.conversations is not None:
        replies, conversations = [], {}
        for number, wire in enumerate(request.conversations):
            replies.append(Reply(param=f"conversations.{number}"))
            try:
                require_few_turns(len(wire))
                conversations[number] = to_messages([message.model_dump() for message in wire])
            except (RenderError, UnusableRowError) as error:
                replies[-1].error = UnscorableError(_said(error), param=replies[-1].param)
        return replies, conversations, [1] * len(replies)
    if request.groups is not None:
        given = [(f"groups.{n}.", group.prompt, group.replies) for n, group in enumerate(request.groups)]
    else:
        assert request.prompt is not None
        assert request.replies is not None
        given = [("", request.prompt, request.replies)]
    replies, conversations, sizes = [], {}, []
    for place, prompt, texts in given:
        turns: Any = prompt if isinstance(prompt, str) else [message.model_dump() for message in prompt]
        sizes.append(len(texts))
        first = len(replies)
        replies += [Reply(param=f"{place}replies.{number}") for number in range(len(texts))]
        try:
            require_few_turns(0 if isinstance(prompt, str) else len(prompt))
            own = conversations_of(turns, texts, bare=renderer.spec.joins_texts)
        except (RenderError, UnusableRowError) as error:
            for reply in replies[first:]:
                reply.error = UnscorableError(_said(error), param=f"{place}prompt")
        else:
            conversations |= dict(enumerate(own, start=first))
    return replies, conversations, sizes


def _said(error: RenderError | UnusableRowError) -> str:
    return error.detail if isinstance(error, UnusableRowError) else str(error)


def _rendered(
    replies: Sequence[Reply],
    conversations: dict[int, Conversation],
    renderer: Renderer,
    *,
    truncate: bool,
    turns: Turns,
) -> Iterator[Unit]:
    """Yield the conversations as units, one for each prompt; set lengths and errors of `replies`."""
    numbers_of: dict[Conversation, list[int]] = {}
    for number, conversation in conversations.items():
        if conversation[-1].role != "assistant":
            replies[number].error = UnscorableError(
                "a conversation must end with an assistant turn, the reply to be scored.", param=replies[number].param
            )
        else:
            numbers_of.setdefault(conversation[:-1], []).append(number)
    preferences = {
        prompt: Preference(
            id=replies[numbers[0]].param,
            source="serve",
            prompt=prompt,
            replies=tuple(conversations[number][-1:] for number in numbers),
            comparisons=(),
        )
        for prompt, numbers in numbers_of.items()
    }
    results = _results(list(preferences.values()), renderer, truncate=truncate, turns=turns)
    for preference, numbers, outcomes in zip(preferences.values(), numbers_of.values(), results, strict=True):
        kept: dict[int, Rendered] = {}
        for index, (number, result) in enumerate(zip(numbers, outcomes, strict=True)):
            reply = replies[number]
            if isinstance(result, Rendered):
                kept[index] = result
                reply.num_tokens, reply.truncated_tokens = len(result.token_ids), result.truncated_tokens
                reply.truncated_reply_tokens = result.truncated_reply_tokens
            else:
                reply.error = _refusal(result, reply.param, renderer)
        if kept:
            yield Unit(group=lay_out(preference, kept), places=tuple(numbers[index] for index in sorted(kept)))


def _results(
    preferences: Sequence[Preference], renderer: Renderer, *, truncate: bool, turns: Turns
) -> list[list[Rendered | RenderError]]:
    """Return for every reply of each preference its tokens, or the error for which it has none."""
    results: list[list[Rendered | RenderError]] = [[] for _ in preferences]
    for part in _in_parts(preferences, MOST_CHARACTERS // TRIALS if truncate else MOST_CHARACTERS):
        # Once a prompt was found too long, its further replies are not rendered: they would fail in the same way.
        asked = {}
        for number, replies in part.items():
            known = results[number][-1] if results[number] else None
            if isinstance(known, Overlong) and known.prompt:
                results[number] += [known] * len(replies)
            else:
                asked[number] = replace(preferences[number], replies=tuple(replies))
        with turns:
            several = list(asked.values())
            rendered = render_replies(several, renderer.that_cuts) if truncate else render_uncut(several, renderer)
        for number, found in zip(asked, rendered, strict=True):
            results[number] += found
    return results


def _in_parts(preferences: Sequence[Preference], most: int) -> Iterator[dict[int, list[Conversation]]]:
    """Yield (number of a preference -> some of its replies), of at most `most` characters or one reply each time."""
    part: dict[int, list[Conversation]] = {}
    num_characters = 0
    for number, preference in enumerate(preferences):
        for reply in preference.replies:
            more = _num_characters(preference.prompt) + _num_characters(reply)
            if part and num_characters + more > most:
                yield part
                part, num_characters = {}, 0
            part.setdefault(number, []).append(reply)
            num_characters += more
    if part:
        yield part


def _num_characters(conversation: Conversation) -> int:
    return sum(len(message.content) + HEADER for message in conversation)


def _refusal(error: RenderError, param: str, renderer: Renderer) -> Refused:
    """Return why a reply that could not be rendered is not scored."""
    if isinstance(error, Overlong):
        cuts_replies = renderer.spec.truncation == CUT_MIDDLE
        told = "let the middle of its reply" if cuts_replies else "if its reply fits alone, let its oldest turns"
        how = "; the model was trained without such conversations" if renderer.refuses else " as in training"
        return TooLongError(f"{error} Shorten it, or {told} be cut{how}: truncate true.", param=param)
    if isinstance(error, PromptTooLong):
        return TooLongError(f"{error} Shorten the prompt.", param=param)
    if isinstance(error, ReplyTooLong):
        return TooLongError(
            f"{error} No turn is left to cut: send shorter replies (a trainer has its own limit of a completion), or "
            f"take a model of a longer limit.",
            param=param,
        )
    return UnscorableError(str(error), param=param)


def _of_token_ids(
    token_ids: Sequence[Sequence[int]], renderer: Renderer, vocabulary: int
) -> tuple[list[Reply], list[Unit]]:
    """Return (a reply for each conversation, those that may be scored in units of common beginnings)."""
    replies: list[Reply] = []
    arrays: dict[int, IntArray] = {}
    for number, ids in enumerate(token_ids):
        reply = Reply(param=f"token_ids.{number}")
        replies.append(reply)
        reply.error = _wrong_ids(ids, reply.param, renderer, vocabulary)
        if reply.error is None:
            reply.num_tokens, arrays[number] = len(ids), np.asarray(ids, dtype=np.int32)
    order = sorted(arrays, key=lambda number: list(token_ids[number]))
    units = []
    for numbers in _together([arrays[number] for number in order]):
        places = [order[number] for number in numbers]
        sequences = [arrays[place] for place in places]
        num_shared = min(common_prefix_length(sequences), min(map(len, sequences)) - 1)
        units.append(
            Unit(
                places=tuple(places),
                group=TokenGroup(
                    preference_id=replies[places[0]].param,
                    source="serve",
                    prompt_key="",
                    shared=sequences[0][:num_shared],
                    suffixes=tuple(ids[num_shared:] for ids in sequences),
                    # Token ids do not say where the reply begins, so everything shared counts as the prompt.
                    prompt_tokens=(num_shared,) * len(sequences),
                    truncated_tokens=(0,) * len(sequences),
                    comparisons=(),
                ),
            )
        )
    return replies, units


def _wrong_ids(ids: Sequence[int], param: str, renderer: Renderer, vocabulary: int) -> Refused | None:
    """Return why token ids cannot be scored, or None."""
    if len(ids) > renderer.spec.max_length:
        return TooLongError(
            f"it has {len(ids)} tokens, above the model's limit of {renderer.spec.max_length}. Shorten it; token ids "
            f"are never cut.",
            param=param,
        )
    if wrong := [token for token in ids if not 0 <= token < vocabulary]:
        return UnscorableError(f"token id {wrong[0]} is not one of the model's 0 to {vocabulary - 1}.", param=param)
    try:
        renderer.require_known_end(np.asarray(ids, dtype=np.int32))
    except EndsInPadding as error:
        return UnscorableError(str(error), param=param)
    except RenderError:
        return UnscorableError(
            f"it ends in token {ids[-1]} where every other ends in {renderer.spec.final_token_id}: token ids, and "
            f"texts in their place, are all that the chat template writes of a conversation. Send messages, or render "
            f"them.",
            param=param,
        )
    return None


def _together(sequences: Sequence[IntArray]) -> list[range]:
    """Return which neighbours of sorted sequences are laid out together, so that the fewest tokens are computed."""
    shared = [common_prefix_length(pair) for pair in pairwise(sequences)]
    # fewest[n]: (tokens to compute for the first n sequences, where the last group of these begins).
    fewest = [(0, 0)]
    for stop in range(1, len(sequences) + 1):
        options = []
        common = total = 0
        for start in range(stop - 1, max(-1, stop - 1 - MOST_TOGETHER), -1):
            length = len(sequences[start])
            common = length if start == stop - 1 else min(common, shared[start])
            total += length
            count = stop - start
            options.append((fewest[start][0] + total - (count - 1) * common, start))
            if common == 0:
                break
        fewest.append(min(options))
    groups, stop = [], len(sequences)
    while stop:
        groups.append(range(fewest[stop][1], stop))
        stop = fewest[stop][1]
    return groups[::-1]
