"""What every rule is made of: shares of credits, and rows that are weighted sums of shares.

A rule gives credits to the comparisons (or rows) of a suite, takes means of them (`Share`), and reports weighted sums
of these means (`RuleRow`). In this form the bootstrap can recompute any rule as a whole, and a baseline that goes
through the same rule can be subtracted draw by draw.

Legend: E credits of one share, K replies of one item.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.suites import SuiteItem

Kind = Literal["subset", "section", "total"]
Scores = Sequence[FloatArray]
"""For each item [K] scores of its replies, NaN for a reply without a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A mean that a rule takes."""

    credits_E: FloatArray
    items_E: npt.NDArray[np.intp]
    """Index of the item of each credit. It depends on the items alone, not on their scores."""
    signed: bool = False
    """Credits lie in [−1, 1] and not in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    """A line of the suite's table: a weighted sum of shares."""

    name: str
    kind: Kind
    weights: Mapping[str, float]
    """Name of a share -> its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rule makes of the scores of one scorer."""

    shares: Mapping[str, Share]
    rows: tuple[RuleRow, ...]

    def value(self, row: RuleRow) -> float:
        """Return the value of a row; NaN if one of its shares has no credit."""
        total = 0.0
        for name, weight in row.weights.items():
            credits_E = self.shares[name].credits_E
            total += weight * float(credits_E.mean()) if credits_E.size else math.nan
        return total


Rule = Callable[[Sequence[SuiteItem], Scores, bool], Outcome]
"""(items, their scores, whether ties are broken at random) -> outcome. False is the rule of the suite itself."""


class Ledger:
    """Collects the credits of a rule, share by share."""

    def __init__(self) -> None:
        self._credits: dict[str, list[float]] = {}
        self._items: dict[str, list[int]] = {}

    def add(self, share: str, item: int, *credits: float) -> None:
        """Record credits of one item under a share."""
        self._credits.setdefault(share, []).extend(credits)
        self._items.setdefault(share, []).extend([item] * len(credits))

    def shares(self, *, signed: Sequence[str] = ()) -> dict[str, Share]:
        """Return the shares recorded so far, in the order in which they were first named."""
        return {
            name: Share(
                credits_E=np.array(values, dtype=np.float64),
                items_E=np.array(self._items[name], dtype=np.intp),
                signed=name in signed,
            )
            for name, values in self._credits.items()
        }


def beats(scores_K: FloatArray, better: int, worse: int, *, fair: bool) -> float:
    """Return 1 if the better reply scores higher, else 0. A tie gives ½ if `fair`, else 0.

    A comparison with a reply that has no finite score is lost in either case: nothing of a suite is left out.
    """
    first, second = scores_K[better], scores_K[worse]
    if not (math.isfinite(first) and math.isfinite(second)):
        return 0.0
    if first == second:
        return 0.5 if fair else 0.0
    return float(first > second)


def top_share(scores_K: FloatArray, winner: int, others: Sequence[int]) -> float:
    """Return 1/k if the winner attains the maximum, which k replies share, else 0; 0 too if a score is missing."""
    own = [float(scores_K[index]) for index in (winner, *others)]
    if not all(map(math.isfinite, own)) or own[0] < max(own):
        return 0.0
    return 1.0 / own.count(own[0])


def mean_of(names: Sequence[str]) -> dict[str, float]:
    """Return equal weights for these shares."""
    return {name: 1.0 / len(names) for name in names}


def mixed(rows: Sequence[RuleRow], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Return the weights of the weighted mean of rows; equal weights if none are given."""
    parts = [1.0] * len(rows) if weights is None else list(weights)
    total: dict[str, float] = {}
    for row, part in zip(rows, parts, strict=True):
        for name, weight in row.weights.items():
            total[name] = total.get(name, 0.0) + weight * part / sum(parts)
    return total


def subsets_of(items: Sequence[SuiteItem], known: Sequence[str] = ()) -> list[str]:
    """Return the subsets that occur: those of `known` in its order, then others by name."""
    there = {item.subset for item in items}
    return [name for name in known if name in there] + sorted(there - set(known))
