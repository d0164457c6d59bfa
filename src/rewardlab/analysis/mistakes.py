"""The comparisons that a model got wrong by the most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewardlab.core.types import ScoredComparison, ScoreRow, join_comparisons


@dataclass(frozen=True, kw_only=True)
class WorstMistakes:
    """Comparisons that a model got wrong by the most, the worst first."""

    comparisons: Sequence[ScoredComparison]
    num_wrong: int
    """How many there are in all."""


def worst_mistakes(rows: Sequence[ScoreRow], *, most: int) -> WorstMistakes:
    """Return the `most` comparisons in which the reply that the label prefers scores furthest below the other.

    Labels of one half, which prefer neither reply, and scores that are not finite do not count as mistakes.
    """
    wrong = [
        (margin, joined)
        for joined in join_comparisons(rows)
        if math.isfinite(margin := margin_of(joined)) and margin < 0 and joined.comparison.label != 0.5
    ]
    wrong.sort(key=lambda entry: (entry[0], entry[1].source, entry[1].preference_id))
    return WorstMistakes(comparisons=tuple(joined for _, joined in wrong[:most]), num_wrong=len(wrong))


def margin_of(joined: ScoredComparison) -> float:
    """Return the score of the reply that the label prefers minus that of the other."""
    preferred, other = sides_of(joined)
    return preferred.score - other.score


def sides_of(joined: ScoredComparison) -> tuple[ScoreRow, ScoreRow]:
    """Return the rows of the reply that the label prefers, and of the other."""
    return (joined.second, joined.first) if joined.comparison.label < 0.5 else (joined.first, joined.second)
