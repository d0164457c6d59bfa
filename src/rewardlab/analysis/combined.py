"""How far a weighted sum of shares may be off, from the score interval of each share.

Legend: N outcomes, C clusters (prompts), U shares.

A share whose outcomes are all 1 by chance has no spread, and adds nothing to a variance by influence or by bootstrap,
though nobody knows it to be exactly 1. Its score interval has a width. The intervals of the shares are combined with
the correlation of the shares (`alike`; for independent shares Zou & Donner 2008, Statistics in Medicine 27, 1693-1702).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rewardlab.analysis.influence import BoolArray, cluster_sums, places
from rewardlab.analysis.intervals import FloatArray, share_limits
from rewardlab.analysis.score_table import IntArray
from rewardlab.core.types import Estimate

Reach = tuple[float, float]
"""How far an interval reaches below and above its value."""


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
    to 1. Parts of the same clusters are combined by `alike`, unless they are to be taken as `independent`. An estimate
    without an interval stays without one.
    """
    if math.isnan(estimate.low):
        return estimate
    reaches_U2 = [
        [weight * reach for reach in share_reach(cluster_sums(outcome[own], clusters[own])[0])] for weight, own in parts
    ]
    own_U = [np.unique(clusters[own]) for _, own in parts]
    apart = independent or sum(own.size for own in own_U) == np.unique(np.concatenate(own_U)).size
    alike_UU = None if apart else _alike_parts(outcome, clusters, [own for _, own in parts])
    below, above = combined_reach(np.array(reaches_U2), alike_UU)
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


def combined_reach(reaches_U2: FloatArray, alike_UU: FloatArray | None = None) -> Reach:
    """Return the reach of a sum of shares from their own, each times its weight; without `alike_UU`, of independent
    ones.
    """
    below, above = (
        math.sqrt(reach_U @ reach_U if alike_UU is None else reach_U @ alike_UU @ reach_U) for reach_U in reaches_U2.T
    )
    return below, above


def alike(sums_CU: FloatArray, counts_CU: FloatArray) -> FloatArray:
    """Return the correlations [U, U] of the errors of shares, 0 where they are negative.

    The clusters show them only where credits vary, so one cluster is added that fails in all its shares at once. Where
    all credits are equal, shares of the same clusters are therefore taken to err together (correlation 1), and shares
    of different clusters independently (0).
    """
    totals_U = counts_CU.sum(0)
    left_CU = sums_CU - counts_CU * (sums_CU.sum(0) / totals_U)
    sizes_U = totals_U / (counts_CU > 0).sum(0)
    lengths_U = np.sqrt(np.square(counts_CU).sum(0))
    overlap_UU = (counts_CU.T @ counts_CU) / np.outer(lengths_U, lengths_U)
    together_UU = left_CU.T @ left_CU + overlap_UU * np.outer(sizes_U, sizes_U)
    spread_U = np.sqrt(np.diag(together_UU))
    alike_UU: FloatArray = np.maximum(together_UU / np.outer(spread_U, spread_U), 0.0)
    return alike_UU


def _alike_parts(outcome: FloatArray, clusters: IntArray, parts: Sequence[BoolArray | IntArray]) -> FloatArray:
    """Return the correlations of `alike` for shares of the outcomes [N] of each part."""
    cluster_N, count = places(clusters)
    sums_CU, counts_CU = np.zeros((2, count, len(parts)))
    for number, own in enumerate(parts):
        sums_CU[:, number] = np.bincount(cluster_N[own], outcome[own], minlength=count)
        counts_CU[:, number] = np.bincount(cluster_N[own], minlength=count)
    return alike(sums_CU, counts_CU)
