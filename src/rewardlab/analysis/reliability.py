"""Calibration of preference probabilities: slope, intercept, reliability curve, and the parts of the Brier score.

Legend: N comparisons, V distinct sizes of log odds, R resamples, G points of a band.

As in calibration.py each comparison counts in both orders with half weight, which is computed on the half where the
model prefers the first reply: q = max(p, 1 − p) with the label turned with it. The isotonic regression of all 2N points
is, by symmetry, that of the N folded ones, no lower than ½.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from scipy.optimize import brentq, isotonic_regression
from scipy.special import expit, stdtrit

from rewardlab.analysis.influence import NO_VARIATION, by_influence, sums_by, without_interval
from rewardlab.analysis.intervals import FloatArray, root_mean_square, student_limits
from rewardlab.analysis.score_table import IntArray
from rewardlab.analysis.stats import central_range
from rewardlab.core.types import Estimate

NUM_DRAWS: Final = 1000
NUM_BAND_POINTS: Final = 51
"""Probabilities at which the band of the curve is given."""
NO_FIT: Final = "no finite value fits best"
"""Method of a slope or an intercept without a value: the model ranks all pairs rightly, or is wrong where it is sure
beyond what numbers hold."""
_STEPS = 60
# An interval that is narrower than this, in logits of a typical row or as a share of its value, is one of rounding.
_NOTHING = 1e-9
# A limit that is further away than Student's by so many doublings is not looked for.
_DOUBLINGS = 6
ENOUGH_LOSSES: Final = 200.0
"""Lost comparisons from which on a coefficient has Student's interval."""
# A coefficient that gives a typical row a larger logit than this means that no finite one fits best.
_LARGEST_LOGIT = 500.0
# A column below this does not vary, since its coefficient and influences might be larger than float64 holds.
_SMALLEST_SCALE = 1e-290
# Log odds that are nearer than this, in parts of the largest, are one.
_ROUNDING = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """The reliability curve by isotonic regression (PAV), and what it says about the Brier score.

    Source: Dimitriadis, Gneiting & Jordan (2021), PNAS 118(8), e2016191118 (CORP).
    """

    probability: tuple[float, ...]
    """[2B] for each of B steps its first and its last probability, from ½ to 1; the half below ½ mirrors it."""
    recalibrated: tuple[float, ...]
    """[2B] the share of wins that isotonic regression gives there."""
    weight: tuple[int, ...]
    """[B] comparisons of each step."""
    band_probability: tuple[float, ...]
    """[G] probabilities at which the band is given."""
    band_low: tuple[float, ...]
    band_high: tuple[float, ...]
    """[G] the central 95 % of the curves of labels redrawn from the model's own probabilities, as alike within a prompt
    as the labels are."""
    miscalibration: Estimate
    """What the Brier score would gain from recalibration; 0 at best. Isotonic regression fits noise too, so the value
    is too high. The interval is that of the true gain; where most of the value is noise, it ends at the value."""
    discrimination: Estimate
    """How much better recalibrated probabilities are than ½ for all."""
    uncertainty: Estimate
    """The Brier score of ½ for all. Brier score = miscalibration − discrimination + uncertainty."""
    null_miscalibration: tuple[float, float]
    """The central 95 % of the miscalibration of a calibrated model with these probabilities."""


def reliability(
    logit: FloatArray, y: FloatArray, clusters: IntArray, *, seed: int = 0, draws: int = NUM_DRAWS, level: float = 0.95
) -> Reliability:
    """Return the reliability curve of log odds [N] with labels `y` [N], by prompt where `clusters` repeat.

    `draws` is the number of resamples behind the band and the intervals.
    """
    folded = _Folded.of(logit, y)
    if not folded.size:
        empty = without_interval(math.nan, 0, level=level)
        return Reliability(
            probability=(), recalibrated=(), weight=(), band_probability=(), band_low=(), band_high=(),
            miscalibration=empty, discrimination=empty, uncertainty=empty, null_miscalibration=(math.nan, math.nan),
        )  # fmt: skip
    curve_V, parts = folded.fit(folded.label, folded.square)
    draw_labels = _Redraws.of(folded, curve_V, clusters[folded.order])
    generator = np.random.default_rng(seed)
    grid = np.linspace(0.5, 1.0, NUM_BAND_POINTS)
    grid = grid[(grid >= folded.probability[0]) & (grid <= folded.probability[-1])]
    null, bands = np.empty(draws), np.empty((draws, grid.size))
    for draw in range(draws):
        label = draw_labels(generator)
        drawn_V, drawn = folded.fit(label, label)
        null[draw] = drawn[0]
        bands[draw] = folded.at(grid, drawn_V)
    band_low, band_high = np.quantile(bands, [(1 - level) / 2, (1 + level) / 2], axis=0)
    estimates = _parts(folded, curve_V, parts, null, clusters[folded.order], level=level)
    low, high = central_range(null, level=level)
    probability, recalibrated, weight = folded.steps(curve_V)
    return Reliability(
        probability=probability,
        recalibrated=recalibrated,
        weight=weight,
        band_probability=tuple(grid.tolist()),
        band_low=tuple(band_low.tolist()),
        band_high=tuple(band_high.tolist()),
        miscalibration=estimates[0],
        discrimination=estimates[1],
        uncertainty=estimates[2],
        null_miscalibration=(low, high),
    )


