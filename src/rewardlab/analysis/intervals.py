"""Formulas of intervals for shares and means over prompts, from arrays [data sets, prompts] to arrays [data sets].

Many data sets at once, because the simulations that check the coverage of these formulas evaluate thousands.

Legend: D data sets, C clusters (prompts), M rows in all. Cluster c has `sizes` m_c rows, which sum to s_c (`sums`) and
whose squares sum to `squares`. The estimate is the ratio p = Σ s_c / Σ m_c with residuals e_c = s_c − p·m_c. Its
variance is estimated twice:

    by rows alike   assumes that any two rows of a prompt have the same correlation ρ (analysis of variance: Donner
                    1986), so that the variance of s_c is σ²·S_c with S_c = m_c (1 + (m_c − 1)ρ). This estimate is
                    much more stable where a few prompts hold most rows.
    by residuals    Σ e_c² / (1 − m_c/M) / M² (Cochran 1977, chapter 6; the divisor: Bell & McCaffrey 2002). This
                    estimate needs no such assumption.

The larger of the two is used. Where every prompt has one row, both are the usual s²/n, and nothing here differs from
the textbook. Which formula is used for what was decided by simulation (benchmarks/coverage.py;
docs/design/intervals.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtr, stdtrit

FloatArray = npt.NDArray[np.float64]

PRIOR_PROMPTS = 0.3
"""For a share: the part of a prompt of average size, all of whose rows are right or all wrong, that is added to the
data when ρ is estimated.

