"""What other trainers take from rows and a run here does not: told, so that nobody believes that it had an effect."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.files import to_float
from rewardlab.core.terminal import number_of, quoted
from rewardlab.core.types import Message
from rewardlab.data.chat import Renderer
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import Source
from rewardlab.data.formats.known import recognise_rows
from rewardlab.data.formats.lone import UNPAIRED_CONVERSATIONS
from rewardlab.data.formats.mapping import unpacked
from rewardlab.data.formats.schema import Schema
from rewardlab.data.rows import (
    BESIDE_CONTENT,
    MEDIA,
    Row,
    UnusableRowError,
    is_absent,
    is_message,
    joined_parts,
    said_by,
    show,
)
from rewardlab.data.templates import mentions, setting
from rewardlab.data.winners import first_of

logger = logging.getLogger("rewardlab")

COLUMNS: Final[Mapping[str, str]] = {
    "margin": "--margin-column margin takes it as a margin in the loss",
    "weight": "--strength-column weight --strength-as weight weights the loss with it",
    "magnitude": "--strength-column magnitude with --strength-as weight or margin uses it as how strongly the better "
    "reply is preferred",
}
"""Column that others weigh or shift the loss by -> how to have that here."""
SYSTEM: Final = ("system_prompt", "system_message")
"""Columns that others put before the prompt."""
BEFORE: Final = (
    *("chat_history", "context", "conversation", "conversations", "dialogue", "document", "input", "messages"),
    "passage",
)
"""Columns in which others keep what was said, or given to read, before the prompt."""
FEWEST_WORDS: Final = 3
"""Of a text in such a column; one with fewer is a name, such as that of a topic."""
ARGUMENTS: Final = "chat_template_kwargs"
"""The column of arguments that others give to the chat template, each row its own."""
PROMPTS: Final = ("instruction", "question", "input")
"""Columns that hold the prompt in formats that need them, in place of `prompt`."""
MARKS: Final = r"<\|(?:im_start|prompter|start_header_id|system|user)\|>|<start_of_turn>|\[INST\]|<｜User｜>"
"""What chat templates write before a turn of the user or the system."""
MARK: Final = re.compile(MARKS)
BEGINS: Final = re.compile(rf"\s*(?:<[^\s<>]{{1,40}}>\s*)?({MARKS}|prompter: )")
"""A text that a chat template has written begins so, perhaps after a token for the beginning."""
OPEN: Final = (
    *("<|im_start|>assistant", "<|end_header_id|>", "<|assistant|>", "<start_of_turn>model"),
    *("[/INST]", "<｜Assistant｜>", "<think>"),
)
"""Or it ends with one of these, an open turn of the assistant."""
USER: Final = re.compile(r"\bUSER: ")
"""What stands before a turn of the user in texts that end with `ASSISTANT:`."""
TURN: Final = ("role", "content", "from", "value")
"""What is read of a message."""


@dataclass(frozen=True)
class _Whole(Message):
    """A message with what is not read of it, as others give it to a chat template."""

    more: Mapping[str, Any]

    def as_dict(self) -> dict[str, str]:
        return {**self.more, **super().as_dict()}


def unread(rows: Sequence[Row], reading: ReadingConfig, renderer: Renderer) -> list[str]:
    """Return a line for each thing in the first rows of a dataset that other trainers use and this run does not."""
    fields = (
        f"messages have `{name}`, which others give to this chat template, and which changes what it writes. Here it "
        f"is given the role and the content alone, in training and wherever the model scores: write what is meant into "
        f"the content."
        for name in _fields(rows, renderer)
    )
    told = [*_numbers(rows[:1], reading), *_arguments(rows, reading, renderer), *_system(rows, reading)]
    told += [*_before(rows, reading), *_answered(rows, reading)]
    return [*told, *fields, *([] if renderer.spec.joins_texts else _marks(rows, reading))]


def _marks(rows: Sequence[Row], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line if a chat template has written the prompts of most rows already."""
    name = _prompts(rows, reading)
    found = [mark for row in rows if isinstance(text := row.get(name), str) and (mark := _mark(text))]
    if 2 * len(found) > len(rows):
        yield (
            f"the column {name} holds turns that a chat template has written, with marks such as "
            f"{show(found[0].strip())}, in {len(found)} of the first {number_of(len(rows), 'row')}. Such a "
            f"text is read as one turn of the user, marks and all, and this model's template is written around it. "
            f"Write the turns as messages, or keep the texts as they are by --chat-template concat."
        )


def _prompts(rows: Sequence[Row], reading: ReadingConfig) -> str:
    """Return the column that is read as the prompt."""
    if (asked := reading.own_columns.get("prompt")) is not None:
        return asked
    needed = _needed(rows, reading)
    return next((name for name in PROMPTS if name in needed), "prompt")


