"""How many labels are wrong, by two estimates that assume different things.

**Confident count** (Northcutt, Jiang & Chuang 2021, Journal of Artificial Intelligence Research 70, 1373-1411, for two
classes that are made equal by turning pairs at random): a pair is confident if one of its two possible labels has at
least the mean probability of labels as they stand. The estimate is the share of confident pairs whose own label is the
other one. It assumes that the probabilities are wrong for few confident pairs. So every mistake of the witnesses, and
every pair on which people disagree, counts as a wrong label: with weak witnesses the estimate is far too high.

**At most**: the share of labels that the witnesses contradict among the tenth of the pairs of which they are surest. If
every label is wrong with the same chance, whatever its pair, then in every part of the data at least that share of
labels is contradicted. So the share where it is lowest is an upper bound. It says nothing about labels that are wrong
for a reason, such as those of hard pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.ceiling import Ceiling, of_preferences
from rewardlab.analysis.influence import share_by_influence
from rewardlab.analysis.stats import by_conversation
from rewardlab.core.types import Estimate
from rewardlab.curation.mislabels.crossfit import Testimony
from rewardlab.curation.mislabels.pairs import FloatArray, Pairs

SUREST: Final = 0.1
"""The upper bound looks at this share of the pairs, the surest ones."""
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Estimates of the share of wrong labels."""

    confident: Estimate
    """Share by the confident count, with an interval by root, over pairs and their threshold; what witnesses learned is
    taken as known."""
    num_confident: int
    threshold: float
    """Mean probability of a label as it stands."""
    at_most: Estimate
    """Share contradicted among the surest tenth."""
    num_labels: int
    ceiling: Ceiling | None
    """How often a perfect model would agree with single labels; None if the data do not allow an estimate."""

    @property
    def wrong(self) -> Estimate:
        """`confident` as a number of labels."""
        count, share = self.num_labels, self.confident
        return Estimate(
            value=share.value * count,
            low=share.low * count,
            high=share.high * count,
            n=share.n,
            method=share.method,
        )


def estimate_noise(testimony: Testimony, pairs: Pairs) -> Noise:
    """Return both estimates from one testimony, by default that of all witnesses together."""
    present_N = np.isfinite(testimony.log_odds_N)
    probability_N = testimony.probability_N(pairs)[present_N]
    clusters_N = np.array(pairs.clusters)[present_N]
    sure_N, _, threshold = confident_count(probability_N)
    count = max(1, round(SUREST * len(probability_N)))
    surest = np.argsort(-np.abs(probability_N - 0.5), kind="stable")[:count]
    contradicted = np.where(probability_N == 0.5, 0.5, (probability_N < 0.5).astype(float))[surest]
    return Noise(
        confident=by_conversation(share_of_confident(probability_N, clusters_N)),
        num_confident=int(sure_N.sum()),
        threshold=threshold,
        at_most=by_conversation(stats.proportion(contradicted, clusters_N[surest].tolist())),
        num_labels=len(pairs),
        ceiling=of_preferences(pairs.preferences),
    )


def share_of_confident(probability_N: FloatArray, clusters_N: np.ndarray) -> Estimate:
    """Return the share of confident pairs whose own label is the other one.

    The threshold is a mean of the same pairs, so the interval is the wider one of the share at this threshold and of
    the share by its influences: how it changes with the threshold (a difference over a standard deviation · N^(−1/5) on
    either side, Silverman's (1986) rate) times p − t is one of them.
    """
    sure_N, wrong_N, threshold = confident_count(probability_N)
    plain = stats.proportion(wrong_N[sure_N].astype(float), clusters_N[sure_N].tolist())
    if math.isnan(plain.low):
        return plain
    width = max(float(probability_N.std()) * probability_N.size**-0.2, _ROUNDING)
    shares = []
    for moved in (threshold - width, threshold + width):
        sure, wrong = _at_threshold(probability_N, moved)
        shares.append(float(wrong[sure].mean()) if sure.any() else plain.value)
    slope = (shares[1] - shares[0]) / (2 * width)
    influence_N = sure_N * (wrong_N - plain.value) / sure_N.mean() + slope * (probability_N - threshold)
    found = share_by_influence(plain.value, influence_N, np.unique(clusters_N, return_inverse=True)[1])
    return replace(plain, low=min(plain.low, found.low), high=max(plain.high, found.high))


def confident_count(probability_N: FloatArray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return ([N] whether a pair is confident, [N] whether it speaks for the other label, the threshold)."""
    threshold = float(probability_N.mean())
    return (*_at_threshold(probability_N, threshold), threshold)


def _at_threshold(probability_N: FloatArray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    given_N, other_N = probability_N >= threshold - _ROUNDING, 1 - probability_N >= threshold - _ROUNDING
    wrong_N = other_N & (~given_N | (1 - probability_N > probability_N))
    return given_N | other_N, wrong_N