With few failures the estimate of ρ is often 0 by chance, and the interval too narrow. With 0.3, intervals of a share of
0.97 cover the truth in more than 93 % of simulations, and the effect vanishes as C grows."""
_TINY = 1e-300
"""Lowest divisor, which replaces 0."""


class Limits(NamedTuple):
    """An estimate and its limits, arrays of one shape."""

    value: FloatArray
    low: FloatArray
    high: FloatArray


def unit_of(values: FloatArray) -> float:
    """Return the power of 2 at or below the size of the largest value; 1 if all are 0.

    Divided by it, values keep their digits, and squares of them neither overflow nor all vanish.
    """
    return math.ldexp(1.0, math.frexp(float(np.abs(values).max(initial=0.0)) or 1.0)[1] - 1)


def root_mean_square(values: FloatArray) -> float:
    """Return √(mean of squares) of values of any size; 0 if all are 0 or there are none."""
    unit = unit_of(values)
    return unit * math.sqrt(float(np.square(values / unit).mean())) if values.size else 0.0


def wilson_limits(share: FloatArray, n: FloatArray, *, level: float) -> Limits:
    """Return Wilson's interval of a share of n independent 0/1 outcomes; n need not be a whole number.

    Centre (p + z²/2n) / (1 + z²/n), half width z/(1 + z²/n) · √(p(1 − p)/n + z²/4n²); it lies inside [0, 1] and is
    never empty. Source: Wilson (1927), JASA 22, 209-212.
    """
    z = ndtri((1 + level) / 2)
    shrink = z * z / n
    centre = (share + shrink / 2) / (1 + shrink)
    half_width = z / (1 + shrink) * np.sqrt(share * (1 - share) / n + shrink / (4 * n))
    # At p = 0 or 1 the limits are exactly 0 or 1; rounding must not carry them past it, or past the value.
    low = np.minimum(np.maximum(centre - half_width, 0.0), share)
    high = np.maximum(np.minimum(centre + half_width, 1.0), share)
    return Limits(share, low, high)


def share_limits(
    sums: FloatArray,
    squares: FloatArray,
    sizes: FloatArray,
    *,
    level: float,
    freedom: float | None = None,
    most: float = math.inf,
) -> Limits:
    """Return an interval of a share of outcomes in [0, 1]: Wilson's, for the effective number of independent outcomes.

    The effective number is n = p(1 − p) / (variance of p). Ties and soft outcomes vary less than wins and losses, so it
    is larger than their number. Rows of one prompt are correlated, so it is smaller: n is then M over the design effect
    (Kish 1965). Source of the idea: Korn & Graubard (1998), Survey Methodology 24, 193-201; compared with its rivals by
    Franco, Little, Louis & Slud (2019), J. Survey Statistics and Methodology 7, 334-364; with ρ in the design effect by
    Saha, Miller & Wang (2016), Int. J. Biostatistics 12(2). Two details are ours: `PRIOR_PROMPTS`, and one more prompt
    that varies like wins and losses.

    With `freedom`, Student's quantile with so many degrees of freedom takes the place of the normal one, for a share
    whose variance is known from few outcomes only, however many there are in all. The effective number is at most
    `most`.
    """
    number = np.minimum(effective_number(sums, squares, sizes), most)
    if freedom is not None:
        # Wilson's formula depends on z²/n and on z²p(1 − p)/n only.
        number = number * float(ndtri((1 + level) / 2) / stdtrit(freedom, (1 + level) / 2)) ** 2
    return wilson_limits(sums.sum(-1) / sizes.sum(-1), number, level=level)


def effective_number(sums: FloatArray, squares: FloatArray, sizes: FloatArray) -> FloatArray:
    """Return [D] how many independent 0/1 outcomes would know the share as well (see `share_limits`)."""
    own = _Clusters.of(sums, squares, sizes)
    plain = own.value * (1 - own.value)
    row = np.maximum(squares.sum(-1) / own.total - np.square(own.value), 0.0)
    # One prompt that varies like wins and losses is added. Without it, outcomes that do not vary (all ties) would be
    # worth infinitely many outcomes and have an interval of width 0.
    row = (own.count * row + plain) / (own.count + 1)
    alike = np.clip(own.correlation(prior=PRIOR_PROMPTS * own.typical_size / 4), 0.0, 1.0)
    effect = own.spread(alike).sum(-1) / own.total
    by_rows_alike = row * effect / own.total
    # With one row a prompt, the estimate by residuals has a factor N/(N − 1) that Wilson's interval does not have.
    # Plain outcomes must give exactly Wilson's interval, so it is left out there.
    single = (sizes == 1).all(-1)
    variance = np.where(single, by_rows_alike, np.maximum(by_rows_alike, own.by_residuals()))
    # A share that is 0 or 1 but for the rounding of a sum of shares is known as one that is.
    number: FloatArray = np.where(plain > 1e-12, plain / np.maximum(variance, _TINY), own.total / effect)
    return number


def weighted_number(
    sums: FloatArray, squares: FloatArray, sizes: FloatArray, weights: FloatArray, squared_weights: FloatArray
) -> FloatArray:
    """Return [D] how many independent outcomes of equal weight would know a weighted share as well, if outcomes of all
    weights vary alike.

    `weights` [D, C] are the sums of the weights of the outcomes of a prompt, `squared_weights` those of their squares;
    the other columns are of the outcomes without weights. By what they show, outcomes of large weight may vary less:
    few of them may be all right by chance.
    """
    own = _Clusters.of(sums, squares, sizes)
    alike = np.clip(own.correlation(prior=PRIOR_PROMPTS * own.typical_size / 4), 0.0, 1.0)[:, None]
    number: FloatArray = np.square(weights.sum(-1)) / ((1 - alike) * squared_weights + alike * np.square(weights)).sum(
        -1
    )
    # Ties vary less, as in `effective_number`.
    plain, mean_square = own.value * (1 - own.value), squares.sum(-1) / own.total
    row = (own.count * np.maximum(mean_square - np.square(own.value), 0.0) + plain) / (own.count + 1)
    found: FloatArray = np.where(plain > 1e-12, number * plain / np.maximum(row, _TINY), number)
    return found


def loss_limits(sums: FloatArray, squares: FloatArray, sizes: FloatArray, *, level: float, tail: float = 0.0) -> Limits:
    """Return an interval of the mean of values with a long tail on one side, such as losses, by Hall's transformation.

    Student's interval lies below the true mean of such values too often: at 10 to 40 rows in a tenth to a fifth of all
    cases. Source: Hall (1992), J. Royal Statistical Society B 54, 221-228 (his cubic), with t quantiles and the
    adjusted skewness.

    Few rows may hold none of a long tail. With `tail`, the upper limit takes the skewness of the estimate to be at
    least so many times its coefficient of variation (twice that is the skewness of gamma distributed losses), up to
    the skewness beyond which Hall's limit would fall again.
    """
    own, quantile = _moments(sums, squares, sizes), _student(sizes, level)
    found = _skewed(own, own.error, quantile=quantile)
    if not tail:
        return found
    least = np.minimum(tail * own.error / np.maximum(own.value, _TINY), _largest_skewness(quantile))
    longer = _skewed(own._replace(skewness=np.maximum(own.skewness, least)), own.error, quantile=quantile)
    return Limits(found.value, found.low, np.maximum(found.high, longer.high))


def p_above_skewed(values: FloatArray, limit: float) -> float:
    """Return the one-sided p-value of the mean of values [C], one a prompt, being at most `limit`: the tail at which
    the lower limit of `loss_limits` is `limit`."""
    own = _moments(values[None], np.square(values)[None], np.ones((1, values.size)))
    value, error, skewness = (float(part[0]) for part in (own.value, own.error, own.skewness))
    if error <= 0:
        return 0.5 if value == limit else float(value < limit)
    t = (value - limit) / error
    return float(stdtr(values.size - 1, -(t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6)))


def mean_limits(sums: FloatArray, squares: FloatArray, sizes: FloatArray, *, level: float) -> Limits:
    """Return an interval of the mean of values of any shape: on each side, the wider limit of Student's and Hall's.

    Hall's alone is too narrow for symmetric values with heavy tails, whose sample skewness is noise. Student's alone is
    too narrow for skewed values.
    """
    own, quantile = _moments(sums, squares, sizes), _student(sizes, level)
    skewed, reach = _skewed(own, own.error_by_residuals, quantile=quantile), quantile * own.error
    return Limits(own.value, np.minimum(own.value - reach, skewed.low), np.maximum(own.value + reach, skewed.high))


def student_limits(sums: FloatArray, squares: FloatArray, sizes: FloatArray, *, level: float) -> Limits:
    """Return Student's interval of a mean, with the larger of the two variances and C − 1 degrees of freedom."""
    own, quantile = _moments(sums, squares, sizes), _student(sizes, level)
    return Limits(own.value, own.value - quantile * own.error, own.value + quantile * own.error)


