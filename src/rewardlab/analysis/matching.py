"""How well the scores of a proxy follow those of a gold model on the same replies: order, margins, spread, choice.

Legend: R replies, N pairs of replies to one prompt, L rows (prompts with their replies), C prompts. Rows with equal
prompts are one prompt in every interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.analysis import stats
from rewardlab.analysis.agreement import Agreement, agreement
from rewardlab.analysis.best_of_n import picked
from rewardlab.analysis.influence import (
    ONE_DECIDES,
    antisymmetric_correlations,
    by_influence,
    by_leaving_out,
    correlations,
    sums_by,
)
from rewardlab.analysis.intervals import FloatArray, loss_limits, student_limits
from rewardlab.analysis.kwise import bounded_mean, known_losses
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.precision import FEWEST_PROMPTS, relative_size
from rewardlab.core.types import Estimate

IntArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]
WITHIN: Final = ("Pearson", "Spearman", "Kendall")
TAIL: Final = {"Pearson": 2.5}
"""Correlation -> the `tail` of what it lacks to 1, where it can take any value (see `intervals.loss_limits`): a good
proxy has few rows far below 1. Chosen by simulation (docs/design/intervals-compared.md)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replies:
    """Replies in order of their rows, and all pairs of two replies of one row that have different texts."""

    row_R: IntArray
    """[R] number of the row of each reply, rising."""
    prompts: tuple[str, ...]
    """[L] key of the prompt of each row."""
    gold_R: FloatArray
    """[R] finite gold scores."""
    first_N: IntArray
    """[N] reply of each pair."""
    second_N: IntArray
    num_identical: int = 0
    """Pairs left out because both replies are the same text."""

    @classmethod
    def of(cls, row_R: IntArray, prompts: Sequence[str], gold_R: FloatArray, text_R: Sequence[str] = ()) -> Replies:
        """Return replies with their pairs; without texts, no two replies count as identical."""
        start_L, count_L = np.unique(row_R, return_index=True, return_counts=True)[1:]
        firsts, seconds = [], []
        for start, count in zip(start_L.tolist(), count_L.tolist(), strict=True):
            one, other = _pairs_of(count)
            firsts.append(one + start)
            seconds.append(other + start)
        first_N, second_N = (
            np.concatenate([*parts, np.empty(0, np.intp)]).astype(np.intp) for parts in (firsts, seconds)
        )
        identical = 0
        if len(text_R):
            known: dict[str, int] = {}
            number_R = np.array([known.setdefault(text, len(known)) for text in text_R])
            same_N = number_R[first_N] == number_R[second_N]
            identical = int(same_N.sum())
            first_N, second_N = first_N[~same_N], second_N[~same_N]
        return cls(
            row_R=row_R,
            prompts=tuple(prompts),
            gold_R=gold_R,
            first_N=first_N,
            second_N=second_N,
            num_identical=identical,
        )

    @cached_property
    def prompt_L(self) -> IntArray:
        """[L] number of the prompt of each row."""
        return stats.numbered(self.prompts)[0]

    @cached_property
    def row_N(self) -> IntArray:
        """[N] row of each pair."""
        return self.row_R[self.first_N]

    @cached_property
    def keys_N(self) -> list[str]:
        """[N] prompt keys of pairs."""
        return [self.prompts[row] for row in self.row_N.tolist()]

    @cached_property
    def keys_R(self) -> list[str]:
        """[R] prompt keys of replies."""
        return [self.prompts[row] for row in self.row_R.tolist()]

    @cached_property
    def gold_N(self) -> FloatArray:
        """[N] gold margins, first minus second."""
        return self.margins(self.gold_R)

    @property
    def num_rows(self) -> int:
        """L."""
        return len(self.prompts)

    def margins(self, scores_R: FloatArray) -> FloatArray:
        """Return [N] score differences, first minus second."""
        found: FloatArray = scores_R[self.first_N] - scores_R[self.second_N]
        return found

    @cached_property
    def decided_N(self) -> BoolArray:
        """[N] whether the gold scores of a pair differ."""
        return np.asarray(self.gold_N != 0)

    @cached_property
    def decided_keys(self) -> list[str]:
        """Prompt keys of the decided pairs."""
        return [key for key, keep in zip(self.keys_N, self.decided_N.tolist(), strict=True) if keep]

    def outcomes(self, scores_R: FloatArray) -> FloatArray:
        """Return, for each decided pair, 1 if the scores order it as the gold scores do, 0 if not, ½ for a tie."""
        return outcomes_of(self.margins(scores_R)[self.decided_N], self.gold_N[self.decided_N])


@cache
def _pairs_of(count: int) -> tuple[IntArray, IntArray]:
    """Return the numbers of both replies of every pair of `count` replies."""
    one, other = np.triu_indices(count, 1)
    return one, other


