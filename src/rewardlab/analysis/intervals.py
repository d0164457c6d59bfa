"""Formulas of intervals for shares and means over prompts, on arrays: [data sets, prompts] to [data sets].

Legend: D data sets, C clusters (prompts), M rows in all. Cluster c has `sizes` m_c rows, which sum to s_c (`sums`) and
whose squares sum to `squares`. The estimate is the ratio p = Σ s_c / Σ m_c with residuals e_c = s_c − p·m_c. Its
variance is found twice:

    by rows alike   rows of a prompt have one correlation ρ (analysis of variance: Donner 1986), so that the variance of
                    s_c is σ²·S_c with S_c = m_c (1 + (m_c − 1)ρ): much steadier where a few prompts hold most rows
    by residuals    Σ e_c² / (1 − m_c/M) / M² (Cochran 1977, chapter 6; the divisor: Bell & McCaffrey 2002), which
                    asks for no such thing

The larger one counts. Where every prompt has one row, both are the usual s²/n, and nothing here differs from the
textbook. Which formula is used for what was decided by simulation (benchmarks/coverage.py; docs/design/intervals.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

FloatArray = npt.NDArray[np.float64]

PRIOR_PROMPTS = 0.3
"""Of a share: how much of a prompt of average size, wholly right or wrong, is added when ρ is estimated.

With few failures ρ is often found to be 0 by accident; 0.3 keeps coverage at 0.97 above 93 % and disappears with C."""
_TINY = 1e-300
_STRAIGHT = 1e-8  # skewness below which Hall's transformation is the identity to float64


class Limits(NamedTuple):
    """An estimate and its limits, arrays of one shape."""

    value: FloatArray
    low: FloatArray
    high: FloatArray


def wilson_limits(share: FloatArray, n: FloatArray, *, level: float) -> Limits:
    """Wilson's interval of a share of n independent 0/1 outcomes; n need not be whole.

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


def share_limits(sums: FloatArray, squares: FloatArray, sizes: FloatArray, *, level: float) -> Limits:
    """A share of outcomes in [0, 1]: Wilson's interval for as many plain and independent outcomes as these are worth.

    They are worth n = p(1 − p) / (variance of p). Ties and soft outcomes vary less than wins and losses, so they are
    worth more than their number, rows of a prompt less: n is then M over the design effect (Kish 1965). Source of the
    idea: Korn & Graubard (1998), Survey Methodology 24, 193-201; compared with its rivals by Franco, Little, Louis &
    Slud (2019), J. Survey Statistics and Methodology 7, 334-364; with ρ in the design effect by Saha, Miller & Wang
    (2016), Int. J. Biostatistics 12(2). `PRIOR_PROMPTS`, and one prompt that varies like wins and losses, are ours.
    """
    own = _Clusters.of(sums, squares, sizes)
    plain = own.value * (1 - own.value)
    row = np.maximum(squares.sum(-1) / own.total - np.square(own.value), 0.0)
    row = (own.count * row + plain) / (own.count + 1)
    alike = np.clip(own.correlation(prior=PRIOR_PROMPTS * own.typical_size / 4), 0.0, 1.0)
    effect = own.spread(alike).sum(-1) / own.total
    by_rows_alike = row * effect / own.total
    # The residuals of plain outcomes, one a prompt, would add the N/(N − 1) that Wilson's interval does not have.
    single = (sizes == 1).all(-1)
    variance = np.where(single, by_rows_alike, np.maximum(by_rows_alike, own.by_residuals()))
    worth = np.where(plain > 0, plain / np.maximum(variance, _TINY), own.total / effect)
    return wilson_limits(own.value, worth, level=level)


def loss_limits(sums: FloatArray, squares: FloatArray, sizes: FloatArray, *, level: float) -> Limits:
    """The mean of values with a long tail on one side, such as losses: Hall's transformation of the t statistic.

    Student's interval misses such means upwards, at 10 to 40 rows in a tenth to a fifth of all cases. Source: Hall
    (1992), J. Royal Statistical Society B 54, 221-228 (his cubic), with t quantiles and the adjusted skewness.
    """
    own = _moments(sums, squares, sizes)
    return _skewed(own, own.error, quantile=_student(sizes, level))


def mean_limits(sums: FloatArray, squares: FloatArray, sizes: FloatArray, *, level: float) -> Limits:
    """The mean of values of any shape: the wider limit, on each side, of Student's and Hall's interval.

    Hall's alone is too narrow for symmetric values with heavy tails, whose sample skewness is noise; Student's alone is
    too narrow for skewed ones.
    """
    own, quantile = _moments(sums, squares, sizes), _student(sizes, level)
    skewed, reach = _skewed(own, own.error_by_residuals, quantile=quantile), quantile * own.error
    return Limits(own.value, np.minimum(own.value - reach, skewed.low), np.maximum(own.value + reach, skewed.high))


