"""Intervals for shares and means, by prompt where prompts repeat.

Legend: N values (one a comparison), C clusters (one a prompt), S columns, R resamples. Which interval is used:

    every value its own prompt      score interval for a share, t interval for a mean
    prompts repeat, C ≥ 40          percentile bootstrap of whole prompts
    prompts repeat, 10 ≤ C < 40     t interval with C − 1 degrees of freedom on the linearised ratio
    prompts repeat, C < 10          none: the value stands alone and the method says why

The mean over N values in C clusters is a ratio of two sums over clusters, Σ_c s_c / Σ_c m_c, where m_c is the size of
cluster c and s_c the sum of its values. Shares and means therefore go through the one function `ratio_of_sums`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from rewardlab.core.types import Estimate

FloatArray = npt.NDArray[np.float64]
Numbers = Sequence[float] | npt.NDArray[np.number]
"""What may be given as [N] numbers."""

MIN_CLUSTERS = 10
"""Below this many prompts, where they repeat, no interval is given."""
MIN_BOOTSTRAP_CLUSTERS = 40
"""Below this many prompts a percentile bootstrap is too narrow, and the t interval is used."""
NUM_RESAMPLES = 2000
"""Bootstrap resamples behind a percentile interval."""

_CHUNK_VALUES = 1 << 22  # bounds the memory of a chunk of resamples to some tens of megabytes
_NO_SPREAD = 1e-12


def wilson(successes: float, n: int, *, level: float = 0.95) -> Estimate:
    """Wilson's score interval for a share of independent 0/1 outcomes.

    `successes` is their sum, between 0 and `n`. Source: Wilson (1927), JASA 22, 209-212; equal to
    ``scipy.stats.binomtest(...).proportion_ci(level, "wilson")``.
    """
    assert 0 <= successes <= n, f"{successes} successes of {n}"
    if n == 0:
        return _without_interval(math.nan, 0, "no data", level)
    share = successes / n
    return _score_interval(share, share * (1 - share), n, level=level, method="Wilson")


def proportion(
    outcomes: Numbers, clusters: Sequence[str] | None = None, *, level: float = 0.95, seed: int = 0
) -> Estimate:
    """The share of comparisons won, from outcomes [N] of 0, ½ or 1, with an interval inside [0, 1].

    `clusters` [N] are the prompt keys. Where none repeats, plain 0/1 outcomes get Wilson's interval; with halves
    among them p(1 − p) is replaced by the empirical variance v = Σx²/N − p² (see `_score_interval`), which is
    smaller because a half varies less than a win or a loss. Where prompts repeat, see the head of this file; if the
    prompts then do not differ at all, the score interval with v = 0 and one observation a prompt stands in for the
    empty interval that resampling would give.
    """
    values = _values(outcomes, clusters)
    assert np.isin(values, (0.0, 0.5, 1.0)).all(), "an outcome is 0, ½ or 1"
    halves = "score interval, ties one half" if (values == 0.5).any() else "Wilson"
    return _share(values, clusters, halves, level=level, seed=seed)


def mean_share(
    shares: Numbers, clusters: Sequence[str] | None = None, *, level: float = 0.95, seed: int = 0
) -> Estimate:
    """`proportion` of outcomes that are themselves means, anywhere in [0, 1]; of plain outcomes it is the same."""
    values = _values(shares, clusters)
    assert ((values >= 0) & (values <= 1)).all(), "a share lies between 0 and 1"
    if np.isin(values, (0.0, 0.5, 1.0)).all():
        return proportion(values, clusters, level=level, seed=seed)
    return _share(values, clusters, "score interval", level=level, seed=seed)


def _share(values: FloatArray, clusters: Sequence[str] | None, method: str, *, level: float, seed: int) -> Estimate:
    if values.size == 0:
        return _without_interval(math.nan, 0, "no data", level)
    if clusters is None or not has_repeats(clusters):
        share = float(values.mean())
        variance = max(float(np.square(values).mean()) - share**2, 0.0)
        return _score_interval(share, variance, values.size, level=level, method=method)
    estimate = ratio_of_sums(*_sums_and_sizes(values, clusters), level=level, seed=seed)
    if estimate.high - estimate.low < _NO_SPREAD:
        method = "score interval over prompts, which do not differ"
        return _score_interval(estimate.value, 0.0, estimate.n, level=level, method=method)
    return dataclasses.replace(estimate, low=max(estimate.low, 0.0), high=min(estimate.high, 1.0))


def mean(values: Numbers, clusters: Sequence[str] | None = None, *, level: float = 0.95, seed: int = 0) -> Estimate:
    """The mean of finite values [N] with a t interval, or by prompt where the keys in `clusters` [N] repeat.

    One value alone has no interval.
    """
    array = _values(values, clusters)
    if array.size == 0:
        return _without_interval(math.nan, 0, "no data", level)
    if clusters is not None and has_repeats(clusters):
        return ratio_of_sums(*_sums_and_sizes(array, clusters), level=level, seed=seed)
    if array.size == 1:
        return _without_interval(float(array[0]), 1, "one value", level)
    return _t_interval(array, np.ones_like(array), level=level, method="t interval")


def ratio_of_sums(numerators: FloatArray, denominators: FloatArray, *, level: float = 0.95, seed: int = 0) -> Estimate:
    """Σ numerators / Σ denominators over independent clusters, both [C], with the interval for that many clusters.

    Denominators are positive. The t interval is that of the ratio estimator: with ratio ρ and residuals
    e_c = s_c − ρ m_c, its squared standard error is C/(C − 1) · Σ e_c² / (Σ m_c)². Source: Cochran, Sampling
    Techniques (1977), chapter 6.
    """
    assert numerators.shape == denominators.shape
    assert (denominators > 0).all()
    num_clusters = numerators.size
    if num_clusters == 0:
        return _without_interval(math.nan, 0, "no data", level)
    value = float(numerators.sum() / denominators.sum())
    if num_clusters < MIN_CLUSTERS:
        return _without_interval(value, num_clusters, too_few_prompts(num_clusters), level)
    if num_clusters < MIN_BOOTSTRAP_CLUSTERS:
        return _t_interval(numerators, denominators, level=level, method="t interval by prompt")
    totals_R2 = bootstrap_totals(np.stack([numerators, denominators], axis=1), seed=seed)
    low, high = central_range(totals_R2[:, 0] / totals_R2[:, 1], level=level)
    return Estimate(value=value, low=low, high=high, n=num_clusters, method="bootstrap by prompt", level=level)


def difference(first: Estimate, second: Estimate) -> Estimate:
    """first − second, two estimates of one level from independent data, with an interval from theirs.

    Source: Zou & Donner (2008), Statistics in Medicine 27, 1693-1702 (for two Wilson intervals: Newcombe 1998). Without
    either interval there is none.
    """
    assert first.level == second.level
    value = first.value - second.value
    return Estimate(
        value=value,
        low=value - math.hypot(first.value - first.low, second.high - second.value),
        high=value + math.hypot(first.high - first.value, second.value - second.low),
        n=min(first.n, second.n),
        method="from the two intervals",
        level=first.level,
    )


def has_repeats(clusters: Sequence[str]) -> bool:
    """Whether any key occurs twice, so that the values are not independent."""
    return len(set(clusters)) < len(clusters)


def too_few_prompts(num_prompts: int) -> str:
    """The method of an estimate whose interval was refused."""
    return f"too few prompts ({num_prompts})"


def cluster_totals(values_NS: FloatArray, clusters: Sequence[str]) -> FloatArray:
    """Column sums within each cluster, [C, S], in the order of the sorted keys."""
    assert len(clusters) == len(values_NS), f"{len(clusters)} keys for {len(values_NS)} values"
    keys, index_N = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
    return np.stack([np.bincount(index_N, column, minlength=len(keys)) for column in values_NS.T], axis=1)


def bootstrap_totals(totals_CS: FloatArray, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> FloatArray:
    """Column sums [R, S] of resamples that draw C of the C rows with replacement.

    Any statistic that is a function of sums over clusters is resampled by this alone.
    """
    num_clusters = len(totals_CS)
    generator = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_VALUES // num_clusters)
    parts = []
    for start in range(0, num_resamples, chunk):
        rows = min(chunk, num_resamples - start)
        drawn = generator.integers(num_clusters, size=(rows, num_clusters))
        drawn += np.arange(rows)[:, None] * num_clusters
        times_drawn = np.bincount(drawn.ravel(), minlength=rows * num_clusters).reshape(rows, num_clusters)
        parts.append(times_drawn @ totals_CS)
    return np.concatenate(parts)


def central_range(draws: FloatArray, *, level: float = 0.95) -> tuple[float, float]:
    """The two quantiles that leave (1 − level)/2 of the draws on either side."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _score_interval(value: float, variance: float, n: int, *, level: float, method: str) -> Estimate:
    """Wilson's interval with the variance v of one outcome in place of p(1 − p).

    Centre (p + z²/2n) / (1 + z²/n), half width z/(1 + z²/n) · √(v/n + z²/4n²). It is the set of q with
    n(p − q)² ≤ z²(q(1 − q) − t/4 · n/(n + z²)), t the share of ties: a score test whose variance gives the ties their
    discount. Since v ≤ p(1 − p) it lies inside [0, 1], and it is never empty, not even when every outcome is a tie.
    """
    z = float(ndtri((1 + level) / 2))
    shrink = z * z / n
    centre = (value + shrink / 2) / (1 + shrink)
    half_width = z / (1 + shrink) * math.sqrt(variance / n + shrink / (4 * n))
    # At p = 0 or 1 the limits are exactly 0 or 1; rounding must not carry them past it, or past the value.
    low = min(max(centre - half_width, 0.0), value)
    high = max(min(centre + half_width, 1.0), value)
    return Estimate(value=value, low=low, high=high, n=n, method=method, level=level)