def outcomes_of(margin_N: FloatArray, gold_N: FloatArray) -> FloatArray:
    """Return [N] 1 where the signs of two differences agree, 0 where not, ½ where the first is 0."""
    found: FloatArray = np.heaviside(margin_N * np.sign(gold_N), 0.5)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """What choosing by the proxy among all replies of a row costs, in units of the gold score."""

    num_rows: int
    """Rows with two or more replies."""
    lost: Estimate
    """Gold score of the best reply less that of the reply with the highest proxy score, ties averaged."""
    gained: Estimate
    """Gold score of that reply less that of a reply drawn at random."""
    share: Estimate
    """Gained by choosing, as a share of what choosing by gold itself would gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMatch:
    """The match on some of the pairs, and against the others."""

    column: str
    value: str
    num_pairs: int
    match: Estimate
    apart: Estimate
    """Match in the slice less that of all other pairs."""
    p: float
    """p-value of the difference being 0; NaN where it is not tested."""
    adjusted: float = math.nan
    """p-value after Holm's correction for all slices of a proxy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Everything that is said about one proxy against gold on one part of the data."""

    num_pairs: int
    """Pairs whose gold scores differ."""
    proxy_ties: int
    agreement: Agreement
    within: Mapping[str, Estimate]
    """Mean over rows of the correlation of the replies of a row; 0 for a row whose proxy scores are all equal."""
    rows_without_order: int
    """Rows left out of `within`: fewer than two replies, or all of one gold score."""
    margins: Mapping[str, Estimate]
    """Correlations of score differences, of both orders of each pair, and of their sizes."""
    slope: Estimate
    """Proxy margin for each unit of gold margin, through the origin."""
    spread: Estimate
    """Root mean square of proxy margins over that of gold margins."""
    score_spread: Estimate
    """Standard deviation of proxy scores over that of gold scores."""
    regret: Regret


def match_of(replies: Replies, scores_R: FloatArray) -> Match:
    """Return how well finite proxy scores [R] follow the gold scores."""
    margin_N, prompt_N = replies.margins(scores_R), replies.prompt_L[replies.row_N]
    found = agreement(
        margins_N=margin_N,
        gold_margins_N=replies.gold_N,
        prompts_N=replies.keys_N,
        scores_R=scores_R,
        gold_scores_R=replies.gold_R,
        prompts_R=replies.keys_R,
    )
    both = antisymmetric_correlations(margin_N, replies.gold_N, prompt_N)
    sizes = correlations(np.abs(margin_N), np.abs(replies.gold_N), prompt_N)
    within, lacking = within_rows(replies, scores_R)
    return Match(
        num_pairs=int(replies.decided_N.sum()),
        proxy_ties=int((margin_N[replies.decided_N] == 0).sum()),
        agreement=found,
        within=within,
        rows_without_order=lacking,
        margins={
            "differences, Pearson": both[0],
            "differences, Spearman": both[1],
            "sizes, Pearson": sizes[0],
            "sizes, Spearman": sizes[1],
        },
        slope=slope_of(margin_N, replies.gold_N, prompt_N),
        spread=spread_of(margin_N, replies.gold_N, prompt_N),
        score_spread=relative_size(scores_R, replies.gold_R, replies.keys_R, centred=True),
        regret=regret_of(replies, scores_R),
    )


def within_rows(replies: Replies, scores_R: FloatArray) -> tuple[dict[str, Estimate], int]:
    """Return the mean over rows of each correlation between the replies of a row, and how many rows are left out.

    All three are Σ xy/√(Σx² Σy²) over the pairs of a row, with x and y the differences of scores (Pearson), of midranks
    (Spearman) or their signs (Kendall's τ-b).
    """
    whole = Replies.of(replies.row_R, replies.prompts, replies.gold_R)
    size = replies.num_rows
    means: dict[str, Estimate] = {}
    varies_L = np.bincount(whole.row_N, whole.gold_N != 0, minlength=size) > 0
    keys = [key for key, keep in zip(replies.prompts, varies_L.tolist(), strict=True) if keep]
    columns = [(values_R, _midranks(whole, values_R)) for values_R in (scores_R, replies.gold_R)]
    for name in WITHIN:
        x_N, y_N = (whole.margins(ranks_R if name == "Spearman" else values_R) for values_R, ranks_R in columns)
        if name == "Kendall":
            x_N, y_N = np.sign(x_N), np.sign(y_N)
        xy_L, xx_L, yy_L = (np.bincount(whole.row_N, v, minlength=size) for v in (x_N * y_N, x_N**2, y_N**2))
        known_L = xx_L * yy_L > 0
        values_L = np.where(known_L, xy_L / np.sqrt(np.where(known_L, xx_L * yy_L, 1.0)), 0.0)
        means[name] = bounded_mean(np.clip(values_L[varies_L], -1, 1), keys, tail=TAIL.get(name, 0.0))
    return means, int((~varies_L).sum())


