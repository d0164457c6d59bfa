"""How often claims on losses, Brier scores and shares near 1 are found, whose values have a long tail.

A lost comparison that a model was sure of costs many times the mean, and one in a hundred that is ranked wrongly counts
like all others together. Few prompts may hold none, or one, so the variance that they show varies with their mean. The
tests of verdicts allow for that: they take the variance that the prompts would have at the limit
(`analysis/bounded.py`), and of losses Hall's transformation too. So their chance to find a difference is not that of a
normal value with a known variance. Here it is found by drawing: steps up and steps down of prompts, each from a gamma
distribution of the skewness that is expected, and what the tests would say of their mean, variance and skewness.

Legend: R draws, C prompts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from scipy.special import expit, ndtr, ndtri

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
_TINY: Final = 1e-300
_HALVINGS: Final = 25


class Side(NamedTuple):
    """What moves the value of a claim to one side far: variances, and third moments without their sign."""

    within: float = 0.0
    """Variance of what the prompts do to one seed, apart from what they do to all seeds."""
    prompts: float = 0.0
    """Variance of what the prompts do to all seeds."""
    third_within: float = 0.0
    third_prompts: float = 0.0

    def plus(self, other: Side) -> Side:
        """Return both together."""
        return Side(*(one + more for one, more in zip(self, other, strict=True)))

    def scaled(self, variance: float, third: float) -> Side:
        """Return the side with its variances and third moments times these factors."""
        return Side(
            self.within * variance, self.prompts * variance, self.third_within * third, self.third_prompts * third
        )

    def over(self, seeds: int, share: float) -> tuple[float, float]:
        """Return variance and third moment of a mean over so many seeds, and over 1 / `share` times the prompts."""
        return (
            (self.within / seeds + self.prompts) * share,
            (self.third_within / seeds**2 + self.third_prompts) * share**2,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """The third moments of the value of a claim, of which its test knows."""

    rising: Side
    """What moves the value up by few large steps."""
    falling: Side
    """What moves it down so."""
    down: float
    """How much the variance over prompts grows, at least, with the mean towards the furthest values below it."""
    up: float
    """The same with the mean towards those above it."""
    is_loss: bool
    """Whether the test allows for skewness, as that of losses does."""
    most: float = math.inf
    """The largest variance over prompts that is possible, as that of shares at one half."""
    reach: float = math.inf
    """How far the value moves at most if every prompt comes out the other way; known of shares alone."""
    of_counts: bool = False
    """Whether all steps have one size, as those of shares by single comparisons have."""
    has_ends: bool = True
    """Whether the variance at the limit is still to be found from the one on the spot."""

    @classmethod
    def seen(cls, third: float, variance: float, *, has_ends: bool) -> Tail:
        """Return the tail of a claim on losses whose mean over seeds has these moments."""
        most = FURTHEST * third / variance if variance > 0 else 0.0
        own, none = Side(prompts=variance, third_prompts=abs(third)), Side()
        return cls(
            rising=own if third > 0 else none,
            falling=none if third > 0 else own,
            down=max(-most, 0.0),
            up=max(most, 0.0),
            is_loss=True,
            has_ends=has_ends,
        )

    @classmethod
    def of_terms(
        cls, shares: Sequence[float], skewness: float, correlations: tuple[float, float], *, furthest: float = FURTHEST
    ) -> Tail:
        """Return the tail, by one comparison, of terms of one quantity that vary by `shares` over comparisons.

        `correlations` are those of two seeds of one arm, and of two arms. What they have in common is taken to have as
        much of the third moment as it has of the variance. So of a difference of two arms each is apart from the other
        by few large steps, to both sides.
        """
        of_seeds, of_arms = correlations
        sides = {1.0: Side(), -1.0: Side()}

        def add(share: float, *, within: float, prompts: float) -> None:
            # A lost comparison moves a loss up, and the claim by the sign of its slope.
            sign, third = math.copysign(1.0, share * skewness), abs(skewness * share**3)
            own = Side(within * share**2, prompts * share**2, within * third, prompts * third)
            sides[sign] = sides[sign].plus(own)

        add(sum(shares), within=0.0, prompts=max(of_arms, 0.0))
        for share in shares:
            add(share, within=1 - of_seeds, prompts=max(of_seeds - max(of_arms, 0.0), 0.0))
        steps = [furthest * skewness * share for share in shares]
        return cls(
            rising=sides[1.0],
            falling=sides[-1.0],
            down=sum(max(-step, 0.0) for step in steps),
            up=sum(max(step, 0.0) for step in steps),
            is_loss=False,
        )

    @classmethod
    def sum_of(cls, parts: Sequence[Tail], *, is_loss: bool) -> Tail:
        """Return the tail of a sum."""
        rising, falling = Side(), Side()
        for part in parts:
            rising, falling = rising.plus(part.rising), falling.plus(part.falling)
        return cls(
            rising=rising,
            falling=falling,
            down=sum(part.down for part in parts),
            up=sum(part.up for part in parts),
            is_loss=is_loss,
            most=sum(math.sqrt(part.most) for part in parts) ** 2,
            reach=sum(part.reach for part in parts),
            of_counts=all(part.of_counts for part in parts),
        )

    def over_prompts(self, count: int, *, each: float, correlation: float) -> Tail:
        """Return the tail of the mean over so many prompts, from that of one comparison."""
        variance, third = (1 + (each - 1) * correlation) / each, third_of_mean(each, correlation)
        growth = third / variance / count
        return replace(
            self,
            rising=self.rising.scaled(variance / count, third / count**2),
            falling=self.falling.scaled(variance / count, third / count**2),
            down=self.down * growth,
            up=self.up * growth,
            most=self.most * variance / count,
        )

    def turned(self) -> Tail:
        """Return the tail of the negative value."""
        return replace(self, rising=self.falling, falling=self.rising, down=self.up, up=self.down)

    def drawn(self, prompts: int, variance: float, *, seeds: int, share: float) -> Drawn:
        """Return draws of a mean of this variance over so many seeds, and over 1 / `share` times the prompts."""
        (up, third_up), (down, third_down) = (side.over(seeds, share) for side in (self.rising, self.falling))
        of_up = up / (up + down) if up + down > 0 else 0.5
        skewness = [
            third / (part * variance) ** 1.5 if part > 0 else 0.0
            for third, part in ((third_up, of_up), (third_down, 1 - of_up))
        ]
        return drawn(prompts, round(of_up, 4), *(round(one, 4) for one in skewness), of_counts=self.of_counts)


class Moments(NamedTuple):
    """How values vary over comparisons."""

    sd: float
    skewness: float


def moments_of_losses(accuracy: float) -> dict[str, Moments]:
    """Return those of losses and Brier scores where the scores of both replies are normal and β is right.

    The mean log odds are then k² and their standard deviation k√2, with the k by which the accuracy is Φ(k/√2).
    """
    z = np.linspace(-9.0, 9.0, 4_001)
    weights = np.exp(-z * z / 2) / np.exp(-z * z / 2).sum()
    ahead = math.sqrt(2) * float(ndtri(max(accuracy, 1 - accuracy, 0.5 + _LEAST)))
    logits = ahead * (ahead + math.sqrt(2) * z)
    found = {}
    for name, values in (("loss", np.logaddexp(0.0, -logits)), ("brier", np.square(expit(-logits)))):
        away = values - weights @ values
        sd = math.sqrt(float(weights @ np.square(away)))
        found[name] = Moments(sd=sd, skewness=float(weights @ away**3) / sd**3)
    return found


def third_of_mean(each: float, correlation: float) -> float:
    """Return the third moment of a mean over `each` comparisons of a prompt, in parts of that of one."""
    two, three = 3 * (each - 1), max((each - 1) * (each - 2), 0.0)
    return float(1 + two * correlation + three * max(correlation, 0.0) ** OF_THREE) / each**2


class Drawn(NamedTuple):
    """What each draw shows of the mean over prompts, in units of its true standard error."""

    mean_R: FloatArray
    error_R: FloatArray
    skewness_R: FloatArray
    rising_R: FloatArray
    """Part of the variance that is of steps upwards."""
    step_R: FloatArray
    """How much the variance would grow, per value, with the mean downwards: third moment of the steps downwards over
    their variance."""


@functools.lru_cache(maxsize=256)
def drawn(prompts: int, rising: float, skewness_up: float, skewness_down: float, *, of_counts: bool = False) -> Drawn:
    """Return draws of the mean over `prompts` values, a part `rising` of whose variance is of steps upwards.

    The skewness is that of the mean of these alone, and of the mean of steps downwards. With `of_counts` the steps to a
    side have one size, and prompts make one or none; else they are those of gamma distributions.
    """
    count = min(prompts, MOST_DRAWN)
    generator, steps = np.random.default_rng(0), _counts if of_counts else _steps
    up_RC, down_RC = (
        sign * math.sqrt(part) * steps(generator, skewness * math.sqrt(count), (DRAWS, count))
        if part > 0
        else np.zeros((DRAWS, count))
        for part, sign, skewness in ((rising, 1.0, skewness_up), (1 - rising, -1.0, skewness_down))
    )
    mean_R = (up_RC + down_RC).mean(1)
    away_RC = up_RC + down_RC - mean_R[:, None]
    up_RC, down_RC = (side_RC - side_RC.mean(1)[:, None] for side_RC in (up_RC, down_RC))
    of_up_R, of_down_R = (np.square(side_RC).sum(1) / (count - 1) for side_RC in (up_RC, down_RC))
    both_R = of_up_R + of_down_R
    return Drawn(
        mean_R=mean_R * math.sqrt(count),
        error_R=np.sqrt(np.square(away_RC).sum(1) / (count - 1)),
        skewness_R=adjusted_skewness(away_RC) / math.sqrt(count),
        rising_R=np.where(both_R > 0, of_up_R / np.where(both_R > 0, both_R, 1.0), 0.5),
        step_R=_step_down(down_RC) / math.sqrt(count)
        if of_counts
        else -adjusted_skewness(down_RC) / math.sqrt(count) * np.sqrt(of_down_R),
    )


def _steps(generator: np.random.Generator, skewness: float, size: tuple[int, int]) -> FloatArray:
    """Return draws of mean 0 and variance 1 with this skewness, from a gamma distribution."""
    shape = 4 / max(skewness, _LEAST) ** 2
    if shape > 1 / _LEAST:
        return generator.normal(size=size)
    found: FloatArray = (generator.gamma(shape, size=size) - shape) / math.sqrt(shape)
    return found


def _step_down(down_RC: FloatArray) -> FloatArray:
    """Return [R] third moments of steps downwards over their variances, as the draws have them; 0 without steps."""
    square_R = np.square(down_RC).mean(1)
    found: FloatArray = np.where(square_R > 0, -(down_RC**3).mean(1) / np.where(square_R > 0, square_R, 1.0), 0.0)
    return found


def _counts(generator: np.random.Generator, skewness: float, size: tuple[int, int]) -> FloatArray:
    """Return draws of mean 0 and variance 1 with this skewness, which have two values."""
    share = (1 - skewness / math.hypot(skewness, 2)) / 2
    drawn_RC = (generator.random(size) < share).astype(np.float64)
    found: FloatArray = (drawn_RC - share) / math.sqrt(share * (1 - share))
    return found


def least_found(
    tail: Tail,
    found: Drawn,
    *,
    share: float,
    moved: float,
    shared: float,
    own_R: FloatArray,
    quantile: float,
    constant: float,
) -> FloatArray:
    """Return [R] the least value, above a limit of 0, that the tests find by the variances of each draw.

    `share` is 1 over the times that there are more prompts than those of `tail`. `moved` and `shared` are the true
    variances of the mean over seeds and of what all seeds share, over prompts; `own_R` is t² · A as it was drawn, and
    `quantile` that of Student's distribution for B. Where nothing varies over prompts, `constant` is the least value.
    """
    error_R = math.sqrt(moved) * found.error_R
    constant_R = own_R + quantile**2 * shared * np.square(found.error_R)
    if tail.has_ends:
        step_R = np.maximum(math.sqrt(moved) * found.step_R, tail.down * share)
        least_R = _least_at_limit(constant_R, np.maximum(step_R, 0.0), np.square(error_R), found.rising_R, quantile)
        spare_R = np.maximum(tail.most * share - np.square(error_R), 0.0)
        least_R = np.minimum(least_R, np.sqrt(constant_R + quantile**2 * spare_R))
    else:
        least_R = np.sqrt(constant_R)
    if math.isfinite(constant):
        least_R = np.where(found.error_R > 0, least_R, constant)
    if tail.is_loss:
        least_R = np.maximum(least_R, error_R * hall_inverse(quantile, found.skewness_R))
    return least_R


def _least_at_limit(
    constant_R: FloatArray, step_R: FloatArray, variance_R: FloatArray, rising_R: FloatArray, quantile: float
) -> FloatArray:
    """Return [R] the v with v² = constant + t² · (what the variance grows by, with the mean by v to the limit).

    In the likeliest distribution there, steps downwards are more by 1/(1 − λ), and steps upwards fewer by 1/(1 + λ): of
    steps of one size it is found by a quadratic equation. Without steps upwards the variance grows by v · step.
    """
    linear_R = quantile**2 * step_R
    high_R = (linear_R + np.sqrt(np.square(linear_R) + 4 * constant_R)) / 2
    low_R, up_R = np.sqrt(constant_R), rising_R * variance_R
    if not up_R.any():
        return high_R
    for _ in range(_HALVINGS):
        middle_R = (low_R + high_R) / 2
        moved_R = step_R * middle_R
        root_R = np.sqrt(np.maximum(np.square(variance_R) + 4 * moved_R * (moved_R + variance_R - 2 * up_R), 0.0))
        part_R = 2 * moved_R / np.maximum(variance_R + root_R, _TINY)
        grown_R = np.maximum(moved_R - 2 * up_R * part_R / (1 + part_R), 0.0)
        is_found_R = np.square(middle_R) > constant_R + quantile**2 * grown_R
        low_R, high_R = np.where(is_found_R, low_R, middle_R), np.where(is_found_R, middle_R, high_R)
    return high_R


def chance_to_exceed(least_R: FloatArray, ahead: float, found: Drawn, *, moved: float, over_seeds: float) -> float:
    """Return the chance that a value that is `ahead`, with these variances over prompts and seeds, is found."""
    spare_R = ahead + math.sqrt(moved) * found.mean_R - least_R
    if over_seeds <= 0:
        return float(np.mean(spare_R > 0))
    return float(ndtr(spare_R / math.sqrt(over_seeds)).mean())
