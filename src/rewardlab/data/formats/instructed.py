"""Preferences as LLaMA-Factory keeps them: ShareGPT conversations with two replies, and Alpaca's instructions.

Source: the README of the folder data of https://github.com/hiyouga/LLaMA-Factory.
"""

from __future__ import annotations

from rewardlab.data.formats.context import with_input
from rewardlab.data.formats.plain import read_explicit, read_implicit
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import ParsedRow, Rules
from rewardlab.data.rows import Row, UnusableRowError, show


def _read_sharegpt(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read conversations + chosen + rejected, each reply one message."""
    conversation = row["conversations"]
    if not isinstance(conversation, (list, tuple)):
        raise UnusableRowError("bad_roles", f"conversations is {show(conversation)}, wanted a list of messages")
    return read_explicit({**row, "prompt": conversation}, place, rules)


def _read_alpaca(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read instruction + input + chosen + rejected.

    Replies that are whole conversations are read without the instruction.
    """
    texts = [row["chosen"], row["rejected"]]
    if not all(isinstance(text, str) and not text.lstrip().startswith("Human:") for text in texts):
        return read_implicit(row, place, rules)
    return read_explicit({**row, "prompt": with_input(row["instruction"], row.get("input"))}, place, rules)


SHAREGPT = Schema(name="LLaMA-Factory's ShareGPT", needed=("conversations", "chosen", "rejected"), read=_read_sharegpt)
ALPACA = Schema(name="Alpaca preferences", needed=("instruction", "chosen", "rejected"), read=_read_alpaca)