def _t_interval(numerators: FloatArray, denominators: FloatArray, *, level: float, method: str) -> Estimate:
    count, total = numerators.size, float(denominators.sum())
    value = float(numerators.sum()) / total
    residuals = numerators - value * denominators
    standard_error = math.sqrt(count / (count - 1) * float(np.square(residuals).sum())) / total
    half_width = float(stdtrit(count - 1, (1 + level) / 2)) * standard_error
    return Estimate(value=value, low=value - half_width, high=value + half_width, n=count, method=method, level=level)


def _without_interval(value: float, n: int, method: str, level: float) -> Estimate:
    return Estimate(value=value, low=math.nan, high=math.nan, n=n, method=method, level=level)


def _sums_and_sizes(values: FloatArray, clusters: Sequence[str]) -> tuple[FloatArray, FloatArray]:
    totals_C2 = cluster_totals(np.stack([values, np.ones_like(values)], axis=1), clusters)
    return totals_C2[:, 0], totals_C2[:, 1]


def _values(values: Numbers, clusters: Sequence[str] | None) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    assert array.ndim == 1, f"wanted one axis, got shape {array.shape}"
    assert np.isfinite(array).all(), "count values that are not finite and leave them out before estimating"
    assert clusters is None or len(clusters) == array.size, "one key a value"
    return array
