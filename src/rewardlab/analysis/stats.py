"""Intervals for shares and means, clustered by prompt where prompts repeat.

Legend: N values (one a comparison), C clusters (one a prompt), S columns, R resamples. Which interval is used:

    a share of wins        Wilson's score interval, for the effective number of outcomes under ties and repeated prompts
    a mean of losses       t interval corrected for skewness (Hall 1992)
    a mean of anything     the wider limits of that and of Student's interval

Below ten prompts (or values, where no prompts are given) there is no interval, and the method of the estimate says why.
The formulas are in intervals.py; how often they cover the truth is in docs/design/intervals.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.analysis.intervals import (
    FloatArray,
    Limits,
    loss_limits,
    mean_limits,
    share_limits,
    unit_of,
    wilson_limits,
)
from rewardlab.core.types import Estimate

Numbers = Sequence[float] | npt.NDArray[np.number]
"""Types accepted as [N] numbers."""

ByLevel = Callable[[float], Estimate]
"""Level, such as 0.95 -> an estimate with its interval of that level."""

MIN_CLUSTERS = 10
"""Below this many prompts no interval is given: no method covers the truth often enough there for shares near 1 and for
skewed means."""
FEWEST_DIFFERING = 5
"""Prompts that must differ from the others for an interval of a mean of values most of which are equal.