def _parts(
    folded: _Folded, curve_V: FloatArray, parts: FloatArray, null: FloatArray, clusters: IntArray, *, level: float
) -> list[Estimate]:
    """Return miscalibration, discrimination and uncertainty with intervals, from the curve [V] and null draws [R].

    To first order each is a mean over comparisons of differences of squared errors, since a small change of the best
    curve does not change its error. But isotonic regression also fits noise, which raises the first two: by about as
    much, and with as much spread, as it raises the miscalibration of a calibrated model. The interval is therefore
    moved down by that amount, widened by that spread, cut at 0, and widened to hold the value.
    """
    best_N = folded.of_rows(curve_V)
    p, y, y2 = folded.probability, folded.label, folded.square
    model, best, half = (g * g - 2 * g * y + y2 for g in (p, best_N, 0.5))
    # Soft labels scatter less about the curve than the wins and losses that are redrawn; hard ones as much.
    scatter = float((best_N * (1 - best_N)).sum())
    soft = min(float(best.sum()) / scatter, 1.0) if scatter > 0 else 1.0
    fitted, noise = soft * float(null.mean()), soft * float(null.std())
    found = []
    for value, terms, moved in zip(parts.tolist(), (model - best, half - best, half), (True, True, False), strict=True):
        own = by_influence(value, terms - value, clusters, level=level)
        if math.isnan(own.low) or not moved:
            found.append(own)
            continue
        down, up = (math.hypot(reach, 2 * noise) for reach in (value - own.low, own.high - value))
        low, high = max(value - fitted - down, 0.0), value - fitted + up
        method = own.method.replace("by influence", "less what fits noise")
        found.append(replace(own, low=min(low, value), high=max(high, value), method=method))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folded:
    """Comparisons turned so that the model prefers the first reply, sorted by probability."""

    probability: FloatArray
    """[N] in [½, 1], ascending."""
    label: FloatArray
    """[N] the label turned with it; ½ at p = ½, where both orders meet."""
    square: FloatArray
    """[N] the square of the label, the mean of both orders at p = ½."""
    order: IntArray
    """[N] where each entry was."""
    starts: IntArray
    """[V] first entry of each distinct size of log odds."""
    weight: FloatArray
    """[V] entries of each distinct size."""

    @classmethod
    def of(cls, logit: FloatArray, y: FloatArray) -> _Folded:
        swapped, size = logit < 0, _level(np.abs(logit))
        label = np.where(swapped, 1 - y, y)
        square = np.where(size == 0, (np.square(label) + np.square(1 - label)) / 2, np.square(label))
        label = np.where(size == 0, 0.5, label)
        order = np.lexsort((label, size))
        starts = np.unique(size[order], return_index=True)[1]
        return cls(
            probability=expit(size[order]),
            label=label[order],
            square=square[order],
            order=order,
            starts=starts,
            weight=np.diff(np.append(starts, size.size)).astype(np.float64),
        )

    @property
    def size(self) -> int:
        """N."""
        return int(self.probability.size)

    def fit(self, label: FloatArray, square: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return [V] the isotonic curve of labels [N], and [3] miscalibration, discrimination and uncertainty.

        `square` [N] are the squares of the labels.
        """
        p, w = self.probability[self.starts], self.weight
        s = np.add.reduceat(label, self.starts) if self.starts.size < self.size else label
        curve = np.maximum(isotonic_regression(s / w, weights=w).x, 0.5)
        # Σ w (g − y)² of a curve g is Σ g (w g − 2 s) + Σ y², with the sum s of the labels y at a probability.
        squares, total = float(square.sum()), float(s.sum())
        model, best = (float(np.dot(g, w * g - 2 * s)) + squares for g in (p, curve))
        half = self.size / 4 - total + squares
        return curve, np.array([max(model - best, 0.0), max(half - best, 0.0), half]) / self.size

    def of_rows(self, curve_V: FloatArray) -> FloatArray:
        """Return [N] the curve [V] at the probability of each comparison."""
        return np.repeat(curve_V, np.diff(np.append(self.starts, self.size)))

    def at(self, grid: FloatArray, curve_V: FloatArray) -> FloatArray:
        """Return the curve [V] at the probabilities `grid` [G], linear between its points."""
        return np.interp(grid, self.probability[self.starts], curve_V)

    def steps(self, curve_V: FloatArray) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
        """Return first and last probability of each step of the curve, its heights, and comparisons a step."""
        p = self.probability[self.starts]
        first = np.flatnonzero(np.diff(curve_V, prepend=-1.0))
        last = np.append(first[1:], curve_V.size) - 1
        ends = np.stack([p[first], p[last]], axis=1).ravel()
        return (
            tuple(ends.tolist()),
            tuple(np.repeat(curve_V[first], 2).tolist()),
            tuple(np.add.reduceat(self.weight, first).astype(np.int64).tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Redraws:
    """Labels redrawn from the model's probabilities, as alike within a prompt as the labels themselves are."""

    probability: FloatArray
    """[N] as those of `_Folded`."""
    prompt: IntArray
    """[N] number of the prompt."""
    num_prompts: int
    alike: float
    """ρ: with this chance all labels of a prompt are drawn by one uniform number, else each by its own."""

    @classmethod
    def of(cls, folded: _Folded, curve_V: FloatArray, clusters: IntArray) -> _Redraws:
        """Return redraws with ρ, the mean product of two standardised residuals of a prompt about the curve [V].

        ρ is cut to [0, 1].

        Two rows of a prompt then have labels of correlation ρ where their probabilities are equal. Rows that repeat a
        pair with its label have ρ = 1, several independent judges of a pair ρ = 0.
        """
        names, prompt = np.unique(clusters, return_inverse=True)
        best = folded.of_rows(curve_V)
        varies = (best > 0) & (best < 1) & (folded.probability > 0.5)
        residual = np.where(varies, (folded.label - best) / np.sqrt(np.where(varies, best * (1 - best), 1.0)), 0.0)
        sums, squares, sizes = (np.bincount(prompt, column) for column in (residual, residual**2, varies))
        # Σ_{n≠m} z_n z_m of each prompt, over what it would be if all its residuals were equal.
        scale = float(((sizes - 1) * squares).sum())
        alike = float((sums**2 - squares).sum()) / scale if scale > 0 else 0.0
        return cls(
            probability=folded.probability,
            prompt=prompt,
            num_prompts=names.size,
            alike=min(max(alike, 0.0), 1.0) if names.size < folded.size else 0.0,
        )

    def __call__(self, generator: np.random.Generator) -> FloatArray:
        """Return [N] labels of 0 and 1."""
        uniform = generator.random(self.probability.size)
        if self.alike:
            shared, own = generator.random(self.num_prompts) < self.alike, generator.random(self.num_prompts)
            uniform = np.where(shared[self.prompt], own[self.prompt], uniform)
        return (uniform < self.probability).astype(np.float64)


def _level(size: FloatArray) -> FloatArray:
    """Return sizes of log odds [N] of which those that differ by rounding alone are equal.

    Differences of scores that are decimal numbers differ so (0.3 − 0.1 and 0.5 − 0.3), and are one point of the curve.
    """
    values_V, of_N = np.unique(size, return_inverse=True)
    largest = values_V[np.isfinite(values_V)].max(initial=0.0)
    begins_V = np.diff(values_V, prepend=-np.inf) > _ROUNDING * largest
    levelled: FloatArray = values_V[begins_V][np.cumsum(begins_V) - 1][of_N]
    return levelled


# --- slope and intercept ---------------------------------------------------------------------------------------


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
    nearest = np.delete(best, k)  # the other coefficients at the b before, from which those at the next are near

    def score(b: float) -> tuple[float, FloatArray, FloatArray]:
        """Return the score at b, and what makes its variance: [N] slopes and variances of labels."""
        nonlocal nearest
        shift = b * own + others @ nearest
        if others.shape[1]:
            moved = logistic(others, y, offset=shift)
            shift = shift + others @ moved[0] if moved is not None else np.full_like(shift, math.nan)
            nearest = nearest if moved is None else nearest + moved[0]
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
