"""What a reward model owes to the length of replies.

Legend: N comparisons. Lengths are tokens of a reply without its prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from rewardlab.analysis.influence import (
    antisymmetric_correlations,
    by_influence,
    by_leaving_out,
    correlations,
    share_by_influence,
    sums_by,
    without_interval,
)
from rewardlab.analysis.intervals import FloatArray, student_limits
from rewardlab.analysis.reliability import logistic
from rewardlab.analysis.score_table import BoolArray, IntArray, Pairs, Replies
from rewardlab.core.types import Estimate

NUM_STRATA: Final = 5
FEWEST_A_SIDE: Final = 5
"""Comparisons that a stratum needs on each side, preferred reply longer and shorter, to be counted."""


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
    fitted = logistic(np.stack([pairs.logit(beta=beta), difference / (spread or 1.0)], axis=1), pairs.label)
    if fitted is None:
        missing = without_interval(
            math.nan, len(np.unique(pairs.prompt)), method="margin and length do not vary, or separate the outcomes"
        )
        return missing, missing
    coefficient, influence = fitted
    first, second = (
        by_influence(float(coefficient[k]), influence[:, k], pairs.prompt, fitted=2, formula=student_limits)
        for k in range(2)
    )
    return first, second


def length_controlled_accuracy(decided: Pairs) -> Estimate:
    """Return accuracy with length controlled: longer and shorter preferred replies count alike.

    Comparisons are divided into `NUM_STRATA` strata by the size of the length difference. In each, accuracy is the mean
    of the accuracies where the preferred reply is the longer one and where it is the shorter one, so that any rule that
    sees length alone gets ½. Strata count by their comparisons. Comparisons of equal length, and strata with fewer than
    `FEWEST_A_SIDE` comparisons on a side, are left out.
    """
    value, influence = length_controlled_influence(decided)
    if math.isnan(value):
        return without_interval(math.nan, len(np.unique(decided.prompt)), method="no strata with both sides")
    kept = length_controlled(decided)
    return share_by_influence(value, influence[kept] * kept.mean(), decided.prompt[kept])


def length_controlled_influence(decided: Pairs) -> tuple[float, FloatArray]:
    """Return accuracy with length controlled, and the influence [N] of every comparison on it, 0 for those left out.

    The influences are those of leaving out prompts: a side of a stratum may have few comparisons, most of one prompt.
    NaN where no stratum has enough comparisons on both sides.
    """
    used = _used_strata(decided)
    influence, value = np.zeros(decided.label.size), 0.0
    if not used:
        return math.nan, influence
    outcome, kept = decided.outcome, length_controlled(decided)
    for stratum in used:
        weight = sum(int(side.sum()) for side in stratum) / kept.sum()
        for side in stratum:
            share = float(outcome[side].mean())
            value += weight * share / 2
            influence[side] = weight / 2 * (outcome[side] - share) * outcome.size / side.sum()
    prompts = decided.prompt[kept]
    moves_C = value - _without_each(used, outcome, kept, prompts)
    influence[kept] = by_leaving_out(influence[kept] * kept.mean(), moves_C, prompts) / kept.mean()
    return value, influence


def _without_each(
    used: Sequence[tuple[BoolArray, BoolArray]], outcome: FloatArray, kept: BoolArray, prompts: IntArray
) -> FloatArray:
    """Return the accuracy with length controlled of what is left of the `kept` comparisons without each prompt [C], in
    the strata of all. Where a prompt has a whole side of a stratum, the side stays as it is.
    """
    sides = [side[kept] for stratum in used for side in stratum]
    own = outcome[kept]
    sums = sums_by(prompts, *(side.astype(np.float64) for side in sides), *(np.where(side, own, 0.0) for side in sides))
    # A stratum counts by its comparisons, so each of its two sides by half of them.
    num_C, won_C = np.zeros_like(sums[0]), np.zeros_like(sums[0])
    for first in range(0, len(sides), 2):
        shares, left = [], np.zeros_like(num_C)
        for number in (first, first + 1):
            side, without_C = sides[number], sides[number].sum() - sums[number]
            lost_C = np.where(without_C > 0, sums[len(sides) + number], 0.0)
            shares.append((own[side].sum() - lost_C) / np.where(without_C > 0, without_C, side.sum()))
            left += without_C
        num_C += left
        won_C += left * (shares[0] + shares[1]) / 2
    without: FloatArray = won_C / np.maximum(num_C, 1.0)
    return without


def length_controlled(decided: Pairs) -> BoolArray:
    """Return [N] whether each comparison counts in the accuracy with length controlled."""
    none = np.zeros(decided.label.size, dtype=np.bool_)
    found: BoolArray = np.logical_or.reduce([none, *(side for stratum in _used_strata(decided) for side in stratum)])
    return found


def _used_strata(decided: Pairs) -> list[tuple[BoolArray, BoolArray]]:
    return [stratum for stratum in length_strata(decided) if min(side.sum() for side in stratum) >= FEWEST_A_SIDE]


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
