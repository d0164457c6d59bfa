"""Means of values that cannot leave a range, tested without trust in values that happen not to vary.

The variance of a few outcomes that agree is 0, and that of many of which two differ is known badly. So a mean is not
held against a limit μ by the variance that was seen, but by the one that its values would have if μ were their mean:
that of the likeliest distribution with this mean, over the values seen and the end of the range. For single outcomes of
0 and 1 this is Wilson's test, for paired ones Tango's (1998, Statistics in Medicine 17, 891-908); the distribution is
that of the empirical likelihood (Owen 1988, Biometrika 75, 237-249). Where all values agree the p-value is the chance
that as many miss those at the end of the range.

Legend: C prompts or conversations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit, ndtr

from rewardlab.analysis.intervals import FloatArray, loss_limits, p_above_skewed, unit_of

_ROUNDING: Final = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Moves:
    """How far each prompt moves a number, and how far it could."""

    moved_C: FloatArray
    """[C] influence of each prompt; 0 where it was not judged."""
    down_C: FloatArray
    """[C] what it would be if the prompt came out as low as it can; at most 0."""
    up_C: FloatArray
    """[C] the same for as high as it can; at least 0."""


class AtLimit(ABC):
    """A value over prompts, and how these would vary if a limit were the true one."""

    @abstractmethod
    def ends(self) -> tuple[float, float]:
        """Return a limit below, and one above, all that are possible."""

    @abstractmethod
    def excess_at(self, limit: float) -> float:
        """Return by how much the variance of the value, if `limit` were the true one, exceeds the one that was seen."""

    @abstractmethod
    def p_skewed(self, limit: float) -> tuple[float, float]:
        """Return the least one-sided p-values of the value being at most `limit`, and at least."""

    @abstractmethod
    def skewed_limits(self, tail: float) -> tuple[float, float]:
        """Return the limits at which these p-values are `tail`."""


@dataclass(frozen=True, kw_only=True)
class Bounded(AtLimit):
    """A mean of values that lie between `least` and `most`."""

    values: tuple[float, ...]
    """The different values that were seen."""
    counts: tuple[int, ...]
    """How often each was seen."""
    least: float
    most: float
    is_skewed: bool = False
    """Whether the values have a long tail, as losses have, so that tests must allow for its skewness too."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Moves, float]], value: float, *, is_skewed: bool = False) -> Bounded:
        """Return `value`, which moves by Σ factor · influence, as a mean of one value for each prompt."""
        count = parts[0][0].moved_C.size
        moved_C = sum((factor * one.moved_C for one, factor in parts), np.zeros(count))
        down_C = sum((factor * (one.down_C if factor > 0 else one.up_C) for one, factor in parts), np.zeros(count))
        up_C = sum((factor * (one.up_C if factor > 0 else one.down_C) for one, factor in parts), np.zeros(count))
        values_C = value + count * (moved_C - moved_C.mean())
        # What rounding leaves of equal values does not tell them apart.
        unit = _ROUNDING * max(count * float(np.abs(down_C).max() + np.abs(up_C).max()), abs(value))
        values_C = values_C.mean() + np.round((values_C - values_C.mean()) / unit) * unit if unit else values_C
        values, counts = np.unique(values_C, return_counts=True)
        return cls(
            values=tuple(values.tolist()),
            counts=tuple(counts.tolist()),
            least=min(value - count * _typical(-down_C), float(values[0])),
            most=max(value + count * _typical(up_C), float(values[-1])),
            is_skewed=is_skewed,
        )

    @cached_property
    def _seen(self) -> tuple[FloatArray, FloatArray, int]:
        values, counts = np.array(self.values), np.array(self.counts)
        return values, counts / counts.sum(), int(counts.sum())

    @property
    def mean(self) -> float:
        """The mean of all values."""
        values, shares, _ = self._seen
        return float(values @ shares)

    def ends(self) -> tuple[float, float]:
        """Return `least` and `most`."""
        return self.least, self.most

    def excess_at(self, limit: float) -> float:
        """Return by how much the variance of the mean, if `limit` were the true one, exceeds the one that was seen."""
        values, shares, count = self._seen
        rounding = _ROUNDING * (self.most - self.least)
        if not self.least < limit < self.most or abs(self.mean - limit) <= rounding:
            return 0.0
        end = self.least if self.mean > limit else self.most
        seen = float(shares @ np.square(values - self.mean))
        return max(_variance_at(values - limit, shares, end - limit) - seen, 0.0) / count

    def p_above(self, limit: float) -> float:
        """Return the one-sided p-value of the mean being at most `limit`."""
        values, shares, count = self._seen
        ahead, mean = self.mean - limit, self.mean
        if abs(ahead) <= _ROUNDING * max(self.most - self.least, abs(limit)):
            return 0.5
        end = self.least if ahead > 0 else self.most
        if (end - limit) * ahead >= 0:
            # No mean beyond the end of the range is possible.
            return 0.0 if ahead > 0 else 1.0
        if len(values) == 1:
            p = min(float((1 - ahead / (mean - end)) ** count), 0.5)
        else:
            p = float(ndtr(-abs(ahead) / math.sqrt(_variance_at(values - limit, shares, end - limit) / count)))
        return p if ahead > 0 else 1 - p

    def p_below(self, limit: float) -> float:
        """Return the one-sided p-value of the mean being at least `limit`."""
        return 1 - self.p_above(limit)

    def p_skewed(self, limit: float) -> tuple[float, float]:
        """Return the one-sided p-values of the mean being at most `limit`, and at least, by Hall's transformation for
        the skewness of the values; 0 where they have no long tail."""
        if not self.is_skewed:
            return 0.0, 0.0
        above = p_above_skewed(np.repeat(self.values, self.counts), limit)
        return above, 1 - above

    def skewed_limits(self, tail: float) -> tuple[float, float]:
        """Return the limits at which these p-values are `tail`; none where the values have no long tail."""
        if not self.is_skewed:
            return math.inf, -math.inf
        each_1C = np.repeat(self.values, self.counts)[None]
        found = loss_limits(each_1C, np.square(each_1C), np.ones_like(each_1C), level=1 - 2 * tail)
        return float(found.low[0]), float(found.high[0])

    def low(self, tail: float, *, most: float = math.inf) -> float:
        """Return the limit whose `p_above` is `tail`; `most` if that is lower."""
        return crossing(lambda limit: self.p_above(limit) - tail, self.least, min(self.mean, most))

    def high(self, tail: float, *, least: float = -math.inf) -> float:
        """Return the limit whose `p_below` is `tail`; `least` if that is higher."""
        return crossing(lambda limit: self.p_below(limit) - tail, self.most, max(self.mean, least))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlikely:
    """What values of pairs would be if these came out the way that is not expected of them."""

    values: FloatArray
    """[N]."""
    chances: FloatArray
    """[N] how likely each is to come out so."""

    @classmethod
    def of_nll(cls, logits_2N: FloatArray) -> Unlikely:
        """Return the changes of NLL from the first model to the second, by the logits of both, if every comparison came
        out against what both together expect, with the mean of both chances."""
        against_N = np.where(logits_2N.sum(axis=0) > 0, -1.0, 1.0)
        first_N, second_N = np.logaddexp(0.0, -against_N * logits_2N)
        return cls(values=second_N - first_N, chances=expit(against_N * logits_2N).mean(axis=0))

    def mean_of(self, seen: FloatArray, prompt_N: npt.NDArray[np.int64]) -> Bounded:
        """Return the mean of the values that were `seen` [N], whose ends are Σwv²/Σwv of those on either side of it.

        Of the m pairs of a prompt √m are taken to come out so at once.
        """
        mean = float(seen.mean())
        part_C = np.sqrt(np.bincount(prompt_N)) / seen.size
        away = self.values - mean
        moves = Moves(
            moved_C=np.bincount(prompt_N, seen - mean) / seen.size,
            down_C=part_C * self._furthest(np.minimum(away, 0.0)),
            up_C=part_C * self._furthest(np.maximum(away, 0.0)),
        )
        return Bounded.of([(moves, 1.0)], mean)

    def _furthest(self, away: FloatArray) -> float:
        """Return Σwv²/Σwv over distances [N] of one sign, 0 where they are of the other; 0 if all are."""
        unit = unit_of(away)
        scaled = away / unit
        total = float(self.chances @ scaled)
        return unit * float(self.chances @ np.square(scaled)) / total if total else 0.0


