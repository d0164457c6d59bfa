"""Intervals of a rule: prompts are drawn again, and the whole rule is recomputed in every draw.

Legend: C clusters, S shares, R draws, E credits of a share.

Drawing is done within strata: clusters whose credits enter the same shares. A suite fixes how many rows its subsets
have, and so does every draw. From a stratum of n clusters n − 1 are drawn, each with weight n/(n − 1): drawing n makes
the spread too small by the factor (n − 1)/n, which matters in small subsets (Rao & Wu 1988, JASA 83, 231-241).

The quantiles of the draws are moved away from the value by the ratio of Student's t, with as many degrees of freedom as
there are clusters less strata, to the normal quantile. This matters below some 30 clusters. A stratum of one cluster
cannot be drawn: it is in every draw once, and only the score intervals say how uncertain it is.

Where all credits are 1 a bootstrap has no spread, though nobody knows the share to be exactly 1. The limits are
therefore widened to those of the score intervals of the shares (`intervals.share_limits`), combined with the
correlation of the shares (`combined.Clustered`; for independent shares Zou & Donner 2008, Statistics in Medicine 27,
1693-1702).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from rewardlab.analysis.combined import Clustered, combined_reach, share_reach
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.signflip import sign_flip
from rewardlab.analysis.stats import MIN_CLUSTERS, central_range, too_few
from rewardlab.analysis.suites.outcomes import Outcome, RuleRow, Share
from rewardlab.core.suites import SuiteItem
from rewardlab.core.types import Estimate

DRAWS = 1000
BLOCK_ENTRIES = 4_000_000
METHOD = "bootstrap of prompts, widened to the score interval"
PAIRED = f"{METHOD}, paired"


@dataclass(frozen=True, kw_only=True)
class Resampled:
    """The clusters of a suite and how often each is drawn; one for all scorers, so that differences are paired."""

    clusters_I: npt.NDArray[np.intp]
    """Index of the cluster of each item. Clusters are numbered by their sorted names."""
    num_clusters: int
    strata: tuple[npt.NDArray[np.intp], ...]
    """Clusters that are drawn among each other; a cluster alone in its stratum weighs 1 in every draw."""
    seed: int

    @classmethod
    def of(cls, items: Sequence[SuiteItem], outcome: Outcome, *, seed: int) -> Resampled:
        """Return the strata of a suite, by which of the outcome's shares each cluster enters."""
        names = sorted({item.cluster for item in items})
        number_of = {name: number for number, name in enumerate(names)}
        clusters_I = np.array([number_of[item.cluster] for item in items], dtype=np.intp)
        enters_CS = np.stack(
            [np.bincount(clusters_I[share.items_E], minlength=len(names)) > 0 for share in outcome.shares.values()],
            axis=1,
        )
        _, pattern_C = np.unique(enters_CS, axis=0, return_inverse=True)
        groups = [np.flatnonzero(pattern_C.ravel() == pattern) for pattern in range(int(pattern_C.max()) + 1)]
        # Ordered by their clusters: shares come in the order of the rows, which must not decide who is drawn when.
        groups.sort(key=lambda stratum: int(stratum[0]))
        # Clusters alone in their stratum are not drawn among each other: a share of one of them would lack any credit
        # in the draws without it.
        return cls(clusters_I=clusters_I, num_clusters=len(names), strata=tuple(groups), seed=seed)

    def sums(self, outcome: Outcome) -> tuple[FloatArray, FloatArray]:
        """Return ([C, S] credits, [C, S] counts) of every cluster in every share."""
        credits, counts = [], []
        for share in outcome.shares.values():
            own_E = self.clusters_I[share.items_E]
            credits.append(np.bincount(own_E, share.credits_E, minlength=self.num_clusters))
            counts.append(np.bincount(own_E, minlength=self.num_clusters).astype(np.float64))
        return np.stack(credits, axis=1), np.stack(counts, axis=1)

    def weights(self, num_draws: int) -> Iterator[FloatArray]:
        """Yield blocks [draws, C] of how much each cluster weighs in each draw, one block in memory at a time."""
        generator = np.random.default_rng((self.seed, 17))
        step = max(1, BLOCK_ENTRIES // max(self.num_clusters, 1))
        for start in range(0, num_draws, step):
            size = min(step, num_draws - start)
            block = np.ones((size, self.num_clusters))
            for stratum in self.strata:
                n = len(stratum)
                if n > 1:
                    drawn = generator.integers(0, n, size=(size, n - 1)) + n * np.arange(size)[:, None]
                    counts = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
                    block[:, stratum] = counts * (n / (n - 1))
            yield block


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A scorer under a rule, with the shares of every draw."""

    outcome: Outcome
    sums_CS: FloatArray
    counts_CS: FloatArray
    draws_RS: FloatArray


def judge(outcomes: Mapping[str, Outcome], resampled: Resampled, *, num_draws: int = DRAWS) -> dict[str, Judged]:
    """Return the shares of each scorer in every draw. All outcomes are of one rule on the same items."""
    tables = {name: resampled.sums(outcome) for name, outcome in outcomes.items()}
    draws: dict[str, list[FloatArray]] = {name: [] for name in outcomes}
    for block_RC in resampled.weights(num_draws):
        for name, (sums_CS, counts_CS) in tables.items():
            with np.errstate(invalid="ignore", divide="ignore"):
                draws[name].append((block_RC @ sums_CS) / (block_RC @ counts_CS))
    return {
        name: Judged(
            outcome=outcome,
            sums_CS=tables[name][0],
            counts_CS=tables[name][1],
            draws_RS=np.concatenate(draws[name]),
        )
        for name, outcome in outcomes.items()
    }


def estimate(judged: Judged, row: RuleRow, resampled: Resampled) -> Estimate:
    """Return the value of a row with its interval; no interval below ten clusters."""
    outcome = judged.outcome
    lowest = sum(-weight for name, weight in row.weights.items() if outcome.shares[name].signed)
    return _widened(
        judged.draws_RS,
        judged.sums_CS,
        Estimate(value=outcome.value(row), low=lowest, high=sum(row.weights.values()), n=0, method=METHOD),
        {name: _reach(outcome.shares[name], None, resampled) for name in row.weights},
        judged,
        row,
        resampled,
    )


def difference(own: Judged, other: Judged, row: RuleRow, resampled: Resampled) -> Estimate:
    """Return own − other of a row, paired: in every draw both are of the same prompts."""
    mine, theirs = own.outcome, other.outcome
    farthest = sum((2 if mine.shares[name].signed else 1) * weight for name, weight in row.weights.items())
    value = mine.value(row) - theirs.value(row)
    return _widened(
        own.draws_RS - other.draws_RS,
        own.sums_CS - other.sums_CS,
        Estimate(value=value, low=-farthest, high=farthest, n=0, method=PAIRED),
        {name: _reach(mine.shares[name], theirs.shares[name].credits_E, resampled) for name in row.weights},
        own,
        row,
        resampled,
    )


def _weights(outcome: Outcome, row: RuleRow) -> FloatArray:
    return np.array([row.weights.get(name, 0.0) for name in outcome.shares])


def _widened(
    draws_RS: FloatArray,
    sums_CS: FloatArray,
    possible: Estimate,
    reach: Mapping[str, tuple[float, float]],
    judged: Judged,
    row: RuleRow,
    resampled: Resampled,
) -> Estimate:
    """Return the estimate from the draws of the shares and from how far the shares of a row reach.

    `possible` has the value, the method, and the limits that no value of the row can pass.
    """
    weights_S = _weights(judged.outcome, row)
    # Only the shares of the row are used: 0 times the NaN of a share without credits would be NaN too.
    used = np.flatnonzero(weights_S)
    weights_U, counts_CU = weights_S[used], judged.counts_CS[:, used]
    there_C = counts_CU.sum(1) > 0
    n, value = int(there_C.sum()), possible.value
    nothing = replace(possible, low=math.nan, high=math.nan, n=n)
    if n < MIN_CLUSTERS or math.isnan(value):
        return replace(nothing, method=too_few(n))
    draws_R = draws_RS[:, used] @ weights_U
    draws_R = draws_R[np.isfinite(draws_R)]
    if not draws_R.size:
        return replace(nothing, method="no interval: no draw has a value")
    low, high = central_range(draws_R)
    freedom = n - sum(bool(there_C[stratum[0]]) for stratum in resampled.strata)
    stretch = float(stdtrit(max(freedom, 1), 0.975) / ndtri(0.975))
    names = list(judged.outcome.shares)
    reaches_U2 = weights_U[:, None] * np.array([reach[names[share]] for share in used])
    below, above = combined_reach(reaches_U2, Clustered(sums_CS[:, used], counts_CU))
    return replace(
        possible,
        low=max(min(value - stretch * (value - low), value - below), possible.low),
        high=min(max(value + stretch * (high - value), value + above), possible.high),
        n=n,
    )


def _reach(share: Share, minus_E: FloatArray | None, resampled: Resampled) -> tuple[float, float]:
    """Return how far the score interval of a share (or of its difference to `minus_E`) reaches below and above it.

    Differences, and credits between −1 and 1, are mapped to [0, 1] for the interval, and back.
    """
    wide = share.signed or minus_E is not None
    if share.signed and minus_E is not None:
        # Signed shares weigh a hundredth; the bootstrap alone covers the spread of their differences.
        return 0.0, 0.0
    values_E = share.credits_E if minus_E is None else share.credits_E - minus_E
    values_E = (1 + values_E) / 2 if wide else values_E
    own_E = resampled.clusters_I[share.items_E]
    columns = (values_E, np.square(values_E), np.ones_like(values_E))
    totals_3C = np.stack([np.bincount(own_E, column) for column in columns]).astype(np.float64)
    below, above = share_reach(totals_3C[:, totals_3C[2] > 0])
    return (2 * below, 2 * above) if wide else (below, above)


def significance(own: Judged, other: Judged, row: RuleRow, *, seed: int) -> float:
    """Return the two-sided p-value of own − other = 0 under flips of the sign of every cluster; NaN below two clusters.

    If the two scorers were alike, each cluster would favour either by as much with probability ½.
    """
    weights_S = _weights(own.outcome, row)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts_CS = np.where(weights_S != 0, (own.sums_CS - other.sums_CS) / own.counts_CS.sum(0), 0.0)
    parts_C = parts_CS @ weights_S
    if (own.counts_CS[:, weights_S != 0].sum(1) > 0).sum() < 2 or not np.isfinite(parts_C).all():
        return math.nan
    # Credits that cancel may leave a little by rounding, whose sign must not count.
    return sign_flip(np.where(np.abs(parts_C) > 1e-12, parts_C, 0.0), seed=seed).p
