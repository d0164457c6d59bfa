"""Over-optimisation: gold against n as a proxy picks the best of n, where it turns over, and the curve of Gao et al.

A proxy is a reward model that stands in for a gold one. The further its picks are pushed, the more of its errors they
collect: gold rises, turns over and falls. Everything here is made from the curves of single prompts
(`best_of_n.curves_of`), which are unbiased at every n, and every interval is over prompts.

Legend: P rows, C prompts, N sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.best_of_n import Curves, Point, kl_upper_bound, points_of
from rewardlab.analysis.bounded import crossing
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.multiple import holm
from rewardlab.analysis.paired import significance_of_means
from rewardlab.analysis.turnover import ALPHA, DRAWS, TurnOver, Verdict, by_prompt, largest_t, turn_over
from rewardlab.core.types import Estimate

KL_LABEL: Final = "upper bound of the KL divergence, nats"
MOST_SIZES: Final = 32
"""Sizes among which the highest is looked for; of more, the small ones and then about equal ratios."""
_FURTHEST: Final = 1e6
"""Times the highest point at which its interval is looked for no further."""
LEAST_REACH: Final = 1.0
"""Least d = √(KL bound) at the largest n from which α and β are told apart: that of n = 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Gain of gold = d(α − βd), d = √(KL bound)."""

    alpha: Estimate
    beta: Estimate
    misfit: float
    """p-value of the curve having exactly this form; with many prompts small departures are seen."""
    furthest: float
    """Largest distance of the curve from the fit."""
    highest: Estimate | None
    """d at which the fitted curve is highest, α/2β; None where the data do not tell β from 0."""
    reach: float
    """Largest d of the data."""

    @property
    def why_not(self) -> str:
        """Why the data cannot tell; empty if they can."""
        if math.isnan(self.beta.low):
            return f"there is no interval ({self.beta.method})"
        if self.reach < LEAST_REACH:
            return f"d reaches {self.reach:.2f} only; take an n of 7 or more"
        if self.beta.low <= 0 <= self.beta.high:
            return "the interval of β includes 0"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overoptimisation:
    """One proxy over one set of prompts."""

    proxy: str
    prompts: str
    """Name of the set."""
    points: tuple[Point, ...]
    """For n = 1 to the largest."""
    scaled: tuple[Estimate, ...]
    """Gain of the proxy by its own pick, in its standard deviations within prompts; NaN if it does not vary."""
    turn: TurnOver
    adjusted_p: float = math.nan
    """`turn.p` with all curves that were judged together accounted for (Holm)."""
    fit: Fit

    @property
    def verdict(self) -> Verdict:
        """Whether gold falls after its maximum, within the sizes that were tried.

        Without evidence of a fall, the verdict is "no turn-over" if a fall as large as all that gold gained is ruled
        out, and "undecided" if the data allow even that.
        """
        if math.isnan(self.adjusted_p):
            return "undecided"
        if self.adjusted_p <= ALPHA:
            return "turns over"
        return "undecided" if self.turn.fall.high >= self.gain.value else "no turn-over"

    @property
    def gain(self) -> Estimate:
        """What gold gains over a single reply where it gains most; the place was chosen by the data."""
        gains = [point.gold_gain for point in self.points if point.gold_gain is not None]
        return max(gains, key=lambda one: one.value)

    @property
    def most(self) -> int:
        """The largest n."""
        return self.points[-1].n


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Two proxies on the same prompts, at the largest n."""

    first: str
    second: str
    prompts: str
    n: int
    difference: Estimate
    """Gold of the second's pick minus that of the first's."""
    p: float
    """p-value of no difference: the larger one by sign flips of prompts and by the interval of the difference."""
    adjusted: float
    """The same with all pairs accounted for (Holm)."""


def sizes_of(most: int) -> tuple[int, ...]:
    """Return the sizes among which the highest is looked for: all of them up to 32.

    Beyond 32, the smallest 16 are followed by sizes of about equal ratios. The largest is always among them.
    """
    if most <= MOST_SIZES:
        return tuple(range(1, most + 1))
    half = MOST_SIZES // 2
    rest = np.geomspace(half, most, MOST_SIZES - half + 1)[1:]
    return (*range(1, half + 1), *dict.fromkeys(round(n) for n in rest.tolist()))


def judge(
    curves: Curves, *, proxy: str, prompts: str, scale: float, draws: int = DRAWS, seed: int = 0
) -> Overoptimisation:
    """Return what the curves of one proxy over a set of prompts say. `scale` is its standard deviation within prompts.

    Raises AssertionError without gold scores.
    """
    assert curves.gold_PN is not None, "over-optimisation is a matter of gold"
    most = curves.gold_PN.shape[1]
    sizes = sizes_of(most)
    gold_CN = by_prompt(curves.gold_PN, curves.prompts)
    points = points_of(curves)
    return Overoptimisation(
        proxy=proxy,
        prompts=prompts,
        points=points,
        scaled=tuple(_scaled(point.proxy_gain, scale) for point in points),
        turn=turn_over(gold_CN[:, np.array(sizes) - 1], sizes, draws=draws, seed=seed),
        fit=fit_gain(gold_CN, draws=draws, seed=seed),
    )


def adjusted(found: Sequence[Overoptimisation]) -> list[Overoptimisation]:
    """Return curves whose p-values are adjusted together, so that one of them turns over by chance in at most 5 %."""
    p_values = holm([one.turn.p for one in found])
    return [replace(one, adjusted_p=p) for one, p in zip(found, p_values, strict=True)]


