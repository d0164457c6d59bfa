"""The accuracies of controls over several seeds, and differences between them with intervals and p-values.

Two things make these numbers uncertain. Another seed shuffles and divides the data in another way, and other
conversations would have been judged differently. The interval over seeds shows only the first. A statement about more
than these conversations needs both: its variance is that over conversations, of outcomes averaged over the seeds, plus
that over seeds divided by their number. This counts a part of the second twice, so the variance is rather too large
than too small. But a few conversations that happen to agree show no variance, so each number must also be told by the
score test of `analysis/bounded.py`, over conversations: the larger p-value counts, and the wider limit. How far a
conversation of several comparisons may move a number there follows from how alike their outcomes are.

Legend: S seeds, N comparisons, C conversations (clusters).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from rewardlab.analysis import stats
from rewardlab.analysis.bounded import Bounded, Moves, crossing
from rewardlab.analysis.influence import share_by_influence
from rewardlab.core.types import Estimate

FloatArray = npt.NDArray[np.float64]
LEVEL = 0.95
TAIL = (1 - LEVEL) / 2
_DOUBLINGS = 40


@dataclass(frozen=True, kw_only=True, eq=False)
class Arm:
    """How often the heads, or runs, of one control ranked comparisons as they are labelled."""

    right_SN: FloatArray
    """[S, N] 0, ½ or 1, or a mean of these over several heads; NaN where a seed did not judge the comparison."""
    clusters: tuple[str, ...]
    """[N] the conversation of each comparison; the same name in every arm."""

    def __post_init__(self) -> None:
        assert self.right_SN.shape[1] == len(self.clusters)
        assert np.isfinite(self.right_SN).any(axis=1).all(), "every seed judges something"

    @property
    def by_seed(self) -> FloatArray:
        """[S] accuracy of each seed."""
        means: FloatArray = np.nanmean(self.right_SN, axis=1)
        return means

    @property
    def mean(self) -> float:
        """The mean over seeds of their accuracies."""
        return float(self.by_seed.mean())

    @property
    def _judged(self) -> npt.NDArray[np.int64]:
        """Indices of the comparisons that at least one seed judged."""
        return np.flatnonzero(np.isfinite(self.right_SN).any(axis=0))

    @property
    def num_judged(self) -> int:
        """Number of comparisons that at least one seed judged."""
        return len(self._judged)

    @property
    def num_conversations(self) -> int:
        """Number of conversations with such a comparison."""
        return len({self.clusters[n] for n in self._judged.tolist()})

    def over_seeds(self) -> Estimate:
        """Return the mean accuracy with Student's interval over seeds."""
        return over_seeds(self.by_seed)

    def over_conversations(self) -> Estimate:
        """Return the mean over seeds of their accuracies, as `mean` is, with an interval over conversations.

        Seeds that judged the same comparisons give the interval of outcomes averaged over the seeds, others that of the
        influences of comparisons, which in the first case are the same.
        """
        judged_SN = np.isfinite(self.right_SN)
        judged_N = self._judged
        kept = [self.clusters[n] for n in judged_N.tolist()]
        if judged_SN[:, judged_N].all():
            means_N = self.right_SN[:, judged_N].mean(axis=0)
            found = stats.mean_share(np.clip(means_N, 0.0, 1.0), kept)
        else:
            moved_N = self._moved_N()[judged_N] * len(kept)
            found = share_by_influence(self.mean, moved_N, np.unique(kept, return_inverse=True)[1])
        return replace(found, method=found.method.replace("prompt", "conversation"))

    def _moved_N(self, right: float | None = None) -> FloatArray:
        """Return [N] by how much each comparison moves the mean; how much it would if it came out as `right`."""
        judged_SN = np.isfinite(self.right_SN)
        right_SN = self.right_SN if right is None else np.where(judged_SN, right, np.nan)
        share_SN = (right_SN - self.by_seed[:, None]) / (judged_SN.sum(axis=1)[:, None] * len(self.right_SN))
        moved_N: FloatArray = np.nansum(share_SN, axis=0)
        return moved_N

    def influences(self) -> dict[str, float]:
        """Return conversation -> its influence: by how much it moves the mean. Those of which nothing was judged are
        left out, since they say nothing of how far conversations differ."""
        names, index_N = self._conversations()
        moved_C = np.bincount(index_N, self._moved_N()[self._judged], minlength=len(names))
        return dict(zip(names, moved_C.tolist(), strict=True))

    def moves(self, names: Sequence[str]) -> Moves:
        """Return the influences of conversations, among them all that were judged, and how large they could be.

        Several comparisons of a conversation seldom all turn round together. So a conversation of n reaches as far as
        gives the variance of n outcomes that are alike by ρ: (1 + (n − 1)ρ) / n of the way of all.
        """
        place = {name: number for number, name in enumerate(names)}
        own, index_N = self._conversations()
        place_C = np.array([place[name] for name in own])
        at_N, num = place_C[index_N], len(names)
        moved_C, down_C, up_C = (
            np.bincount(at_N, self._moved_N(right)[self._judged], minlength=num).astype(np.float64)
            for right in (None, 0.0, 1.0)
        )
        count_C = np.maximum(np.bincount(at_N, minlength=num), 1)
        reach_C = (1 + (count_C - 1) * self._alike()) / count_C
        return Moves(moved_C=moved_C, down_C=down_C * reach_C, up_C=up_C * reach_C)

    def _alike(self) -> float:
        """Return how alike outcomes of a conversation may be: their correlation ρ, as means over seeds, by the analysis
        of variance, and two standard errors (Fisher 1925) more, since a few conversations show it badly. It is 1 where
        nothing varies, or no conversation has several comparisons."""
        names, index_N = self._conversations()
        mean_N = np.nanmean(self.right_SN[:, self._judged], axis=0)
        count_C = np.bincount(index_N)
        num, total = len(names), mean_N.size
        if num == 1 or total == num:
            return 1.0
        mean_C = np.bincount(index_N, mean_N) / count_C
        within = float(np.square(mean_N - mean_C[index_N]).sum()) / (total - num)
        between = float(count_C @ np.square(mean_C - mean_N.mean())) / (num - 1)
        typical = (total - float(count_C @ count_C) / total) / (num - 1)
        whole = between + (typical - 1) * within
        if whole <= 0:
            return 1.0
        found = min(max((between - within) / whole, 0.0), 1.0)
        error = (1 - found) * (1 + (typical - 1) * found) * math.sqrt(2 / (typical * (typical - 1) * (num - 1)))
        return float(min(found + 2 * error, 1.0))

    def _conversations(self) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return the conversations of which something was judged, and for each judged comparison which it belongs
        to."""
        names, index_N = np.unique(np.asarray(self.clusters, dtype=np.str_)[self._judged], return_inverse=True)
        return names.tolist(), index_N


def over_seeds(values_S: FloatArray, *, lowest: float = 0.0, highest: float = 1.0) -> Estimate:
    """Return the mean of one number per seed with Student's interval, cut to the range from `lowest` to `highest`."""
    count = len(values_S)
    mean = float(values_S.mean())
    half = float(student.ppf((1 + LEVEL) / 2, count - 1) * values_S.std(ddof=1) / math.sqrt(count))
    return Estimate(
        value=mean,
        low=max(mean - half, lowest),
        high=min(mean + half, highest),
        n=count,
        method=f"t interval over {count} seeds",
        level=LEVEL,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Contrast:
    """A sum of accuracies times factors, minus a constant, with its uncertainty."""

    value: float
    by_seed: FloatArray
    """[S] the value for each seed."""
    variance_seeds: float
    """Variance of `value` that comes from the seeds."""
    variance_conversations: float
    """Variance of `value` that comes from the conversations."""
    num_conversations: int
    fewest: int
    """The smallest number of conversations of any of the accuracies. Below `stats.MIN_CLUSTERS` there is no interval
    and no p-value: a few conversations may be all right or all wrong by chance, without any variance."""
    bounded: Bounded
    """The same over conversations, as a mean of values that have an end."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Arm, float]], constant: float = 0.0) -> Contrast:
        """Return Σ factor · accuracy − constant."""
        by_seed = sum((factor * arm.by_seed for arm, factor in parts), start=np.zeros(len(parts[0][0].right_SN)))
        by_seed = by_seed - constant
        value = float(by_seed.mean())
        moves = _moves_of(parts)
        moved_C = sum((factor * one.moved_C for one, factor in moves), start=np.zeros_like(moves[0][0].moved_C))
        return cls(
            value=value,
            by_seed=by_seed,
            variance_seeds=float(by_seed.var(ddof=1)) / len(by_seed),
            variance_conversations=float(moved_C @ moved_C) * len(moved_C) / max(len(moved_C) - 1, 1),
            num_conversations=len(moved_C),
            fewest=min(arm.num_conversations for arm, _ in parts),
            bounded=Bounded.of(moves, value),
        )

    @property
    def is_of_few(self) -> bool:
        """Return whether there are too few conversations for an interval or a p-value."""
        return self.fewest < stats.MIN_CLUSTERS

    @property
    def variance(self) -> float:
        """The variance of `value` from seeds and conversations together."""
        return self.variance_seeds + self.variance_conversations

    @property
    def freedom(self) -> float:
        """Degrees of freedom of the two variances together (Satterthwaite 1946)."""
        seeds, conversations = len(self.by_seed) - 1, max(self.num_conversations - 1, 1)
        below = self.variance_seeds**2 / seeds + self.variance_conversations**2 / conversations
        return self.variance**2 / below if below > 0 else float(conversations)

    def p_above(self) -> float:
        """Return the one-sided p-value of the hypothesis that the value is at most 0; NaN for few conversations."""
        if self.is_of_few:
            return math.nan
        if self.value <= 0 and self.variance <= 0:
            return 1.0
        by_variance = 0.0 if self.variance <= 0 else student.sf(self.value / math.sqrt(self.variance), self.freedom)
        return max(float(by_variance), self.bounded.p_above(0.0))

    def estimate(self) -> Estimate:
        """Return the value with an interval over conversations and seeds; without one for few conversations."""
        if self.is_of_few:
            return _of_few(self.value, self.fewest)
        half = float(student.ppf((1 + LEVEL) / 2, self.freedom)) * math.sqrt(self.variance)
        return Estimate(
            value=self.value,
            low=self.bounded.low(TAIL, most=self.value - half),
            high=self.bounded.high(TAIL, least=self.value + half),
            n=self.num_conversations,
            method="t interval over conversations and seeds",
            level=LEVEL,
        )


def _moves_of(parts: Sequence[tuple[Arm, float]]) -> list[tuple[Moves, float]]:
    """Return the influences of conversations on each accuracy, over the conversations that any of them has."""
    names = sorted({name for arm, _ in parts for name in arm.influences()})
    return [(arm.moves(names), factor) for arm, factor in parts]


def _of_few(value: float, number: int) -> Estimate:
    return stats.without_interval(value, number, method=stats.too_few(number, "conversations"))


def p_of_mean(values_S: FloatArray, truth: float) -> float:
    """Return the two-sided p-value of Student's test over seeds of the hypothesis that the mean is `truth`.

    Equal seeds show no spread, so their p is that of the signs, which cannot be below 2^(1 − S).
    """
    deviation, spread = float(values_S.mean()) - truth, float(values_S.std(ddof=1))
    if spread == 0:
        return 1.0 if deviation == 0 else 2.0 ** (1 - len(values_S))
    return float(2 * student.sf(abs(deviation) / spread * math.sqrt(len(values_S)), len(values_S) - 1))


def share_of(part: Arm, whole: Arm, *, chance: float = 0.5) -> Estimate:
    """Return (accuracy of `part` − chance) / (that of `whole` − chance), with Fieller's interval.

    The interval holds the shares b at which part − chance − b·(whole − chance) may be 0, by the variances of
    `Contrast` or by its score test. There is no interval if the accuracy of `whole` may itself be chance, or for few
    conversations.
    Source: Fieller (1954), Journal of the Royal Statistical Society B 16, 175-185.
    """
    over, under = part.mean - chance, whole.mean - chance
    of_part, of_whole = Contrast.of([(part, 1.0)], chance), Contrast.of([(whole, 1.0)], chance)
    apart = Contrast.of([(part, 1.0), (whole, -1.0)])
    covariance = (of_part.variance + of_whole.variance - apart.variance) / 2
    t = float(student.ppf((1 + LEVEL) / 2, min(of_part.freedom, of_whole.freedom)))
    # (over − b·under)² = t²(var over − 2b·cov + b²·var under) is a quadratic equation in b.
    a = under**2 - t**2 * of_whole.variance
    b = over * under - t**2 * covariance
    c = over**2 - t**2 * of_part.variance
    value = over / under if under else math.nan
    if apart.is_of_few:
        return _of_few(value, apart.fewest)
    none = Estimate(
        value=value,
        low=math.nan,
        high=math.nan,
        n=of_whole.num_conversations,
        method="the model's own accuracy may be chance",
        level=LEVEL,
    )
    if under <= 0 or a <= 0 or of_whole.bounded.p_above(0.0) > TAIL:
        return none
    # Only rounding can make this negative: a model that is significantly above chance has an interval.
    root = math.sqrt(max(b * b - a * c, 0.0))
    (of_part_C, _), (of_whole_C, _) = _moves_of([(part, 1.0), (whole, 1.0)])

    def apart_by(share: float) -> Bounded:
        return Bounded.of([(of_part_C, 1.0), (of_whole_C, -share)], over - share * under)

    low = _beyond((b - root) / a, -1.0, lambda share: apart_by(share).p_above(0.0))
    high = _beyond((b + root) / a, 1.0, lambda share: apart_by(share).p_below(0.0))
    if math.isnan(low + high):
        return none
    method = "Fieller's interval over conversations and seeds"
    return replace(none, low=low, high=high, method=method)


def _beyond(limit: float, step: float, p: Callable[[float], float]) -> float:
    """Return the first share from `limit` on, in the direction of `step`, whose p-value is at most `TAIL`; NaN if
    there is none."""
    inside = limit
    for _ in range(_DOUBLINGS):
        if p(limit) <= TAIL:
            return limit if limit == inside else crossing(lambda share: p(share) - TAIL, limit, inside)
        inside, limit, step = limit, limit + step, 2 * step
    return math.nan


Arms = Mapping[str, Arm]
"""Control -> its accuracies."""
