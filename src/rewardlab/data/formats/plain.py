"""Pairs with a prompt, whole conversations, and long form: what people write themselves, and HH transcripts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewardlab.core.errors import DataError
from rewardlab.core.files import to_float
from rewardlab.core.types import Conversation
from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats.context import COLUMNS as CONTEXT
from rewardlab.data.formats.context import prompt_of_conversation, read_asked, with_system
from rewardlab.data.formats.schema import Schema, resembling
from rewardlab.data.judgements import ParsedRow, Rules, make_pair
from rewardlab.data.rows import (
    Row,
    UnusableRowError,
    is_absent,
    is_message,
    parse_transcript,
    read_conversation,
    read_prompt,
    read_reply,
    require_reply,
    require_text,
    show,
    split_texts,
)

Replies = tuple[Conversation, Conversation]
COLUMNS = ("prompt", "chosen", "rejected")
PROMPT_NAMES = ("question", "query", "input", "instruction", "problem", "context", "trajectory", "messages")
"""What others call the column of the prompt."""
LONG_FORM_TEXTS = ("response", "completion", "text", "content")
"""Columns in which long-form data keeps a reply. The first that is present is used."""


def read_sides(row: Row, rules: Rules) -> tuple[Conversation, Replies]:
    """Return (prompt, (chosen, rejected)) of a row, whose prompt is what both share if it has none of its own."""
    return (_implicit_sides if is_absent(row.get("prompt")) else _explicit_sides)(row, rules)


def read_explicit(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + chosen + rejected, each text or messages."""
    prompt, sides = _explicit_sides(row, rules)
    return make_pair(prompt, sides, row, place, rules)


def _explicit_sides(row: Row, rules: Rules) -> tuple[Conversation, Replies]:
    prompt = prompt_of_conversation(row["prompt"], [row["chosen"], row["rejected"]])
    asked = read_asked({**row, "prompt": prompt}, rules)
    return asked.prompt, (asked.reply(row["chosen"]), asked.reply(row["rejected"]))


