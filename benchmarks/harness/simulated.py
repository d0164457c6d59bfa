"""Score rows whose truth is known, many data sets at a time: the last axis is prompts, the first draws."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import expit, ndtr
from scipy.stats import t as student

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

UNEVEN = "1 to 60 each"
ONE_LARGE = "2 each but one with a third of all"
SIZES = ("2 each", "8 each", UNEVEN, ONE_LARGE)
"""Comparisons of a prompt."""
_TABLE = 400_000


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of every prompt: sum, sum of squares and number of its values; each [draws, C]."""

    sums: FloatArray
    squares: FloatArray
    sizes: FloatArray

    @classmethod
    def alone(cls, values: FloatArray) -> Totals:
        """Every value its own prompt."""
        return cls(sums=values, squares=np.square(values), sizes=np.ones_like(values))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A distribution of values, made from normal ones."""

    draw: Callable[[FloatArray], FloatArray]
    mean: float


def _table(values: FloatArray) -> Shape:
    """The distribution of a sorted table."""
    values = np.sort(values)
    return Shape(
        draw=lambda normal: values[np.minimum((ndtr(normal) * len(values)).astype(int), len(values) - 1)],
        mean=float(values.mean()),
    )


def _nll(spread: float, sharpness: float) -> FloatArray:
    """NLLs of a model that says σ(sharpness · d) where σ(d) is right and d is normal."""
    generator = np.random.default_rng(9)
    logits = generator.normal(0, spread, _TABLE)
    sign = np.where(generator.random(_TABLE) < expit(logits), 1.0, -1.0)
    return np.logaddexp(0.0, -sharpness * sign * logits)


LOSSES = {
    "NLL, calibrated": _table(_nll(1.5, 1.0)),
    "NLL, calibrated and sure": _table(_nll(4.0, 1.0)),
    "NLL, overconfident": _table(_nll(1.5, 3.0)),
    "NLL, hardly trained": _table(_nll(0.2, 1.0)),
    "Brier score": _table(np.square(-np.expm1(-_nll(3.0, 1.0)))),
    "lognormal, skewness 6": Shape(draw=np.exp, mean=float(np.exp(0.5))),
}
MARGINS = {
    "normal": Shape(draw=lambda normal: normal, mean=0.0),
    "Student, 3 degrees of freedom": _table(student.ppf((np.arange(_TABLE) + 0.5) / _TABLE, 3)),
    "exponential, skewness 2": Shape(draw=lambda normal: -np.log(ndtr(-normal)), mean=1.0),
}


def sizes(shape: str, draws: int, prompts: int, generator: np.random.Generator) -> IntArray:
    """[draws, C] comparisons of each prompt."""
    if shape == UNEVEN:
        return np.minimum(1 + generator.pareto(1.1, (draws, prompts)) * 1.5, 60).astype(np.int64)
    if shape == ONE_LARGE:
        found = np.full((draws, prompts), 2)
        found[:, 0] = prompts
        return found
    return np.full((draws, prompts), int(shape.split()[0]))


def outcomes(sizes_DC: IntArray, share: float, alike: float, generator: np.random.Generator) -> Totals:
    """0/1 outcomes; a prompt's chance is beta distributed, so that two outcomes of it are correlated by `alike`."""
    chance: FloatArray | float = share
    if alike:
        weight = (1 - alike) / alike
        chance = generator.beta(share * weight, (1 - share) * weight, size=sizes_DC.shape)
    sums = generator.binomial(sizes_DC, chance).astype(np.float64)
    return Totals(sums=sums, squares=sums, sizes=sizes_DC.astype(np.float64))


def values(sizes_DC: IntArray, shape: Shape, alike: float, generator: np.random.Generator) -> Totals:
    """Values of one distribution, made from normal ones that are correlated by `alike` within a prompt."""
    own = np.sqrt(alike) * generator.normal(size=sizes_DC.shape)
    sums, squares = np.zeros(sizes_DC.shape), np.zeros(sizes_DC.shape)
    for number in range(int(sizes_DC.max())):
        there = np.nonzero(sizes_DC > number)
        found = shape.draw(own[there] + np.sqrt(1 - alike) * generator.normal(size=len(there[0])))
        sums[there] += found
        squares[there] += np.square(found)
    return Totals(sums=sums, squares=squares, sizes=sizes_DC.astype(np.float64))


def rankings(draws: int, prompts: int, noise: float, generator: np.random.Generator) -> tuple[Totals, float]:
    """All pairs of 2 to 7 replies a prompt, ranked by utility and scored with normal noise; (totals, accuracy)."""
    most = 7
    replies = generator.integers(2, most + 1, (draws, prompts))
    utility = generator.normal(size=(draws, prompts, most))
    error = generator.normal(size=utility.shape)
    score = error if np.isinf(noise) else utility + noise * error
    sums, pairs = np.zeros((draws, prompts)), np.zeros((draws, prompts))
    for first, second in itertools.combinations(range(most), 2):
        there = second < replies
        right = (utility[..., first] > utility[..., second]) == (score[..., first] > score[..., second])
        sums += there & right
        pairs += there
    accuracy = 0.5 if np.isinf(noise) else 0.5 + np.arctan(1 / noise) / np.pi
    return Totals(sums=sums, squares=sums, sizes=pairs), float(accuracy)


def judged(
    n: int, spread: float, sharpness: float, generator: np.random.Generator, *, each: int = 1, alike: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """([n] probabilities σ(sharpness · d), [n] labels with P(1) = σ(d)), d normal; `each` of a prompt are `alike`."""

    def correlated() -> FloatArray:
        shared = generator.normal(size=n // each).repeat(each)
        return np.sqrt(alike) * shared + np.sqrt(1 - alike) * generator.normal(size=n)

    logits = spread * correlated()
    labels = (ndtr(correlated()) < expit(logits)).astype(np.float64)
    return expit(sharpness * logits), labels


def true_ece(spread: float, sharpness: float, *, bins: int = 10) -> float:
    """ECE of `judged` over symmetrised pairs, by quadrature."""
    normal = np.linspace(-8, 8, 400_001)
    weight = np.exp(-0.5 * normal**2)
    weight /= weight.sum()
    right = np.maximum(expit(spread * normal), expit(-spread * normal))
    said = np.maximum(expit(sharpness * spread * normal), expit(-sharpness * spread * normal))
    index = np.minimum((said * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(index, weight * (said - right), bins)).sum())
