"""Preferences as LLaMA-Factory keeps them: ShareGPT conversations with two replies, and Alpaca's instructions.

Source: the README of the folder data of https://github.com/hiyouga/LLaMA-Factory.
"""

from __future__ import annotations

from rewardlab.data.formats.plain import read_explicit, read_implicit
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import ParsedRow, Rules
from rewardlab.data.rows import Row, UnusableRowError, is_absent, show


def _read_sharegpt(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read conversations + chosen + rejected, each reply one message. A `system` text becomes the first turn."""
    conversation = row["conversations"]
    if not isinstance(conversation, (list, tuple)):
        raise UnusableRowError("bad_roles", f"conversations is {show(conversation)}, wanted a list of messages")
    prompt = [*_system(row), *conversation]
    return read_explicit({**row, "prompt": prompt}, place, rules)


def _read_alpaca(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read instruction + input + chosen + rejected, with the turns of `history` and the `system` text before them.

    Replies that are whole conversations are read without the instruction.
    """
    texts = [row["chosen"], row["rejected"]]
    if not all(isinstance(text, str) and not text.lstrip().startswith("Human:") for text in texts):
        return read_implicit(row, place, rules)
    asked = [row["instruction"], row.get("input")]
    if not all(text is None or isinstance(text, str) for text in asked):
        raise UnusableRowError("bad_roles", f"instruction and input are {show(asked)}, wanted texts")
    question = "\n".join(text for text in asked if isinstance(text, str) and text)
    turns = [*_system(row), *_turns_before(row.get("history"))]
    prompt = [*turns, {"role": "user", "content": question}] if turns else question
    return read_explicit({**row, "prompt": prompt}, place, rules)


def _system(row: Row) -> list[object]:
    """Return the system turn of a row; nothing if the column is absent or empty."""
    return [] if is_absent(row.get("system")) else [{"role": "system", "content": row["system"]}]


def _turns_before(history: object) -> list[object]:
    """Return the turns of a `history` of [question, answer] lists. Raises UnusableRowError for anything else."""
    if is_absent(history):
        return []
    if not isinstance(history, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history
    ):
        raise UnusableRowError("bad_roles", f"history is {show(history)}, wanted a list of [question, answer]")
    return [
        {"role": role, "content": said}
        for question, answer in history
        for role, said in (("user", question), ("assistant", answer))
    ]


SHAREGPT = Schema(name="LLaMA-Factory's ShareGPT", needed=("conversations", "chosen", "rejected"), read=_read_sharegpt)
ALPACA = Schema(name="Alpaca preferences", needed=("instruction", "chosen", "rejected"), read=_read_alpaca)