With fewer, how often and how far prompts differ is hardly known. Where three of 200 prompts differ in the mean, mostly
upwards, 85 % of all intervals hold the truth, where one does 57 %; of those of five or more that differ 93 % or more do
(6,000 draws, not kept)."""
NO_VARIATION: Final = "no variation"
"""Method of an estimate without an interval because nothing varies in the data, such as a correlation of exactly 1."""
LEAST_P = 1e-9
"""Smallest p-value that is found by inverting an interval."""
_HALVINGS = 30
_ROUNDING = 1e-12
"""Relative difference up to which two values are equal."""
_FEW_KEYS = 4
"""From so many comparisons a key on, keys are numbered without sorting them all."""
_LONG_KEY = 64
"""Keys with more characters are not made into an array, in which each takes as much room as the longest."""


def wilson(successes: float, n: int, *, level: float = 0.95) -> Estimate:
    """Return Wilson's score interval for a share of independent 0/1 outcomes; no interval below ten outcomes.

    `successes` is their sum, between 0 and `n`. Source: Wilson (1927), JASA 22, 209-212; equal to
    ``scipy.stats.binomtest(...).proportion_ci(level, "wilson")``.
    """
    assert 0 <= successes <= n, f"{successes} successes of {n}"
    if n < MIN_CLUSTERS:
        return without_interval(successes / n if n else math.nan, n, method=too_few(n, "outcomes"), level=level)
    limits = wilson_limits(np.array([successes / n]), np.array([float(n)]), level=level)
    value, low, high = (float(limit[0]) for limit in limits)
    return Estimate(value=value, low=low, high=high, n=n, method="Wilson", level=level)


def proportion(outcomes: Numbers, clusters: Sequence[str] | None = None, *, level: float = 0.95) -> Estimate:
    """Return the share of comparisons won, from outcomes [N] of 0, ½ or 1, with an interval inside [0, 1].

    `clusters` [N] are the prompt keys. 0/1 outcomes of which no two share a prompt get Wilson's interval, all others
    that for their effective number (see `intervals.share_limits`).
    """
    values = _values(outcomes, clusters)
    assert np.isin(values, (0.0, 0.5, 1.0)).all(), "an outcome is 0, ½ or 1"
    return _proportion_by_level(values, clusters)(level)


def _proportion_by_level(values: FloatArray, clusters: Sequence[str] | None) -> ByLevel:
    tied, repeated = bool((values == 0.5).any()), clusters is not None and has_repeats(clusters)
    if not tied and not repeated and values.size >= MIN_CLUSTERS:
        return lambda level: wilson(float(values.sum()), values.size, level=level)
    method = "score interval, ties one half" if tied and not repeated else "score interval"
    return _of_clusters(share_limits, values, clusters, method=method)


def mean_share(shares: Numbers, clusters: Sequence[str] | None = None, *, level: float = 0.95) -> Estimate:
    """Return the mean of shares [N] in [0, 1] with an interval. For outcomes of 0, ½ or 1 it equals `proportion`."""
    return mean_share_by_level(shares, clusters)(level)


def mean_share_by_level(shares: Numbers, clusters: Sequence[str] | None = None) -> ByLevel:
    """Return the estimates of `mean_share` by level."""
    values = _values(shares, clusters)
    assert ((values >= 0) & (values <= 1)).all(), "a share lies between 0 and 1"
    if np.isin(values, (0.0, 0.5, 1.0)).all():
        return _proportion_by_level(values, clusters)
    return _of_clusters(share_limits, values, clusters, method="score interval")


def mean(values: Numbers, clusters: Sequence[str] | None = None, *, level: float = 0.95) -> Estimate:
    """Return the mean of finite values [N] of any distribution, clustered where the keys in `clusters` [N] repeat."""
    return mean_by_level(values, clusters)(level)


def mean_by_level(values: Numbers, clusters: Sequence[str] | None = None) -> ByLevel:
    """Return the estimates of `mean` by level."""
    array = _values(values, clusters)
    return _of_any_size(mean_limits, array, clusters, method="t interval, widened for skewness")


def mean_with_ties(values: Numbers, clusters: Sequence[str] | None = None, *, level: float = 0.95) -> Estimate:
    """Return `mean` of values most of which may be equal, such as what one choice of a reply gains over another.

    There is no interval where fewer than `FEWEST_DIFFERING` prompts have another mean than the most common one: an
    interval of the variance seen has no width if none differs, though some of all prompts may.
    """
    found = mean(values, clusters, level=level)
    differing = num_differing(values, clusters)
    if math.isnan(found.low) or differing >= FEWEST_DIFFERING:
        return found
    return replace(found, low=math.nan, high=math.nan, method=too_few_differ(differing))


def level_mean(values: Numbers, clusters: Sequence[str] | None = None) -> Estimate:
    """Return `mean` of scores or margins of one model, without an interval where all of them are equal.

    Scores of few levels, such as verdicts of 0 and 1, may be equal by chance. An interval of width 0 would say that
    others cannot differ.
    """
    return _unless_equal(mean(values, clusters), values)


def level_loss(losses: Numbers, clusters: Sequence[str] | None = None) -> Estimate:
    """Return `mean_loss` of one model, likewise."""
    return _unless_equal(mean_loss(losses, clusters), losses)


def _unless_equal(found: Estimate, values: Numbers) -> Estimate:
    if math.isnan(found.low) or num_differing(values):
        return found
    return replace(found, low=math.nan, high=math.nan, method=NO_VARIATION)


def num_differing(values: Numbers, clusters: Sequence[str] | None = None) -> int:
    """Return how many prompts have another mean of values [N] than the most common one, but for rounding."""
    array = _values(values, clusters)
    if clusters is not None and has_repeats(clusters):
        sums_C, sizes_C = cluster_totals(np.stack([array, np.ones_like(array)], axis=1), clusters).T
        array = sums_C / sizes_C
    ordered = np.sort(array)
    apart = np.flatnonzero(np.diff(ordered) > _ROUNDING * np.abs(array).max(initial=0.0)) + 1
    return int(array.size - np.diff([0, *apart.tolist(), array.size]).max(initial=0))


def too_few_differ(number: int) -> str:
    """Return the `method` of an estimate without an interval because hardly any prompt differs from the others."""
    return f"too few prompts that differ ({number})" if number else "no prompt differs"


def mean_loss(
    losses: Numbers, clusters: Sequence[str] | None = None, *, tail: float = 0.0, level: float = 0.95
) -> Estimate:
    """Return the mean of losses [N], which are at least 0 and skewed to one side. The lower limit is at least 0.

    `tail` is that of `intervals.loss_limits`.
    """
    array = _values(losses, clusters)
    assert (array >= 0).all(), "a loss is at least 0"
    limits, method = partial(loss_limits, tail=tail), "t interval, corrected for skewness"
    # With a tail the formula must know where 0 is.
    estimate = _of_any_size(limits, array, clusters, centred=not tail, method=method)(level)
    # `not … < 0` rather than `>= 0`, so that a NaN limit (no interval) stays NaN.
    return estimate if not estimate.low < 0 else replace(estimate, low=0.0)


def _of_any_size(
    limits: Callable[..., Limits],
    values: FloatArray,
    clusters: Sequence[str] | None,
    *,
    centred: bool = True,
    method: str,
) -> ByLevel:
    """Return the estimates of `_of_clusters` by a formula whose limits move and stretch with the values.

    So the values can be stretched to a size at which squares neither overflow nor vanish, and `centred` by their
    median: sums of squares of a prompt, where it repeats, have no digits left for values far from 0.
    """
    num_clusters, unit = values.size if clusters is None else len(set(clusters)), unit_of(values)
    if num_clusters < MIN_CLUSTERS:
        return partial(_too_few, values, clusters)
    scaled = values / unit
    centre = float(np.median(scaled)) if centred and num_clusters < values.size else 0.0
    found_at = _of_clusters(limits, scaled - centre, clusters, method=method)

    def at(level: float) -> Estimate:
        found = found_at(level)
        value, low, high = (unit * (centre + limit) for limit in (found.value, found.low, found.high))
        return replace(found, value=value, low=low, high=high)

    return at


def _of_clusters(
    limits: Callable[..., Limits], values: FloatArray, clusters: Sequence[str] | None, *, method: str
) -> ByLevel:
    """Return estimates by a formula of intervals.py over prompts, or over single values where no prompt repeats."""
    repeated = clusters is not None and has_repeats(clusters)
    columns = np.stack([values, np.square(values), np.ones_like(values)], axis=1)
    totals_C3 = cluster_totals(columns, clusters) if clusters is not None and repeated else columns
    if len(totals_C3) < MIN_CLUSTERS:
        return partial(_too_few, values, clusters)
    name = f"{method}, by prompt" if repeated else method

    def at(level: float) -> Estimate:
        value, low, high = (float(limit[0]) for limit in limits(*totals_C3.T[:, None], level=level))
        return Estimate(value=value, low=low, high=high, n=len(totals_C3), method=name, level=level)

    return at


def difference(first: Estimate, second: Estimate) -> Estimate:
    """Return first − second, two estimates of one level from independent data, with an interval made from theirs.

    Source: Zou & Donner (2008), Statistics in Medicine 27, 1693-1702 (for two Wilson intervals: Newcombe 1998). The
    limits are NaN if either estimate has no interval.
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