def _needed(rows: Sequence[Row], reading: ReadingConfig) -> tuple[str, ...]:
    """Return the columns by which the format of some rows is known; none if there is none."""
    schema = _schema(rows, reading)
    return () if schema is None else (*schema.needed, *schema.one_of)


def _schema(rows: Sequence[Row], reading: ReadingConfig) -> Schema | None:
    try:
        return recognise_rows(rows[0], "", reading) if rows else None
    except DataError:  # whoever reads the rows says so
        return None


def tell_texts_before(source: Source, reading: ReadingConfig) -> None:
    """Log a warning for each column of a dataset's first rows that may hold a part of the prompt and is not read; no
    text of a row is in it."""
    try:
        found = list(_before(first_of(source), reading, quotes=False))
    except Exception:  # of any class: what is odd in rows is told by whoever reads all of them, and ends nothing here
        logger.debug("data: %s: its first rows could not be looked at", source.label, exc_info=True)
        return
    for said in found:
        logger.warning("data: %s: %s", source.label, said)


def _before(rows: Sequence[Row], reading: ReadingConfig, *, quotes: bool = True) -> Iterator[str]:
    """Yield a line for each column that may hold a part of the prompt which stands nowhere else in the rows."""
    needed = _needed(rows, reading)
    read = {*needed, *reading.own_columns.values()}
    if reading.joins_input or "instruction" in needed:
        read |= {"input"}
    prompt = _prompts(rows, reading)
    for name in (one for one in BEFORE if one not in read):
        held = [row for row in rows if name in row and not (name == "messages" and _is_answered(row, reading))]
        lost = [part for row in held if (part := _only_in(name, row, prompt))]
        if lost:
            yield (
                f"the column {name} is not read, and in {len(lost)} of the first {number_of(len(rows), 'row')} it has "
                f"a text that the row has nowhere else{f', such as {show(lost[0])}' if quotes else ''}. If it belongs "
                f"to the prompt, write it there; earlier turns go into the prompt as messages, or into a column "
                f"history."
            )