class _Moments(NamedTuple):
    """Moments of the estimate p, arrays [D]."""

    value: FloatArray
    error: FloatArray
    """Standard error by the larger of the two variances."""
    error_by_residuals: FloatArray
    skewness: FloatArray
    """γ, the skewness of p."""


def _moments(sums: FloatArray, squares: FloatArray, sizes: FloatArray) -> _Moments:
    # One row a prompt is the usual case. The general code below gives the same numbers in more steps.
    if (sizes == 1).all():
        count = sizes.shape[-1]
        value = sums.mean(-1)
        residuals = sums - value[:, None]
        error = np.sqrt(np.square(residuals).sum(-1) / (count * (count - 1)))
        return _Moments(value, error, error, adjusted_skewness(residuals) / np.sqrt(count))
    own = _Clusters.of(sums, squares, sizes)
    alike, variance = own.by_rows_alike()
    by_residuals, spread = own.by_residuals(), own.spread(alike)
    # Standardised residuals are assumed to have one distribution for all prompts. A prompt then contributes to the
    # third moment of p in proportion to S_c^1.5.
    skewness = adjusted_skewness(own.residuals / np.sqrt(spread * (1 - own.part)))
    skewness = skewness * (spread**1.5).sum(-1) / spread.sum(-1) ** 1.5
    return _Moments(own.value, np.sqrt(np.maximum(variance, by_residuals)), np.sqrt(by_residuals), skewness)


def adjusted_skewness(residuals: FloatArray) -> FloatArray:
    """Return [D] adjusted skewness (Joanes & Gill 1998, G₁ without its centring) of residuals [D, C]; 0 if all are
    0."""
    count, largest = residuals.shape[-1], np.abs(residuals).max(-1)
    # Scaled by the largest, so that the third power of small residuals does not underflow in float64.
    scaled = residuals / np.where(largest > 0, largest, 1.0)[:, None]
    square = np.maximum(np.square(scaled).mean(-1), 0.5 / count)
    skewness: FloatArray = (scaled**3).mean(-1) / square**1.5 * (np.sqrt(count * (count - 1)) / (count - 2))
    return skewness


def _skewed(own: _Moments, error: FloatArray, *, quantile: float) -> Limits:
    """Return Hall's limits, from the quantiles of Student's distribution: f(T) = T + γT²/3 + γ²T³/27 + γ/6 has it
    approximately where T = (p − μ)/error has skewness γ.
    """
    low, high = (own.value - error * hall_inverse(y, own.skewness) for y in (quantile, -quantile))
    return Limits(own.value, low, high)


