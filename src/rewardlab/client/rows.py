"""The rows to be scored, and their division into requests.

Rows with the same prompt go into the same request, wherever they were in the call: a server then computes their prompt
once. Our own server scores a request by one model, so two models never score replies to the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.core.errors import RenderError
from rewardlab.core.spec import OutputAs
from rewardlab.core.types import UNLISTED, Conversation, is_readable
from rewardlab.data.chat import to_messages
from rewardlab.data.prompts import conversations_in
from rewardlab.data.rows import show

MAX_CHARACTERS: Final = 1_000_000
"""Most characters of text in a request, unless the replies to one prompt have more. Servers limit the size of one."""
PER_TOKEN: Final = 6
"""Characters that a token id takes in a request."""
Prompt = str | Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One conversation to be scored: prompt and reply, or tokens."""

    name: str
    """Its name in messages, such as `conversation 3`."""
    prompt: Prompt = ()
    reply: str = ""
    token_ids: tuple[int, ...] | None = None

    @property
    def key(self) -> Prompt | tuple[int, ...]:
        """A key that is equal for rows that one model has to score."""
        return self.prompt if self.token_ids is None else self.token_ids

    @property
    def prompt_size(self) -> int:
        """Characters of the prompt."""
        return len(self.prompt) if isinstance(self.prompt, str) else sum(len(turn.content) for turn in self.prompt)

    @property
    def size(self) -> int:
        """Characters besides the prompt."""
        return len(self.reply) if self.token_ids is None else PER_TOKEN * len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to one row."""

    score: float | None
    """None if the row has no score; `error` says why."""
    output: OutputAs = "raw"
    """What kind of score it is, as it was asked for (`ClientConfig.output`)."""
    error: str | None = None
    num_tokens: int | None = None
    """Number of tokens of the whole conversation, if known."""
    truncated_tokens: int | None = None
    """Number of tokens that were cut from the prompt, if known."""
    truncated_reply_tokens: int | None = None
    """Number of tokens that were cut from the middle of the reply, if known."""
    digest: str | None = None
    """Digest of the model that gave the score, if known."""


def rows_of_conversations(conversations: Iterable[Any]) -> list[Row]:
    """Return a row for each conversation.

    Raises RenderError, naming the conversation, unless each is a list of messages that ends with an assistant turn.
    """
    return [
        Row(name=f"conversation {number}", prompt=turns[:-1], reply=turns[-1].content)
        for number, turns in enumerate(conversations_in(conversations))
    ]


def rows_of_groups(groups: Iterable[tuple[Any, Any]], *, single: bool = False) -> tuple[list[Row], list[int]]:
    """Return (a row for each reply, the number of replies of each group).

    A group is (prompt, replies). `single` says that the caller has only one, so that messages do not number it.

    Raises RenderError, naming the group, unless a prompt is a text or messages and replies are a list of texts.
    """
    rows: list[Row] = []
    counts = []
    for number, group in enumerate(_list_of(groups, "(prompt, replies)")):
        if not isinstance(group, list | tuple) or len(group) != 2:
            raise RenderError(f"group {number}: wanted (prompt, replies), got {show(group)}.")
        prompt, replies = group
        of = "" if single else f" of group {number}"
        is_list = isinstance(replies, Iterable) and not isinstance(replies, UNLISTED)
        texts = list(replies) if is_list else []
        if not is_list or not all(isinstance(reply, str) for reply in texts):
            raise RenderError(f"replies{of} are a list of texts. Put a single one into a list.")
        try:
            turns = prompt if isinstance(prompt, str) else to_messages(prompt)
        except RenderError as error:
            raise RenderError(f"prompt{of}: {error}") from error
        rows += [_readable(Row(name=f"reply {k}{of}", prompt=turns, reply=text)) for k, text in enumerate(texts)]
        counts.append(len(texts))
    return rows, counts


def rows_of_tokens(token_ids: Iterable[Any]) -> list[Row]:
    """Return a row for each list of token ids. Raises RenderError, naming the list, for any other value."""
    rows = []
    for number, values in enumerate(_list_of(token_ids, "lists of token ids")):
        listed: Any = values.tolist() if hasattr(values, "tolist") else values
        numbers = list(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else []
        if not numbers or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in numbers):
            raise RenderError(f"tokens {number}: expected a list of one token id or more, each a number from 0 up.")
        rows.append(Row(name=f"tokens {number}", token_ids=tuple(numbers)))
    return rows


def _list_of(given: Any, what: str) -> Iterable[Any]:
    """Return what was given. Raises RenderError for what is not a list."""
    if not isinstance(given, Iterable) or isinstance(given, UNLISTED):
        raise RenderError(f"wanted a list of {what}, got {show(given)}.")
    return given


def _readable(row: Row) -> Row:
    """Return a row. Raises RenderError for half of a surrogate pair, which can neither be sent nor tokenised."""
    texts = [row.prompt] if isinstance(row.prompt, str) else [turn.content for turn in row.prompt]
    if not is_readable(*texts, row.reply):
        raise RenderError(f"{row.name}: a text has half a surrogate pair, which no tokenizer can read.")
    return row


def requests_of(
    rows: Sequence[Row], *, max_batch: int, whole: bool, max_characters: int = MAX_CHARACTERS
) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each request, those with the same prompt together and in order.

    A request has at most `max_batch` rows and `max_characters` of text, except for a single row with more text. With
    `whole`, rows of one prompt are never divided, so a prompt with more replies makes a larger request.
    """
    together: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        together.setdefault(row.key, []).append(number)
    request: list[int] = []
    size = 0
    for numbers in together.values():
        for part in [numbers] if whole else [[number] for number in numbers]:
            # Rows that are sent one by one repeat the prompt in each, so its size counts for every row.
            own = sum(rows[number].size for number in part) + rows[part[0]].prompt_size
            if request and (len(request) + len(part) > max_batch or size + own > max_characters):
                yield request
                request, size = [], 0
            request += part
            size += own
    if request:
        yield request