def within_spread(scores_PK: Sequence[FloatArray]) -> float:
    """Return the standard deviation of scores of replies to one prompt, pooled over prompts; 0 without variation."""
    degrees = sum(len(scores_K) - 1 for scores_K in scores_PK)
    squares = sum(float(np.square(scores_K - scores_K.mean()).sum()) for scores_K in scores_PK if np.ptp(scores_K))
    return math.sqrt(squares / degrees) if degrees else 0.0


def contrasts(sets: Mapping[str, Mapping[str, Curves]]) -> list[Contrast]:
    """Return every two proxies at the largest n, set by set: set -> proxy -> curves over the same prompts.

    The p-values are adjusted together.
    """
    pairs = [(name, *two) for name, curves in sets.items() for two in combinations(curves, 2)]
    found = []
    for name, first, second in pairs:
        one, other = sets[name][first], sets[name][second]
        assert one.gold_PN is not None
        assert other.gold_PN is not None
        assert one.prompts == other.prompts, "a paired difference is of the same prompts"
        change_P = other.gold_PN[:, -1] - one.gold_PN[:, -1]
        estimate = stats.mean_with_ties(change_P, one.prompts)
        # Below ten prompts, or five that differ, there is no interval, so no test either.
        p = math.nan if math.isnan(estimate.low) else significance_of_means(change_P, one.prompts).p
        found.append((estimate, p, one.gold_PN.shape[1]))
    return [
        Contrast(
            first=first,
            second=second,
            prompts=name,
            n=n,
            difference=replace(estimate, method=f"{estimate.method}, paired"),
            p=p,
            adjusted=own,
        )
        for (name, first, second), (estimate, p, n), own in zip(
            pairs, found, holm([p for _, p, _ in found]), strict=True
        )
    ]


def fit_gain(gold_CN: FloatArray, *, draws: int = DRAWS, seed: int = 0) -> Fit:
    """Return the fit of d(α − βd) to the gain of gold over n = 1, from values by prompt [C, N] for n = 1 to N.

    The fit is by least squares over n, each n weighted by the stretch of d for which it stands. It is linear in the
    curve, so each prompt has an α and a β of its own, whose means are the fit and whose spread gives the intervals: the
    covariance between sizes is that of the prompts. Source of the form: Gao, Schulman & Hilton (2022), arXiv
    2210.10760.
    """
    d_N = np.sqrt([kl_upper_bound(n) for n in range(1, gold_CN.shape[1] + 1)])
    gain_CN = gold_CN - gold_CN[:, :1]
    if len(d_N) < 3:
        none = stats.mean([])
        none = replace(none, method="needs an n of 3 or more")
        return Fit(alpha=none, beta=none, misfit=math.nan, furthest=math.nan, highest=None, reach=float(d_N[-1]))
    weights_N = np.gradient(d_N)
    design_N2 = np.stack([d_N, -np.square(d_N)], axis=1)
    solve_2N = np.linalg.solve(design_N2.T @ (weights_N[:, None] * design_N2), design_N2.T * weights_N)
    own_C2 = gain_CN @ solve_2N.T
    names = [str(place) for place in range(len(own_C2))]
    alpha, beta = (stats.mean_with_ties(column, names) for column in own_C2.T)
    residuals_CN = gain_CN - own_C2 @ design_N2.T
    misfit = math.nan
    if len(gold_CN) >= stats.MIN_CLUSTERS:
        places = np.array(sizes_of(len(d_N))) - 1
        kept_CN = residuals_CN[:, places]
        misfit = largest_t(np.concatenate([kept_CN, -kept_CN], axis=1), draws=draws, seed=seed)
    found = Fit(
        alpha=alpha,
        beta=beta,
        misfit=misfit,
        furthest=float(np.abs(residuals_CN.mean(0)).max()),
        highest=None,
        reach=float(d_N[-1]),
    )
    return replace(found, highest=_highest(own_C2, alpha, beta)) if not found.why_not else found


def size_at(d: float) -> float:
    """Return the n, as a real number of at least 1, at which √(log n − (n − 1)/n) is d; infinite if it is too large."""
    if d <= 0:
        return 1.0
    if d > 20:
        return math.inf
    low, high = 0.0, d * d + 1
    for _ in range(100):
        middle = (low + high) / 2
        # −expm1(−x) is (n − 1)/n at n = e^x.
        low, high = (middle, high) if middle + math.expm1(-middle) < d * d else (low, middle)
    return math.exp(low)


def _highest(own_C2: FloatArray, alpha: Estimate, beta: Estimate) -> Estimate | None:
    """Return α/2β with Fieller's interval, from 0; None where α or β is not above 0, or has no interval.

    It holds every d for which the mean of α − 2dβ may be 0. A symmetric one, which takes β as known, held d in 58 to
    88 % where β is hardly told from 0. Source: Fieller (1954), Journal of the Royal Statistical Society B 16, 175-185.
    """
    if not (alpha.value > 0 and beta.low > 0):
        return None
    value = alpha.value / (2 * beta.value)

    def mean_at(d: float) -> Estimate:
        return stats.mean(own_C2[:, 0] - 2 * d * own_C2[:, 1])

    outside = 2 * value
    while mean_at(outside).high > 0:
        if outside > _FURTHEST * value:
            return replace(alpha, value=value, low=math.nan, high=math.nan, method="β may be 0")
        outside *= 2
    high = crossing(lambda d: mean_at(d).high, outside, value)
    low = crossing(lambda d: -mean_at(d).low, 0.0, value) if alpha.low > 0 else 0.0
    return replace(alpha, value=value, low=low, high=high, method="Fieller's interval")


def _scaled(estimate: Estimate, scale: float) -> Estimate:
    divisor = scale or math.nan
    return replace(estimate, value=estimate.value / divisor, low=estimate.low / divisor, high=estimate.high / divisor)