def crossing(of: Callable[[float], float], outside: float, inside: float) -> float:
    """Return where a function goes from below 0 at `outside` to above 0; `inside` if it is at most 0 there."""
    if of(inside) <= 0 or inside == outside:
        return inside
    return float(brentq(of, outside, inside, xtol=_ROUNDING * abs(inside - outside)))


def _typical(reach_C: FloatArray) -> float:
    """Return how far one prompt moves the mean, where larger prompts count by their size."""
    total = float(reach_C.sum())
    return float(reach_C @ reach_C) / total if total > 0 else 0.0


def _variance_at(away: FloatArray, shares: FloatArray, end: float) -> float:
    """Return the variance of the likeliest distribution with the mean 0 over values `away` from it, and `end`.

    The mean of `away` lies on the other side of 0 than `end`. The likeliest distribution gives each value its share
    over 1 + λ·away, with the least λ by which the mean is 0, and `end` the rest. λ is at most 1 / |end|, in units of
    which it is found here.
    """
    scaled = away / abs(end) if end < 0 else -away / abs(end)

    def mean(part: float) -> float:
        return float(shares @ (scaled / (1 + part * scaled)))

    most = 1 - _ROUNDING
    part = brentq(mean, 0.0, most) if mean(most) < 0 else most
    weights = shares / (1 + part * scaled)
    rest = max(1 - float(weights.sum()), 0.0)
    return (float(weights @ np.square(scaled)) + rest) * end * end
