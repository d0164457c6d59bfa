"""Logistic regressions of outcomes on margins and lengths: calibration slope and intercept, with intervals by prompt.

Legend: N comparisons, P columns, C prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, stdtrit

from rewardlab.analysis.influence import by_influence, sums_by
from rewardlab.analysis.intervals import FloatArray, root_mean_square, student_limits
from rewardlab.analysis.score_table import IntArray
from rewardlab.analysis.stats import NO_VARIATION, without_interval
from rewardlab.core.types import Estimate

NO_FIT: Final = "no finite value fits best"
"""Method of a slope or an intercept without a value: the model ranks all pairs rightly, or is wrong where it is sure
beyond what numbers hold."""
_STEPS = 60
# An interval that is narrower than this, in logits of a typical row or as a share of its value, is one of rounding.
_NOTHING = 1e-9
# A limit that is further away than Student's by so many doublings is not looked for.
_DOUBLINGS = 6
# Nearer to the estimate than by so many standard errors a score is rounding.
_CLOSE = 1e-6
ENOUGH_LOSSES: Final = 200.0
"""Lost comparisons from which on a coefficient has Student's interval."""
# A coefficient that gives a typical row a larger logit than this means that no finite one fits best.
_LARGEST_LOGIT = 500.0
# A column below this does not vary, since its coefficient and influences might be larger than float64 holds.
_SMALLEST_SCALE = 1e-290


def calibration_slope(logit: FloatArray, y: FloatArray, clusters: IntArray) -> Estimate:
    """Return b of the logistic regression of the labels `y` [N] on the model's `logit` [N], logit P = b·logit.

    b is 1 for a calibrated model, below 1 for one that is too sure; 1/b is the temperature that fits best. There is no
    constant term: with every pair in both orders, as the order of replies is arbitrary, it is 0 by symmetry.
    """
    fitted = logistic(logit[:, None], y)
    if fitted is None:
        return without_interval(math.nan, len(np.unique(clusters)), method=NO_FIT)
    return coefficient_estimates(logit[:, None], y, fitted, clusters)[0]


def calibration_intercept(logit: FloatArray, y: FloatArray, clusters: IntArray) -> Estimate:
    """Return a of logit P(the model's preferred reply wins) = a + |logit|, with slope 1 (calibration in the large).

    a is 0 for a calibrated model, below 0 where its preferred replies win less often than it says. Each pair is turned
    so that the model prefers the first reply, so that a does not depend on the order of replies.
    """
    turned = np.where(logit < 0, 1 - y, np.where(logit == 0, 0.5, y))
    fitted = logistic(np.ones((logit.size, 1)), turned, offset=np.abs(logit))
    if fitted is None:
        return without_interval(math.nan, len(np.unique(clusters)), method=NO_FIT)
    coefficient, influence = fitted
    return by_influence(float(coefficient[0]), influence[:, 0], clusters, formula=student_limits)


def coefficient_estimates(
    x_NP: FloatArray, y: FloatArray, fitted: tuple[FloatArray, FloatArray], clusters: IntArray, *, fitted_along: int = 0
) -> list[Estimate]:
    """Return the coefficients of a logistic regression, `fitted` as by `logistic`, with score intervals by prompt.

    A limit is the b that the score test rejects only just, with the other coefficients fitted to it. Its variance is
    the one that labels have if b is true: few labels against a sharp model do not say how few there might be, and
    Student's interval, whose variance on both sides is that at the estimate, ends too low. That the labels of a prompt
    are alike, or the model's form is wrong, multiplies this variance by what the spread of the influences is beyond it
    at the estimate. Labels of 0 and 1 do not vary less than it says; soft ones do. Source: Rao (1948); with a variance
    that is not the model's Boos (1992), The American Statistician 46, 327-333. Where many comparisons are lost, as many
    as `ENOUGH_LOSSES` by the fitted probabilities, Student's interval is as good, and is taken since it costs nothing.
    `fitted_along` is the `fitted` of `by_influence`.
    """
    expected_losses = float(expit(-np.abs(x_NP @ fitted[0])).sum())
    found = []
    for k, (value, influence) in enumerate(zip(fitted[0].tolist(), fitted[1].T, strict=True)):
        own = by_influence(value, influence, clusters, fitted=fitted_along, formula=student_limits)
        unit = root_mean_square(x_NP[:, k])
        if (own.high - own.low) * unit <= _NOTHING * max(1.0, abs(value) * unit):
            own = without_interval(value, own.n, method=NO_VARIATION)
        few = not math.isnan(own.low) and expected_losses < ENOUGH_LOSSES
        found.append(_by_score(own, x_NP, y, fitted[0], k, clusters) if few else own)
    return found


