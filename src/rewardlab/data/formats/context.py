"""What a row has for its prompt in columns of its own: `system`, `history`, and the `input` of an instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewardlab.core.types import Conversation
from rewardlab.data.formats.mapping import unpacked
from rewardlab.data.judgements import Rules
from rewardlab.data.rows import (
    Row,
    UnusableRowError,
    is_absent,
    is_message,
    read_conversation,
    read_prompt,
    read_reply,
    said_by,
    show,
)

COLUMNS = ("system", "history")
"""Columns with turns that come before the prompt."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The prompt of a row, and what its replies may repeat of it."""

    prompt: Conversation
    """With the turns of `system` and `history`."""
    own: Conversation
    """Without them."""
    after: object
    """As `read_reply` expects it in `after`."""

    def reply(self, value: object) -> Conversation:
        """Return the turns of a reply. Raises UnusableRowError if the value is not a reply to this prompt."""
        return read_reply(value, self.prompt, own=self.own, after=self.after)

    def replies(self, values: Sequence[object]) -> tuple[dict[int, Conversation], dict[int, UnusableRowError]]:
        """Return (the turns of each reply by its number, why others cannot be used)."""
        read: dict[int, Conversation] = {}
        left_out: dict[int, UnusableRowError] = {}
        for number, value in enumerate(values):
            try:
                read[number] = self.reply(value)
            except UnusableRowError as unusable:
                left_out[number] = unusable
        return read, left_out


def read_asked(row: Row, rules: Rules) -> Asked:
    """Return the prompt in the column `prompt`, with what other columns hold of it.

    If `--prompt-column instruction` names the column, the row's `input` belongs to the prompt, as in Alpaca's files.

    Raises UnusableRowError for a prompt without text, and for columns that do not fit it.
    """
    value = row["prompt"]
    if rules.reading.joins_input:
        value = with_input(value, row.get("input"))
    own = read_prompt(value, bare=rules.bare)
    return Asked(prompt=with_context(own, row), own=own, after=rules.before_reply(value))


def prompt_of_conversation(prompt: object, replies: Sequence[object]) -> object:
    """Return the prompt that a row means whose replies are whole conversations: all turns up to its own.

    The column `prompt` may hold a lone user turn, and the conversations a system turn or other turns before it, which
    all of them share. Any other prompt is returned as it is.
    """
    asked = _lone_turn(prompt)
    whole = [list(reply) for reply in replies if isinstance(reply, (list, tuple)) and reply and is_message(reply[0])]
    if asked is None or len(whole) < len(replies) or said_by(whole[0][0])[:2] == ("user", asked):
        return prompt
    turns = [read_conversation(reply) for reply in whole]
    said = [turn.role == "user" and turn.content.strip() == asked.strip() for turn in turns[0]]
    end = said.index(True) + 1 if True in said else 0
    if turns[0][0].role == "assistant" or any(other[:end] != turns[0][:end] for other in turns[1:]):
        return prompt
    return whole[0][:end] if end else prompt


def _lone_turn(prompt: object) -> str | None:
    """Return the text of a prompt that is a single turn of the user; None for any other, and for one without text."""
    if isinstance(prompt, str):
        return prompt if prompt.strip() else None
    if not isinstance(prompt, (list, tuple)) or len(prompt) != 1:
        return None
    (turn,) = read_conversation(prompt)
    return turn.content if turn.role == "user" and turn.content.strip() else None


def require_one_context(rows: Sequence[Row]) -> None:
    """Raise UnusableRowError if rows that are read as one have other turns before their prompt."""
    for name in COLUMNS:
        if other := next((row for row in rows if (row.get(name) or None) != (rows[0].get(name) or None)), None):
            raise UnusableRowError(
                "prompt_differs",
                f"rows of one prompt have {name} {show(rows[0].get(name))} and {show(other.get(name))}",
            )


def with_input(instruction: object, given: object) -> object:
    """Return an instruction with its input on a new line. Raises UnusableRowError unless both are texts."""
    if is_absent(given):
        return instruction
    if not isinstance(instruction, str) or not isinstance(given, str):
        raise UnusableRowError("bad_roles", f"instruction and input are {show([instruction, given])}, wanted texts")
    return f"{instruction}\n{given}" if instruction else given


def with_context(prompt: Conversation, row: Row) -> Conversation:
    """Return the prompt after the turns of the row's `system` and `history`, unless it has them already.

    Raises UnusableRowError for columns that do not fit it.
    """
    return with_system(with_history(prompt, row), row)


def with_system(prompt: Conversation, row: Row) -> Conversation:
    """Return the prompt after the text of the row's `system`, as a system turn, unless it has that turn already.

    Raises UnusableRowError if the prompt has another system turn, or `system` is not a text.
    """
    text = row.get("system")
    if is_absent(text):
        return prompt
    if not isinstance(text, str):
        raise UnusableRowError(
            "bad_roles", f"system is {show(text)}, wanted a text; rename it if it means another thing"
        )
    own = [turn.content.strip() for turn in prompt if turn.role == "system" and turn.content.strip()]
    if not text.strip() or text.strip() in own:
        return prompt
    if own:
        raise UnusableRowError(
            "context_differs", f"system is {show(text)}, and the prompt's system turn {show(own[0])}"
        )
    return (*read_conversation([{"role": "system", "content": text}]), *prompt[_num_system(prompt) :])


def with_history(prompt: Conversation, row: Row) -> Conversation:
    """Return the prompt with the turns of the row's `history` before its user turn, unless it has them already.

    Raises UnusableRowError if the prompt has other turns before, or `history` is not a list of turns.
    """
    turns = _turns_of(unpacked(row.get("history")))
    start = _num_system(prompt)
    if not turns or prompt[start : start + len(turns)] == turns:
        return prompt
    if len(prompt) > start + 1:
        raise UnusableRowError(
            "context_differs", f"the prompt has {len(prompt) - start} turns that do not begin with those of history"
        )
    return (*prompt[:start], *turns, *prompt[start:])


def _num_system(prompt: Conversation) -> int:
    """Return the number of system turns at the beginning of a prompt."""
    return next((place for place, turn in enumerate(prompt) if turn.role != "system"), len(prompt))


def _turns_of(history: object) -> Conversation:
    """Return the turns of a `history`, which holds [question, answer] lists or messages.

    Raises UnusableRowError for any other value.
    """
    if is_absent(history):
        return ()
    entries = list(history) if isinstance(history, (list, tuple)) else [history]
    turns: list[object] = []
    for entry in entries:
        if isinstance(entry, (list, tuple)) and len(entry) == 2:
            turns += [{"role": "user", "content": entry[0]}, {"role": "assistant", "content": entry[1]}]
        elif is_message(entry):
            turns.append(entry)
        else:
            raise UnusableRowError(
                "bad_roles",
                f"history is {show(history)}, wanted a list of [question, answer]; rename it if it means another thing",
            )
    return read_conversation(turns) if turns else ()
