"""Calibration of preference probabilities: the reliability curve, and the parts of the Brier score.

Legend: N comparisons, V distinct sizes of log odds, R resamples, G points of a band.

As in calibration.py each comparison counts in both orders with half weight, which is computed on the half where the
model prefers the first reply: q = max(p, 1 − p) with the label turned with it. The isotonic regression of all 2N points
is, by symmetry, that of the N folded ones, no lower than ½.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.special import expit

from rewardlab.analysis.influence import by_influence
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.score_table import IntArray
from rewardlab.analysis.stats import central_range, without_interval
from rewardlab.core.types import Estimate

NUM_DRAWS: Final = 1000
NUM_BAND_POINTS: Final = 51
"""Probabilities at which the band of the curve is given."""
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
