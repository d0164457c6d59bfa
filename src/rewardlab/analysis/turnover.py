"""Where a curve over n is highest, and whether it falls after that, with an error bar for both.

The size n* at which the mean curve is largest is chosen by the data, so neither it nor the fall that follows it has an
interval from a textbook formula for means. Both are found by turning a test around. For a size n, the hypothesis is
that no other size has a larger mean, μ(m) − μ(n) ≤ 0 for all m; the statistic is the largest of the t statistics of
the differences, paired by prompt. Sizes for which the hypothesis is not rejected at 5 % are the set in which n* lies
with 95 % certainty (multiple comparisons with the best: Hsu 1984, Annals of Statistics 12, 1136-1144; by the largest
t statistic: White 2000, Econometrica 68, 1097-1126). A curve turns over if its last size is not among them.

Two tests are made, and the larger p-value is taken. Prompts are drawn with replacement, and the t statistic is
computed again from each draw (the bootstrap t: Efron & Tibshirani 1993, chapter 12), which allows for skewness; signs
are flipped by prompt (see signflip.py), which is exact for symmetric differences however few prompts there are. How
often the verdicts are right is in docs/gold-curve.md.

Legend: P rows, C prompts, N sizes, M differences, R draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray, mean_limits
from rewardlab.core.types import Estimate

ALPHA: Final = 0.05
DRAWS: Final = 1_999
"""Draws and flips; with what was seen they are 2,000."""
_CHUNK_VALUES: Final = 4_000_000
_ROUNDING: Final = 1e-9
_EQUAL: Final = 1e-12

Verdict = Literal["turns over", "no turn-over", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOver:
    """Where a curve is highest, and what comes after."""

    peak: Estimate
    """The size with the largest mean; its limits are the smallest and the largest size that it may be at 95 %."""
    may_be: tuple[int, ...]
    """All sizes that may be the highest."""
    fall: Estimate
    """How far the mean at the last size lies below the largest. Each limit holds at 95 %, so it is an interval of 90 %
    (as in a test of equivalence). The value is from the size that happened to be highest, so it is a little too
    large."""
    p: float
    """p-value of the hypothesis that no size has a larger mean than the last one; NaN without an interval."""

    @property
    def is_gain_shown(self) -> bool:
        """Whether the first size is shown not to be the best."""
        return bool(self.may_be) and not math.isnan(self.peak.low) and self.peak.low > 1


def by_prompt(values_PN: FloatArray, prompts: Sequence[str]) -> FloatArray:
    """Return [C, N] values, one row a prompt, whose mean and its error are those of the rows, clustered by prompt.

    Where every prompt has one row these are the rows. Elsewhere they are the mean and the residuals of the ratio of
    totals, which has the same variance to first order (Cochran 1977, chapter 6).
    """
    if not stats.has_repeats(prompts):
        return values_PN
    totals = stats.cluster_totals(np.column_stack([values_PN, np.ones(len(values_PN))]), prompts)
    sums_CN, sizes_C1 = totals[:, :-1], totals[:, -1:]
    mean_N = values_PN.mean(0)
    linear: FloatArray = mean_N + (sums_CN - mean_N * sizes_C1) / sizes_C1.mean()
    return linear


def turn_over(values_CN: FloatArray, sizes_N: Sequence[int], *, draws: int = DRAWS, seed: int = 0) -> TurnOver:
    """Return where the mean of `values_CN` over prompts is largest among the sizes, and its fall to the last of them.

    Below ten prompts (`stats.MIN_CLUSTERS`), or five whose values are not the same at all sizes
    (`stats.FEWEST_DIFFERING`), there is no interval and no test.
    """
    count, num = values_CN.shape
    assert num == len(sizes_N) >= 1
    mean_N = values_CN.mean(0)
    best = int(np.argmax(mean_N))
    fall = float(mean_N[best] - mean_N[-1])
    differing = int((np.ptp(values_CN, axis=1) > _EQUAL * np.abs(values_CN).max()).sum())
    if count < stats.MIN_CLUSTERS or (num > 1 and differing < stats.FEWEST_DIFFERING):
        few = stats.too_few(count) if count < stats.MIN_CLUSTERS else stats.too_few_differ(differing)
        return TurnOver(
            peak=_estimate(float(sizes_N[best]), math.nan, math.nan, count, few, 1 - ALPHA),
            may_be=tuple(sizes_N),
            fall=_estimate(fall, math.nan, math.nan, count, few, 1 - 2 * ALPHA),
            p=math.nan,
        )
    tests_N = _tested([_against(values_CN, at) for at in range(num)], draws=draws, seed=seed)
    # Rounding, or chance in the draws, must not shut out the size that is highest itself.
    may_be = [
        n for place, (n, test) in enumerate(zip(sizes_N, tests_N, strict=True)) if test.p > ALPHA or place == best
    ]
    last = tests_N[-1]
    return TurnOver(
        peak=_estimate(
            float(sizes_N[best]),
            float(may_be[0]),
            float(may_be[-1]),
            count,
            "sizes that a test does not rule out, by prompt",
            1 - ALPHA,
        ),
        may_be=tuple(may_be),
        fall=_estimate(
            fall,
            min(last.low if last.p <= ALPHA else 0.0, fall),
            max(_most(values_CN), fall),
            count,
            "largest t statistic, by prompt",
            1 - 2 * ALPHA,
        ),
        p=last.p,
    )


def largest_t(values_CM: FloatArray, *, draws: int = DRAWS, seed: int = 0) -> float:
    """Return the p-value of the hypothesis that no column of values [C, M] has a mean above 0."""
    (test,) = _tested([lambda: values_CM], draws=draws, seed=seed)
    return test.p


@dataclass(frozen=True, slots=True)
class _Test:
    """A test of the hypothesis that no column has a mean above 0."""

    p: float
    low: float
    """Lower limit, at 95 %, of the largest mean; 0 if the hypothesis stands."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was seen of the columns that vary."""

    mean_M: FloatArray
    error_M: FloatArray
    largest: float
    """The largest t statistic."""
    certain: float
    """Largest value of a column that has the same value for every prompt."""

    @classmethod
    def of(cls, values_CM: FloatArray) -> _Seen:
        varies_M = np.ptp(values_CM, axis=0) > 0
        mean_M, count = values_CM.mean(0), len(values_CM)
        error_M = values_CM.std(0, ddof=1) / math.sqrt(count)
        ratio_M = mean_M[varies_M] / error_M[varies_M]
        certain = mean_M[~varies_M].max(initial=-math.inf)
        return cls(mean_M[varies_M], error_M[varies_M], float(ratio_M.max(initial=-math.inf)), float(certain))