class _Moments(NamedTuple):
    """Of p, arrays [D]."""

    value: FloatArray
    error: FloatArray
    """Standard error, the larger one."""
    error_by_residuals: FloatArray
    skewness: FloatArray
    """γ."""


def _moments(sums: FloatArray, squares: FloatArray, sizes: FloatArray) -> _Moments:
    if (sizes == 1).all():  # the same in fewer steps, since this is the usual case
        count = sizes.shape[-1]
        value = sums.mean(-1)
        residuals = sums - value[:, None]
        error = np.sqrt(np.square(residuals).sum(-1) / (count * (count - 1)))
        return _Moments(value, error, error, _skewness(residuals) / np.sqrt(count))
    own = _Clusters.of(sums, squares, sizes)
    alike, variance = own.by_rows_alike()
    by_residuals, spread = own.by_residuals(), own.spread(alike)
    # All prompts are alike once standardised; what they add to the third moment of p goes by S_c.
    skewness = _skewness(own.residuals / np.sqrt(spread * (1 - own.part)))
    skewness = skewness * (spread**1.5).sum(-1) / spread.sum(-1) ** 1.5
    return _Moments(own.value, np.sqrt(np.maximum(variance, by_residuals)), np.sqrt(by_residuals), skewness)


def _skewness(residuals: FloatArray) -> FloatArray:
    """[D] adjusted skewness (Joanes & Gill 1998, G₁ without its centring) of residuals [D, C]; 0 where all are 0."""
    count, largest = residuals.shape[-1], np.abs(residuals).max(-1)
    scaled = residuals / np.where(largest > 0, largest, 1.0)[:, None]  # so that no power is too small for float64
    square = np.maximum(np.square(scaled).mean(-1), 0.5 / count)
    skewness: FloatArray = (scaled**3).mean(-1) / square**1.5 * (np.sqrt(count * (count - 1)) / (count - 2))
    return skewness


def _skewed(own: _Moments, error: FloatArray, *, quantile: float) -> Limits:
    """Hall's limits: f(T) = T + γT²/3 + γ²T³/27 + γ/6 is Student's where T = (p − μ)/error has skewness γ."""
    low, high = (own.value - error * _inverse(y, own.skewness) for y in (quantile, -quantile))
    return Limits(own.value, low, high)


def _inverse(y: float, skewness: FloatArray) -> FloatArray:
    """The T with f(T) = y."""
    third, moved = skewness / 3, y - skewness / 6
    straight = np.abs(third) < _STRAIGHT
    return np.where(straight, moved, (np.cbrt(1 + 3 * third * moved) - 1) / np.where(straight, 1.0, third))


def _student(sizes: FloatArray, level: float) -> float:
    """Quantile of Student's distribution with C − 1 degrees of freedom."""
    return float(stdtrit(sizes.shape[-1] - 1, (1 + level) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clusters:
    """What the formulas share; arrays [D, C], or [D] where a prompt is not meant."""

    sizes: FloatArray
    residuals: FloatArray
    """e_c."""
    part: FloatArray
    """m_c / M."""
    total: FloatArray
    """M."""
    value: FloatArray
    """p."""
    typical_size: FloatArray
    """Donner's n₀: the size of a prompt, less where sizes differ."""
    between: FloatArray
    """Sum of squares between prompts."""
    within: FloatArray
    """Sum of squares within them."""

    @classmethod
    def of(cls, sums: FloatArray, squares: FloatArray, sizes: FloatArray) -> _Clusters:
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
        """Between prompts, with a sum of squares added, and within."""
        return (self.between + prior) / (self.count - 1), self.within / np.maximum(self.total - self.count, 1)

    def correlation(self, prior: FloatArray | float = 0.0) -> FloatArray:
        """ρ of two rows of a prompt, by analysis of variance; 1 where no rows differ at all."""
        between, within = self.mean_squares(prior)
        scale = between + (self.typical_size - 1) * within
        return np.where(scale > 0, (between - within) / np.maximum(scale, _TINY), 1.0)

    def spread(self, alike: FloatArray) -> FloatArray:
        """S_c."""
        spread: FloatArray = self.sizes * (1 + (self.sizes - 1) * alike[:, None])
        return spread

    def by_residuals(self) -> FloatArray:
        """Variance of p."""
        variance: FloatArray = (np.square(self.residuals) / (1 - self.part)).sum(-1) / np.square(self.total)
        return variance

    def by_rows_alike(self) -> tuple[FloatArray, FloatArray]:
        """ρ, as far below 0 as the largest prompt allows, and the variance of p."""
        found = self.correlation()
        lowest = -0.9 / np.maximum(self.sizes.max(-1) - 1, 1)  # at −1 in its place a sum would not vary at all
        alike = np.clip(found, lowest, 1.0)
        between, within = self.mean_squares()
        row = within + (between - within) / self.typical_size
        row = np.where(found > lowest, row, (self.between + self.within) / (self.total - 1))
        return alike, row * self.spread(alike).sum(-1) / np.square(self.total)