def _by_score(
    found: Estimate, x_NP: FloatArray, y: FloatArray, coefficient: FloatArray, k: int, clusters: IntArray
) -> Estimate:
    """Return coefficient k with the limits of its score test, from Student's, which it keeps where there are none."""
    units = np.array([root_mean_square(column) for column in x_NP.T])
    x, best = x_NP / units, coefficient * units
    own, others = x[:, k], np.delete(x, k, axis=1)
    at_best = np.delete(best, k)

    def score(b: float) -> tuple[float, FloatArray, FloatArray]:
        """Return the score at b, and what makes its variance: [N] slopes and variances of labels."""
        shift = b * own + others @ at_best
        if others.shape[1]:
            moved = logistic(others, y, offset=shift)
            shift = shift + others @ moved[0] if moved is not None else np.full_like(shift, math.nan)
        vary = expit(shift) * expit(-shift)
        rest = own
        if others.shape[1] and np.isfinite(shift).all():
            weighted = others * vary[:, None]
            rest = own - others @ np.linalg.lstsq(weighted.T @ others, weighted.T @ own)[0]
        return float(own @ (y - expit(shift))), rest, vary

    _, rest, vary = score(float(best[k]))
    information = float(np.square(rest) @ vary)
    reach, quantile = (found.high - found.low) / 2 * float(units[k]), float(stdtrit(found.n - 1, (1 + found.level) / 2))
    least = _least_excess(rest, vary, y, y - expit(x @ best), clusters)
    excess = max((reach / quantile) ** 2 * information, least)

    def spare(b: float) -> float:
        """Return how far the score at b is beyond chance; below 0 near the estimate, infinite where nothing fits."""
        size, slope, variance = score(b)
        if not math.isfinite(size):
            return math.inf
        return abs(size) - quantile * math.sqrt(excess * float(np.square(slope) @ variance))

    if not spare(float(best[k])) < 0:
        return found  # nothing varies but for rounding, as where labels are the model's own probabilities
    low, high = (_crossing(spare, float(best[k]), side * reach) / float(units[k]) for side in (-1.0, 1.0))
    method = found.method.replace("t interval", "score interval")
    return replace(found, low=min(low, found.value), high=max(high, found.value), method=method)


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """A regression on one column: logit P = `value` · x + offset."""

    x_N: FloatArray
    y_N: FloatArray
    offset_N: FloatArray
    clusters_N: IntArray
    value: float

    def _score(self, b: float) -> tuple[float, float, float]:
        """Return the score at b, with variance and third moment for single labels of 0 and 1."""
        logit = b * self.x_N + self.offset_N
        vary = expit(logit) * expit(-logit)
        score, variance = self.x_N @ (self.y_N - expit(logit)), np.square(self.x_N) @ vary
        return float(score), float(variance), float((self.x_N**3 * (1 - 2 * expit(logit))) @ vary)

    @cached_property
    def _seen(self) -> tuple[float, float]:
        """Student's variance of the value, and the excess by which labels vary more than single ones."""
        logit = self.value * self.x_N + self.offset_N
        vary, residual = expit(logit) * expit(-logit), self.y_N - expit(logit)
        information = float(np.square(self.x_N) @ vary)
        (score_C,) = sums_by(self.clusters_N, self.x_N * residual)
        variance = float(score_C @ score_C) * score_C.size / max(score_C.size - 1, 1) / information / information
        least = _least_excess(self.x_N, vary, self.y_N, residual, self.clusters_N)
        return variance, max(variance * information, least)

    @cached_property
    def expected_losses(self) -> float:
        """How many comparisons are lost by the fitted probabilities."""
        return float(expit(-np.abs(self.value * self.x_N + self.offset_N)).sum())

    @cached_property
    def _varies(self) -> bool:
        """Whether the value has an error beyond that of rounding."""
        unit = root_mean_square(self.x_N)
        return math.sqrt(self._seen[0]) * unit > _NOTHING * max(1.0, abs(self.value) * unit)

    def _at(self, by: float) -> tuple[float, float, float]:
        """Return how far the value moves by one unit of its score, with variance and third moment of the score, if
        value + `by` is the truth."""
        score, variance, third = self._score(self.value + by)
        if abs(by) <= _CLOSE * math.sqrt(self._seen[0]) or not score:
            return 1 / self._score(self.value)[1], variance, third
        return -by / score, variance, third

    def times_at(self, by: float) -> float:
        """Return by what the variance of the value is to be multiplied so that, held against value + `by`, it is tested
        by its score there (see `coefficient_estimates`). 1 where nothing varies but for rounding."""
        if not self._varies:
            return 1.0
        seen, excess = self._seen
        moved, variance, _ = self._at(by)
        return moved**2 * excess * variance / seen

    def third_at(self, by: float) -> float:
        """Return the third moment that the value has by its score if value + `by` is the truth.

        Labels that vary more than single ones are taken to come in as many copies.
        """
        if not self._varies:
            return 0.0
        moved, _, third = self._at(by)
        return moved**3 * self._seen[1] ** 2 * third


