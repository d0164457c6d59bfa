"""Reads prompts and replies of programs and requests in the same way as training data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rewardlab.core.errors import RenderError
from rewardlab.core.types import UNLISTED, Conversation, Message, is_readable
from rewardlab.data.chat import to_messages
from rewardlab.data.rows import is_open_transcript, parse_transcript, show


def prompt_turns(value: Any, *, bare: bool) -> tuple[Conversation, bool]:
    """Return (the turns of a prompt, whether they were parsed from a transcript), read as training data are read.

    A prompt is a list of messages or a text. A text that is an open transcript ("Human: … Assistant:") is split into
    its turns, except for `bare` models, which take texts without a template.

    Raises RenderError or UnusableRowError if the value is not a prompt.
    """
    # An open transcript ends with an empty assistant turn, the one to be replied in; the reply takes its place.
    if not bare and is_open_transcript(value):
        return parse_transcript(value)[:-1], True
    return ((Message("user", value),) if isinstance(value, str) else to_messages(value)), False


def conversations_of(prompt: Any, replies: Iterable[str], *, bare: bool) -> list[Conversation]:
    """Return one conversation for each reply to one prompt, which is read by `prompt_turns`.

    Raises RenderError or UnusableRowError if `prompt` is not a prompt, and RenderError if `replies` is not a list of
    texts.
    """
    is_list = isinstance(replies, Iterable) and not isinstance(replies, UNLISTED)
    texts = list(replies) if is_list else []
    if not is_list:
        raise RenderError(f"replies are a list of texts, and not {show(replies)}. Put a single one into a list.")
    for number, reply in enumerate(texts):
        if not isinstance(reply, str):
            raise RenderError(f"replies are a list of texts, and reply {number} is {show(reply)}. Leave it out.")
    turns, is_transcript = prompt_turns(prompt, bare=bare)
    # Parsing a transcript strips its turns, in training data too, so a reply to one is stripped as well.
    return [(*turns, Message("assistant", reply.strip() if is_transcript else reply)) for reply in texts]


def conversations_in(given: Any) -> list[Conversation]:
    """Return the conversations of a list, each of messages that end with an assistant turn.

    Raises RenderError for what is not a list, such as a single conversation, and naming a conversation of another kind.
    """
    # Going through a text or a message would give characters or keys. A single conversation is an equally likely slip.
    is_list = isinstance(given, Iterable) and not isinstance(given, UNLISTED)
    several = list(given) if is_list else []
    if not is_list or any(isinstance(one, Message | Mapping) for one in several):
        raise RenderError(
            "score takes a list of conversations, each a list of messages. Put a single one into a list; for replies "
            "to one prompt there is score_replies(prompt, replies)."
        )
    conversations = []
    for number, one in enumerate(several):
        try:
            turns = to_messages(one)
        except RenderError as error:
            raise RenderError(f"conversation {number}: {error}") from error
        if not turns or turns[-1].role != "assistant":
            raise RenderError(f"conversation {number} must end with an assistant turn, the reply to be scored.")
        if not is_readable(*(turn.content for turn in turns)):
            raise RenderError(
                f"conversation {number}: a text has half a surrogate pair, which no tokenizer can read. Replace it."
            )
        conversations.append(turns)
    return conversations


def reply_text(value: Any) -> str:
    """Return the text of a response: a text, or one assistant turn as a message or a list of it, as TRL keeps them.

    Raises RenderError or TypeError for anything else.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | list | tuple):
        raise TypeError(f"a response is {show(value)}, not text")
    turns = to_messages([value] if isinstance(value, Mapping) else value)
    if [turn.role for turn in turns] != ["assistant"]:
        raise TypeError("a response as messages has to be one assistant turn; put whole conversations into `messages`")
    return turns[0].content
