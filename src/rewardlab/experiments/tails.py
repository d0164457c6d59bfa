"""How often claims on losses and Brier scores are found, whose values have a long tail.

A lost comparison that a model was sure of costs many times the mean. Few prompts may hold none, or one, so the variance
that they show varies with their mean. The tests of verdicts allow for that: they take the variance that the prompts
would have at the limit (`analysis/bounded.py`), and of losses Hall's transformation too. So their chance to find a
difference is not that of a normal value with a known variance. Here it is found by drawing: values of prompts from a
gamma distribution of the skewness that is expected, and what the tests would say of their mean, variance and skewness.

Legend: R draws, C prompts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from scipy.special import ndtr

from rewardlab.analysis.intervals import FloatArray, adjusted_skewness, hall_inverse

DRAWS: Final = 2_000
MOST_DRAWN: Final = 400
"""Most prompts that are drawn. The mean of more has the skewness of a mean of so many less skewed ones."""
FURTHEST: Final = 0.75
"""How much the furthest value of `bounded` makes the variance grow with the mean, where the prompts that were drawn
hold less of the tail, in parts of the growth that the true third moment gives. Chosen by simulation: with it the
chances of 36 kinds of claims by one seed came nearest (docs/design/verdicts-simulated.md)."""
OF_THREE: Final = 5 / 3
"""Power of the correlation of two comparisons that the third moment of three has; of two it has the first. In
simulated scores that two or three comparisons have partly in common it is 1.5 to 1.9."""
_LEAST: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The third moments of the value of a claim, of which its test knows."""

    within: float
    """Third central moment of what the prompts do to one seed, apart from what they do to all seeds."""
    prompts: float
    """Third central moment of what the prompts do to all seeds."""
    down: float
    """How much the variance over prompts grows, at least, with the mean towards the furthest values below it."""
    up: float
    """The same with the mean towards those above it."""
    is_loss: bool
    """Whether the test allows for skewness, as that of losses does."""
    has_ends: bool = True
    """Whether the variance at the limit is still to be found from the one on the spot."""

    @classmethod
    def seen(cls, third: float, variance: float, *, has_ends: bool) -> Tail:
        """Return the tail of a claim on losses whose mean over seeds has these moments."""
        most = FURTHEST * third / variance if variance > 0 else 0.0
        return cls(within=0.0, prompts=third, down=max(-most, 0.0), up=max(most, 0.0), is_loss=True, has_ends=has_ends)

    @classmethod
    def of_terms(cls, shares: Sequence[float], skewness: float, correlations: tuple[float, float]) -> Tail:
        """Return the tail, by one comparison, of terms of one quantity that vary by `shares` over comparisons.

        `correlations` are those of two seeds of one arm, and of two arms. What they have in common is taken to have as
        much of the third moment as it has of the variance. So the third moment of a difference of two arms is 0.
        """
        of_seeds, of_arms = correlations
        cubes = sum(share**3 for share in shares)
        # A lost comparison moves a loss up, and the claim by the sign of its slope.
        return cls(
            within=skewness * (1 - of_seeds) * cubes,
            prompts=skewness * (of_arms * sum(shares) ** 3 + (of_seeds - of_arms) * cubes),
            down=FURTHEST * skewness * sum(max(-share, 0.0) for share in shares),
            up=FURTHEST * skewness * sum(max(share, 0.0) for share in shares),
            is_loss=False,
        )

    @classmethod
    def sum_of(cls, parts: Sequence[Tail], *, is_loss: bool) -> Tail:
        """Return the tail of a sum."""
        within, prompts, down, up = (
            sum(getattr(part, name) for part in parts) for name in ("within", "prompts", "down", "up")
        )
        return cls(within=within, prompts=prompts, down=down, up=up, is_loss=is_loss)

    def over_prompts(self, count: int, *, each: float, correlation: float) -> Tail:
        """Return the tail of the mean over so many prompts, from that of one comparison."""
        third = third_of_mean(each, correlation)
        growth = third * each / (1 + (each - 1) * correlation) / count
        scale = third / count**2
        return replace(
            self,
            within=self.within * scale,
            prompts=self.prompts * scale,
            down=self.down * growth,
            up=self.up * growth,
        )

    def turned(self) -> Tail:
        """Return the tail of the negative value."""
        return replace(self, within=-self.within, prompts=-self.prompts, down=self.up, up=self.down)

    def skewness(self, variance: float, *, seeds: int, share: float) -> float:
        """Return the skewness of a mean of this variance over so many seeds, and over 1 / `share` times the prompts."""
        third = (self.within / seeds**2 + self.prompts) * share**2
        return third / variance**1.5 if variance > 0 else 0.0


