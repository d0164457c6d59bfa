"""A check of whether the flags are about length: heads prefer longer replies, and so contradict labels that do not.

Removing such rows would teach a model to prefer longer replies. Legend: N pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from rewardlab.analysis import stats
from rewardlab.core.types import Conversation, Estimate
from rewardlab.curation.mislabels.pairs import Pairs
from rewardlab.curation.mislabels.ranking import BoolArray


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How often the preferred reply is the shorter one, in characters; equal lengths count one half."""

    flagged: Estimate
    """Among the flagged pairs."""
    others: Estimate
    """Among the pairs that are not flagged."""

    @property
    def lean(self) -> bool:
        """Return whether the two shares differ: the interval of their difference does not contain 0."""
        change = stats.difference(self.flagged, self.others)
        return bool(change.low > 0 or change.high < 0)

    def sentence(self) -> str:
        """Return what was found, in words."""
        parts = [
            f"{100 * one.value:.0f} % [{100 * one.low:.0f}, {100 * one.high:.0f}]"
            if isfinite(one.low)
            else f"{100 * one.value:.0f} % [—]"
            for one in self.both
        ]
        told = f"The preferred reply is shorter in {parts[0]} of the flagged pairs and in {parts[1]} of the others."
        if not self.lean:
            return told
        return f"{told} The witnesses lean on length: removing these rows would teach a model to do so."

    @property
    def both(self) -> tuple[Estimate, Estimate]:
        """The shares among the flagged pairs and among the others."""
        return self.flagged, self.others


def lengths_of(pairs: Pairs, flagged_N: BoolArray) -> Lengths | None:
    """Return how often the shorter reply is preferred among flagged pairs and the others; None if either is empty."""
    if not flagged_N.any() or flagged_N.all():
        return None
    shorter_N = np.array([_shorter(pairs, number) for number in range(len(pairs))])
    clusters_N = np.array(pairs.clusters)
    flagged, others = (
        stats.by_conversation(stats.proportion(shorter_N[mask], clusters_N[mask].tolist()))
        for mask in (flagged_N, ~flagged_N)
    )
    return Lengths(flagged=flagged, others=others)


def _shorter(pairs: Pairs, number: int) -> float:
    replies = pairs.preferences[pairs.owners_N[number]].replies
    first, second = (characters(replies[side[number]]) for side in (pairs.first_N, pairs.second_N))
    preferred, other = (first, second) if pairs.label_N[number] > 0.5 else (second, first)
    return 0.5 if preferred == other else float(preferred < other)


def characters(reply: Conversation) -> int:
    """Return the characters of a reply, over its turns."""
    return sum(len(turn.content) for turn in reply)
