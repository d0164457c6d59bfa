"""Preferences as rows of a file: the project's own form, which loses nothing, and TRL's pairs of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rewardlab.core.types import Comparison, Conversation, Message, Preference
from rewardlab.curation.rows import ReadRow
from rewardlab.data.rows import read_name

LOST: Final[Mapping[str, str]] = {
    "tie": "a tie (label 0.5)",
    "soft_label": "a label between 0 and 1",
    "weight": "a weight other than 1",
    "margin": "a margin of its own (--margin-column writes margins)",
}
"""Cause for which TRL's pairs cannot hold a judgement -> its meaning."""
NOT_KEPT: Final = ("strengths", "annotators")
"""Fields that pairs do not hold and that no loss of TRL uses; they are counted."""


def provenance_of(row: ReadRow) -> tuple[str, str]:
    """Return (id, source) of a row: its own if it is in the project's form and has them, else by its place."""
    assert row.preference is not None
    if len(row.rows) == 1 and "replies" in row.rows[0] and "comparisons" in row.rows[0]:
        own, source = row.rows[0].get("id"), row.rows[0].get("source")
        if isinstance(own, str) and isinstance(source, str) and own and source:
            return read_name(own), read_name(source)
    return row.preference.id, row.preference.source


def as_own_row(preference: Preference, row_id: str, source: str) -> dict[str, Any]:
    """Return a preference as a row of the schema of judged replies, which reads back to the same preference.

    Texts are always written as messages: a text alone could be taken for a transcript.
    """
    row: dict[str, Any] = {
        "id": row_id,
        "source": source,
        "prompt": _messages(preference.prompt),
        "replies": [_reply(preference.prompt, reply) for reply in preference.replies],
        "comparisons": [dict(_judgement(one)) for one in preference.comparisons],
    }
    if preference.ranking is not None:
        row["ranking"] = list(preference.ranking)
    return row


def _judgement(one: Comparison) -> Iterator[tuple[str, object]]:
    """Yield the entries of a judgement, without those that have their default."""
    yield from (("first", one.first), ("second", one.second), ("label", one.label))
    if one.weight != 1.0:
        yield "weight", one.weight
    if one.margin != 0.0:
        yield "margin", one.margin
    if one.strength is not None:
        yield "strength", one.strength
    if one.annotator is not None:
        yield "annotator", one.annotator


def _messages(turns: Conversation) -> list[dict[str, str]]:
    return [turn.as_dict() for turn in turns]


def _reply(prompt: Conversation, reply: Conversation) -> list[dict[str, str]]:
    """Return a reply as messages.

    Reading removes the prompt from the beginning of a reply. So a reply that itself begins like the prompt gets the
    prompt put in front, and loses only that.
    """
    whole: tuple[Message, ...] = (*prompt, *reply) if reply[: len(prompt)] == prompt else reply
    return _messages(whole)


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """The form of TRL's pairs."""

    implicit: bool
    """Whether both sides are whole conversations, without a column for the prompt."""
    with_margin: bool
    """Whether there is a column for margins."""
    inexpressible: str
    """`error`, `drop` or `harden`."""


@dataclass(kw_only=True)
class PairCounts:
    """Counts of the judgements that should become pairs. Judgements = pairs + left out."""

    judgements: int = 0
    pairs: int = 0
    swapped: int = 0
    """Pairs whose judgement named the better reply second."""
    hardened: Counter[str] = field(default_factory=Counter)
    """Cause -> pairs that were written as if they were certain and of weight 1."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Cause -> judgements. A judgement with several causes counts for the first."""
    not_kept: Counter[str] = field(default_factory=Counter)
    """Field of `NOT_KEPT` -> pairs that had it."""
    examples: dict[str, str] = field(default_factory=dict)
    """Cause -> id of the first judgement that was left out for it."""

    def add(self, later: PairCounts) -> None:
        """Add the counts of the judgements that follow these."""
        self.judgements += later.judgements
        self.pairs += later.pairs
        self.swapped += later.swapped
        for name in ("hardened", "left_out", "not_kept"):
            getattr(self, name).update(getattr(later, name))
        self.examples = {**later.examples, **self.examples}

    def as_dict(self) -> dict[str, object]:
        """Return the counts as a JSON mapping."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}


def as_pairs(
    preference: Preference, row_id: str, source: str, how: Pairs, counts: PairCounts
) -> Sequence[dict[str, Any]]:
    """Return the judgements of a preference as rows of TRL, and count them. All rows have the same columns."""
    rows: list[dict[str, Any]] = []
    for number, one in enumerate(preference.comparisons):
        counts.judgements += 1
        causes = _causes(one, how)
        if causes and (how.inexpressible != "harden" or causes[0] == "tie"):
            counts.left_out[causes[0]] += 1
            counts.examples.setdefault(causes[0], row_id)
            continue
        counts.hardened.update(causes)
        counts.pairs += 1
        counts.swapped += one.label < 0.5
        counts.not_kept.update(
            name for name, value in zip(NOT_KEPT, (one.strength, one.annotator), strict=True) if value is not None
        )
        better, worse = (one.first, one.second) if one.label > 0.5 else (one.second, one.first)
        sides = {"chosen": preference.replies[better], "rejected": preference.replies[worse]}
        before = preference.prompt if how.implicit else ()
        rows.append(
            {
                "id": row_id if len(preference.comparisons) == 1 else f"{row_id}#{number}",
                "source": source,
                **({} if how.implicit else {"prompt": _messages(preference.prompt)}),
                **{side: _messages((*before, *reply)) for side, reply in sides.items()},
                **({"margin": one.margin} if how.with_margin else {}),
            }
        )
    return rows


def _causes(one: Comparison, how: Pairs) -> list[str]:
    """Return the causes for which a pair cannot hold a judgement."""
    held = {
        "tie": one.label != 0.5,
        "soft_label": one.label in (0.0, 0.5, 1.0),
        "weight": one.weight == 1.0,
        "margin": how.with_margin or one.margin == 0.0,
    }
    return [cause for cause in LOST if not held[cause]]
