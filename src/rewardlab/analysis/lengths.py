"""What a reward model owes to the length of replies.

Legend: N comparisons. Lengths are tokens of a reply without its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from rewardlab.analysis.combined import widened_to_parts
from rewardlab.analysis.influence import (
    antisymmetric_correlations,
    by_leaving_out,
    correlations,
    share_by_influence,
    sums_by,
)
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.logistic import coefficient_estimates, logistic
from rewardlab.analysis.score_table import BoolArray, IntArray, Pairs, Replies
from rewardlab.analysis.stats import without_interval
from rewardlab.core.types import Estimate

NUM_STRATA: Final = 5
FEWEST_A_SIDE: Final = 5
"""Prompts that a stratum needs on each side, preferred reply longer and shorter, to be counted. A side of one prompt
seems to be known exactly, since nothing varies between prompts: where it was half of all that counted, intervals of
95 % covered 37 %."""


def length_estimates(replies: Replies, finite: Pairs, decided: Pairs, *, beta: float) -> Mapping[str, Estimate]:
    """Return every number about length, from replies with finite scores, finite and decided comparisons."""
    own = correlations(replies.score, replies.length, replies.prompt)
    pairs = antisymmetric_correlations(finite.difference, finite.length_difference, finite.prompt)
    margin, length = length_coefficients(finite, beta=beta)
    return {
        "eval_score_length_pearson": own[0],
        "eval_score_length_spearman": own[1],
        "eval_margin_length_pearson": pairs[0],
        "eval_margin_length_spearman": pairs[1],
        "eval_accuracy_length_controlled": length_controlled_accuracy(decided),
        "eval_length_controlled_slope": margin,
        "eval_length_coefficient": length,
    }


def length_coefficients(pairs: Pairs, *, beta: float) -> tuple[Estimate, Estimate]:
    """Return the coefficients of the labels' logistic regression on the model's logit and on the length difference.

    The length difference is in its own standard deviations. A model that makes the right use of length leaves nothing
    to it: its coefficient is 0. It is above 0 where the model underrates longer replies, below 0 where it overrates
    them.
    """
    difference = pairs.length_difference
    spread = float(np.sqrt(np.square(difference).mean())) if difference.size else 0.0
    x_N2 = np.stack([pairs.logit(beta=beta), difference / (spread or 1.0)], axis=1)
    fitted = logistic(x_N2, pairs.label)
    if fitted is None:
        missing = without_interval(
            math.nan, len(np.unique(pairs.prompt)), method="margin and length do not vary, or separate the outcomes"
        )
        return missing, missing
    margin, length = coefficient_estimates(x_N2, pairs.label, fitted, pairs.prompt, fitted_along=2)
    return margin, length


def length_controlled_accuracy(decided: Pairs) -> Estimate:
    """Return accuracy with length controlled: longer and shorter preferred replies count alike.

    Comparisons are divided into `NUM_STRATA` strata by the size of the length difference. In each, accuracy is the mean
    of the accuracies where the preferred reply is the longer one and where it is the shorter one, so that any rule that
    sees length alone gets ½. Strata count by their comparisons. Comparisons of equal length, and strata with fewer than
    `FEWEST_A_SIDE` prompts on a side, are left out. The interval is at least as wide as those of the sides combined,
    since a small side may be all right by chance.
    """
    value, influence, kept = length_controlled_influence(decided)
    if math.isnan(value):
        return without_interval(math.nan, len(np.unique(decided.prompt)), method="no strata with both sides")
    outcome, prompts = decided.outcome[kept], decided.prompt[kept]
    parts = [
        (sum(int(side.sum()) for side in sides) / outcome.size / 2, side)
        for sides in _used_strata(decided)[0]
        for side in sides
    ]
    # Sides of the same prompts may err in opposite ways, which the influences know and `combined.Clustered` does not.
    found = share_by_influence(value, influence, prompts)
    return widened_to_parts(found, outcome, prompts, parts, independent=True)


def length_controlled_influence(decided: Pairs) -> tuple[float, FloatArray, BoolArray]:
    """Return accuracy with length controlled, the influences [K] of the comparisons that count, and which [N] do.

    The influences are those of leaving out prompts, since a side of a stratum may have few of them. The value is NaN
    where no stratum has enough prompts on both sides.
    """
    strata, kept = _used_strata(decided)
    outcome, prompts = decided.outcome[kept], decided.prompt[kept]
    influence, value = np.zeros(outcome.size), 0.0
    if not strata:
        return math.nan, influence, kept
    if (outcome == outcome[0]).all():  # sums of shares would tell this only to rounding
        return float(outcome[0]), influence, kept
    for sides in strata:
        weight = sum(int(side.sum()) for side in sides) / outcome.size
        for side in sides:
            share = float(outcome[side].mean())
            value += weight * share / 2
            influence[side] = weight / 2 * (outcome[side] - share) * outcome.size / side.sum()
    moves_C = value - _without_each(strata, outcome, prompts)
    moves_C[np.abs(moves_C) < 1e-12] = 0.0  # rounding
    return value, by_leaving_out(influence, moves_C, prompts), kept


def length_controlled_weights(decided: Pairs) -> FloatArray:
    """Return [N] the weight of each comparison's outcome in the accuracy with length controlled; they add up to 1."""
    strata, kept = _used_strata(decided)
    weight, own = np.zeros(decided.label.size), np.zeros(int(kept.sum()))
    for sides in strata:
        size = sum(int(side.sum()) for side in sides)
        for side in sides:
            own[side] = size / own.size / 2 / side.sum()
    weight[kept] = own
    return weight