def _midranks(whole: Replies, values_R: FloatArray) -> FloatArray:
    """Return [R] how many replies of its row are below each, ties one half."""
    above_N = np.heaviside(whole.margins(values_R), 0.5)
    size = len(values_R)
    below_R = np.bincount(whole.first_N, above_N, size) + np.bincount(whole.second_N, 1 - above_N, size)
    return below_R.astype(np.float64)


def slope_of(margin_N: FloatArray, gold_N: FloatArray, prompt_N: IntArray) -> Estimate:
    """Return Σ xy/Σy², the proxy margin x for each unit of gold margin y, with its interval by leaving out prompts.

    Prompts whose gold margins are all 0 say nothing about it and do not count. There is no interval below ten others,
    nor where one prompt has all that can be told apart from 0.
    """
    decided_N = np.isin(prompt_N, np.unique(prompt_N[gold_N != 0]))
    margin_N, gold_N, prompt_N = margin_N[decided_N], gold_N[decided_N], prompt_N[decided_N]
    xy_C, yy_C = sums_by(prompt_N, margin_N * gold_N, np.square(gold_N))
    if not yy_C.any():
        return stats.without_interval(math.nan, 0)
    value = float(xy_C.sum() / yy_C.sum())
    influence_N = (margin_N * gold_N - value * np.square(gold_N)) * (len(gold_N) / yy_C.sum())
    if _one_has_all(yy_C):
        return stats.without_interval(value, len(yy_C), method=ONE_DECIDES)
    moves_C = value - (xy_C.sum() - xy_C) / (yy_C.sum() - yy_C)
    return by_influence(value, by_leaving_out(influence_N, moves_C, prompt_N), prompt_N)


def spread_of(margin_N: FloatArray, gold_N: FloatArray, prompt_N: IntArray) -> Estimate:
    """Return √(Σx²/Σy²), how large proxy margins x are beside gold margins y, with an interval of its logarithm.

    Ties of gold are left out: what the proxy makes of them says nothing about its scale. Pairs count in both orders, so
    the mean of margins is 0. Both means of squares are fitted, and with few prompts the influences are too small by
    that. The interval is by leaving out prompts; there is none below `precision.FEWEST_PROMPTS`, nor where one prompt
    has all that can be told apart from 0.
    """
    decided_N = gold_N != 0
    margin_N, gold_N, prompt_N = margin_N[decided_N], gold_N[decided_N], prompt_N[decided_N]
    xx, yy = (float(np.square(v).mean()) if v.size else 0.0 for v in (margin_N, gold_N))
    count = len(np.unique(prompt_N))
    if yy <= 0:
        return stats.without_interval(math.nan, count)
    value = math.sqrt(xx / yy)
    if count < FEWEST_PROMPTS or not value:
        return stats.without_interval(value, count, method=stats.too_few(count) if value else stats.NO_VARIATION)
    influence_N = value / 2 * (np.square(margin_N) / xx - np.square(gold_N) / yy)
    xx_C, yy_C = sums_by(prompt_N, np.square(margin_N), np.square(gold_N))
    if _one_has_all(xx_C) or _one_has_all(yy_C):
        return stats.without_interval(value, count, method=ONE_DECIDES)
    moves_C = value * (math.log(value) - np.log((xx_C.sum() - xx_C) / (yy_C.sum() - yy_C)) / 2)
    return by_influence(value, by_leaving_out(influence_N, moves_C, prompt_N), prompt_N, scale="log", fitted=2)


def _one_has_all(squares_C: FloatArray) -> bool:
    """Return whether one prompt has all of a sum of squares that can be told apart from 0."""
    total = float(squares_C.sum())
    return total - float(squares_C.max()) <= 1e-9 * total


def regret_of(replies: Replies, scores_R: FloatArray) -> Regret:
    """Return what choosing by the scores among all replies of a row costs and gains, over rows of two or more."""
    lost, gained, keys = [], [], []
    for row, inside in _by_row(replies):
        gold_K = replies.gold_R[inside]
        if len(gold_K) < 2:
            continue
        chosen = float(picked(scores_R[inside], gold_K, most=len(gold_K))[-1])
        lost.append(max(float(gold_K.max()) - chosen, 0.0))
        gained.append(chosen - float(gold_K.mean()))
        keys.append(replies.prompts[row])
    lost_L, gained_L = np.array(lost), np.array(gained)
    return Regret(
        num_rows=len(keys),
        lost=known_losses(stats.mean_loss(lost_L, keys), lost_L, keys),
        gained=stats.mean_with_ties(gained_L, keys),
        share=_share_gained(gained_L, lost_L, keys),
    )


