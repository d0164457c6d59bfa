"""Tests whether scores belong to other rows or other replies than their place says: swapped, shifted, turned round.

Scores that belong where they are agree with gold better there than anywhere else. So the proxy's scores are also
compared with gold with the places of the replies reversed, with their sign turned, and one or two rows further up or
down. Shifts are tried in the whole file, in each quarter of it and in its last tenth, since a row that is missing in
the middle moves only what follows.

Legend: L rows, K replies of most rows, A alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.matching import outcomes_of
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.paired import change_of_shares, significance_of
from rewardlab.core.types import Estimate
from rewardlab.gold.findings import further

SHIFTS: Final = (-2, -1, 1, 2)
"""Rows by which scores are moved."""
QUARTERS: Final = 4
LEVEL: Final = 0.01
"""Chance that any alternative is wrongly named for a proxy."""
ALL: Final = "all rows"
FEWEST: Final = 20
"""Rows below which a part of the file is not looked at by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another place for the scores, and what the match would be there."""

    name: str
    """How the scores would have to be taken: `swapped`, `turned round`, or from `1 row further down`."""
    where: str
    """`ALL`, or which of them."""
    match: Estimate
    """Match with the scores where they are."""
    other: Estimate
    """Match with the scores in the other place, on the same rows."""
    change: Estimate
    """Other less match, paired by row."""
    p: float
    """p-value of there being no difference, two-sided, after Holm's correction for all alternatives."""

    @property
    def is_shown(self) -> bool:
        """Whether the other place is better, and shown to be."""
        return self.change.value > 0 and self.p <= LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What was found for one proxy."""

    alternatives: tuple[Alternative, ...]
    """All that could be looked at."""
    first_row: int | None = None
    """Row, from 1, from which on the scores seem shifted; None unless a shift is named."""

    @property
    def match(self) -> Estimate | None:
        """Match with all scores where they are; None if it was not held against any other place."""
        return next((one.match for one in self.alternatives if one.where == ALL), None)

    @property
    def named(self) -> Alternative | None:
        """The alternative, among those shown to be better, that gains most over all its prompts; None if none is shown.

        Of equally good ones it is the one for all rows.
        """
        shown = [one for one in self.alternatives if one.is_shown]
        return max(shown, key=lambda one: (one.change.value * one.match.n, one.where == ALL), default=None)


def order_of(scores_LK: FloatArray, gold_LK: FloatArray, prompts: Sequence[str]) -> Order:
    """Return how well scores [L, K] match gold if they are put elsewhere: swapped, or shifted by some rows.

    NaN stands for a score that is missing.
    """
    if not gold_LK.size or gold_LK.shape[1] < 2:
        return Order(alternatives=())
    here_LN = outcomes_by_place(scores_LK, gold_LK)
    moved = {"swapped": outcomes_by_place(scores_LK[:, ::-1], gold_LK)}
    if gold_LK.shape[1] > 2:
        # With two replies, turning the sign is the same as swapping them.
        moved["turned round"] = outcomes_by_place(-scores_LK, gold_LK)
    for shift in SHIFTS:
        if len(gold_LK) > abs(shift):
            moved[further(shift)] = outcomes_by_place(_shifted(scores_LK, shift), gold_LK)
    parts = _parts(len(gold_LK))
    raw = [
        found
        for name, there_LN in moved.items()
        for where, rows in (parts if is_shift(name) else parts[:1])
        if (found := compared(name, where, here_LN[rows], there_LN[rows], prompts[rows])) is not None
    ]
    adjusted = holm([one.p for one in raw])
    order = Order(alternatives=tuple(replace(one, p=p) for one, p in zip(raw, adjusted, strict=True)))
    named = order.named
    if named is None or not is_shift(named.name):
        return order
    return Order(alternatives=order.alternatives, first_row=_first_row(here_LN, moved[named.name]))


def is_shift(name: str) -> bool:
    """Return whether an alternative takes scores from another row."""
    return name not in ("swapped", "turned round")


def outcomes_by_place(scores_LK: FloatArray, gold_LK: FloatArray) -> FloatArray:
    """Return [L, N] the outcome of each pair of places of a row; NaN where a score is missing or gold ties."""
    one, other = np.triu_indices(gold_LK.shape[1], 1)
    gold_LN = gold_LK[:, one] - gold_LK[:, other]
    found_LN = outcomes_of(scores_LK[:, one] - scores_LK[:, other], gold_LN)
    return np.where(gold_LN == 0, np.nan, found_LN)


def _shifted(scores_LK: FloatArray, shift: int) -> FloatArray:
    """Return the scores with those of row i + `shift` in row i; NaN beyond the ends."""
    found = np.full_like(scores_LK, np.nan)
    if shift > 0:
        found[:-shift] = scores_LK[shift:]
    else:
        found[-shift:] = scores_LK[:shift]
    return found


def _parts(num_rows: int) -> list[tuple[str, slice]]:
    """Return all rows, each quarter of the file, and its last tenth, as far as they are large enough."""
    edges = np.linspace(0, num_rows, QUARTERS + 1).astype(int)
    last = num_rows - num_rows // 10
    quarters = [
        (f"rows {start + 1}–{end}", slice(start, end))
        for start, end in (*pairwise(edges.tolist()), (last, num_rows))
        if end - start >= FEWEST
    ]
    return [(ALL, slice(0, num_rows)), *quarters]


def compared(
    name: str, where: str, here_LN: FloatArray, there_LN: FloatArray, prompts: Sequence[str]
) -> Alternative | None:
    """Return the match in both places, on the pairs with an outcome in both; None for fewer than ten prompts."""
    known_LN = ~np.isnan(here_LN) & ~np.isnan(there_LN)
    row_N = np.nonzero(known_LN)[0]
    keys = [prompts[row] for row in row_N.tolist()]
    if len(set(keys)) < stats.MIN_CLUSTERS:
        return None
    here_N, there_N = here_LN[known_LN], there_LN[known_LN]
    test = significance_of(there_N - here_N, keys)
    return Alternative(
        name=name,
        where=where,
        match=stats.mean_share(here_N, keys),
        other=stats.mean_share(there_N, keys),
        change=change_of_shares(there_N - here_N, keys),
        p=test.p,
    )


def _first_row(here_LN: FloatArray, there_LN: FloatArray) -> int:
    """Return the row, from 1, such that the match is highest with the scores in place before it and moved from it on.

    It is 1 if they are moved from the start. A row without a pair says nothing.
    """
    gain_L = np.nansum(there_LN - here_LN, axis=1)
    after_L = np.concatenate([np.cumsum(gain_L[::-1])[::-1], [0.0]])
    best = int(np.argmax(after_L))
    return best + 1