def _without_each(strata: Sequence[tuple[BoolArray, BoolArray]], outcome: FloatArray, prompts: IntArray) -> FloatArray:
    """Return [C] the accuracy with length controlled without the comparisons of each prompt.

    Strata stay those of all comparisons. Each side has at least two prompts.
    """
    num_C, won_C = np.zeros((2, np.unique(prompts).size))
    for sides in strata:
        left, shares = [], []
        for side in sides:
            size_C, wins_C = sums_by(prompts, side.astype(np.float64), np.where(side, outcome, 0.0))
            left.append(size_C.sum() - size_C)
            shares.append((wins_C.sum() - wins_C) / left[-1])
        num_C += sum(left)
        won_C += sum(left) * sum(shares) / 2
    without: FloatArray = won_C / num_C
    return without


def length_controlled(decided: Pairs) -> BoolArray:
    """Return [N] whether each comparison counts in the accuracy with length controlled."""
    return _used_strata(decided)[1]


def _used_strata(decided: Pairs) -> tuple[list[tuple[BoolArray, BoolArray]], BoolArray]:
    """Return the two sides of each stratum that counts, among the comparisons [K] that do, and which [N] do."""
    used = [
        sides
        for sides in length_strata(decided)
        if min(np.unique(decided.prompt[side]).size for side in sides) >= FEWEST_A_SIDE
    ]
    none = np.zeros(decided.label.size, dtype=np.bool_)
    kept: BoolArray = np.logical_or.reduce([none, *(side for sides in used for side in sides)])
    return [(longer[kept], shorter[kept]) for longer, shorter in used], kept


def length_strata(decided: Pairs) -> list[tuple[BoolArray, BoolArray]]:
    """Return for each stratum the comparisons [N] whose preferred reply is longer, and those where it is shorter."""
    difference = decided.length_difference
    size = np.abs(difference)
    unequal = size > 0
    if not unequal.any():
        return []
    edges = np.unique(np.quantile(size[unequal], np.linspace(0, 1, NUM_STRATA + 1)[1:-1]))
    stratum = np.searchsorted(edges, size, "left")
    return [
        (unequal & (stratum == number) & (difference > 0), unequal & (stratum == number) & (difference < 0))
        for number in range(edges.size + 1)
    ]
