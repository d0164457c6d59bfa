"""Several tests at once, and several models: Holm, the set of models not distinguishable from the best, ranks.

Legend: M models, C prompts, N comparisons, R bootstrap draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.stats import LEAST_P, MIN_CLUSTERS, central_range, mean_by_level, p_by_interval, too_few
from rewardlab.core.types import Estimate

IntArray = npt.NDArray[np.integer[Any]]
AtLeast: TypeAlias = Callable[[Sequence[int], int, float], float]
"""(models left, the worst of them, its p-value) -> a p-value that is no smaller."""

DRAWS: Final = 2_000
"""Bootstrap draws of prompts."""
FLIPS: Final = 4_999
"""Random patterns of signs."""
EXCHANGES: Final = 1_999
"""Random ways to give models each other's gains."""
_MOST_EXCHANGED: Final = 2_000
"""Prompts beyond which they are not drawn: a mean of more is hardly skewed."""
_CHUNK_VALUES: Final = 4_000_000
_ROUNDING: Final = 1e-9


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that the chance of any false finding among them is at most the level, in their order.

    NaN stays NaN and is not counted. Source: Holm (1979), Scandinavian Journal of Statistics 6, 65-70: the k-th
    smallest of n is multiplied by n − k + 1, and none is below an earlier one.
    """
    adjusted, largest = [math.nan] * len(p_values), 0.0
    tested = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    for place, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - place) * p))
        adjusted[index] = largest
    return adjusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a model stands among the others."""

    rank: Estimate
    """Rank by the mean over all comparisons (1 is best, equal means share their mean rank), and the range that holds
    95 % of the bootstrap draws."""
    first: float
    """Share of bootstrap draws in which it is best; equal models share it."""
    p_best: float
    """p-value of the model being as good as the best of all: its p-value in the model confidence set."""


def standings(
    gains: Mapping[str, FloatArray],
    prompts_N: IntArray,
    *,
    of_any_size: bool = False,
    draws: int = DRAWS,
    flips: int = FLIPS,
    seed: int = 0,
) -> dict[str, Standing]:
    """Return the standing of each model by its mean gain, from gains [N] (higher is better) on the same comparisons.

    `prompts_N` is the number of the prompt of each comparison, from 0: prompts are drawn with replacement, whole.
    `p_best` is that of the model confidence set (see `confidence_set`). Gains `of_any_size`, such as those in NLL, may
    be skewed: there the interval of the mean has to show a difference too, as in `paired.significance_of_means`, and
    so has the exchange of models within prompts.

    Below ten prompts ranks have no range and `p_best` is NaN.
    """
    values_MN = np.stack(list(gains.values()))
    totals_CM, sizes_C = _totals(values_MN, prompts_N)
    means_M = values_MN.mean(1)
    rank_M = rankdata(-means_M)
    num_prompts = len(sizes_C)
    if num_prompts < MIN_CLUSTERS:
        few = too_few(num_prompts)
        return {
            name: Standing(
                rank=Estimate(value=float(rank), low=np.nan, high=np.nan, n=num_prompts, method=few),
                first=np.nan,
                p_best=np.nan,
            )
            for name, rank in zip(gains, rank_M, strict=True)
        }
    drawn_RM = _bootstrap_means(totals_CM, sizes_C, draws=draws, seed=seed)
    # A product of matrices may round equal columns differently, and models with equal gains have equal ranks.
    drawn_RM = drawn_RM[:, [int((own_C == totals_CM.T).all(1).argmax()) for own_C in totals_CM.T]]
    ranks_RM = rankdata(-drawn_RM, axis=1)
    best_RM = drawn_RM == drawn_RM.max(1, keepdims=True)
    first_M = (best_RM / best_RM.sum(1, keepdims=True)).mean(0)
    skewed: list[AtLeast] = []
    if of_any_size:
        by_interval = partial(_p_by_interval, values_MN, [str(prompt) for prompt in prompts_N])
        skewed = [by_interval, partial(_p_by_exchange, totals_CM, draws=flips, seed=seed)]
    p_M = confidence_set(totals_CM, draws=flips, seed=seed, at_least=skewed)
    method = f"bootstrap over prompts, {draws:,} draws"
    return {
        name: Standing(
            rank=_with_range(float(rank_M[model]), ranks_RM[:, model], num_prompts, method),
            first=float(first_M[model]),
            p_best=float(p_M[model]),
        )
        for model, name in enumerate(gains)
    }


def confidence_set(
    totals_CM: FloatArray, *, draws: int = FLIPS, seed: int = 0, at_least: Sequence[AtLeast] = ()
) -> FloatArray:
    """Return [M] p-values of a model being as good as the best, from the total gains of prompts [C, M].

    Source: the model confidence set of Hansen, Lunde & Nason (2011), Econometrica 79, 453-497, with their statistic
    T_max. Models are taken out, the worst first, while the hypothesis that all left are equally good is rejected; a
    model's p-value is the largest met up to its own, and that of the last is 1. The models with a p-value of at least
    0.05 hold the best one in 95 of 100 samples, whatever the number of models.

    In place of their bootstrap, which keeps its level only with many prompts, signs are flipped by prompt: a model's
    statistic is the sum of its differences from the mean of those left, over the root of their squares. So for two
    models the p-value is that of `sign_flip`. Each of `at_least` may raise the p-value of a step.
    """
    flipped_RM = _flipped_sums(totals_CM, draws=draws, seed=seed)
    left, p_values, largest = list(range(totals_CM.shape[1])), np.ones(totals_CM.shape[1]), 0.0
    while len(left) > 1:
        below_CM, size_M = _below(totals_CM, left)
        worst_M = below_CM.sum(0) / size_M
        drawn_RM = (flipped_RM[:, left].mean(1, keepdims=True) - flipped_RM[:, left]) / size_M
        worst = int(np.argmax(worst_M))
        extreme = int((drawn_RM.max(1) >= worst_M[worst] - _ROUNDING).sum())
        p = (1 + extreme) / (1 + draws)
        for raised in at_least:
            p = raised(left, left[worst], p)
        largest = max(largest, p)
        p_values[left.pop(worst)] = largest
    return p_values