def third_of_mean(each: float, correlation: float) -> float:
    """Return the third moment of a mean over `each` comparisons of a prompt, in parts of that of one."""
    two, three = 3 * (each - 1), max((each - 1) * (each - 2), 0.0)
    return float(1 + two * correlation + three * max(correlation, 0.0) ** OF_THREE) / each**2


class Drawn(NamedTuple):
    """What each draw shows of the mean over prompts, in units of its true standard error."""

    mean_R: FloatArray
    error_R: FloatArray
    skewness_R: FloatArray


@functools.lru_cache(maxsize=256)
def drawn(prompts: int, skewness: float) -> Drawn:
    """Return draws of the mean over `prompts` values, the skewness of which mean is `skewness`."""
    count = min(prompts, MOST_DRAWN)
    size = max(abs(skewness) * math.sqrt(count), _LEAST)
    shape = 4 / size**2
    generator = np.random.default_rng(0)
    if shape > 1 / _LEAST:
        values_RC = generator.normal(size=(DRAWS, count))
    else:
        values_RC = (generator.gamma(shape, size=(DRAWS, count)) - shape) / math.sqrt(shape)
    values_RC = math.copysign(1.0, skewness) * values_RC
    mean_R = values_RC.mean(1)
    away_RC = values_RC - mean_R[:, None]
    error_R = np.sqrt(np.square(away_RC).sum(1) / (count - 1))
    return Drawn(mean_R * math.sqrt(count), error_R, adjusted_skewness(away_RC) / math.sqrt(count))


def least_found(
    tail: Tail,
    found: Drawn,
    *,
    share: float,
    moved: float,
    shared: float,
    own_R: FloatArray,
    quantile: float,
) -> FloatArray:
    """Return [R] the least value, above a limit of 0, that the tests find by the variances of each draw.

    `share` is 1 over the times that there are more prompts than those of `tail`. `moved` and `shared` are the true
    variances of the mean over seeds and of what all seeds share, over prompts; `own_R` is t² · A as it was drawn, and
    `quantile` that of Student's distribution for B.
    """
    error_R = math.sqrt(moved) * found.error_R
    slope_R = np.maximum(-found.skewness_R * error_R, tail.down * share)
    # v² > t²·A + t²·(B + slope · v), of which v is the root.
    linear_R = quantile**2 * np.maximum(slope_R, 0.0) * float(tail.has_ends)
    constant_R = own_R + quantile**2 * shared * np.square(found.error_R)
    least_R: FloatArray = (linear_R + np.sqrt(np.square(linear_R) + 4 * constant_R)) / 2
    if tail.is_loss:
        least_R = np.maximum(least_R, error_R * hall_inverse(quantile, found.skewness_R))
    return least_R


def chance_to_exceed(least_R: FloatArray, ahead: float, found: Drawn, *, moved: float, over_seeds: float) -> float:
    """Return the chance that a value that is `ahead`, with these variances over prompts and seeds, is found."""
    spare_R = ahead + math.sqrt(moved) * found.mean_R - least_R
    if over_seeds <= 0:
        return float(np.mean(spare_R > 0))
    return float(ndtr(spare_R / math.sqrt(over_seeds)).mean())
