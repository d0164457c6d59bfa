"""Rows as columns of numbers: all that an inspection needs of each row, so that no text has to stay in memory.

Legend: P preferences, R the replies of all of them, C their comparisons.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import RenderError
from rewardlab.core.types import Comparison, Conversation, Preference
from rewardlab.curation.rows import ReadRow
from rewardlab.data.bulk import render_replies
from rewardlab.data.chat import EndsInPadding, Renderer
from rewardlab.data.judgements import ParsedRow
from rewardlab.data.layout import Rendered, common_prefix_length
from rewardlab.data.rows import UnusableRowError
from rewardlab.data.scripts import count_scripts
from rewardlab.data.splits import Texts, first_turn_key, reply_key
from rewardlab.data.tally import Tally

Column = npt.NDArray[Any]
SYSTEM: Final = ("none", "with text", "empty")
KINDS: Final[Mapping[str, str]] = {
    "number_P": "i8", "prompt_P": "u8", "first_turn_P": "u8", "replies_P": "i4", "turns_P": "i4", "system_P": "i1",
    "prompt_length_P": "i8", "computed_P": "i8", "unshared_P": "i8",
    "reply_R": "u8", "long_R": "?", "length_R": "i8", "whole_R": "i8", "refused_R": "i1",
    "owner_C": "i8", "first_C": "i4", "second_C": "i4", "label_C": "f8", "strength_C": "f8", "weight_C": "f8",
    "annotator_C": "u8", "earlier_C": "i1", "named_C": "?",
}  # fmt: skip
"""Column -> its type. `owner_C` counts from the first preference of a chunk until chunks are joined; `refused_R` is 0
for a reply that has lengths, and otherwise 1 + the index in `REFUSALS` of the cause for which it has none. `named_C`
says whether the format has a name for the better reply, which a label may overrule."""
REFUSALS: Final = ("template_refuses", "ends_in_padding")
"""Why a conversation cannot be rendered."""


@dataclass(kw_only=True, eq=False)
class Columns:
    """The columns of a chunk of rows, and counts over all of them."""

    tally: Tally = field(default_factory=Tally)
    scripts: Counter[str] = field(default_factory=Counter)
    values: dict[str, Column] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Column:
        return self.values[name]

    @property
    def starts_P(self) -> Column:
        """[P] the index of each preference's first reply."""
        ends: Column = np.cumsum(self["replies_P"].astype(np.int64))
        return ends - self["replies_P"]

    def texts(self) -> Texts:
        """Return the hashes of texts, from which roots are found."""
        return Texts(
            prompts_P=self["prompt_P"],
            first_turns_P=self["first_turn_P"],
            replies_R=self["reply_R"],
            long_R=self["long_R"],
            owners_R=np.repeat(np.arange(len(self["replies_P"])), self["replies_P"]),
        )

    def take(self, chosen_P: npt.NDArray[np.int64]) -> Columns:
        """Return the preferences with these sorted indices; counts over all rows stay as they are."""
        wanted_P = np.zeros(len(self["replies_P"]), dtype=bool)
        wanted_P[chosen_P] = True
        number_P = np.cumsum(wanted_P) - 1
        kept = {
            "P": wanted_P,
            "R": np.repeat(wanted_P, self["replies_P"]),
            "C": wanted_P[self["owner_C"]],
        }
        values = {name: column[kept[name[-1]]] for name, column in self.values.items()}
        values["owner_C"] = number_P[values["owner_C"]]
        return Columns(tally=self.tally, scripts=self.scripts, values=values)


def join(chunks: Iterable[Columns]) -> Columns:
    """Return the columns of all chunks, one after the other."""
    whole = Columns()
    parts: dict[str, list[Column]] = {name: [np.empty(0, dtype=kind)] for name, kind in KINDS.items()}
    number = 0
    for chunk in chunks:
        whole.tally.add(chunk.tally)
        whole.scripts.update(chunk.scripts)
        chunk.values["owner_C"] = chunk.values["owner_C"] + number
        number += len(chunk["replies_P"])
        for name, column in chunk.values.items():
            parts[name].append(column)
    whole.values = {name: np.concatenate(columns) for name, columns in parts.items()}
    return whole


