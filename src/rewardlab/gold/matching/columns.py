"""Rows with gold scores and the scores of proxies as columns of numbers, and what the pairs are divided by.

Legend: L rows, R replies, N pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.matching import BoolArray, IntArray, Replies
from rewardlab.core.errors import DataError
from rewardlab.core.terminal import number_of
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.proxies import Proxy

FEWEST: Final = 10
"""Pairs with different gold scores below which nothing is judged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One part of the data (test or train) with the scores of all proxies for the same replies."""

    name: str
    rows: Sequence[GoldRow]
    """Rows as they were read, in the order of the file."""
    replies: Replies
    scores: Mapping[str, FloatArray]
    """Proxy -> [R] scores."""
    table: Mapping[str, FloatArray]
    """`gold` and each proxy -> [L, K] scores by place in the file, NaN where there is none; K is that of most rows."""
    reply_R: IntArray
    """[R] number of the reply in its row, from 0."""
    length_R: FloatArray
    """[R] characters."""
    cut_R: np.ndarray
    """[R] whether the reply ended at the token limit."""
    without_text: int
    """Replies that could not be sampled."""
    without_gold: int
    """Replies with a text and without a gold score."""
    without_score: Mapping[str, int]
    """Proxy -> replies with a gold score but without its score; they are left out for all proxies."""
    built_N: BoolArray | None = None
    """[N] whether `gold build` made a comparison of the pair; None where it did of all, or is not known to have."""
    least_loss: float = 0.0
    """Mean entropy of the labels that `gold build --soft-tau` gave: no proxy has a lower loss on them."""
    built_in: Path | None = None
    """Folder of the preferences that `gold build` made of the rows; None where that is not known."""


def part_of(name: str, rows: Sequence[GoldRow], proxies: Sequence[Proxy]) -> Part:
    """Return a part from rows and the scores of proxies for all of them, in their order.

    Raises DataError if scores are not as many as the replies, or fewer than `FEWEST` pairs can be judged.
    """
    _require_same(name, rows, proxies)
    places, gold, kept_scores = [], [], []
    lacking = dict.fromkeys((proxy.name for proxy in proxies), 0)
    without_text = without_gold = 0
    for number, row in enumerate(rows):
        row_gold = row.gold or (None,) * len(row.responses)
        for reply, (text, score) in enumerate(zip(row.responses, row_gold, strict=True)):
            if text is None or score is None:
                without_text += text is None
                without_gold += text is not None
                continue
            own = [proxy.scores[number][reply] for proxy in proxies]
            for proxy, value in zip(proxies, own, strict=True):
                lacking[proxy.name] += value is None
            if None not in own:
                places.append((number, reply))
                gold.append(score)
                kept_scores.append(own)
    scores_RM = np.array(kept_scores, dtype=np.float64).reshape(len(places), len(proxies))
    row_R = np.array([number for number, _ in places], dtype=np.intp)
    texts = [rows[number].responses[reply] or "" for number, reply in places]
    replies = Replies.of(row_R, [row.key for row in rows], np.array(gold, dtype=np.float64), texts)
    if (found := int(replies.decided_N.sum())) < FEWEST:
        raise DataError(
            f"the {name} rows have {number_of(found, 'pair')} of replies with different gold scores, and "
            f"scores by every proxy; at "
            f"least {FEWEST} are needed. Label more rows, or look at what is missing."
        )
    return Part(
        name=name,
        rows=rows,
        replies=replies,
        scores={proxy.name: scores_RM[:, number] for number, proxy in enumerate(proxies)},
        table=_tables(rows, proxies),
        reply_R=np.array([reply for _, reply in places], dtype=np.intp),
        length_R=np.array([len(text) for text in texts], dtype=np.float64),
        cut_R=np.array([rows[number].is_cut[reply] for number, reply in places], dtype=bool),
        without_text=without_text,
        without_gold=without_gold,
        without_score=lacking,
    )


def _require_same(name: str, rows: Sequence[GoldRow], proxies: Sequence[Proxy]) -> None:
    for proxy in proxies:
        if len(proxy.scores) != len(rows):
            raise DataError(
                f"{proxy.name} has scores of {number_of(len(proxy.scores), 'row')} and the {name} part has "
                f"{len(rows)}. They belong "
                f"together by place, so one of them is of other data, or lacks rows."
            )
        for row, own in zip(rows, proxy.scores, strict=True):
            if len(own) != len(row.responses):
                raise DataError(
                    f"{row.where or row.id}: {proxy.name} has {number_of(len(own), 'score')} for "
                    f"{number_of(len(row.responses), 'reply')}."
                )


def _tables(rows: Sequence[GoldRow], proxies: Sequence[Proxy]) -> dict[str, FloatArray]:
    """Return all scores by row and place, for rows of the most frequent number of replies; others are NaN."""
    sizes = np.bincount([len(row.responses) for row in rows])
    most = int(sizes.argmax())
    columns: dict[str, Sequence[Sequence[float | None]]] = {"gold": [row.gold or () for row in rows]}
    columns |= {proxy.name: proxy.scores for proxy in proxies if proxy.name != "gold"}
    found = {}
    for name, values in columns.items():
        table = np.full((len(rows), most), np.nan)
        for number, own in enumerate(values):
            if len(own) == most:
                table[number] = [np.nan if one is None else one for one in own]
        found[name] = table
    return found


def slice_columns(part: Part) -> dict[str, list[str]]:
    """Return what the decided pairs are divided by: column -> a text for each; columns of one value are left out."""
    own = part.replies
    decided = own.decided_N
    first_N, second_N = own.first_N[decided], own.second_N[decided]
    row_N = own.row_N[decided]
    size_N = np.abs(own.gold_N[decided])
    longer_N = (part.length_R[first_N] - part.length_R[second_N]) * np.sign(own.gold_N[decided])
    cut_N = part.cut_R[first_N] | part.cut_R[second_N]
    sources = [str(row.extra.get("source", row.extra.get("subset", "none"))) for row in part.rows]
    turns = [_turns(row) for row in part.rows]
    columns = {
        "source": [sources[row] for row in row_N.tolist()],
        "size of gold's margin": quarters(size_N),
        "gold's winner": [
            "longer" if gap > 0 else "shorter" if gap < 0 else "equally long" for gap in longer_N.tolist()
        ],
        "cut at the token limit": ["one or both" if cut else "neither" for cut in cut_N.tolist()],
        "turns of the prompt": [turns[row] for row in row_N.tolist()],
    }
    return {name: values for name, values in columns.items() if len(set(values)) > 1}


def quarters(size_N: FloatArray) -> list[str]:
    """Return [N] which quarter of the sizes each belongs to, named by its limits.

    Equal sizes stand together, so that there are fewer parts, and larger ones, where many are equal.
    """
    edges = np.unique(np.quantile(size_N, [0.25, 0.5, 0.75], method="lower"))
    edges = edges[edges < size_N.max()]
    names = [*(f"up to {edge:.3g}" for edge in edges), f"above {edges[-1]:.3g}" if len(edges) else "all"]
    return [f"{number + 1} {names[number]}" for number in np.searchsorted(edges, size_N, "left").tolist()]


def _turns(row: GoldRow) -> str:
    count = sum(turn.role != "system" for turn in row.prompt)
    return str(count) if count < 4 else "4 and more"
