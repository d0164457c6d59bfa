"""How many labels are wrong, by two estimates that assume different things.

**Confident count** (Northcutt, Jiang & Chuang 2021, Journal of Artificial Intelligence Research 70, 1373-1411, for two
classes that a random turn makes alike): a pair is confident if a label has at least the mean probability that labels
have. Among confident pairs, the share whose label is the other one is the estimate. It assumes that out-of-sample
probabilities err on few confident pairs, so whatever the witnesses get wrong, and whatever people disagree about, is
counted as a wrong label: with weak witnesses it is far too high.

**At most**: among the tenth of the pairs of which the witnesses are surest, the share that they contradict. If labels
are wrong by chance, whatever the pair, then at least that chance of them is contradicted wherever one looks; so the
share, where it is lowest, is an upper bound. It says nothing of labels that are wrong for a reason, on hard pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.ceiling import Ceiling, of_preferences
from rewardlab.core.types import Estimate
from rewardlab.curation.mislabels.crossfit import Testimony
from rewardlab.curation.mislabels.pairs import FloatArray, Pairs

SUREST: Final = 0.1
"""Share of the pairs, the surest ones, behind the upper bound."""
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Estimates of the share of wrong labels."""

    confident: Estimate
    """Share by the confident count, with an interval by root; the threshold is taken as known."""
    num_confident: int
    threshold: float
    """Mean probability of a label as it stands."""
    at_most: Estimate
    """Share contradicted among the surest tenth."""
    num_labels: int
    ceiling: Ceiling | None
    """How often a perfect model would agree with single labels; None where the data tell of none."""

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
    sure_N, wrong_N, threshold = confident_count(probability_N)
    count = max(1, round(SUREST * len(probability_N)))
    surest = np.argsort(-np.abs(probability_N - 0.5), kind="stable")[:count]
    contradicted = np.where(probability_N == 0.5, 0.5, (probability_N < 0.5).astype(float))[surest]
    return Noise(
        confident=stats.proportion(wrong_N[sure_N].astype(float), clusters_N[sure_N].tolist()),
        num_confident=int(sure_N.sum()),
        threshold=threshold,
        at_most=stats.proportion(contradicted, clusters_N[surest].tolist()),
        num_labels=len(pairs),
        ceiling=of_preferences(pairs.preferences),
    )


def confident_count(probability_N: FloatArray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return ([N] whether a pair is confident, [N] whether it is for the other label, the threshold)."""
    threshold = float(probability_N.mean())
    given_N, other_N = probability_N >= threshold - _ROUNDING, 1 - probability_N >= threshold - _ROUNDING
    wrong_N = other_N & (~given_N | (1 - probability_N > probability_N))
    return given_N | other_N, wrong_N, threshold