def _least_excess(
    slope: FloatArray, variance: FloatArray, y: FloatArray, residual: FloatArray, clusters: IntArray
) -> float:
    """Return by how much the variance of a score exceeds that of single labels of 0 and 1, at least.

    Soft labels vary less. Labels of a prompt are alike by ρ, the mean product of two standardised residuals of it, as
    in `_Redraws`: copies of a pair are as one.
    """
    each = np.abs(slope) * np.sqrt(variance)
    whole = float(np.square(each).sum())
    soft = max(1 - float((np.square(slope) * y * (1 - y)).sum()) / whole, 0.0)
    z = np.where(variance > 0, np.sign(slope) * residual / np.sqrt(np.where(variance > 0, variance, 1.0)), 0.0)
    sizes, z_C, zz_C, each_C = sums_by(clusters, np.ones_like(z), z, np.square(z), each)
    scale = float(((sizes - 1) * zz_C).sum())
    alike = min(max(float((np.square(z_C) - zz_C).sum()) / scale, 0.0), 1.0) if scale > 0 else 0.0
    return soft * (1 - alike + alike * float(np.square(each_C).sum()) / whole)


def _crossing(of: Callable[[float], float], start: float, step: float) -> float:
    """Return where a function that is below 0 at `start` rises to 0, or start + step if it does not soon."""
    end = start + step
    for _ in range(_DOUBLINGS):
        if math.isinf(reached := of(end)):
            break
        if reached >= 0:
            return float(brentq(partial(_at_most, of, reached), start, end, rtol=1e-6))
        end = start + 2 * (end - start)
    return start + step


def _at_most(of: Callable[[float], float], most: float, b: float) -> float:
    return min(of(b), most)


def logistic(
    x_NP: FloatArray, y: FloatArray, *, offset: FloatArray | None = None
) -> tuple[FloatArray, FloatArray] | None:
    """Return [P] coefficients of the logistic regression of `y` [N] in [0, 1] on `x_NP`, and [N, P] their influences.

    They are found by Newton's method with halved steps. None if no finite coefficients fit best, or more than one set
    does: all outcomes on one side, or columns without variation.
    """
    num_rows, num_columns = x_NP.shape
    scale = np.array([root_mean_square(column) for column in x_NP.T])
    if not num_rows or not (scale > _SMALLEST_SCALE).all():
        return None
    x = x_NP / scale
    # A single row may be as large as all others together are small, so the typical one says what is too much.
    most = _LARGEST_LOGIT / np.array([np.median(np.abs(column[column != 0])) for column in x.T])
    shift = np.zeros(num_rows) if offset is None else offset
    coefficient = np.zeros(num_columns)

    def loss_of(b: FloatArray) -> float:
        logits = x @ b + shift
        return float((np.logaddexp(0.0, logits) - y * logits).mean())

    loss = loss_of(coefficient)
    for _ in range(_STEPS):
        probability = expit(x @ coefficient + shift)
        gradient = x.T @ (probability - y) / num_rows
        hessian = (x.T * (probability * (1 - probability))) @ x / num_rows
        # A model that is sure of everything has a second derivative of 0, which leaves no step to take.
        if not hessian.any() or np.linalg.cond(hessian) > 1e12 or (np.abs(coefficient) > most).any():
            return None
        step = np.linalg.solve(hessian, gradient)
        while (moved := loss_of(coefficient - step)) > loss + 1e-15 and np.abs(step).max() > 1e-12:
            step = step / 2
        coefficient, loss = coefficient - step, moved
        if np.abs(step).max() < 1e-10 * (1 + np.abs(coefficient).max()):
            influence = np.linalg.solve(hessian, (x * (y - probability)[:, None]).T).T
            return coefficient / scale, influence / scale
    return None
