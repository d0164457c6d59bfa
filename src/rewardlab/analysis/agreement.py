"""How well a model's scores agree with those of a gold model: match rate and correlations.

Legend: N comparisons, R replies, C prompts, G groups of prompts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import stdtrit
from scipy.stats import kendalltau, pearsonr, spearmanr

from rewardlab.analysis import stats
from rewardlab.analysis.influence import ONE_DECIDES
from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.types import Estimate

GROUPS: Final = 100
"""Most groups of prompts that are left out, one after the other."""
CORRELATIONS: Final[Mapping[str, Callable[[FloatArray, FloatArray], float]]] = {
    "Pearson": lambda ours, gold: float(pearsonr(ours, gold).statistic),
    "Spearman": lambda ours, gold: float(spearmanr(ours, gold).statistic),
    "Kendall": lambda ours, gold: float(kendalltau(ours, gold).statistic),
}
"""Name -> correlation of two columns; Kendall's is τ-b."""
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of one model with gold scores."""

    match: Estimate
    """Share of comparisons that the model orders as the gold model does; the model's ties count one half."""
    correlations: Mapping[str, Estimate]
    """Of the scores of replies, over all of them."""
    gold_ties: int
    """Comparisons left out of the match rate because the gold model gives both replies one score."""


def agreement(
    *,
    margins_N: FloatArray,
    gold_margins_N: FloatArray,
    prompts_N: Sequence[str],
    scores_R: FloatArray,
    gold_scores_R: FloatArray,
    prompts_R: Sequence[str],
) -> Agreement:
    """Return the agreement from score differences of comparisons [N] and scores of replies [R], all finite."""
    decided = gold_margins_N != 0
    match_N = np.heaviside(margins_N[decided] * np.sign(gold_margins_N[decided]), 0.5)
    keys = [key for key, keep in zip(prompts_N, decided, strict=True) if keep]
    return Agreement(
        match=stats.mean_share(match_N, keys),
        correlations={
            name: correlation(scores_R, gold_scores_R, prompts_R, measure=measure)
            for name, measure in CORRELATIONS.items()
        },
        gold_ties=int((~decided).sum()),
    )


def correlation(
    first_R: FloatArray,
    second_R: FloatArray,
    prompts_R: Sequence[str],
    *,
    measure: Callable[[FloatArray, FloatArray], float],
    level: float = 0.95,
) -> Estimate:
    """Return a correlation of two columns with an interval by prompt, on the scale of Fisher's z.

    Prompts are dealt into at most 100 groups by a hash of their keys; each group is left out once, and the spread of
    the values gives the standard error (the delete-a-group jackknife: Kott 2001, J. Official Statistics 17, 521-526),
    with t quantiles for G − 1 degrees of freedom. The value is NaN without variation. There is no interval below ten
    prompts, nor where the correlation is exactly ±1, nor where nothing varies without one of the groups.
    """
    method = "delete-a-group jackknife by prompt, Fisher's z"
    keys = sorted(set(prompts_R))
    if len(first_R) < 2 or np.ptp(first_R) == 0 or np.ptp(second_R) == 0:
        return stats.without_interval(math.nan, len(keys), method=stats.NO_VARIATION, level=level)
    value = measure(first_R, second_R)
    if abs(value) > 1 - _ROUNDING:
        value = math.copysign(1.0, value)  # rounding of a sum may leave it a little short of that
    if len(keys) < stats.MIN_CLUSTERS or abs(value) == 1:
        few = stats.too_few(len(keys)) if len(keys) < stats.MIN_CLUSTERS else "all in one order"
        return stats.without_interval(value, len(keys), method=few, level=level)
    group_R = deal_groups(keys, prompts_R)
    kept_GR = [group_R != group for group in range(int(group_R.max()) + 1)]
    if not all(np.ptp(first_R[kept]) and np.ptp(second_R[kept]) for kept in kept_GR):
        return stats.without_interval(value, len(keys), method=ONE_DECIDES, level=level)
    # Values are kept off ±1, where Fisher's z is infinite.
    without_G = np.array(
        [
            math.atanh(max(-1 + _ROUNDING, min(1 - _ROUNDING, measure(first_R[kept], second_R[kept]))))
            for kept in kept_GR
        ]
    )
    count, centre = len(without_G), math.atanh(value)
    error = math.sqrt((count - 1) / count * float(np.square(without_G - centre).sum()))
    reach = float(stdtrit(count - 1, (1 + level) / 2)) * error
    return Estimate(
        value=value,
        low=math.tanh(centre - reach),
        high=math.tanh(centre + reach),
        n=len(keys),
        method=method,
        level=level,
    )


def deal_groups(keys: Sequence[str], prompts_R: Sequence[str]) -> np.ndarray:
    """Return the group of each reply.

    Prompts are dealt out in turn, in the order of a hash, so that the groups depend neither on the order of rows nor
    on how ids were numbered.
    """
    dealt = sorted(keys, key=lambda key: (zlib.crc32(key.encode("utf-8", "surrogatepass")), key))
    group = {key: place % min(GROUPS, len(dealt)) for place, key in enumerate(dealt)}
    return np.array([group[key] for key in prompts_R])
