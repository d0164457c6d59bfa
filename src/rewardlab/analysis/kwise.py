"""Rankings of more than two replies: how well scores order them, and what choosing by score costs.

Legend: G groups (preferences) of K replies each, computed for all groups of one size at once.

The reference is a gold score where one is given, else each reply's share of wins over the comparisons it is in: 1 for
the first of a full ranking, 0 for the last, and for one chosen reply among rejected ones 1 and 0. It need not be free
of ties. A group is judged if it has more than two replies with a reference, not all equal, and finite scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.stats import kendalltau

from rewardlab.analysis import stats
from rewardlab.analysis.influence import by_influence, rank_correlation
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.score_table import BoolArray, IntArray, ScoreTable
from rewardlab.core.errors import DataError
from rewardlab.core.types import Estimate, ScoreRow

ReplyKey = tuple[str, str, int]
"""Source, id of the preference, and number of the reply."""
FEWEST_REPLIES: Final = 3
# Ends of a range that are equal in exact arithmetic differ by rounding.
_ROUNDING: Final = 1e-12
# Pairs of replies are compared in chunks of this many values, which limits their memory to some tens of megabytes.
# A group with more pairs than that is sorted instead, one at a time.
_CHUNK_VALUES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KWise:
    """Numbers of the groups of more than two replies."""

    estimates: Mapping[str, Estimate]
    num_groups: int
    """Groups judged."""
    num_unusable: int
    """Groups of more than two replies that are left out: a score that is not finite, or a reference that is missing or
    the same for all."""
    num_gold: int
    """Replies with a finite score and a finite gold score; 0 without gold scores."""
    num_without_gold: int
    """Replies without a finite gold score, where some have one; 0 without gold scores."""


def kwise(table: ScoreTable, *, gold: Mapping[ReplyKey, float] | None = None) -> KWise:
    """Judge every group of more than two replies, by the comparisons or by the `gold` score of each reply.

    Gold scores are also correlated with the scores of all replies. Raises DataError if no reply of the table has a
    finite gold score.
    """
    reference_R = win_shares(table.rows) if gold is None else _looked_up(table.rows, gold)
    groups, num_unusable = _groups(table, reference_R)
    parts = [_judge(table.replies.score[index_GK], reference_R[index_GK], gold is not None) for index_GK in groups]
    prompt = [table.replies.prompt[index_GK[:, 0]] for index_GK in groups]
    names = parts[0] if parts else dict.fromkeys(_judge(np.zeros((0, 3)), np.zeros((0, 3)), gold is not None))
    columns = {name: np.concatenate([part[name] for part in parts] or [np.empty(0)]) for name in names}
    keys = table.names(np.concatenate(prompt)) if prompt else []
    estimates = {
        "eval_kendall_tau": bounded_mean(columns["tau"], keys, ends=(columns["tau_low"], columns["tau_high"])),
        "eval_ndcg": bounded_mean(columns["ndcg"], keys, ends=(0.0, 1.0)),
        "eval_best_of_k": stats.mean_share(columns["picked"], keys),
        "eval_regret": regret_share(columns["regret"], keys),
        "eval_kwise_spearman": bounded_mean(
            columns["spearman"], keys, ends=(columns["spearman_low"], columns["spearman_high"])
        ),
    }
    num_gold = num_without_gold = 0
    if gold is not None:
        if not np.isfinite(reference_R).any():
            raise DataError(
                f"none of the {len(gold):,} gold scores is a finite score of one of the {reference_R.size:,} replies. "
                "They go by source, id of the preference and number of the reply; are they of the data that was scored?"
            )
        num_without_gold = int(np.count_nonzero(~np.isfinite(reference_R)))
        lost = columns["gold_regret"]
        estimates["eval_gold_regret"] = known_losses(stats.mean_loss(lost, keys), lost, keys)
        known = np.isfinite(reference_R) & np.isfinite(table.replies.score)
        num_gold = int(known.sum())
        estimates["eval_gold_spearman"] = by_influence(
            *rank_correlation(table.replies.score[known], reference_R[known]),
            table.replies.prompt[known],
            scale="fisher",
        )
    return KWise(
        estimates=estimates,
        num_groups=sum(len(index_GK) for index_GK in groups),
        num_unusable=num_unusable,
        num_gold=num_gold,
        num_without_gold=num_without_gold,
    )


def regret_share(values: FloatArray, keys: Sequence[str]) -> Estimate:
    """Return the mean of regrets [G] in [0, 1], as a loss cut at 1, without an interval as `known_losses` says.

    Regrets of only 0, ½ and 1, as where one reply is chosen, are a share: the size of a loss is known then.
    """
    if np.isin(values, (0.0, 0.5, 1.0)).all():
        return stats.mean_share(values, keys)
    loss = known_losses(stats.mean_loss(values, keys), values, keys)
    return replace(loss, high=1.0) if loss.high > 1 else loss


def known_losses(regret: Estimate, values: FloatArray, keys: Sequence[str]) -> Estimate:
    """Return the mean regret, without its interval if fewer than ten prompts lose anything.

    The size of losses is then hardly known, and the interval would be too narrow: of width 0 where no prompt loses.
    """
    losing = len(set(itertools.compress(keys, (values > 0).tolist())))
    if losing >= stats.MIN_CLUSTERS or math.isnan(regret.low):
        return regret
    return replace(regret, low=math.nan, high=math.nan, method=f"too few prompts with a regret ({losing})")


def bounded_mean(
    values: FloatArray,
    keys: Sequence[str],
    *,
    ends: tuple[FloatArray | float, FloatArray | float] = (-1.0, 1.0),
    tail: float = 0.0,
) -> Estimate:
    """Return the mean of values [G] between the lowest and the highest that each group can reach (`ends`).

    What is lacking to the highest of all groups is a loss, and has the interval of one where ten prompts or more have
    another value than the most common one. Where fewer have, as where nearly all groups are in the best order, or
    values are only the ends and their middle, it is the score interval of the share of the way from the lowest end of
    all groups to the highest. No limit lies beyond these. `tail` is that of `intervals.loss_limits`.
    """
    low_G, high_G = (np.broadcast_to(np.asarray(end, dtype=np.float64), values.shape) for end in ends)
    lowest, highest = (float(low_G.min()), float(high_G.max())) if values.size else (-1.0, 1.0)
    if highest - lowest < _ROUNDING:
        lowest, highest = -1.0, 1.0
    way_G = np.clip((values - lowest) / (highest - lowest), 0.0, 1.0)
    # A correlation of two replies is 1 or -1, and may come out with other last bits.
    half_G = np.round(2 * way_G) / 2
    way_G = np.where(np.abs(way_G - half_G) < _ROUNDING, half_G, way_G)
    if not np.isin(way_G, (0.0, 0.5, 1.0)).all() and _varies(way_G, keys):
        loss = stats.mean_loss((highest - lowest) * (1 - way_G), keys, tail=tail)
        value, low, high = highest - loss.value, max(highest - loss.high, lowest), min(highest - loss.low, highest)
        return replace(loss, value=value, low=low, high=high)
    share = stats.mean_share(way_G, keys)
    value, low, high = (lowest + (highest - lowest) * limit for limit in (share.value, share.low, share.high))
    return replace(share, value=value, low=low, high=high, method=share.method.replace("Wilson", "score interval"))


def _varies(values: FloatArray, keys: Sequence[str]) -> bool:
    """Return whether ten prompts or more have another value [G] than the most common one."""
    rounded = np.round(values, 12)
    known, counts = np.unique(rounded, return_counts=True)
    others = len(set(itertools.compress(keys, (rounded != known[counts.argmax()]).tolist())))
    return others >= stats.MIN_CLUSTERS


def win_shares(rows: Sequence[ScoreRow]) -> FloatArray:
    """Return [R] for each reply its wins (label ties one half) over the comparisons it is in; NaN if there are none."""
    place = {(row.source, row.preference_id, row.reply): number for number, row in enumerate(rows)}
    wins, met = np.zeros(len(rows)), np.zeros(len(rows))
    for number, row in enumerate(rows):
        for comparison in row.comparisons:
            other = place[row.source, row.preference_id, comparison.second]
            won = 1.0 if comparison.label > 0.5 else 0.5 if comparison.label == 0.5 else 0.0
            wins[number] += won
            wins[other] += 1 - won
            met[number] += 1
            met[other] += 1
    with np.errstate(invalid="ignore"):
        shares: FloatArray = wins / met
    return shares


def kendall_tau_b(x_GK: FloatArray, y_GK: FloatArray) -> FloatArray:
    """Return [G] Kendall's τ-b of two rows of values; 0 where all values of the first are equal.

    A scorer that gives all replies one score orders nothing, which is 0 and not undefined. Source: Kendall (1945).
    """
    if _is_large(x_GK):
        taus = [_kendall_of_one(x, y) for x, y in zip(x_GK, y_GK, strict=True)]
        return np.array(taus, dtype=np.float64)
    sign_x, sign_y = (np.sign(v[:, :, None] - v[:, None, :]) for v in (x_GK, y_GK))
    both = (sign_x * sign_y).sum(axis=(1, 2))
    scale = np.sqrt(np.abs(sign_x).sum(axis=(1, 2)) * np.abs(sign_y).sum(axis=(1, 2)))
    return np.where(scale > 0, both / np.maximum(scale, 1.0), 0.0)


def _is_large(values_GK: FloatArray) -> bool:
    return bool(values_GK.shape[1] ** 2 > _CHUNK_VALUES)


def _kendall_of_one(x_K: FloatArray, y_K: FloatArray) -> float:
    if not (np.ptp(x_K) and np.ptp(y_K)):
        return 0.0
    return float(kendalltau(x_K, y_K, variant="b", method="asymptotic").statistic)


def _below_and_equal(values_GK: FloatArray) -> tuple[IntArray, IntArray]:
    """Return [G, K] how many values of its row are below each value, and how many are equal to it, itself included."""
    if not _is_large(values_GK):
        below, equal = (
            compare(values_GK[:, None, :], values_GK[:, :, None]).sum(axis=2) for compare in (np.less, np.equal)
        )
        return below, equal
    ordered = np.sort(values_GK, axis=1)
    low, high = (
        np.stack([np.searchsorted(own, row, side) for own, row in zip(ordered, values_GK, strict=True)])
        for side in ("left", "right")
    )
    return low, high - low


def ndcg(score_GK: FloatArray, gain_GK: FloatArray) -> FloatArray:
    """Return [G] normalised discounted cumulative gain: gains Σ g / log₂(1 + rank), over that of the best order.

    Replies of equal score share their discounts (McSherry & Najork 2008). Gains are at least 0, not all 0.
    """
    num_replies = score_GK.shape[1]
    discount = 1 / np.log2(np.arange(2, num_replies + 2))
    sums = np.concatenate([[0.0], np.cumsum(discount)])
    below, equal = _below_and_equal(score_GK)
    better = num_replies - below - equal
    shared = (sums[better + equal] - sums[better]) / equal
    best = (-np.sort(-gain_GK, axis=1) * discount).sum(axis=1)
    found: FloatArray = (gain_GK * shared).sum(axis=1) / best
    return found


def _judge(score_GK: FloatArray, reference_GK: FloatArray, has_gold: bool) -> dict[str, FloatArray]:
    """Return [G] values of each measure."""
    if not len(score_GK):
        own = ("ndcg", "picked", "regret", "gold_regret")
        names = (*own, *(f"{name}{end}" for name in ("tau", "spearman") for end in ("", "_low", "_high")))
        return {name: np.empty(0) for name in names}
    best, worst = reference_GK.max(axis=1), reference_GK.min(axis=1)
    top_GK = (score_GK == score_GK.max(axis=1, keepdims=True)).astype(np.float64)
    top_GK /= top_GK.sum(axis=1, keepdims=True)
    lost = np.maximum(best - (top_GK * reference_GK).sum(axis=1), 0.0)
    gain_GK = reference_GK - worst[:, None] if has_gold else reference_GK
    # The same scores in the best order, and in the worst: with ties even the best may be below 1.
    rising_GK, best_GK = np.sort(reference_GK, axis=1), np.sort(score_GK, axis=1)
    worst_GK = best_GK[:, ::-1]
    return {
        "tau": kendall_tau_b(score_GK, reference_GK),
        "tau_low": kendall_tau_b(worst_GK, rising_GK),
        "tau_high": kendall_tau_b(best_GK, rising_GK),
        "ndcg": np.minimum(ndcg(score_GK, gain_GK), 1.0),
        "picked": np.minimum((top_GK * (reference_GK == best[:, None])).sum(axis=1), 1.0),
        "regret": np.minimum(lost / (best - worst), 1.0),
        "spearman": _spearman(score_GK, reference_GK),
        "spearman_low": _spearman(worst_GK, rising_GK),
        "spearman_high": _spearman(best_GK, rising_GK),
        "gold_regret": lost,
    }


def _spearman(x_GK: FloatArray, y_GK: FloatArray) -> FloatArray:
    """Return [G] rank correlations; 0 where all values of the first are equal."""
    # The count below minus the count above is twice the rank about its mean.
    num_replies = x_GK.shape[1]
    rank_x, rank_y = (
        (2 * below + equal - num_replies).astype(np.float64) for below, equal in map(_below_and_equal, (x_GK, y_GK))
    )
    scale = np.sqrt(np.square(rank_x).sum(axis=1) * np.square(rank_y).sum(axis=1))
    return np.where(scale > 0, (rank_x * rank_y).sum(axis=1) / np.maximum(scale, 1.0), 0.0)


def _looked_up(rows: Sequence[ScoreRow], gold: Mapping[ReplyKey, float]) -> FloatArray:
    return np.array([gold.get((row.source, row.preference_id, row.reply), math.nan) for row in rows])


def _groups(table: ScoreTable, reference_R: FloatArray) -> tuple[list[IntArray], int]:
    """Return for each number of replies the rows of its groups [G, K], and how many groups are left out."""
    preference_R = table.replies.preference
    known: BoolArray = ~np.isnan(reference_R)
    sizes = np.bincount(preference_R, minlength=len(table.preferences))
    num_known = np.bincount(preference_R, known, minlength=len(table.preferences)).astype(np.int64)
    lost = known & ~(np.isfinite(table.replies.score) & np.isfinite(reference_R))
    bad = np.bincount(preference_R, lost, minlength=len(table.preferences)) > 0
    rows = np.flatnonzero(known)
    starts = np.cumsum(num_known) - num_known
    groups, num_judged = [], 0
    for size in np.unique(num_known[num_known >= FEWEST_REPLIES]).tolist():
        usable = np.flatnonzero((num_known == size) & ~bad)
        index_GK = rows[starts[usable][:, None] + np.arange(size)]
        index_GK = index_GK[np.ptp(reference_R[index_GK], axis=1) > 0]
        num_judged += len(index_GK)
        chunk = max(1, _CHUNK_VALUES // size**2)
        groups += [index_GK[start : start + chunk] for start in range(0, len(index_GK), chunk)]
    return groups, int((sizes >= FEWEST_REPLIES).sum()) - num_judged