def _below(totals_CM: FloatArray, left: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    """Return [C, M] how far each of the models left is below their mean, and [M] the size of that over prompts."""
    below_CM = totals_CM[:, left].mean(1, keepdims=True) - totals_CM[:, left]
    size_M = np.sqrt(np.square(below_CM).sum(0))
    # A model that equals the mean of all on every prompt has no spread, and is not worse.
    return below_CM, np.where(size_M > _ROUNDING * np.abs(totals_CM).max(initial=1.0), size_M, np.inf)


def _p_by_exchange(totals_CM: FloatArray, left: Sequence[int], _: int, p: float, *, draws: int, seed: int) -> float:
    """Return the larger of p and the p-value of the same statistic where the models left take each other's gains.

    In each prompt the gains are handed on by a drawn number of places, from model to model. Of equal models whose gains
    are skewed that is exact, which flipped signs are for two models alone: of several, the one whose few large gains
    are missing by chance is the worst, and seems to vary little.
    """
    count, num_prompts = len(left), len(totals_CM)
    if count < 3 or num_prompts > _MOST_EXCHANGED:
        return p
    below_CM, size_M = _below(totals_CM, left)
    least = float((below_CM.sum(0) / size_M).max()) - _ROUNDING
    smallest = float(size_M.min()) ** 2 * _ROUNDING
    both_CM = np.stack([below_CM, np.square(below_CM)])
    generator, extreme, draws = np.random.default_rng(seed), 0, min(draws, EXCHANGES)
    chunk = max(1, _CHUNK_VALUES // num_prompts)
    for start in range(0, draws, chunk):
        places_RC = generator.integers(0, count, size=(min(chunk, draws - start), num_prompts), dtype=np.int16)
        handed = (np.concatenate(np.roll(both_CM, place, axis=2), axis=1) for place in range(count))
        found = sum((places_RC == place).astype(np.float64) @ own_C for place, own_C in enumerate(handed))
        sums_RM, squares_RM = np.split(found, 2, axis=1)
        extreme += int(((sums_RM / np.sqrt(np.maximum(squares_RM, smallest))).max(1) >= least).sum())
    return max(p, (1 + extreme) / (1 + draws))


def _p_by_interval(values_MN: FloatArray, clusters: Sequence[str], left: Sequence[int], worst: int, p: float) -> float:
    """Return the larger of p and the p-value by the interval of how far one model is below the mean of those left.

    The latter is one-sided, and is multiplied by their number since the worst of them was chosen (Bonferroni).
    """
    below_N = values_MN[list(left)].mean(0) - values_MN[worst]
    times = len(left) / 2
    found = p_by_interval(mean_by_level(below_N, clusters), least=max(p / times, LEAST_P))
    return max(p, min(1.0, times * found))


def _flipped_sums(totals_CM: FloatArray, *, draws: int, seed: int) -> FloatArray:
    """Return [R, M] sums over prompts under random signs, one sign a prompt for all models."""
    generator, whole_M = np.random.default_rng(seed), totals_CM.sum(0)
    chunk = max(1, _CHUNK_VALUES // len(totals_CM))
    parts = []
    for start in range(0, draws, chunk):
        plus_RC = generator.integers(0, 2, size=(min(chunk, draws - start), len(totals_CM)), dtype=np.int8)
        parts.append(2 * (plus_RC @ totals_CM) - whole_M)
    return np.concatenate(parts)


def _with_range(rank: float, drawn_R: FloatArray, num_prompts: int, method: str) -> Estimate:
    low, high = central_range(drawn_R)
    # The rank that was seen belongs to the range, however seldom the draws repeat it.
    return Estimate(value=rank, low=min(low, rank), high=max(high, rank), n=num_prompts, method=method)


def _totals(values_MN: FloatArray, prompts_N: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return [C, M] sums and [C] numbers of the comparisons of each prompt."""
    num_prompts = int(prompts_N.max()) + 1
    sums = [np.bincount(prompts_N, values, minlength=num_prompts) for values in values_MN]
    return np.stack(sums, axis=1), np.bincount(prompts_N, minlength=num_prompts).astype(np.float64)


def _bootstrap_means(totals_CM: FloatArray, sizes_C: FloatArray, *, draws: int, seed: int) -> FloatArray:
    """Return [R, M] means over prompts drawn with replacement."""
    generator, count = np.random.default_rng(seed), len(sizes_C)
    means = np.empty((draws, totals_CM.shape[1]))
    for draw in range(draws):
        times_C = np.bincount(generator.integers(0, count, count), minlength=count)
        means[draw] = (times_C @ totals_CM) / (times_C @ sizes_C)
    return means