def summarise(rows: Sequence[ReadRow], *, renderer: Renderer | None) -> Columns:
    """Return the columns of a chunk of rows, with lengths in tokens of the `renderer`, or else in words."""
    found = Columns()
    lists: dict[str, list[Any]] = {name: [] for name in KINDS}
    kept: list[Preference] = []
    for row in rows:
        if row.parsed is None or row.preference is None:
            assert row.cause is not None
            found.tally.drop(row.place, UnusableRowError(row.cause, row.detail or ""))
            continue
        found.tally.keep(row.parsed)
        _add(lists, len(kept), row, row.preference, row.parsed)
        kept.append(row.preference)
    _add_lengths(lists, kept, renderer)
    found.scripts = count_scripts(text for preference in kept for text in _all_texts(preference))
    found.values = {name: np.array(lists[name], dtype=kind) for name, kind in KINDS.items()}
    return found


def _add(lists: dict[str, list[Any]], owner: int, row: ReadRow, preference: Preference, parsed: ParsedRow) -> None:
    """Add everything about a row but its lengths."""
    order, label = parsed.order, parsed.label
    prompt = preference.prompt
    system = [turn.content.strip() for turn in prompt if turn.role == "system"]
    lists["number_P"].append(row.number)
    lists["prompt_P"].append(int(preference.key, 16))
    lists["first_turn_P"].append(first_turn_key(prompt))
    lists["replies_P"].append(len(preference.replies))
    lists["turns_P"].append(len(prompt) - len(system))
    lists["system_P"].append((1 if any(system) else 2) if system else 0)
    for reply in preference.replies:
        key, is_long = reply_key(reply)
        lists["reply_R"].append(key)
        lists["long_R"].append(is_long)
    for one in preference.comparisons:
        lists["owner_C"].append(owner)
        lists["first_C"].append(one.first)
        lists["second_C"].append(one.second)
        lists["label_C"].append(one.label)
        lists["strength_C"].append(np.nan if one.strength is None else one.strength)
        lists["weight_C"].append(one.weight)
        lists["annotator_C"].append(annotator_key(one.annotator))
        is_named = order is None and (label is not None or one.annotator is not None)
        lists["earlier_C"].append(_earlier(one, (0, 1) if is_named else order))
        lists["named_C"].append(is_named)


def _earlier(one: Comparison, order: Sequence[int] | None) -> int:
    """Return 1 if the better reply stands before the other in the row, 0 if behind it, and −1 for a tie or without
    `order`."""
    if one.label == 0.5 or order is None:
        return -1
    return int((order[one.first] < order[one.second]) == (one.label > 0.5))


def annotator_key(name: str | None) -> int:
    """Return a hash of a name; 0 for None."""
    if name is None:
        return 0
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") or 1


def _add_lengths(lists: dict[str, list[Any]], kept: Sequence[Preference], renderer: Renderer | None) -> None:
    """Add lengths, in tokens or in words, and how many tokens replies share."""
    if renderer is None:
        for preference in kept:
            prompt = num_words(preference.prompt)
            replies = [num_words(reply) for reply in preference.replies]
            whole = [prompt + own for own in replies]
            lists["length_R"] += replies
            lists["whole_R"] += whole
            lists["refused_R"] += [0] * len(replies)
            _add_shared(lists, prompt, whole, prompt)
        return
    for results in render_replies(kept, renderer):
        for one in results:
            length, before, refused = (
                (len(one.token_ids), one.prompt_tokens, 0)
                if isinstance(one, Rendered)
                else (0, 0, 1 + REFUSALS.index(_cause(one)))
            )
            lists["length_R"].append(length - before)
            lists["whole_R"].append(length)
            lists["refused_R"].append(refused)
        rendered = [one.token_ids for one in results if isinstance(one, Rendered)]
        whole = [len(token_ids) for token_ids in rendered]
        # Each reply keeps at least one token of its own, at which its score is read, as the trainer lays replies out.
        shared = min(common_prefix_length(rendered), min(whole) - 1) if rendered else 0
        _add_shared(lists, next((one.prompt_tokens for one in results if isinstance(one, Rendered)), 0), whole, shared)


def _add_shared(lists: dict[str, list[Any]], prompt: int, whole: Sequence[int], shared: int) -> None:
    lists["prompt_length_P"].append(prompt)
    lists["unshared_P"].append(sum(whole))
    lists["computed_P"].append(sum(whole) - shared * max(len(whole) - 1, 0))


def _cause(error: RenderError) -> str:
    return "ends_in_padding" if isinstance(error, EndsInPadding) else "template_refuses"


def num_words(turns: Conversation) -> int:
    """Return the number of words in the contents of turns, separated by white space."""
    return sum(len(turn.content.split()) for turn in turns)


def _all_texts(preference: Preference) -> Iterable[str]:
    for turns in (preference.prompt, *preference.replies):
        for turn in turns:
            yield turn.content