def hall_inverse(y: float, skewness: FloatArray) -> FloatArray:
    """Return the T with f(T) = y, where f is Hall's transformation for an estimate of this skewness (`_skewed`)."""
    moved = y - skewness / 6
    root = np.cbrt(1 + skewness * moved)
    # 3 (root − 1)/γ, without the division by a γ that may be 0: root³ − 1 = γ · moved = (root − 1)(root² + root + 1).
    found: FloatArray = 3 * moved / (np.square(root) + root + 1)
    return found


def _largest_skewness(quantile: float) -> float:
    """Return the skewness at which Hall's upper limit for this quantile is furthest from the estimate."""
    grid = np.linspace(0.0, 1.0, 1001)
    return float(grid[np.argmin(hall_inverse(-quantile, grid))])


def _student(sizes: FloatArray, level: float) -> float:
    """Return the quantile of Student's distribution with C − 1 degrees of freedom for a two-sided interval."""
    return float(stdtrit(sizes.shape[-1] - 1, (1 + level) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clusters:
    """Quantities that the formulas share: [D, C] where there is one for each prompt, otherwise [D]."""

    sizes: FloatArray
    """[D, C] m_c, the rows of each prompt."""
    residuals: FloatArray
    """[D, C] e_c."""
    part: FloatArray
    """[D, C] m_c / M."""
    total: FloatArray
    """[D] M."""
    value: FloatArray
    """[D] p."""
    typical_size: FloatArray
    """[D] Donner's n₀: the mean size of a prompt, reduced where sizes differ."""
    between: FloatArray
    """[D] sum of squares between prompts."""
    within: FloatArray
    """[D] sum of squares within prompts."""

    @classmethod
    def of(cls, sums: FloatArray, squares: FloatArray, sizes: FloatArray) -> _Clusters:
        """Return the quantities from [D, C] sums, sums of squares and numbers of rows of the prompts."""
        total = sizes.sum(-1)
        value = sums.sum(-1) / total
        residuals = sums - value[:, None] * sizes
        return cls(
            sizes=sizes,
            residuals=residuals,
            part=sizes / total[:, None],
            total=total,
            value=value,
            typical_size=(total - np.square(sizes).sum(-1) / total) / (sizes.shape[-1] - 1),
            between=(np.square(residuals) / sizes).sum(-1),
            within=np.maximum((squares - np.square(sums) / sizes).sum(-1), 0.0),
        )

    @property
    def count(self) -> int:
        """C."""
        return int(self.sizes.shape[-1])

    def mean_squares(self, prior: FloatArray | float = 0.0) -> tuple[FloatArray, FloatArray]:
        """Return [D] mean squares between prompts, with `prior` added to their sum of squares, and [D] within
        prompts."""
        return (self.between + prior) / (self.count - 1), self.within / np.maximum(self.total - self.count, 1)

    def correlation(self, prior: FloatArray | float = 0.0) -> FloatArray:
        """Return [D] ρ, the correlation of two rows of a prompt by analysis of variance; 1 where all rows are equal."""
        between, within = self.mean_squares(prior)
        scale = between + (self.typical_size - 1) * within
        return np.where(scale > 0, (between - within) / np.maximum(scale, _TINY), 1.0)

    def spread(self, alike: FloatArray) -> FloatArray:
        """Return [D, C] S_c, from ρ [D]."""
        spread: FloatArray = self.sizes * (1 + (self.sizes - 1) * alike[:, None])
        return spread

    def by_residuals(self) -> FloatArray:
        """Return [D] the variance of p by residuals."""
        variance: FloatArray = (np.square(self.residuals) / (1 - self.part)).sum(-1) / np.square(self.total)
        return variance

    def by_rows_alike(self) -> tuple[FloatArray, FloatArray]:
        """Return [D] ρ, no lower than the largest prompt allows, and [D] the variance of p by rows alike."""
        correlation = self.correlation()
        # At −1/(m − 1) the sum of a prompt of m rows would not vary at all. 0.9 of that keeps its variance above 0.
        lowest = -0.9 / np.maximum(self.sizes.max(-1) - 1, 1)
        alike = np.clip(correlation, lowest, 1.0)
        between, within = self.mean_squares()
        row = within + (between - within) / self.typical_size
        # Where ρ was clipped, the analysis of variance does not hold, and the plain variance of the rows is used.
        row = np.where(correlation > lowest, row, (self.between + self.within) / (self.total - 1))
        return alike, row * self.spread(alike).sum(-1) / np.square(self.total)
