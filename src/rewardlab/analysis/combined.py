"""How far a weighted sum of shares may be off, from the score interval of each share.

Legend: N outcomes, C clusters (prompts), U shares.

A share whose outcomes are all 1 by chance has no spread, and adds nothing to a variance by influence or by bootstrap,
though nobody knows it to be exactly 1. Its score interval has a width. The intervals of the shares are combined with
the correlation of the shares (`Clustered`; for independent shares Zou & Donner 2008, Statistics in Medicine 27,
1693-1702).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
from scipy.sparse import coo_array, csc_array, csr_array

from rewardlab.analysis.influence import BoolArray, cluster_sums, places
from rewardlab.analysis.intervals import FloatArray, share_limits
from rewardlab.analysis.score_table import IntArray
from rewardlab.core.types import Estimate

Reach = tuple[float, float]
"""How far an interval reaches below and above its value."""
AT_ONCE: Final = 2**20
"""Correlations that are computed at a time, of which there may be as many as the square of the shares."""


def widened_to_parts(
    estimate: Estimate,
    outcome: FloatArray,
    clusters: IntArray,
    parts: Sequence[tuple[float, BoolArray | IntArray]],
    *,
    independent: bool = False,
) -> Estimate:
    """Return an estimate of a weighted sum of shares, no narrower than the score intervals of the shares combined.

    `parts` are each the weight of a share and which outcomes [N], or the numbers of those, it is of. The weights add up
    to 1. Parts of the same clusters are combined by `Clustered`, unless they are to be taken as `independent`. An
    estimate without an interval stays without one.
    """
    if math.isnan(estimate.low):
        return estimate
    reaches_U2 = [
        [weight * reach for reach in share_reach(cluster_sums(outcome[own], clusters[own])[0])] for weight, own in parts
    ]
    own_U = [np.unique(clusters[own]) for _, own in parts]
    apart = independent or sum(own.size for own in own_U) == np.unique(np.concatenate(own_U)).size
    of = None if apart else _clustered(outcome, clusters, [own for _, own in parts])
    below, above = combined_reach(np.array(reaches_U2), of)
    return replace(
        estimate,
        low=max(min(estimate.low, estimate.value - below), 0.0),
        high=min(max(estimate.high, estimate.value + above), 1.0),
        method=f"{estimate.method}, widened to those of its parts",
    )


def share_reach(totals_3C: FloatArray) -> Reach:
    """Return how far the score interval of 95 % of a share reaches, from sums, sums of squares and sizes [3, C] of its
    clusters, each with an outcome in it.
    """
    sums, squares, sizes = totals_3C[:, None]
    if sizes.size < 2:
        # A single prompt says nothing about others, so the limits are 0 and 1.
        share = float(sums.sum() / sizes.sum())
        return share, 1 - share
    middle, low, high = (float(limit[0]) for limit in share_limits(sums, squares, sizes, level=0.95))
    return middle - low, high - middle


def combined_reach(reaches_U2: FloatArray, of: Clustered | None = None) -> Reach:
    """Return the reach of a sum of shares from their own, each times its weight; without `of`, of independent ones."""
    if of is None:
        squares_2 = np.square(reaches_U2).sum(0)
    else:
        blocks = (reaches_U2[own].T @ (alike @ reaches_U2) for own, alike in of.alike())
        squares_2 = np.diag(sum(blocks, np.zeros((2, 2))))
    below, above = (math.sqrt(square) for square in squares_2)
    return below, above


class Clustered:
    """Shares by what the clusters give them. What it holds grows with the pairs of a share and a cluster in it."""

    def __init__(self, sums_CU: FloatArray | coo_array, counts_CU: FloatArray | coo_array) -> None:
        """Take the sums and numbers of the credits of each share in each cluster."""
        counts = csc_array(counts_CU)
        totals_U = counts.sum(0)
        shares_C = (counts > 0).sum(1)
        self._left_CU = csc_array(csc_array(sums_CU) - counts * (csc_array(sums_CU).sum(0) / totals_U))
        sizes_U = totals_U / (counts > 0).sum(0)
        self._scaled_CU = csc_array(counts * (sizes_U / np.sqrt((counts * counts).sum(0))))
        self._spread_U = np.sqrt((self._left_CU * self._left_CU).sum(0) + np.square(sizes_U))
        self._most_U = np.minimum((counts > 0).T @ shares_C, totals_U.size)
        """[U] with how many shares each has a cluster in common, or more."""

    def alike(self) -> Iterator[tuple[slice, csr_array]]:
        """Yield the correlations [B, U] of the errors of the shares, 0 where they are negative, for some shares [B]
        after the other.

        The clusters show them only where credits vary, so one cluster is added that fails in all its shares at once.
        Where all credits are equal, shares of the same clusters are therefore taken to err together (correlation 1),
        and shares of different clusters independently (0).
        """
        ends = np.flatnonzero(np.diff(np.cumsum(self._most_U) // AT_ONCE)) + 1
        for begin, end in pairwise([0, *ends.tolist(), self._most_U.size]):
            own = slice(begin, end)
            together_BU = self._left_CU[:, own].T @ self._left_CU + self._scaled_CU[:, own].T @ self._scaled_CU
            found = coo_array(together_BU)
            spreads = self._spread_U[own][found.row] * self._spread_U[found.col]
            found.data = np.maximum(found.data / spreads, 0.0)
            yield own, csr_array(found)


def _clustered(outcome: FloatArray, clusters: IntArray, parts: Sequence[BoolArray | IntArray]) -> Clustered:
    """Return the shares of the outcomes [N] of each part."""
    cluster_N, count = places(clusters)
    numbers = [np.flatnonzero(own) if own.dtype == np.bool_ else own for own in parts]
    used = np.concatenate(numbers)
    place = (cluster_N[used], np.repeat(np.arange(len(parts)), [own.size for own in numbers]))
    shape = (count, len(parts))
    return Clustered(coo_array((outcome[used], place), shape), coo_array((np.ones(used.size), place), shape))
