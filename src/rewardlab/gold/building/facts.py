"""What the gold labels prefer besides quality: position and length; and how far apart the scores of a pair are."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.analysis.stats import mean_share
from rewardlab.core.types import Estimate
from rewardlab.gold.building.pairing import Judged

MOST_MARGINS: Final = 1 << 20
"""Most margins that are kept for the quantiles. With more pairs, every second, fourth, … is kept."""
QUANTILES: Final = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about the pairs that were written."""

    winner_first: Estimate
    """Share of pairs whose better reply was sampled first: ½ where the order of sampling says nothing."""
    winner_longer: Estimate
    """Share of pairs whose better reply has more characters; equal lengths count ½. Length alone is right as often."""
    margins: dict[str, float]
    """Quantile -> difference of the gold scores of a pair."""


class Watcher:
    """Adds up what is seen, prompt by prompt."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._first, self._longer = array("d"), array("d")
        self._margins = array("d")
        self._every, self._seen = 1, 0

    def see(self, key: str, judged: list[Judged]) -> None:
        """Add the preferences of a row, whose prompt has this key."""
        first = longer = pairs = 0.0
        for one in judged:
            sizes = [sum(len(turn.content) for turn in reply) for reply in one.preference.replies]
            for comparison in one.preference.comparisons:
                pairs += 1
                first += comparison.first < comparison.second
                apart = sizes[comparison.first] - sizes[comparison.second]
                longer += 0.5 if apart == 0 else apart > 0
                self._margin(comparison.strength or 0.0)
        if pairs:
            self._keys.append(key)
            self._first.append(first / pairs)
            self._longer.append(longer / pairs)

    def _margin(self, margin: float) -> None:
        if self._seen % self._every == 0:
            self._margins.append(margin)
            # Every second margin goes, and from then on half as many are kept, so that all pairs count alike.
            if len(self._margins) == MOST_MARGINS:
                self._margins = self._margins[::2]
                self._every *= 2
        self._seen += 1

    def facts(self) -> Facts:
        """Return what was seen. Shares are means over rows, with intervals by prompt."""
        margins = np.quantile(np.frombuffer(self._margins), QUANTILES).tolist()
        return Facts(
            winner_first=mean_share(np.frombuffer(self._first), self._keys),
            winner_longer=mean_share(np.frombuffer(self._longer), self._keys),
            margins={f"{level:g}": value for level, value in zip(QUANTILES, margins, strict=True)},
        )
