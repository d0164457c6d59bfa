"""Preferences as other trainers keep them: ShareGPT conversations with two replies, Alpaca's instructions, messages
with a rejected reply, and OpenAI's preferred and non-preferred outputs.

Sources: the README of the folder data of https://github.com/hiyouga/LLaMA-Factory; "Custom Dataset" in the docs of
https://github.com/modelscope/ms-swift; "Direct preference optimization" in the guides of OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Mapping

from rewardlab.data.formats.context import with_input
from rewardlab.data.formats.mapping import unpacked
from rewardlab.data.formats.plain import read_explicit, read_implicit
from rewardlab.data.formats.schema import Schema
from rewardlab.data.judgements import ParsedRow, Rules
from rewardlab.data.rows import Row, UnusableRowError, is_absent, is_message, require_no_tools, said_by, show


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


def _read_swift(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read messages, whose last turn is the chosen reply, + rejected_response in its place, or rejected_messages."""
    turns = row["messages"]
    if not isinstance(turns, (list, tuple)) or not turns or not is_message(turns[-1]):
        raise UnusableRowError("bad_roles", f"messages is {show(turns)}, wanted a list that ends with the chosen reply")
    if (role := said_by(turns[-1])[0]) != "assistant":
        raise UnusableRowError("bad_roles", f"the last of messages is a {show(role)} turn, wanted the chosen reply")
    rejected = row.get("rejected_response")
    if is_absent(rejected) and not is_absent(row.get("rejected_messages")):
        return read_implicit(
            {**row, "messages": None, "chosen": turns, "rejected": row["rejected_messages"]}, place, rules
        )
    return read_explicit({**row, "prompt": turns[:-1], "chosen": turns[-1:], "rejected": rejected}, place, rules)


def _read_openai(row: Row, place: str, rules: Rules) -> ParsedRow:
    """Read input, which has messages and perhaps tools, + preferred_output + non_preferred_output, messages as well."""
    given = unpacked(row["input"])
    if not isinstance(given, Mapping) or not isinstance(given.get("messages"), (list, tuple)):
        raise UnusableRowError("bad_roles", f"input is {show(given)}, wanted an object with a list of messages")
    require_no_tools(given)
    sides = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    return read_explicit({**row, "prompt": given["messages"], **sides}, place, rules)


OPENAI = Schema(
    name="OpenAI's preferred and non-preferred outputs",
    needed=("input", "preferred_output", "non_preferred_output"),
    read=_read_openai,
)
SWIFT = Schema(
    name="ms-swift, messages and a rejected reply",
    needed=("messages",),
    one_of=("rejected_response", "rejected_messages"),
    read=_read_swift,
)
SHAREGPT = Schema(name="LLaMA-Factory's ShareGPT", needed=("conversations", "chosen", "rejected"), read=_read_sharegpt)
ALPACA = Schema(name="Alpaca preferences", needed=("instruction", "chosen", "rejected"), read=_read_alpaca)
