"""Expressions of slopes and intercepts over seeds and prompts: what varies more if a limit is the truth.

Of few lost comparisons the variance at the estimate does not show how few there might be: a slope that came out low by
chance has a small one. So prompts are taken to vary as the score test has it (`logistic.py`) where the limit is the
true value.

Legend: S seeds, C prompts (clusters).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from scipy.special import stdtr

from rewardlab.analysis.bounded import AtLimit, crossing
from rewardlab.analysis.crossed import Observed, over_prompts
from rewardlab.analysis.logistic import ENOUGH_LOSSES

_SURE: Final = 1_000.0
"""Standard errors by which a limit is beyond every interval."""
_DOUBLINGS: Final = 60
_MOST_SKEWED: Final = 2.0
"""Skewness beyond which the expansion is none: far beyond the estimate it would find nothing impossible."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Slopes(AtLimit):
    """An expression of numbers, some of which are coefficients of regressions, with its derivatives by them."""

    parts: tuple[tuple[Observed, float], ...]
    """Those that come from prompts."""
    value: float

    def excess_at(self, limit: float) -> float:
        """Return by how much the variance over prompts that all seeds share, if `limit` were the true value, exceeds
        the one that was seen.

        Each arm is moved in proportion to its variance, as far as all of them together must be for the value to be at
        the limit. So the likeliest arms there would be, if they had nothing in common.
        """
        moved = self._moved(limit)
        parts = [(_at(one, by), weight) for (one, weight), by in zip(self.parts, moved, strict=True)] if moved else []
        return max(over_prompts(parts)[0] - self._shared, 0.0) if parts else 0.0

    def _moved(self, limit: float) -> list[float]:
        """Return how far the truth of each arm is from what was seen if the value is at the limit; none where nothing
        varies."""
        total = sum(weight * part for (_, weight), part in zip(self.parts, self._own, strict=True))
        return [(limit - self.value) * part / total for part in self._own] if total > 0 else []

    @cached_property
    def _own(self) -> list[float]:
        """The derivative by each arm times its variance."""
        seen_C = [one.influence_SC.mean(axis=0) for one, _ in self.parts if one.influence_SC is not None]
        return [weight * float(mean_C @ mean_C) for (_, weight), mean_C in zip(self.parts, seen_C, strict=True)]

    @cached_property
    def _shared(self) -> float:
        return over_prompts(self.parts)[0]

    def ends(self) -> tuple[float, float]:
        """Return a limit below, and one above, every interval."""
        return self._beyond(-1.0), self._beyond(1.0)

    def _beyond(self, side: float) -> float:
        together = over_prompts(self.parts)[1]
        away = _SURE * math.sqrt(together)
        for _ in range(_DOUBLINGS):
            if away**2 >= _SURE**2 * (together + self.excess_at(self.value + side * away)):
                break
            away *= 2
        return self.value + side * away

    def p_skewed(self, limit: float) -> tuple[float, float]:
        """Return the one-sided p-values of the value being at most `limit`, and at least, over prompts alone, with the
        skewness that scores have where that is the truth; 0 on the side where the value does not lie.

        Lost comparisons of a sharp model are few and weigh much, so slopes fall further than they rise. Source: the
        expansion of Cornish and Fisher (1938), Revue de l'Institut International de Statistique 5, 307-320.
        """
        moved = self._moved(limit)
        if not moved:
            return 0.0, 0.0
        parts = [(_at(one, by), weight) for (one, weight), by in zip(self.parts, moved, strict=True)]
        _, together, count = over_prompts(parts)
        third = sum(weight**3 * _third(one, by) for (one, weight), by in zip(self.parts, moved, strict=True))
        if not together > 0:
            return 0.0, 0.0
        away = (self.value - limit) / math.sqrt(together)
        cube = math.copysign(together**1.5, away)
        p = _p_of(abs(away), min(third / cube, _MOST_SKEWED) if cube else _MOST_SKEWED, count - 1)
        return (p, 0.0) if away > 0 else (0.0, p) if away < 0 else (p, p)

    def skewed_limits(self, tail: float) -> tuple[float, float]:
        """Return the limits at which these p-values are `tail`."""
        below, above = self.ends()
        return (
            crossing(lambda limit: self.p_skewed(limit)[0] - tail, below, self.value),
            crossing(lambda limit: self.p_skewed(limit)[1] - tail, above, self.value),
        )


def slopes_over(parts: Sequence[tuple[Observed, float]], value: float) -> Slopes | None:
    """Return an expression with these derivatives; None if no coefficient of a regression is among its numbers, or each
    has so many lost comparisons that the variance seen is as good (`coefficient_estimates`)."""
    of_prompts = tuple((one, weight) for one, weight in parts if weight and one.influence_SC is not None)
    few = any(fit.expected_losses < ENOUGH_LOSSES for one, _ in of_prompts for fit in one.fits)
    return Slopes(parts=of_prompts, value=value) if few else None


def _at(one: Observed, by: float) -> Observed:
    """Return a number with the influences that it would have if the truth of each seed were further away by this."""
    if not one.fits or one.influence_SC is None:
        return one
    times_S = np.array([fit.times_at(by) for fit in one.fits])
    return replace(one, influence_SC=one.influence_SC * np.sqrt(times_S)[:, None])


def _third(one: Observed, by: float) -> float:
    """Return the third moment over prompts of a number, if the truth of each seed were further away by this."""
    return float(np.mean([fit.third_at(by) for fit in one.fits])) if one.fits else 0.0


def _p_of(away: float, skewness: float, freedom: float) -> float:
    """Return the chance to be this many standard errors away, on the side to which values have this skewness."""
    if skewness <= 0:
        return float(stdtr(freedom, -away))
    bent = skewness / 6
    # Cornish and Fisher's quantile is t + bent·(t² − 1). Its root is written so that a small `bent` loses no digits.
    straight = 2 * (away + bent) / (1 + math.sqrt(1 + 4 * bent * (away + bent)))
    return float(stdtr(freedom, -straight))
