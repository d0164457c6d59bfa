"""A number over several seeds, each judged on the same prompts, and how uncertain expressions of such numbers are.

Two things are sampled: seeds and prompts. They are crossed: every seed meets every prompt. The mean over k seeds of a
number judged on C prompts has the variance σ²_S/k + σ²_P/C + σ²_SP/(kC). Two parts of it can be estimated apart from
each other, and nothing is counted twice:

    A, what seeds do not share    σ²_S/k + σ²_SP/(kC): the variance of the k values over k, k − 1 degrees of freedom
    B, what they share            σ²_P/C: the mean covariance of two seeds through the prompts that both met

The half-width of the interval is √(t²_{k−1}·A + t²_{C−1}·B). Its coverage is at least the nominal level, whatever the
ratio of A to B (Banerjee 1961, Sankhyā A 23, 85-108). Satterthwaite's degrees of freedom would also be possible for the
variance A + B, but with two or three seeds they give too many false findings; docs/design/verdicts.md simulates both.

Numbers that are not means are linearised: the influence ψ_sc of a prompt c on the value of seed s says how the value
changes with the weight of the prompt (see influence.py). An expression of several numbers changes by its gradient.
Shares, losses and AUC near the end of their range, and arms that differ on few prompts, show too little variance; so to
their B is added what it would be more if the limit were the truth (bounded.py; slopes: crossed_slopes.py). Some numbers
lie above the truth on average, as ECE does. Before such a number is compared with a limit, this excess is subtracted
from it.

Legend: S seeds, C prompts (clusters).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtr, stdtrit

from rewardlab.analysis.bounded import AtLimit, crossing
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.logistic import Fit
from rewardlab.analysis.stats import MIN_CLUSTERS
from rewardlab.core.types import Estimate

Varies = Literal["always", "steps", "never"]
_LEAST_P: Final = 1e-12
"""p-values are not told apart below this."""
_ROUNDING: Final = 1e-12
_ENDLESS: Final = 1_000_000
"""Stands for a number of rows that is not known."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observed:
    """One number of one arm, for each of its seeds."""

    by_seed_S: FloatArray
    """[S] the value of each seed."""
    seeds: tuple[int, ...]
    """[S] names of the seeds; arms are paired where they share a name."""
    influence_SC: FloatArray | None = None
    """[S, C] how far each prompt moves the value of each seed, 0 where the seed did not judge it; None where the value
    does not come from prompts."""
    clusters: tuple[str, ...] = ()
    """[C] prompts; a prompt has the same name in every arm."""
    weight_SC: FloatArray | None = None
    """[S, C] each prompt's part of the comparisons of a seed; None where all prompts have one size."""
    outcome_SC: FloatArray | None = None
    """[S, C] outcomes whose mean by `weight_SC` the value is, for one whose influences are of something else besides;
    None where the outcomes follow from the influences."""
    each_SC: FloatArray | None = None
    """[S, C] comparisons of each prompt; None where that is not known."""
    turned_S: FloatArray | None = None
    """[S] how far a comparison that comes out the other way is from the value, for loss, Brier score and AUC; None for
    all others."""
    has_long_tail: bool = False
    """Whether few prompts may move the value far, as those of a loss do, so that the tests allow for skewness."""
    row_error: float | None = None
    """The standard error of one seed, for a value that is computed from rows but has no influences, as values of curves
    are. NaN if it is not known; None for values that have influences, or do not come from rows."""
    num_rows: int = 0
    """Number of rows behind `row_error`; 0 if it is not known."""
    fits: tuple[Fit, ...] = ()
    """[S] the regressions whose coefficients the values are; empty for all others."""
    excess: float = 0.0
    """By how much the values may lie above the truth on average, as those of ECE do; at least 0."""
    varies: Varies = "always"
    """``never``: settings decide the value. ``steps``: whole numbers, so that few equal values show little."""

    def __post_init__(self) -> None:
        assert len(self.seeds) == len(set(self.seeds)) == len(self.by_seed_S) > 0
        assert np.isfinite(self.by_seed_S).all(), "without the value of a seed there is none of the arm"
        assert self.influence_SC is None or self.influence_SC.shape == (len(self.seeds), len(self.clusters))

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return float(self.by_seed_S.mean())

    @property
    def num_alike(self) -> float:
        """How many prompts of equal weight count as much as these in the mean over seeds (Kish); at least 1."""
        if self.weight_SC is None:
            return float(len(self.clusters))
        weight_C = self.weight_SC.mean(axis=0)
        return float(weight_C.sum() ** 2 / (weight_C @ weight_C))

    @property
    def has_row_error(self) -> bool:
        """Whether the value comes from rows without influences whose noise is known."""
        return self.row_error is not None and not math.isnan(self.row_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a variance, estimated with `freedom` degrees of freedom."""

    variance: float
    freedom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """An expression of numbers over seeds and prompts, and how uncertain it is."""

    value: float
    seeds: tuple[Part, ...]
    """A: a part for every set of arms whose seeds are linked; empty if no arm has two seeds."""
    prompts: Part | None
    """B; None where no number comes from prompts or rows."""
    within: float
    """The part of A that more prompts would make smaller: σ²_SP/(kC)."""
    num_seeds: int
    """Seeds of the arm with the fewest."""
    num_prompts: int
    """Prompts of all arms together; 0 where no number comes from prompts."""
    unit: str = "prompts"
    """What `num_prompts` counts: ``rows`` where only their number is known."""
    too_high: float = 0.0
    """By how much the value may lie above the truth on average."""
    too_low: float = 0.0
    """By how much it may lie below it."""
    single_seeds: bool = False
    """Whether some arm that varies has one seed, so that its noise over seeds is not in any interval."""
    is_blind: bool = False
    """Whether some arm that varies has one seed and no prompts, so that nothing shows its noise."""
    is_pooled: bool = False
    """Whether the noise over seeds is that of more arms than the expression names."""
    is_borrowed: bool = False
    """Whether that of an arm with one seed is taken to be that of arms with several."""
    rows_unknown: bool = False
    """Whether some number comes from rows whose noise is not known, so that it is in no interval."""
    reach: float = math.inf
    """How far the value moves at most if every prompt comes out the other way: Σ |slope| · range."""
    num_alike: float = 0.0
    """How many prompts of equal weight would count as much; 0 where that is `num_prompts`."""
    bounded: AtLimit | None = None
    """How prompts would vary if a limit were the true value; None where that is not known."""

    @property
    def variance(self) -> float:
        """A + B."""
        return sum(part.variance for part in self.parts)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every part of the variance."""
        return (*self.seeds, *(() if self.prompts is None else (self.prompts,)))

    @property
    def is_constant(self) -> bool:
        """Whether nothing varied, over seeds or prompts, though something could have."""
        return bool(self.parts) and not self.variance > 0

    @property
    def p_of_constant(self) -> float:
        """The chance that nothing varied though the truth lies on the other side of 0; NaN if it is not known.

        A prompt that differs moves the value by at most `reach` over the number of prompts. So the truth differs by the
        distance d from 0 only if a share of at least d / `reach` of all prompts differ, and n drawn prompts miss them
        with a chance of at most (1 − share)ⁿ; of prompts that differ in weight, n are those of equal weight that would
        count as much. With k seeds alone, all lie on one side as often as k coins do: ½ᵏ.
        """
        if not self.parts:
            return 0.0
        if not self.num_prompts:
            return 0.5**self.num_seeds
        if not 0 < self.reach < math.inf:
            return math.nan
        return float(max(0.0, 1 - abs(self.value) / self.reach) ** (self.num_alike or self.num_prompts))

    def at_limit(self, limit: float) -> Crossed:
        """Return the same with the variance over prompts that it would have if `limit` were the true value.

        What this exceeds the variance seen by is added to B: all seeds may share what none of them has shown. Nothing
        is added where nothing varied, which has its own p-value.
        """
        if self.bounded is None or self.prompts is None or self.is_constant:
            return self
        variance = self.prompts.variance + self.bounded.excess_at(limit)
        return replace(self, prompts=replace(self.prompts, variance=variance))

    def _beyond(self, limit: float, end: float, of: Callable[[float], float]) -> float:
        """Return where `of` falls to 0, going from `limit` towards `end`."""
        assert self.bounded is not None
        return crossing(of, end, limit) if not self.is_constant and self.bounded.excess_at(limit) > 0 else limit

    @property
    def is_testable(self) -> bool:
        """Whether anything is known about how uncertain the value is."""
        if math.isnan(self.value) or 0 < self.num_prompts < MIN_CLUSTERS:
            return False
        return not self.is_blind

    def p_above(self, limit: float = 0.0) -> float:
        """Return the p-value of the value being at most `limit`; NaN if nothing is known about its noise."""
        return self._with_skewness(self._p_above(limit), limit, side=0)

    def p_below(self, limit: float = 0.0) -> float:
        """Return the p-value of the value being at least `limit`; NaN if nothing is known about its noise."""
        return self._with_skewness(self._p_below(limit), limit, side=1)

    def _p_above(self, limit: float) -> float:
        return self.at_limit(limit)._p(self.value - self.too_high - limit)

    def _p_below(self, limit: float) -> float:
        return self.at_limit(limit)._p(limit - self.value - self.too_low)

    def _with_skewness(self, p: float, limit: float, *, side: int) -> float:
        """Return p, at least the p-value over prompts that allows for the skewness of losses."""
        if self.bounded is None or self.is_constant or math.isnan(p):
            return p
        return max(p, self.bounded.p_skewed(limit)[side])

    def interval(self, level: float) -> Estimate:
        """Return the value with its two-sided interval; without limits where nothing is known about its noise."""
        tail = (1 - level) / 2
        half = self.half_width(tail) if self.is_testable else math.nan
        low, high = self.value - self.too_high - half, self.value + self.too_low + half
        if self.bounded is not None and not math.isnan(half):
            below, above = self.bounded.ends()
            low = self._beyond(low, below, lambda limit: self._p_above(limit) - tail)
            high = self._beyond(high, above, lambda limit: self._p_below(limit) - tail)
            if not self.is_constant:
                least, most = self.bounded.skewed_limits(tail)
                low, high = min(low, least), max(high, most)
        return Estimate(
            value=self.value,
            low=low,
            high=high,
            n=self.num_prompts or self.num_seeds,
            method=self.method,
            level=level,
        )

    @property
    def method(self) -> str:
        """How the interval was found, for the foot of a table."""
        if math.isnan(self.value):
            return "not defined"
        if 0 < self.num_prompts < MIN_CLUSTERS:
            return f"too few {self.unit} ({self.num_prompts})"
        if self.is_constant and not self.is_blind:
            same = f"the same in {self.num_seeds} seed{'s' * (self.num_seeds > 1)}"
            return f"no prompt of {self.num_prompts} differs" if self.num_prompts else same
        seeds = f"{self.num_seeds} seed{'s' * (self.num_seeds > 1)}"
        of_others = ", noise of all arms" * self.is_pooled or ", noise as of other arms" * self.is_borrowed
        over = [f"{seeds}{of_others}"] if self.seeds else []
        over += [f"{self.num_prompts} {self.unit}"] if self.num_prompts else []
        if self.is_blind:
            return "one seed: nothing to tell its noise by"
        if not over:
            return "exact"
        left_out = ", noise over seeds not known" * self.single_seeds + ", over rows not known" * self.rows_unknown
        return f"t interval over {' and '.join(over)}{left_out}"

    def half_width(self, tail: float) -> float:
        """Return the half-width of the interval that leaves `tail` on each side.

        Where nothing varied it is the distance whose `p_of_constant` is `tail`; NaN if that is not known.
        """
        if not self.is_constant:
            return half_width(self.parts, tail)
        if not self.num_prompts or not 0 < self.reach < math.inf:
            return math.nan
        return float(self.reach * (1 - tail ** (1 / (self.num_alike or self.num_prompts))))

    def _p(self, ahead: float) -> float:
        if not self.is_testable:
            return math.nan
        if not self.variance > 0:
            return self.p_of_constant if ahead > 0 else 1.0
        return p_value(self.parts, ahead)


def half_width(parts: Sequence[Part], tail: float) -> float:
    """Return √Σ t²·variance with t the quantiles of the parts' degrees of freedom that leave `tail` above them."""
    return math.sqrt(sum(float(stdtrit(part.freedom, tail)) ** 2 * part.variance for part in parts))


def p_value(parts: Sequence[Part], ahead: float) -> float:
    """Return the least tail whose half-width does not reach `ahead`: the one-sided p-value of a value at most 0."""
    known = [part for part in parts if part.variance > 0]
    if not known:
        return 0.0 if ahead > 0 else 1.0
    if ahead <= 0:
        return 1 - p_value(parts, -ahead) if ahead < 0 else 0.5
    if len(known) == 1:
        return float(stdtr(known[0].freedom, -ahead / math.sqrt(known[0].variance)))
    if half_width(known, _LEAST_P) <= ahead:
        return _LEAST_P
    found = brentq(lambda logarithm: half_width(known, math.exp(logarithm)) - ahead, math.log(_LEAST_P), math.log(0.5))
    return float(math.exp(found))


def combined(parts: Sequence[tuple[Observed, float]], value: float, *, reach: float = math.inf) -> Crossed:
    """Return `value`, an expression of the means of several numbers with these derivatives, and its variance.

    `reach` is that of `Crossed`. Seeds may show no variance at all by chance, where their values are few and discrete.
    B then is the variance over prompts of the mean over seeds.

    Numbers of the same seeds are paired by seed, all numbers by prompt. Arms that share some of their seeds are paired
    in these, with the degrees of freedom of the one with the fewest.
    """
    moving = [(one, weight) for one, weight in parts if weight and one.varies != "never"]
    groups = _linked([one.seeds for one, _ in moving])
    seeds = tuple(part for group in groups if (part := _over_seeds([moving[number] for number in group])) is not None)
    of_prompts = [(one, weight) for one, weight in moving if one.influence_SC is not None]
    shared, together, num_prompts = over_prompts(of_prompts)
    if not sum(part.variance for part in seeds) > 0:
        shared = together
    of_rows = [(one, weight) for one, weight in moving if one.has_row_error]
    rows = min((one.num_rows or _ENDLESS for one, _ in of_rows), default=0)
    num_prompts = min(num_prompts or rows, rows) if rows else num_prompts
    known = bool(of_prompts or of_rows)
    return Crossed(
        value=value,
        seeds=seeds,
        prompts=Part(variance=shared + _over_rows(of_rows), freedom=max(num_prompts - 1, 1)) if known else None,
        within=max(together - shared, 0.0) if seeds else 0.0,
        num_seeds=min((len(one.seeds) for one, _ in parts), default=0),
        num_prompts=num_prompts,
        unit="prompts" if of_prompts or not of_rows else "rows",
        too_high=sum(max(weight, 0.0) * one.excess for one, weight in parts),
        too_low=sum(max(-weight, 0.0) * one.excess for one, weight in parts),
        single_seeds=any(len(one.seeds) == 1 for one, _ in moving),
        is_blind=any(len(one.seeds) == 1 and one.influence_SC is None and not one.has_row_error for one, _ in moving),
        rows_unknown=any(one.row_error is not None and math.isnan(one.row_error) for one, _ in moving),
        reach=reach,
        num_alike=min((one.num_alike for one, _ in of_prompts if one.outcome_SC is not None), default=0.0),
    )


def _over_rows(parts: Sequence[tuple[Observed, float]]) -> float:
    """Return the variance from rows whose influences are not known.

    Two numbers may have the same rows. Errors that add up are taken to be wholly correlated, those that would cancel
    each other to be independent.
    """
    errors = [(weight, one.row_error or 0.0) for one, weight in parts]
    rising, falling = (sum(max(sign * weight, 0.0) * error for weight, error in errors) for sign in (1, -1))
    return rising**2 + falling**2


def _linked(seeds: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Return the numbers of the arms in groups: arms that share a seed, directly or through others, are in one."""
    groups: list[tuple[set[int], list[int]]] = []
    for number, own in enumerate(seeds):
        touched = [group for group in groups if group[0] & set(own)]
        merged = (set(own).union(*(names for names, _ in touched)), [n for _, members in touched for n in members])
        groups = [group for group in groups if group not in touched]
        groups.append((merged[0], [*merged[1], number]))
    return [members for _, members in groups]


def _over_seeds(parts: Sequence[tuple[Observed, float]]) -> Part | None:
    """Return A of arms with linked seeds; None if no arm has two seeds."""
    moved: dict[int, float] = {}
    several = [(one, weight) for one, weight in parts if len(one.seeds) > 1]
    if not several:
        return None
    for one, weight in several:
        for seed, away in zip(one.seeds, (one.by_seed_S - one.mean).tolist(), strict=True):
            moved[seed] = moved.get(seed, 0.0) + weight * away / len(one.seeds)
    fewest = min(len(one.seeds) for one, _ in several)
    largest = max(abs(weight) * float(np.abs(one.by_seed_S).max()) for one, weight in several)
    squares = sum(away * away for away in moved.values())
    # What rounding leaves of equal values is not noise.
    squares = 0.0 if squares <= (_ROUNDING * largest) ** 2 else squares
    return Part(variance=squares * fewest / (fewest - 1), freedom=fewest - 1)


def over_prompts(parts: Sequence[tuple[Observed, float]]) -> tuple[float, float, int]:
    """Return B, the variance over prompts of the mean over seeds (B + σ²_SP/(kC)), and the number of prompts.

    For two numbers with k and l seeds, b of which are the same, B takes the mean over the kl − b pairs of different
    seeds. Where the only pair is of the same seed, B takes that one.
    """
    alike = all(one.clusters == parts[0][0].clusters for one, _ in parts)
    every = parts[0][0].clusters if parts and alike else dict.fromkeys(n for one, _ in parts for n in one.clusters)
    count = len(every)
    if count < 2:
        return 0.0, 0.0, count
    place = {} if alike else {name: number for number, name in enumerate(every)}
    placed = []
    for one, weight in parts:
        assert one.influence_SC is not None
        whole_SC = one.influence_SC
        if not alike:
            whole_SC = np.zeros((len(one.seeds), count))
            whole_SC[:, [place[name] for name in one.clusters]] = one.influence_SC
        placed.append((dict(zip(one.seeds, weight * whole_SC, strict=True)), weight * whole_SC.sum(axis=0)))
    mean_C = sum((whole_C / len(own) for own, whole_C in placed), np.zeros(count))
    largest = sum(float(np.abs(whole_C).max(initial=0.0)) / len(own) for own, whole_C in placed)
    if float(np.abs(mean_C).max()) <= _ROUNDING * largest:
        # What rounding leaves of influences that cancel each other is not noise.
        return 0.0, 0.0, count
    shared, together = 0.0, float(mean_C @ mean_C)
    for number, (first, first_C) in enumerate(placed):
        for other_number, (second, second_C) in enumerate(placed[: number + 1]):
            times = 1 if number == other_number else 2
            same = first.keys() & second.keys()
            all_pairs, pairs = float(first_C @ second_C), len(first) * len(second)
            of_same = float(sum(first[seed] @ second[seed] for seed in same))
            different = pairs - len(same)
            shared += times * ((all_pairs - of_same) / different if different else all_pairs / pairs)
    scale = count / (count - 1)
    # Both are sums over all pairs; each mean over seeds divides them by k·l, which `pairs` did.
    return max(shared, 0.0) * scale, max(together, 0.0) * scale, count
