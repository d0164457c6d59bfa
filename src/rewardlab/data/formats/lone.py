"""Replies that stand alone in their rows and are called good or bad, as for KTO: rows of one prompt become one
preference.

Sources: "unpaired preference" of https://huggingface.co/docs/trl/dataset_formats, the KTO data of LLaMA-Factory and
ms-swift.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from rewardlab.data.config import ReadingConfig
from rewardlab.data.formats.context import COLUMNS as CONTEXT
from rewardlab.data.formats.context import prompt_of_conversation, read_asked
from rewardlab.data.formats.kwise import rating_of
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import (
    ParsedRow,
    Rules,
    compare_all,
    draw_replies,
    reasons,
    require_two,
    seeded_generator,
)
from rewardlab.data.rows import Row, UnusableRowError, label_word, read_conversation, show

REPLIES = ("completion", "response")
"""Columns with a reply. The first that is there is read."""
CONVERSATIONS = ("messages", "conversations")
"""Columns with a whole conversation, whose last turn is the reply."""
COLUMNS = (CONVERSATIONS, REPLIES)


def _prompt_and_reply(row: Row) -> tuple[object, object]:
    """Return the prompt of a row, without the columns before it, and its reply.

    Raises UnusableRowError for a conversation that does not end with an assistant turn.
    """
    whole, reply = (next((row[name] for name in names if row.get(name) is not None), None) for names in COLUMNS)
    if whole is not None and (reply is None or row.get("prompt") is None):
        turns = read_conversation(whole)
        if turns[-1].role != "assistant":
            raise UnusableRowError("bad_roles", f"the last turn is by {turns[-1].role}, wanted the assistant's reply")
        return [turn.as_dict() for turn in turns[:-1]], [turns[-1].as_dict()]
    if reply is None:
        raise UnusableRowError("missing_field", f"none of {', '.join(map(repr, REPLIES))}")
    return prompt_of_conversation(row.get("prompt"), [reply]), reply


def _key(row: Row, before: Sequence[str] = CONTEXT) -> object:
    """Return what rows of one prompt share: its turns, and the columns that belong to it. None for a row without a
    prompt."""
    try:
        prompt, _ = _prompt_and_reply(row)
        if isinstance(prompt, (list, tuple)):
            prompt = [(turn.role, turn.content) for turn in read_conversation(prompt)]
    except UnusableRowError:
        return None
    return None if prompt is None else (prompt, [row.get(name) or None for name in before])


def _join(rows: Sequence[Row], place: str, rules: Rules) -> Row:
    """Return rows of one prompt as one row."""
    return {**rows[0], "rows": list(rows)}


def _read(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read what `_join` made of the rows of a prompt: each reply is compared with every one of another label."""
    rows = row["rows"]
    assert isinstance(rows, list)
    labels = [_label(one) for one in rows]
    sides = [_prompt_and_reply(one) for one in rows]
    asked = read_asked({**row, "prompt": sides[0][0]}, rules)
    replies, left_out = asked.replies([reply for _, reply in sides])
    require_two(replies, left_out)
    if len(rows) < 2:
        raise UnusableRowError("no_comparison", "a lone reply to its prompt")
    usable = list(replies)
    kept = [usable[k] for k in _drawn([labels[k] for k in usable], place, rules)]
    # A strength in one of the rows says nothing of how far two replies are apart.
    judged = {**row, "strength": None, "label": None}
    parsed = compare_all([replies[k] for k in kept], [labels[k] for k in kept], asked.prompt, judged, place, rules)
    return replace(parsed, order=None, left_out=reasons(left_out))


def _drawn(labels: Sequence[float], place: str, rules: Rules) -> list[int]:
    """Return the replies that are kept: all, or as many as `--max-replies` allows, of different labels if there are."""
    kept = draw_replies(len(labels), place, rules)
    others = [k for k, label in enumerate(labels) if label != labels[kept[0]]]
    if not others or not set(kept).isdisjoint(others):
        return kept
    drawn = seeded_generator(rules.seed, f"another label of {place}").integers(len(others))
    return sorted([*kept[1:], others[int(drawn)]])


def _label(row: Row) -> float:
    """Return 1 for good, 0 for bad, or what lies between. Raises UnusableRowError for any other value."""
    number = rating_of(row["label"])
    if not 0 <= number <= 1:
        reply = next((name for name in REPLIES[::-1] if row.get(name) is not None), None)
        named = "" if reply == "response" else f" --response-column {reply}"
        # Whole conversations are never read as rated replies.
        rated = "" if reply is None else f", and a rating is compared by --attributes label=1{named}"
        raise UnusableRowError(
            "bad_label",
            f"label is {show(row['label'])}, wanted true (good) or false (bad); --map-label turns words into "
            f"numbers{rated}",
            label=label_word(row["label"]),
        )
    return number


def _is_unrated(names: Collection[str], row: Row) -> bool:
    """Return whether a row has none of these columns, which `--attributes` names as ratings."""
    return row.keys().isdisjoint(names)


UNPAIRED = Schema(
    name="unpaired replies, good or bad",
    needed=("prompt", "label"),
    one_of=REPLIES,
    read=_read,
    key=_key,
    join=_join,
    of_replies=True,
    unit="prompt",
    own_strength=True,
)
UNPAIRED_CONVERSATIONS = Schema(
    name="unpaired conversations, good or bad",
    needed=("label",),
    one_of=CONVERSATIONS,
    read=_read,
    key=_key,
    join=_join,
    of_replies=True,
    unit="prompt",
    own_strength=True,
)


def lone(schema: Schema, reading: ReadingConfig) -> Schema:
    """Return one of these schemas as the flags have it read.

    With `--prompt-column instruction`, rows of one instruction and different `input` are of different prompts. Rows
    with a rating that `--attributes` names are not good or bad: they would be compared by another column than asked.
    """
    if reading.joins_input:
        schema = replace(schema, key=partial(_key, before=(*CONTEXT, "input")))
    names = tuple(reading.attribute_weights)
    return replace(schema, suits=partial(_is_unrated, names)) if names else schema