def _by_row(replies: Replies) -> Iterator[tuple[int, slice]]:
    """Yield the number of each row that has replies, and where these are."""
    rows, start_L = np.unique(replies.row_R, return_index=True)
    ends = [*start_L[1:].tolist(), len(replies.row_R)]
    for row, start, end in zip(rows.tolist(), start_L.tolist(), ends, strict=True):
        yield row, slice(start, end)


def _share_gained(gained_L: FloatArray, lost_L: FloatArray, keys: Sequence[str]) -> Estimate:
    """Return Σ gained/Σ(gained + lost); what is lacking to 1 has the interval of a loss, by influence.

    There is no interval where fewer than ten prompts lose anything (see `kwise.known_losses`).
    """
    under_L = gained_L + lost_L
    under = float(under_L.mean()) if under_L.size else 0.0
    if under <= 0:
        return stats.without_interval(math.nan, len(set(keys)))
    value, lacking = float(gained_L.mean()) / under, float(lost_L.mean()) / under
    numbers, _ = stats.numbered(keys)
    loss = by_influence(lacking, (lost_L - lacking * under_L) / under, numbers, formula=loss_limits)
    low, high = min(1 - loss.high, value), min(max(1 - loss.low, value), 1.0)
    if math.isnan(loss.low):
        low = high = math.nan
    return known_losses(replace(loss, value=value, low=low, high=high), lost_L, keys)


def slice_matches(
    replies: Replies, scores_R: FloatArray, columns: Mapping[str, Sequence[str]]
) -> tuple[SliceMatch, ...]:
    """Return the match for each value of each column, which has a text for each decided pair.

    The difference from all other pairs is tested by its interval (see `_apart`). Fewer than ten prompts on either side
    are not tested.
    """
    outcome_N, keys = replies.outcomes(scores_R), np.asarray(replies.decided_keys, dtype=object)
    found = []
    for column, values in columns.items():
        own = np.asarray(values, dtype=object)
        distinct = sorted(set(values))
        for value in distinct:
            inside_N = np.asarray(own == value)
            apart, p = _apart(outcome_N, inside_N, keys) if len(distinct) > 1 else (_no_rest(keys), math.nan)
            found.append(
                SliceMatch(
                    column=column,
                    value=value,
                    num_pairs=int(inside_N.sum()),
                    match=stats.mean_share(outcome_N[inside_N], keys[inside_N].tolist()),
                    apart=apart,
                    p=p,
                )
            )
    adjusted = holm([one.p for one in found])
    return tuple(replace(one, adjusted=p) for one, p in zip(found, adjusted, strict=True))


def _no_rest(keys: npt.NDArray[np.object_]) -> Estimate:
    return stats.without_interval(math.nan, len(set(keys.tolist())), method="no other pairs")


def _apart(outcome_N: FloatArray, inside_N: BoolArray, keys: npt.NDArray[np.object_]) -> tuple[Estimate, float]:
    """Return the match inside less that outside, and the p-value of there being no difference.

    The interval is made from those of both sides, since a small side may be all right by chance and does not vary then.
    Where both have pairs of the same prompts they are not independent, and the limits are the wider ones of these and
    of the difference by influence. p is 1 − the level at which the interval ends at 0.
    """
    (inside, within), (outside, beyond) = ((outcome_N[side], keys[side].tolist()) for side in (inside_N, ~inside_N))
    value, count = float(inside.mean() - outside.mean()), min(len(set(within)), len(set(beyond)))
    if count < stats.MIN_CLUSTERS:
        return stats.without_interval(value, count), math.nan
    sides = stats.mean_share_by_level(inside, within), stats.mean_share_by_level(outside, beyond)
    share = float(inside_N.mean())
    mean_N = np.where(inside_N, inside.mean(), outside.mean())
    influence_N = (outcome_N - mean_N) * np.where(inside_N, 1 / share, -1 / (1 - share))
    # One value a prompt: its pairs inside weigh otherwise than those outside, so they are not alike.
    (totals_C,) = sums_by(stats.numbered(keys.tolist())[0], influence_N)
    influence_C = totals_C * (totals_C.size / influence_N.size)
    shared = not set(within).isdisjoint(beyond)

    def apart(level: float) -> Estimate:
        own = stats.difference(sides[0](level), sides[1](level))
        if not shared:
            return own
        numbers_C = np.arange(totals_C.size)
        other = by_influence(value, influence_C, numbers_C, formula=student_limits, level=level)
        low, high = np.fmin(own.low, other.low), np.fmax(own.high, other.high)
        return replace(own, low=float(low), high=float(high), method=f"{own.method}, or by influence if wider")

    return apart(0.95), stats.p_by_interval(apart)