def _answered(rows: Sequence[Row], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line if prompts end with a turn of the assistant, which the reply then follows as another one."""
    schema = _schema(rows, reading)
    if schema is not None and schema.name == UNPAIRED_CONVERSATIONS.name:  # there that turn is the reply
        return
    needed = () if schema is None else schema.needed
    name = next((name for name in ("conversations", "context") if name in needed), _prompts(rows, reading))
    turns = [said[-1] for row in rows if (said := _conversation(row.get(name)))]
    if found := [turn for turn in turns if turn.role == "assistant"]:
        yield (
            f"the column {name} ends with a turn of the assistant in {len(found)} of the first "
            f"{number_of(len(rows), 'row')}, such as {show(found[0].content)}, and the reply follows as a second one. "
            f"If the reply continues that turn, join the two in each reply; if that turn is a reply itself, take it "
            f"out."
        )


def _is_answered(row: Row, reading: ReadingConfig) -> bool:
    """Return whether the replies of a row are one message each, which are read as answers to its `messages`."""
    own = reading.own_columns
    sides = [row.get(own.get(name, name)) for name in ("chosen", "rejected")]
    return all(map(is_message, sides)) and is_absent(row.get(own.get("prompt", "prompt")))


def _only_in(name: str, row: Row, prompt: str) -> str | None:
    """Return the first text or turn in a column that is in no other column of the row; None if there is none. What a
    chat template has written is the prompt once more, and so is the prompt with a role or the row's system before it.
    """
    held = row[name]
    said = [turn.content for turn in _conversation(unpacked(held))]
    if not said and isinstance(held, str) and len(held.split()) >= FEWEST_WORDS and not _mark(held):
        said = [held]
    if not said:
        return None
    others = [_folded(text) for other, value in row.items() if other != name for text in _texts(unpacked(value))]
    known = [_folded(text) for other in (prompt, "system", *SYSTEM) for text in _turns(row.get(other))]
    return next((text for text in said if not _is_repeated(_folded(text), others, known)), None)


def _is_repeated(text: str, others: Sequence[str], known: Sequence[str]) -> bool:
    """Return whether one of the others has all of a text, or little is left of it without what is known."""
    if any(text in one for one in others):
        return True
    left = text
    for one in sorted(known, key=len, reverse=True):
        left = left.replace(one, " ") if one else left
    return not text or (left != text and len(left.split()) < FEWEST_WORDS)


def _turns(value: object) -> list[str]:
    """Return a text, or what is said in messages."""
    return [turn.content for turn in _conversation(unpacked(value))] or ([value] if isinstance(value, str) else [])


def _folded(text: str) -> str:
    """Return a text with one space for all white space between words."""
    return " ".join(text.split())


def _texts(value: object, depth: int = 4) -> Iterator[str]:
    """Yield the texts in a value, those of lists and mappings too as far as messages are deep."""
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for held in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(held, depth - 1)


def _mark(text: str) -> str | None:
    """Return a mark of a text that a chat template has written: one that it begins with, or one before an open turn at
    its end; None for any other text, such as one that speaks of marks."""
    if begins := BEGINS.match(text):
        return begins[1]
    end = text.rstrip()
    mark = USER if end.endswith("ASSISTANT:") else MARK if end.endswith(OPEN) else None
    found = mark.search(end) if mark else None
    return found[0] if found else None


def _numbers(rows: Sequence[Row], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line for each column of the first row by which others weigh or shift the loss."""
    for row in rows:
        # Comparisons that are written out have weights and margins of their own.
        for name, remedy in () if "comparisons" in row else COLUMNS.items():
            if math.isfinite(to_float(row.get(name))) and name not in (
                reading.margin_column,
                reading.strength_as,
                reading.strength_column,
            ):
                yield f"the column {name} is not read; {remedy}."
    if reading.strength_column is not None and reading.strength_as == "none":
        yield (
            f"--strength-column {reading.strength_column}: the loss makes no use of a strength without --strength-as "
            f"weight, margin or soft."
        )


def _system(rows: Sequence[Row], reading: ReadingConfig) -> Iterator[str]:
    """Yield a line for each column with a text that others put before the prompt."""
    for name in SYSTEM:
        texts = [value for row in rows if isinstance(value := row.get(name), str) and value.strip()]
        if texts and name not in reading.own_columns.values():
            yield f"the column {name} is not read; where it is called system, it becomes the first turn."


def _arguments(rows: Sequence[Row], reading: ReadingConfig, renderer: Renderer) -> Iterator[str]:
    """Yield a line if rows have arguments that the chat template knows and that are not written into it."""
    if ARGUMENTS in reading.own_columns.values():
        return
    template = renderer.spec.chat_template
    given = [
        {name: value for name, value in _as_mapping(row.get(ARGUMENTS)).items() if mentions(template, name)}
        for row in rows
    ]
    sets = list({json.dumps(one, sort_keys=True, default=str): one for one in given}.values())
    if len(sets) > 1:
        shown = " and ".join(show(one) for one in sets[:2])
        yield (
            f"the column {ARGUMENTS} is not read, and rows have different ones, such as {shown}: a saved model has one "
            f"template for whatever it scores. --template-arguments NAME=VALUE gives it the same ones for all rows; "
            f"what is to differ belongs into the texts."
        )
        return
    words = [
        quoted(f"{name}={json.dumps(value)}")
        for name, value in (sets[0] if sets else {}).items()
        if not isinstance(value, str | bool | int | float) or setting(name, value) not in template
    ]
    if words:
        yield (
            f"the column {ARGUMENTS} is not read; --template-arguments {' '.join(words)} gives the chat template the "
            f"same for all rows, in training and wherever the model scores."
        )


def _as_mapping(value: object) -> Mapping[str, object]:
    """Return arguments, which may be written as JSON, without those that are null; nothing for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # a text that is not JSON, or nested too deep
            return {}
    if not isinstance(value, Mapping):
        return {}
    return {str(name): held for name, held in value.items() if held is not None}


def _fields(rows: Sequence[Row], renderer: Renderer) -> list[str]:
    """Return what messages have besides role and content that changes what the chat template writes of them."""
    known = {*TURN, *BESIDE_CONTENT, *MEDIA}
    tried: set[str] = set()
    found: list[str] = []
    for row in rows:
        for turns in map(_conversation, row.values()):
            names = {name for turn in turns for name, value in turn.more.items() if value not in (None, "", [], {})}
            for name in sorted(names - known - tried):
                tried.add(name)
                if _is_written(turns, name, renderer):
                    found.append(name)
    return found


def _is_written(turns: Sequence[_Whole], name: str, renderer: Renderer) -> bool:
    """Return whether the text of a conversation depends on what its messages have under a name."""
    if not mentions(renderer.spec.chat_template, name):
        return False
    own = [_Whole(turn.role, turn.content, {name: turn.more[name]} if name in turn.more else {}) for turn in turns]
    try:
        return renderer.text(own) != renderer.text([Message(turn.role, turn.content) for turn in turns])
    except RenderError:
        return False  # the row will be left out for it, or the field is one that no template takes


def _conversation(value: object) -> list[_Whole]:
    """Return a list of messages with all that they have; nothing for any other value."""
    if not isinstance(value, list | tuple) or not value:
        return []
    turns = []
    for entry in value:
        if not isinstance(entry, Mapping):
            return []
        try:
            role, content, roles = said_by(entry)
            content = joined_parts(content)
        except UnusableRowError:
            return []
        if not isinstance(role, str) or role not in roles or not isinstance(content, str):
            return []
        more = {str(name): held for name, held in entry.items() if name not in TURN}
        turns.append(_Whole(roles[role], content, more))
    return turns
