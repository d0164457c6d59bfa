"""How small a difference the pairs at hand can show, and how likely a test is to show one.

Legend: N comparisons, C prompts, D comparisons on which two models disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.stats import binom, norm
from scipy.stats import t as student

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.signflip import effective_prompts
from rewardlab.core.types import Estimate

POWER: Final = 0.80
ALPHA: Final = 0.05
_HALVINGS: Final = 40
_UNLIKELY: Final = 1e-12


def mcnemar_power(difference: float, *, disagreeing: float, num_pairs: int, alpha: float = ALPHA) -> float:
    """Return the power of the exact two-sided McNemar test, which is the sign-flip test of independent 0/1 rows.

    `difference` is the true difference of two accuracies and `disagreeing` the share of pairs that exactly one of the
    models ranks right, at least |difference|. The number D of such pairs is binomial; given D, so is the number that
    one model wins. Source: Miettinen (1968), Biometrics 24, 339-352, without his normal approximations.
    """
    assert 0 < disagreeing <= 1
    assert abs(difference) <= disagreeing * (1 + 1e-12)
    low, high = binom.ppf([_UNLIKELY, 1 - _UNLIKELY], num_pairs, disagreeing)
    number_D = np.arange(int(low), int(high) + 1)
    # The largest count that is still significant on the low side; -1 where none is.
    limit_D = binom.ppf(alpha / 2, number_D, 0.5)
    limit_D = np.where(2 * binom.cdf(limit_D, number_D, 0.5) > alpha * (1 + 1e-12), limit_D - 1, limit_D)
    won = min(max((1 + abs(difference) / disagreeing) / 2, 0.0), 1.0)
    significant_D = binom.cdf(limit_D, number_D, won) + binom.sf(number_D - limit_D - 1, number_D, won)
    return float(binom.pmf(number_D, num_pairs, disagreeing) @ significant_D)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What the power of the sign-flip test by prompt depends on, from totals T_c of prompts of m_c comparisons."""

    variance: float
    """Σ T_c²/N² where the true difference is 0: the variance of the mean difference under random signs."""
    growth: float
    """Σ m_c(m_c − 1)/N²: at a true difference δ the variance under random signs is larger by δ² times this."""
    num_pairs: int
    """N."""
    num_moving: float
    """(Σ T_c²)² / Σ T_c⁴: the number of equal prompts that would move the sum as much. Prompts without a difference,
    and small ones beside a large one, hardly take part in the test."""


def clustered_power(difference: float, noise: Noise, *, alpha: float = ALPHA) -> float:
    """Return the approximate power of the sign-flip test by prompt for a true `difference` of means.

    The squares of single changes, which say how often the models disagree, do not depend on the difference δ. So
    E T_c² grows by m_c(m_c − 1)δ² and the variance of T_c shrinks by m_cδ². The mean is taken as normal, and the test
    as Student's on totals of `num_moving` prompts: for the sum over the root of ΣT_c², the statistic of the sign
    flips, the quantile t becomes t·√(k/(k − 1 + t²)) with k prompts.
    """
    k = max(noise.num_moving, 2.0)
    t = float(student.ppf(1 - alpha / 2, k - 1))
    needed = t * math.sqrt(k / (k - 1 + t * t) * (noise.variance + noise.growth * difference**2))
    left = noise.variance - difference**2 / noise.num_pairs
    if left <= 0:
        return float(abs(difference) >= needed)
    error = math.sqrt(left)
    return float(norm.sf((needed - abs(difference)) / error) + norm.cdf((-needed - abs(difference)) / error))


def smallest_difference(
    changes_N: FloatArray, clusters: tuple[str, ...], *, power: float = POWER, alpha: float = ALPHA
) -> Estimate:
    """Return the smallest true difference that these comparisons show with this power, if the models disagree as often
    as they did.

    `changes_N` are the paired differences. The limits are the smallest differences at the limits of the share of
    disagreements, so they say how far that share is known. The value is NaN if the models disagree so seldom that no
    difference is shown often enough; there is no interval below ten prompts.
    """
    repeated = stats.has_repeats(clusters)
    size = np.abs(changes_N)
    if not repeated and np.isin(size, (0.0, 1.0)).all():
        share = stats.wilson(float(size.sum()), len(size))

        def exact(disagreeing: float) -> float:
            return _smallest(
                lambda difference: mcnemar_power(difference, disagreeing=disagreeing, num_pairs=len(size), alpha=alpha),
                most=disagreeing,
                power=power,
            )

        return _at_limits(exact, share, method=f"{power:.0%} power, exact, at the disagreement seen")
    totals_C, sizes_C = stats.cluster_totals(np.stack([changes_N, np.ones_like(changes_N)], axis=1), clusters).T
    growth = float((sizes_C * (sizes_C - 1)).sum()) / len(size) ** 2
    squares_C = np.square(totals_C) / len(size) ** 2
    moving = effective_prompts(totals_C)
    # The difference that was seen is part of the squares, and is taken out.
    seen = growth * float(changes_N.mean()) ** 2

    def approximate(variance: float) -> float:
        noise = Noise(variance=max(variance - seen, 0.0), growth=growth, num_pairs=len(size), num_moving=moving)
        return _smallest(
            lambda difference: clustered_power(difference, noise, alpha=alpha),
            most=math.sqrt(noise.variance * len(size)),
            power=power,
        )

    known = stats.mean_loss(squares_C * len(squares_C))
    return _at_limits(approximate, known, method=f"{power:.0%} power, approximate, at the disagreement seen")


def _smallest(power_of: Callable[[float], float], *, most: float, power: float) -> float:
    """Return the smallest difference up to `most` with this power by halving; NaN if `most` has less."""
    if most <= 0 or power_of(most) < power:
        return math.nan
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if power_of(middle) >= power else (middle, high)
        if high - low < 1e-6 * most:
            break
    return high


def _at_limits(smallest: Callable[[float], float], noise: Estimate, *, method: str) -> Estimate:
    """Return the smallest difference at the estimated noise, with those at its limits as limits."""
    value = smallest(noise.value) if noise.value > 0 else math.nan
    if math.isnan(value) or math.isnan(noise.low):
        return stats.without_interval(value, noise.n, method=method)
    low, high = (smallest(limit) if limit > 0 else math.nan for limit in (noise.low, noise.high))
    # At a lower limit with hardly any disagreement nothing can be shown; the value itself is then the lower limit.
    return Estimate(value=value, low=value if math.isnan(low) else min(low, value), high=high, n=noise.n, method=method)