def p_by_interval(by_level: ByLevel, *, least: float = LEAST_P) -> float:
    """Return the two-sided p-value of 0 that intervals give: 1 − the level at which the interval ends at 0.

    So p is below 0.05 where the interval of 95 % excludes 0, and only there. It is found by bisection between 1 and
    `least`, which is returned where p is no larger. NaN without an interval.
    """
    widest = by_level(1 - least)
    if math.isnan(widest.low) or not _holds_0(widest):
        return math.nan if math.isnan(widest.low) else least
    low, high = math.log10(least), 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _holds_0(by_level(1 - 10**middle)) else (low, middle)
    return float(10**high)


def _holds_0(estimate: Estimate) -> bool:
    return estimate.low <= 0 <= estimate.high


def has_repeats(clusters: Sequence[str]) -> bool:
    """Return whether any key occurs twice, so that the values are not independent."""
    return len(set(clusters)) < len(clusters)


def too_few(number: int, things: str = "prompts") -> str:
    """Return the `method` of an estimate that has no interval."""
    return f"too few {things} ({number})" if number else "no data"


def without_interval(value: float, count: int, *, method: str = "", level: float = 0.95) -> Estimate:
    """Return an estimate with NaN limits; the method says why, by default that there are too few prompts."""
    why = method or ("no data" if math.isnan(value) else too_few(count))
    return Estimate(value=value, low=math.nan, high=math.nan, n=count, method=why, level=level)


def by_conversation(estimate: Estimate) -> Estimate:
    """Return an estimate with a method that names its clusters conversations instead of prompts."""
    method = estimate.method.replace("by prompt", "by conversation").replace("few prompts", "few conversations")
    method = method.replace("no prompt", "no conversation")
    return replace(estimate, method=method)


def cluster_totals(values_NS: FloatArray, clusters: Sequence[str]) -> FloatArray:
    """Return column sums within each cluster, [C, S], in the order of the sorted keys."""
    assert len(clusters) == len(values_NS), f"{len(clusters)} keys for {len(values_NS)} values"
    index_N, count = numbered(clusters)
    return np.stack([np.bincount(index_N, column, minlength=count) for column in values_NS.T], axis=1)


def numbered(clusters: Sequence[str]) -> tuple[npt.NDArray[np.intp], int]:
    """Return ([N] the place of each key among the sorted ones, how many there are)."""
    distinct = set(clusters)
    if len(distinct) * _FEW_KEYS > len(clusters) and max(map(len, distinct)) <= _LONG_KEY:
        keys, index_N = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
        return index_N, len(keys)
    # Sorting a key for each comparison takes several times as long.
    place = {key: number for number, key in enumerate(sorted(distinct))}
    return np.fromiter(map(place.__getitem__, clusters), dtype=np.intp, count=len(clusters)), len(place)


def central_range(draws: FloatArray, *, level: float = 0.95) -> tuple[float, float]:
    """Return the two quantiles that leave (1 − level)/2 of the draws on either side."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _too_few(values: FloatArray, clusters: Sequence[str] | None, level: float) -> Estimate:
    """Return the mean without an interval, with a method that says what there are too few of."""
    n = values.size if clusters is None else len(set(clusters))
    value = float(values.mean()) if values.size else math.nan
    return without_interval(value, n, method=too_few(n, "values" if clusters is None else "prompts"), level=level)


def _values(values: Numbers, clusters: Sequence[str] | None) -> FloatArray:
    """Return the values as an array [N] of finite numbers, with one key for each if there are keys."""
    array = np.asarray(values, dtype=np.float64)
    assert array.ndim == 1, f"wanted one axis, got shape {array.shape}"
    assert np.isfinite(array).all(), "count values that are not finite and leave them out before estimating"
    assert clusters is None or len(clusters) == array.size, "one key a value"
    return array
