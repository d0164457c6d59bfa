"""Pairs to be read by eye: those that a proxy orders against gold though gold sees a large difference.

Legend: N pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rewardlab.core.types import Conversation
from rewardlab.gold.matching.columns import Part
from rewardlab.gold.shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Two replies to a prompt, of which gold and a proxy prefer different ones."""

    row: int
    """Number of the row in its file, from 1."""
    id: str
    replies: tuple[int, int]
    """Numbers of the two replies in the row, from 0; gold prefers the first of them."""
    gold: tuple[float, float]
    scores: Mapping[str, tuple[float, float]]
    """Proxy -> its scores of the two: of all proxies, that of which this is an example first."""
    prompt: Conversation
    texts: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Some pairs that a proxy orders against gold."""

    num_wrong: int
    """Pairs that it orders against gold; its ties are none."""
    num_pairs: int
    """Pairs whose gold scores differ."""
    pairs: tuple[Example, ...]
    """Those among them in which gold's scores differ most, at most one a prompt."""


def examples_of(part: Part, proxy: str, count: int) -> Examples:
    """Return at most `count` pairs that a proxy orders against gold, by falling difference of gold's scores."""
    own = part.replies
    against_N = own.margins(part.scores[proxy]) * np.sign(own.gold_N) < 0
    chosen: dict[str, Example] = {}
    # Stable, so that of equal differences the first in the file is shown.
    for pair in np.argsort(-np.abs(own.gold_N), kind="stable").tolist():
        if len(chosen) == count:
            break
        if against_N[pair] and own.keys_N[pair] not in chosen:
            chosen[own.keys_N[pair]] = _example(part, proxy, pair)
    return Examples(num_wrong=int(against_N.sum()), num_pairs=int(own.decided_N.sum()), pairs=tuple(chosen.values()))


def _example(part: Part, proxy: str, pair: int) -> Example:
    own = part.replies
    two = [int(own.first_N[pair]), int(own.second_N[pair])]
    if own.gold_N[pair] < 0:
        two.reverse()
    place = int(own.row_N[pair])
    row, (one, other) = part.rows[place], (int(part.reply_R[number]) for number in two)
    names = [proxy, *(name for name in part.scores if name != proxy)]
    return Example(
        row=place + 1,
        id=row.id,
        replies=(one, other),
        gold=_both(own.gold_R, two),
        scores={name: _both(part.scores[name], two) for name in names},
        prompt=row.prompt,
        texts=(row.responses[one] or "", row.responses[other] or ""),
    )


def _both(values_R: np.ndarray, two: Sequence[int]) -> tuple[float, float]:
    return float(values_R[two[0]]), float(values_R[two[1]])


def said(proxy: str, found: Examples) -> str:
    """Return in a sentence which pairs are shown, and of how many."""
    if not found.num_wrong:
        return f"{proxy} orders none of {found.num_pairs:,} pairs against gold."
    return (
        f"{proxy} orders {found.num_wrong:,} of {found.num_pairs:,} pairs against gold. Shown below: "
        f"{len(found.pairs)} of these, where gold's scores differ most, one a prompt. Look who is right; being the "
        f"worst, they say nothing of the others."
    )


def as_shown(one: Example) -> Shown:
    """Return a pair to be read: the reply that gold prefers first, each with gold's score and those of the proxies."""
    replies = []
    for side, text in enumerate(one.texts):
        scores = [f"{name} {pair[side]:.4g}" for name, pair in one.scores.items()]
        replies.append((", ".join([f"reply {one.replies[side]}: gold {one.gold[side]:.4g}", *scores]), text))
    apart = [f"{name} by {pair[0] - pair[1]:.3g}" for name, pair in one.scores.items()]
    title = f"Row {one.row} (id {one.id}): gold prefers reply {one.replies[0]} by {one.gold[0] - one.gold[1]:.3g}"
    return Shown(title=f"{title}, {', '.join(apart)}", prompt=one.prompt, replies=tuple(replies))