Columns = Callable[[], FloatArray]
"""Makes values [C, M]. They are made again for each chunk of draws, so that those of all tests need no memory."""


def _against(values_CN: FloatArray, at: int) -> Columns:
    """Return the differences of all other sizes from that of number `at`."""
    tiny = _EQUAL * float(np.abs(values_CN).max())

    def make() -> FloatArray:
        difference_CM: FloatArray = np.delete(values_CN - values_CN[:, [at]], at, axis=1)
        # Differences that are zero in exact arithmetic are zero here.
        difference_CM[np.abs(difference_CM) <= tiny] = 0.0
        return difference_CM

    return make


def _tested(columns: Sequence[Columns], *, draws: int, seed: int) -> list[_Test]:
    """Return the tests of several sets of columns over the same prompts, with the same draws."""
    seen = [_Seen.of(make()) for make in columns]
    drawn: dict[int, list[tuple[FloatArray, FloatArray]]] = {
        place: [] for place, one in enumerate(seen) if one.largest > 0 >= one.certain
    }
    if drawn:
        count = len(columns[0]())
        for times_RC, plus_RC in _patterns(count, draws, seed):
            for place, parts in drawn.items():
                values_CM = columns[place]()
                values_CM = values_CM[:, np.ptp(values_CM, axis=0) > 0]
                parts.append((_bootstrap(values_CM, times_RC), _flipped(values_CM, plus_RC)))
    # A column with the same value above 0 for every prompt refutes the hypothesis without draws. Where no mean is above
    # 0, nothing speaks against it.
    return [
        _test(one, [np.concatenate(each) for each in zip(*drawn[place], strict=True)], draws)
        if place in drawn
        else _Test(1 / (1 + draws), one.certain)
        if one.certain > 0
        else _Test(1.0, 0.0)
        for place, one in enumerate(seen)
    ]


