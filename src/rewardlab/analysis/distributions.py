"""Distributions of rewards and margins: mean, spread, percentiles, extremes and a histogram.

Legend: N values, C clusters (prompts).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.influence import by_influence, cluster_sums
from rewardlab.analysis.intervals import FloatArray, effective_number, student_limits, wilson_limits
from rewardlab.analysis.score_table import BoolArray, IntArray
from rewardlab.core.types import Estimate

PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)
NUM_BARS: Final = 40
"""Bars of a histogram."""
EXTREME: Final = "extreme of the sample"
"""Method of a smallest or largest value: it has no interval, for more rows would give a more extreme one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Finite values of one kind, such as the scores of preferred replies."""

    num_values: int
    mean: Estimate
    std: Estimate
    """Standard deviation, with divisor N − 1."""
    percentiles: Mapping[str, Estimate]
    """``p50`` and so on -> estimate."""
    lowest: Estimate
    highest: Estimate
    edges: tuple[float, ...]
    """Edges of the bars of the histogram, one more than bars; empty without values."""
    counts: tuple[int, ...]
    """Values in each bar."""


def distribution(
    values: FloatArray, clusters: IntArray, keys: Sequence[str], *, edges: FloatArray | None = None
) -> Distribution:
    """Return the distribution of finite values [N], clustered by `clusters` [N] with names `keys` [N].

    `edges` are those of the histogram's bars, by default of `NUM_BARS` equal ones from the lowest to the highest value.
    """
    assert np.isfinite(values).all(), "count values that are not finite and leave them out first"
    edges = histogram_edges(values) if edges is None else edges
    counts = np.histogram(values, edges)[0].tolist() if edges.size else []
    return Distribution(
        num_values=values.size,
        mean=stats.level_mean(values, keys),
        std=standard_deviation(values, clusters),
        percentiles={f"p{percent}": quantile(values, clusters, share=percent / 100) for percent in PERCENTILES},
        lowest=_extreme(values, np.min, clusters),
        highest=_extreme(values, np.max, clusters),
        edges=tuple(edges.tolist()),
        counts=tuple(counts),
    )


def histogram_edges(values: FloatArray) -> FloatArray:
    """Return the edges of `NUM_BARS` equal bars over all values [N]; of one bar where all are equal."""
    if not values.size:
        return np.empty(0)
    low, high = float(values.min()), float(values.max())
    if not math.isfinite(high - low) or math.nextafter(low, math.inf) >= high:
        return np.array([low - 0.5, high + 0.5])
    return np.linspace(low, high, NUM_BARS + 1)


def standard_deviation(values: FloatArray, clusters: IntArray) -> Estimate:
    """Return the standard deviation of values [N], divisor N − 1, with an interval of its logarithm.

    By its influence alone, that of two values which are equally frequent is known exactly. But squares are taken about
    the mean of the values, and about the true one, e away, they are larger by e². So the lower limit is widened, as for
    independent errors, by half of (e / deviation)² with e as far as the interval of the mean reaches.
    """
    if values.size < 2:
        return stats.without_interval(math.nan, values.size)
    centred = values - values.mean()
    size = float(np.abs(centred).max())
    if not size:
        return stats.without_interval(0.0, len(np.unique(clusters)), method=stats.NO_VARIATION)
    # Scaled, so that squares of large or small values neither overflow nor vanish.
    scaled = centred / size
    square = np.square(scaled)
    unit = math.sqrt(float(square.sum()) / (values.size - 1))
    influence = size * unit * (square / square.mean() - 1) / 2
    found = by_influence(size * unit, influence, clusters, scale="log")
    totals_3C, repeated = cluster_sums(scaled, clusters)
    if totals_3C.shape[1] < stats.MIN_CLUSTERS or found.low == 0:
        return found
    of_mean = student_limits(*(row[None] for row in totals_3C), level=found.level)
    about_mean = ((float(of_mean.high[0]) - float(of_mean.value[0])) / unit) ** 2 / 2
    low, high = (found.value, found.value) if math.isnan(found.low) else (found.low, found.high)
    low = found.value * math.exp(-math.hypot(math.log(found.value / low), about_mean))
    method = f"t interval of the logarithm, by influence{', by prompt' if repeated else ''}"
    return replace(found, low=low, high=high, method=method)


def quantile(values: FloatArray, clusters: IntArray, *, share: float) -> Estimate:
    """Return the quantile below which this `share` of the values [N] lies, with Woodruff's interval.

    Wilson's interval of `share`, for the effective number of values by prompt, is read back into values. That number is
    the smaller of two, that of the share of values below the quantile and that of the share at or below it, which
    differ where values are tied; and it is at most N. There is no interval if a limit lies beyond all values. Source:
    Woodruff (1952), JASA 47, 635-646.
    """
    if not values.size:
        return stats.without_interval(math.nan, 0)
    ordered = np.sort(values)
    value = float(np.quantile(ordered, share))
    count = len(np.unique(clusters))
    if count < stats.MIN_CLUSTERS:
        return stats.without_interval(value, count)
    # The share itself is known; only the width of its interval is asked for.
    numbers, repeated = _effective_numbers([values < value, values <= value], clusters)
    number = min([*numbers, float(values.size)])
    found = wilson_limits(np.array([share]), np.array([number]), level=0.95)
    # The k-th smallest of n independent values stands for the share k/n as a lower limit, and mirrored as an upper one.
    # Each of the n counts for `step` of the N values.
    step = values.size / number
    low, high = float(found.low[0]) * values.size - step, float(found.high[0]) * values.size + step - 1
    if low < 0 or high > values.size - 1:
        return stats.without_interval(value, count, method=f"too few values for this percentile ({values.size})")
    low, high = np.interp([low, high], np.arange(values.size), ordered).tolist()
    method = f"Woodruff's interval{', by prompt' if repeated else ''}"
    return Estimate(value=value, low=min(low, value), high=max(high, value), n=count, method=method)


def _effective_numbers(kinds: Sequence[BoolArray], clusters: IntArray) -> tuple[list[float], bool]:
    """Return the effective numbers of those outcomes [N] that vary (of all if none does), and whether a cluster
    repeats."""
    varying = [outcome for outcome in kinds if 0 < outcome.mean() < 1] or kinds
    totals = [cluster_sums(outcome.astype(np.float64), clusters) for outcome in varying]
    numbers = [float(effective_number(*(row[None] for row in totals_3C))[0]) for totals_3C, _ in totals]
    return numbers, totals[0][1]


def _extreme(values: FloatArray, chosen: object, clusters: IntArray) -> Estimate:
    assert callable(chosen)
    if not values.size:
        return stats.without_interval(math.nan, 0)
    return stats.without_interval(float(chosen(values)), len(np.unique(clusters)), method=EXTREME)