def _read_pair(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read prompt + chosen + rejected. Where the prompt is null, the sides are whole conversations."""
    if not is_absent(row["prompt"]):
        return read_explicit(row, place, rules)
    try:
        return read_implicit(row, place, rules)
    except UnusableRowError as unusable:
        if unusable.cause != "no_prompt":
            raise
        cause = "missing_field" if row["prompt"] is None else "empty_prompt"
        raise UnusableRowError(cause, f"no text in 'prompt', and {unusable.detail}") from None


def read_implicit(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read chosen + rejected as whole conversations (messages, or HH transcripts). The prompt is what they share, after
    the text of `system`.

    Beside `messages`, they may be one message each, as in LLaMA-Factory's openai format: the replies to these.
    """
    prompt, sides = _implicit_sides(row, rules)
    return make_pair(prompt, sides, row, place, rules)


def _implicit_sides(row: Row, rules: Rules) -> tuple[Conversation, Replies]:
    if is_message(row["chosen"]) and is_message(row["rejected"]) and not is_absent(row.get("messages")):
        return _explicit_sides({**row, "prompt": row["messages"]}, rules)
    try:
        prompt, sides = _parted_sides(row, rules)
    except UnusableRowError as unusable:
        near = [name for name in row if resembling(name, COLUMNS, row) == "prompt"]
        near += [name for name in PROMPT_NAMES if not is_absent(row.get(name))]
        if unusable.cause != "no_prompt" or not near:
            raise
        hint = f"is the column {near[0]!r} the 'prompt'? If so, use --prompt-column {near[0]}"
        raise UnusableRowError("no_prompt", f"{unusable.detail}; {hint}") from None
    return with_system(prompt, row), sides


def _parted_sides(row: Row, rules: Rules) -> tuple[Conversation, Replies]:
    """Return (the prompt that two whole conversations share, what follows in each)."""
    sides = [row["chosen"], row["rejected"]]
    texts = [side for side in sides if isinstance(side, str)]
    if len(texts) == 2 and rules.bare:
        text, *rest = split_texts(*texts)
        prompt = read_prompt(text, bare=True)
        return prompt, (read_reply(rest[0], prompt), read_reply(rest[1], prompt))
    if len(texts) == 2:
        chosen, rejected = (parse_transcript(text) for text in texts)
    else:
        chosen, rejected = (read_conversation(side) for side in sides)
    return part(chosen, rejected)


def part(chosen: Conversation, rejected: Conversation) -> tuple[Conversation, Replies]:
    """Return (the turns that two conversations share at their beginning, what follows in each).

    Raises UnusableRowError unless they part at an assistant turn, and end with one.
    """
    shared = 0
    # Each side keeps at least one turn, so that identical conversations are dropped as `identical_replies`.
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    for side in (chosen, rejected):
        if side[shared].role != "assistant":
            raise UnusableRowError(
                "prompt_differs",
                f"the sides part at turn {shared + 1}, a {side[shared].role} turn: {show(side[shared])}",
            )
    prompt = require_text(chosen[:shared])
    return prompt, (require_reply(chosen[shared:]), require_reply(rejected[shared:]))


def _read_long_form(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read the rows of one pair, joined by `join_pair`."""
    return (read_implicit if is_absent(row.get("prompt")) else read_explicit)(row, place, rules)


def _join_pair(rows: Sequence[Row], place: str, rules: Rules) -> Row:
    """Join the rows of one pair into one row with chosen and rejected, and the prompt if they have one.

    Raises UnusableRowError for rows that are not a pair, DataError if a flag forbids dropping an incomplete one.
    """
    try:
        return _joined(rows, rules.reading)
    except UnusableRowError as unusable:
        if unusable.cause == "incomplete_pair" and rules.reading.incomplete_pairs == "error":
            raise DataError(
                f"{place}: {unusable.detail}. Complete the pair, or drop such pairs with --incomplete-pairs drop."
            ) from unusable
        raise


def _joined(rows: Sequence[Row], reading: ReadingConfig) -> Row:
    roles = [str(row["role"]) for row in rows]
    unknown = sorted(set(roles) - {"chosen", "rejected"})
    if unknown:
        raise UnusableRowError("bad_roles", f"role {show(unknown[0])}, wanted chosen or rejected")
    if sorted(roles) != ["chosen", "rejected"]:
        raise UnusableRowError(
            "incomplete_pair",
            f"pair {show(rows[0]['pair_id'])} has {' and '.join(roles) if len(roles) < 4 else f'{len(roles)} rows'}, "
            f"wanted one of each side",
        )
    chosen, rejected = sorted(rows, key=lambda row: str(row["role"]))
    asked = ("prompt", *CONTEXT, *(["input"] if reading.joins_input else []))
    if any((chosen.get(column) or None) != (rejected.get(column) or None) for column in asked):
        raise UnusableRowError("prompt_differs", f"pair {show(chosen['pair_id'])} has two prompts")
    joined = {column: chosen.get(column) for column in asked}
    joined |= {"chosen": _side(chosen), "rejected": _side(rejected)}
    judged = {"label": "bad_label", "strength": "bad_strength"}
    if reading.margin_column:
        judged[reading.margin_column] = "bad_margin"
    for column, cause in judged.items():
        values = [row[column] for row in (chosen, rejected) if not is_absent(row.get(column))]
        if len(values) == 2 and values[0] != values[1] and not (column == "label" and _are_one_label(*values)):
            raise UnusableRowError(
                cause, f"the sides have {column} {show(values[0])} and {show(values[1])}, wanted one for the pair"
            )
        joined[column] = values[0] if values else None
    judges = {str(row["annotator"]): row["annotator"] for row in rows if not is_absent(row.get("annotator"))}
    # Two names say nothing of who compared the sides.
    joined["annotator"] = next(iter(judges.values())) if len(judges) == 1 else None
    return joined


def _are_one_label(chosen: object, rejected: object) -> bool:
    """Return whether each side has its own share of one label: 1 and 0, or 0.7 and 0.3."""
    shares = to_float(chosen), to_float(rejected)
    return min(shares) >= 0 and math.isclose(sum(shares), 1, abs_tol=1e-9)


def _side(row: Row) -> object:
    """Return what a long-form row holds: messages or, without them, a text."""
    return next(row[column] for column in ("messages", *LONG_FORM_TEXTS) if row.get(column) is not None)


LONG_FORM = Schema(
    name="long form, two rows a pair",
    needed=("pair_id", "role"),
    one_of=("messages", *LONG_FORM_TEXTS),
    read=_read_long_form,
    group_by=("pair_id",),
    join=_join_pair,
    unit="pair",
)
PAIRS = Schema(name="pairs", needed=COLUMNS, nullable=("prompt",), read=_read_pair)
WHOLE = Schema(name="whole conversations or HH transcripts", needed=("chosen", "rejected"), read=read_implicit)
