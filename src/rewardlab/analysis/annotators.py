"""How far several judges agree: Krippendorff's α, with an interval by prompt.

Legend: N judgements, U units (things that are judged), C clusters (prompts), G groups of them.

α = 1 − D_o / D_e: the disagreement seen within units over that of judgements paired at random (Krippendorff 2011,
Computing Krippendorff's Alpha-Reliability). It is 1 where all agree and 0 where units say nothing. Units with one
judgement do not enter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from rewardlab.analysis import stats
from rewardlab.analysis.agreement import deal_groups
from rewardlab.analysis.intervals import FloatArray, share_limits
from rewardlab.core.types import Estimate

IntArray = npt.NDArray[np.int64]
Metric = Literal["nominal", "interval"]
METHOD: Final = "delete-a-group jackknife by prompt"
SHARE_METHOD: Final = "score interval, by prompt"


def krippendorff_alpha(
    units_N: IntArray, values_N: FloatArray, clusters_N: Sequence[str], *, metric: Metric, level: float = 0.95
) -> Estimate:
    """Return α of judgements [N]; those with the same number in `units_N` judge the same thing.

    `nominal` asks whether two values are equal, `interval` how large the square of their difference is. Units that are
    judged by so many can only disagree so far, so a nominal α is a share of the way from its lowest value to 1, and has
    the score interval of one, for the effective number of prompts by leaving out each once. Squares have no such end:
    prompts are dealt into at most 100 groups, each of which is left out once (see `agreement.correlation`); the
    interval is made on the scale of log(1 − α), with t quantiles. `n` counts the prompts with a unit that was judged at
    least twice. The value is NaN without such a prompt, and where all judgements are equal. There is no interval below
    ten prompts, nor where no two judgements of a unit differ.
    """
    _, unit_N, sizes_U = np.unique(units_N, return_inverse=True, return_counts=True)
    paired = sizes_U[unit_N] >= 2
    keys = [key for key, keep in zip(clusters_N, paired, strict=True) if keep]
    count = len(set(keys))
    if not count:
        return stats.without_interval(math.nan, 0, method="nothing was judged twice", level=level)
    sums_CS = _sums(unit_N[paired], values_N[paired], keys, metric)
    total_S = sums_CS.sum(0)
    value = _alpha(total_S, metric)
    if math.isnan(value):
        return stats.without_interval(value, count, method="all judgements are equal", level=level)
    if count < stats.MIN_CLUSTERS or value >= 1:
        few = stats.too_few(count) if count < stats.MIN_CLUSTERS else "no two differ"
        return stats.without_interval(value, count, method=few, level=level)
    if metric == "nominal":
        return _as_share(value, sums_CS, _most(unit_N[paired], values_N[paired]), level)
    names = sorted(set(keys))
    group_C = deal_groups(names, names)
    without = [_alpha(total_S - sums_CS[group_C == group].sum(0), metric) for group in range(int(group_C.max()) + 1)]
    rest_G = 1 - np.array([other for other in without if not math.isnan(other)])
    # Where leaving out a group makes α 1, log(1 − α) is not finite, and the plain scale is used.
    logarithmic = bool((rest_G > 0).all())
    moved_G, centre = (np.log(rest_G), math.log(1 - value)) if logarithmic else (rest_G, 1 - value)
    error = math.sqrt((len(moved_G) - 1) / len(moved_G) * float(np.square(moved_G - centre).sum()))
    reach = float(stdtrit(len(moved_G) - 1, (1 + level) / 2)) * error
    low, high = (1 - (math.exp(end) if logarithmic else end) for end in (centre + reach, centre - reach))
    return Estimate(value=value, low=max(low, -1.0), high=min(high, 1.0), n=count, method=METHOD, level=level)


def _as_share(value: float, sums_CS: FloatArray, most: float, level: float) -> Estimate:
    """Return a nominal α with the score interval of its share of the way from the lowest value to 1.

    `most` is the sum of disagreements where each unit disagrees as far as its judgements can.
    """
    total_S = sums_CS.sum(0)
    # 1 − α is the disagreement over what chance would give, so the longest way is that of `most`.
    way = (1 - value) * most / float(total_S[0])
    left_C = np.array([_alpha(rest_S, "nominal") for rest_S in total_S - sums_CS])
    left_C = np.where(np.isnan(left_C), value, left_C)
    count = len(sums_CS)
    share = 1 - (1 - value) / way
    moved_C = share + (count - 1) * (value - left_C) / way
    # The mean of the jackknife's values is off by its bias, which is not taken out of α.
    moved_C += share - moved_C.mean()
    # Where a few prompts hold most judgements, the variance is known from these few only.
    size_C = sums_CS[:, 1]
    equal = float(np.square(size_C.sum()) / np.square(size_C).sum())
    freedom = None if np.ptp(size_C) == 0 else max(equal - 1, 1.0)
    found = share_limits(moved_C[None], np.square(moved_C)[None], np.ones((1, count)), level=level, freedom=freedom)
    low, high = (1 - way * (1 - float(limit[0])) for limit in (found.low, found.high))
    return Estimate(
        value=value, low=min(max(low, -1.0), value), high=max(high, value), n=count, method=SHARE_METHOD, level=level
    )


def _most(unit_N: IntArray, values_N: FloatArray) -> float:
    """Return the sum over units of the disagreement (see `_sums`) of judgements spread evenly over all values."""
    _, own_N = np.unique(unit_N, return_inverse=True)
    sizes_U, kinds = np.bincount(own_N), np.unique(values_N).size
    each_U, more_U = sizes_U // kinds, sizes_U % kinds
    equal_U = more_U * np.square(each_U + 1) + (kinds - more_U) * np.square(each_U)
    return float(((np.square(sizes_U) - equal_U) / (sizes_U - 1)).sum())


def in_both_orders(
    units_N: IntArray, values_N: FloatArray, clusters_N: Sequence[str], *, mirror: float
) -> tuple[IntArray, FloatArray, list[str]]:
    """Return judgements of pairs in both orders: as they are, and as those of another unit with value `mirror − v`.

    A pair has no first reply by nature. Without this, data that name the better reply first would have judgements that
    are all equal, and an α of 0 however well their judges agree.
    """
    other = int(units_N.max(initial=-1)) + 1
    return (
        np.concatenate([units_N, units_N + other]),
        np.concatenate([values_N, mirror - values_N]),
        [*clusters_N, *clusters_N],
    )


def _sums(unit_N: IntArray, values_N: FloatArray, keys: Sequence[str], metric: Metric) -> FloatArray:
    """Return [C, S] sums of each prompt, from which `_alpha` is computed.

    The columns are the disagreement within its units, the number of its judgements, and either the count of each value
    (nominal) or the sum of the values and of their squares (interval).
    """
    _, first, own_N = np.unique(unit_N, return_index=True, return_inverse=True)
    sizes_U = np.bincount(own_N).astype(np.float64)
    if metric == "nominal":
        _, kind_N = np.unique(values_N, return_inverse=True)
        columns_NK = np.eye(int(kind_N.max()) + 1)[kind_N]
        counts_UK = np.stack([np.bincount(own_N, column) for column in columns_NK.T], axis=1)
        differing_U = np.square(sizes_U) - np.square(counts_UK).sum(1)
    else:
        # Values are centred, since only differences count and squares of large values lose digits. They are scaled by a
        # power of two, which changes neither α nor any digit.
        small_N = np.ldexp(values_N, -int(np.frexp(np.abs(values_N).max())[1]))
        centred_N = small_N - small_N.mean()
        columns_NK = np.stack([centred_N, np.square(centred_N)], axis=1)
        sum_U, square_U = (np.bincount(own_N, column) for column in columns_NK.T)
        differing_U = np.maximum(2 * (sizes_U * square_U - np.square(sum_U)), 0.0)
    within_N = np.zeros(len(unit_N))
    within_N[first] = differing_U / (sizes_U - 1)
    return stats.cluster_totals(np.column_stack([within_N, np.ones(len(unit_N)), columns_NK]), keys)


def _alpha(sums_S: FloatArray, metric: Metric) -> float:
    """Return α from the sums over all prompts; NaN where all judgements are equal."""
    within, number, values = float(sums_S[0]), float(sums_S[1]), sums_S[2:]
    if metric == "nominal":
        differing = number**2 - float(np.square(values).sum())
    else:
        differing = 2 * (number * float(values[1]) - float(values[0]) ** 2)
    # For equal values that are not exact in binary, rounding leaves a little.
    if number < 2 or differing <= 1e-12 * number**2:
        return math.nan
    return 1 - within / (differing / (number - 1))