def _test(seen: _Seen, drawn: Sequence[FloatArray], draws: int) -> _Test:
    """Return the test by the more cautious of the two kinds of draws."""
    reached = seen.largest * (1 - _ROUNDING)
    p = max((1 + int((drawn_R >= reached).sum())) / (1 + draws) for drawn_R in drawn)
    if p > ALPHA:
        return _Test(p, 0.0)
    wanted = max(float(np.quantile(drawn_R, 1 - ALPHA, method="lower")) for drawn_R in drawn)
    return _Test(p, max(float((seen.mean_M - wanted * seen.error_M).max()), 0.0))


def _patterns(count: int, draws: int, seed: int) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield [R, C] how often each prompt is drawn, and [R, C] whether its sign stays, in chunks of draws."""
    generator, chances = np.random.default_rng(seed), np.full(count, 1 / count)
    chunk = max(1, _CHUNK_VALUES // count)
    for start in range(0, draws, chunk):
        size = min(chunk, draws - start)
        times_RC = generator.multinomial(count, chances, size=size).astype(np.float64)
        yield times_RC, generator.integers(0, 2, size=(size, count), dtype=np.int8).astype(np.float64)


def _bootstrap(values_CM: FloatArray, times_RC: FloatArray) -> FloatArray:
    """Return the largest t statistic of each draw with replacement, about the mean that was seen."""
    count = len(values_CM)
    centred_CM = values_CM - values_CM.mean(0)
    squares_CM = np.square(centred_CM)
    moved_RM = times_RC @ centred_CM / count
    variance_RM = (times_RC @ squares_CM / count - np.square(moved_RM)) / (count - 1)
    # A draw of equal values has no error: it is then as far out as can be, on its side.
    has_error = variance_RM > _ROUNDING / count**2 * squares_CM.max(0)
    certain_RM = np.where(moved_RM == 0, 0.0, np.copysign(np.inf, moved_RM))
    ratio_RM = moved_RM / np.sqrt(np.where(has_error, variance_RM, 1.0))
    largest: FloatArray = np.where(has_error, ratio_RM, certain_RM).max(1)
    return largest


def _flipped(values_CM: FloatArray, plus_RC: FloatArray) -> FloatArray:
    """Return the largest t statistic under random signs, one a prompt for all columns."""
    count = len(values_CM)
    scaled_CM = values_CM / np.sqrt(np.square(values_CM).sum(0))
    sums_RM = 2 * (plus_RC @ scaled_CM) - scaled_CM.sum(0)
    share_R = np.clip(sums_RM.max(1) / math.sqrt(count), -1.0, 1.0)
    # The sum over the root of the squares, which flips leave alone, and the t statistic rise together.
    with np.errstate(divide="ignore"):
        found: FloatArray = share_R * math.sqrt(count - 1) / np.sqrt(1 - np.square(share_R))
    return found


def _most(values_CN: FloatArray) -> float:
    """Return the upper limit, at 95 %, of the fall from the largest mean to the last.

    The limit for the size that is truly highest would be enough. Which one that is is not known, so the largest limit
    over all sizes is taken, which needs no draws.
    """
    falls_NC = (values_CN - values_CN[:, [-1]]).T
    return float(mean_limits(falls_NC, np.square(falls_NC), np.ones_like(falls_NC), level=1 - 2 * ALPHA).high.max())


def _estimate(value: float, low: float, high: float, count: int, method: str, level: float) -> Estimate:
    return Estimate(value=value, low=low, high=high, n=count, method=method, level=level)
