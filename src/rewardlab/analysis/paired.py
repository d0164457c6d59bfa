"""Two models on the same comparisons: differences with paired intervals, tests, and whether one is as good.

Legend: N comparisons, C prompts. A difference is that of the other model minus the reference; a gain is the same with
the sign by which more is better, so −1 times the difference of NLL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest

from rewardlab.analysis import stats
from rewardlab.analysis.aligned import Aligned
from rewardlab.analysis.bounded import Bounded, Moves, Unlikely
from rewardlab.analysis.intervals import FloatArray, Limits, mean_limits, share_limits
from rewardlab.analysis.losses import nll_estimate
from rewardlab.analysis.metrics import OrientedComparisons
from rewardlab.analysis.power import smallest_difference
from rewardlab.analysis.score_table import logits_of
from rewardlab.analysis.signflip import Significance, sign_flip
from rewardlab.core.types import Estimate

BoolArray = npt.NDArray[np.bool_]
Metric = Literal["accuracy", "nll", "margin"]
METRICS: Final[Mapping[Metric, str]] = {
    "accuracy": "share of comparisons ranked as labelled; score ties count one half, label ties are left out",
    "nll": "mean negative log-likelihood of the labels under σ(β d)",
    "margin": "mean margin, in standard deviations of the model's own score differences over both orders",
}
"""Metric -> what it means."""
FALLING: Final = ("nll",)
"""Metrics of which less is better."""
ALPHA: Final = 0.05
WIDER: Final = "; the interval's p is larger"
"""Added to the method of a test whose p is that of the interval."""
_HALVINGS: Final = 50
# Two models whose scores differ by a factor have equal margins in exact arithmetic.
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """One metric of several models on the same comparisons."""

    values_MN: FloatArray
    """[M, N] values whose means are the metric; of the margin, linearised (see `margin_values`)."""
    prompt_keys: tuple[str, ...]
    margins_MN: FloatArray | None = None
    """[M, N] score differences, of the margin alone: its values have the right mean over all comparisons only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One metric of two models."""

    first: Estimate
    second: Estimate
    difference: Estimate
    """Second minus first, paired."""
    test: Significance
    """Is the difference 0? Sign flips by prompt, for NLL and margin at least the p of the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Comparisons by who ranks them as labelled."""

    both: int
    only_first: int
    only_second: int
    neither: int
    tied: int
    """A model gives both replies one score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """Whether the second model is at most a margin worse than the first, or not further away than that."""

    metric: Metric
    margin: float
    """In units of the metric, above 0."""
    interval: Estimate
    """The difference with its 90 % interval, whose two limits are each that of a one-sided test at 5 %."""
    not_worse: Significance
    """One-sided: the second is worse by the margin or more."""
    equivalent: Significance
    """TOST: the larger of the two one-sided p-values."""

    @property
    def is_not_worse(self) -> bool:
        """Whether the second is shown to be less than the margin worse."""
        return self.not_worse.p < ALPHA

    @property
    def is_equivalent(self) -> bool:
        """Whether the two are shown to be less than the margin apart."""
        return self.equivalent.p < ALPHA


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The second model against the first, on the same comparisons: their metrics and verdicts."""

    first: str
    second: str
    comparisons: int
    """Decided ones: finite scores and a label that is not a tie."""
    metrics: Mapping[Metric, Difference]
    """Those that were asked for and can be computed."""
    verdicts: Verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class PairComparison(Paired):
    """The same with all metrics, and what else can be said of two models."""

    prompts: int
    mcnemar: Significance | None
    """Exact, of independent 0/1 rows; None where prompts repeat or scores tie."""
    smallest: Estimate
    """Smallest true difference of accuracy that these comparisons show with 80 % power."""
    equivalence: Equivalence | None


def columns_of(aligned: Aligned, metric: Metric) -> Columns | None:
    """Return a metric's values for every model; None if a model has no β for the NLL, or verdicts instead of scores.

    Accuracy and margin are of the decided comparisons, the NLL of all. Raises DataError if a β times a score difference
    is too large to compute with.
    """
    used = aligned if metric == "nll" else aligned.decided
    if metric != "accuracy" and any(aligned.verdicts_only):
        return None
    values = []
    for difference_N, beta in zip(used.difference_MN, aligned.betas, strict=True):
        own = OrientedComparisons(difference=difference_N, label=used.label_N, prompt_keys=used.prompt_keys)
        if metric == "nll":
            if beta is None:
                return None
            logits_of(difference_N, beta=beta)
            values.append(own.nll(beta=beta))
        else:
            values.append(own.outcome if metric == "accuracy" else margin_values(difference_N))
    margins_MN = used.difference_MN if metric == "margin" else None
    return Columns(values_MN=np.stack(values), prompt_keys=used.prompt_keys, margins_MN=margins_MN)


def change_within(columns: Columns, second: int, kept_N: BoolArray) -> FloatArray:
    """Return the paired changes from the first model to that of number `second` on the comparisons `kept_N`, whose
    mean is the difference of the metric on these alone.
    """
    if columns.margins_MN is None:
        change_N: FloatArray = columns.values_MN[second][kept_N] - columns.values_MN[0][kept_N]
        return change_N
    return _changes(*(margin_values(columns.margins_MN[number][kept_N]) for number in (0, second)))


def _changes(first_N: FloatArray, second_N: FloatArray) -> FloatArray:
    """Return second − first, exactly 0 where only rounding tells them apart: a test would count the signs of it."""
    change_N: FloatArray = second_N - first_N
    change_N[_equal(first_N, second_N)] = 0.0
    return change_N


def without_rounding(values_MN: FloatArray) -> FloatArray:
    """Return the values of all models, those of earlier ones where only rounding tells them apart: ranks would too."""
    found_MN = values_MN.copy()
    for later, own_N in enumerate(found_MN):
        for earlier_N in found_MN[:later]:
            equal_N = _equal(earlier_N, own_N)
            own_N[equal_N] = earlier_N[equal_N]
    return found_MN


def _equal(first_N: FloatArray, second_N: FloatArray) -> BoolArray:
    """Return [N] whether only rounding tells two values apart."""
    size_N = np.maximum(np.abs(first_N), np.abs(second_N))
    equal_N: BoolArray = np.abs(second_N - first_N) <= _ROUNDING * np.maximum(size_N, 1.0)
    return equal_N


def margin_values(difference_N: FloatArray) -> FloatArray:
    """Return [N] values whose mean is mean(d)/√mean(d²), and whose intervals are those of this ratio to first order.

    √mean(d²) is the standard deviation of the model's score differences over both orders of each pair, so models of
    any scale can be compared; the ratio lies in [−1, 1]. With z = d/√mean(d²) and θ = mean(z), the values are
    z − θ(z² − 1)/2 (the delta method; van der Vaart 1998, Asymptotic Statistics, chapter 3). All are 0 if every
    difference is.
    """
    size = np.abs(difference_N).max(initial=0.0)
    if size == 0:
        return np.zeros_like(difference_N)
    scaled = difference_N / size
    z = scaled / math.sqrt(float(np.square(scaled).mean()))
    values: FloatArray = z - z.mean() * (np.square(z) - 1) / 2
    return values


def change_of_shares(change_N: FloatArray, clusters: Sequence[str], *, level: float = 0.95) -> Estimate:
    """Return the mean of paired changes of outcomes in [−1, 1], with a score interval.

    It has a width even where all verdicts are equal.
    """
    # A change of −1, −½, 0, ½ or 1 for each comparison is mapped to [0, 1] for the interval, and back.
    share = stats.mean_share((1 + change_N) / 2, clusters, level=level)
    method = share.method.removesuffix(", ties one half").replace("Wilson", "score interval")
    return replace(
        share, value=2 * share.value - 1, low=2 * share.low - 1, high=2 * share.high - 1, method=f"{method}, paired"
    )


def difference_of(metric: Metric, change_N: FloatArray, clusters: Sequence[str], *, level: float = 0.95) -> Estimate:
    """Return the mean of paired changes of a metric, with its interval by prompt."""
    if metric == "accuracy":
        return change_of_shares(change_N, clusters, level=level)
    estimate = stats.mean(change_N, clusters, level=level)
    return replace(estimate, method=f"{estimate.method}, paired")


def significance_of(change_N: FloatArray, clusters: Sequence[str], *, seed: int = 0) -> Significance:
    """Return the sign-flip test by prompt of paired changes [N]."""
    return sign_flip(stats.cluster_totals(change_N[:, None], clusters)[:, 0], seed=seed)


def significance_of_means(change_N: FloatArray, clusters: Sequence[str], *, seed: int = 0) -> Significance:
    """Return the test of paired changes [N] of any size: the larger p of sign flips and of the interval of the mean.

    Sign flips take changes to be as likely up as down. Where a few are large, as of two models that fail in different
    ways, that is not so though the mean is 0, and they find a change too often. The interval of the mean allows for the
    skewness, so both have to show one, and p is never below 0.05 where the interval of 95 % holds 0. Below ten prompts
    there is no interval, and p is that of sign flips.
    """
    flips = significance_of(change_N, clusters, seed=seed)
    by_interval = stats.p_by_interval(stats.mean_by_level(change_N, clusters), least=max(flips.p, stats.LEAST_P))
    return replace(flips, p=by_interval, method=f"{flips.method}{WIDER}") if by_interval > flips.p else flips


def tested(metric: Metric, change_N: FloatArray, clusters: Sequence[str]) -> Significance:
    """Return the test of paired changes of a metric: sign flips by prompt, for means those and the interval."""
    return (significance_of if metric == "accuracy" else significance_of_means)(change_N, clusters)


def compare_metric(metric: Metric, first_N: FloatArray, second_N: FloatArray, clusters: Sequence[str]) -> Difference:
    """Return one metric of two models from their values [N] on the same comparisons."""
    means: Mapping[Metric, Callable[..., Estimate]] = {
        "accuracy": stats.mean_share,
        "nll": stats.level_loss,
        "margin": stats.level_mean,
    }
    alone = means[metric]
    change_N = _changes(first_N, second_N) if metric == "margin" else second_N - first_N
    return Difference(
        first=alone(first_N, clusters),
        second=alone(second_N, clusters),
        difference=difference_of(metric, change_N, clusters),
        test=tested(metric, change_N, clusters),
    )


def verdicts_of(first_N: FloatArray, second_N: FloatArray) -> Verdicts:
    """Return the counts of comparisons by the outcomes [N] of both models, each 0, ½ or 1."""
    right, also = first_N == 1, second_N == 1
    wrong, wrong_too = first_N == 0, second_N == 0
    return Verdicts(
        both=int((right & also).sum()),
        only_first=int((right & wrong_too).sum()),
        only_second=int((wrong & also).sum()),
        neither=int((wrong & wrong_too).sum()),
        tied=int(((first_N == 0.5) | (second_N == 0.5)).sum()),
    )


def mcnemar(first_N: FloatArray, second_N: FloatArray, clusters: Sequence[str]) -> Significance | None:
    """Return the exact McNemar test; None unless rows are independent (no prompt repeats) and outcomes 0 or 1.

    It is the binomial test of the comparisons that exactly one model ranks right. Source: McNemar (1947), Psychometrika
    12, 153-157; exact: Mosteller (1952), Biometrics 8, 220-226.
    """
    verdicts = verdicts_of(first_N, second_N)
    if verdicts.tied or stats.has_repeats(clusters):
        return None
    differing = verdicts.only_first + verdicts.only_second
    p = float(binomtest(verdicts.only_first, differing).pvalue) if differing else 1.0
    return Significance(p=p, method="McNemar, exact")


def equivalence(
    metric: Metric, change_N: FloatArray, clusters: Sequence[str], *, margin: float, unlikely: Unlikely | None = None
) -> Equivalence:
    """Return whether the second model is shown to be less than `margin` worse, and less than `margin` away.

    Two one-sided tests at 5 % each (TOST; Schuirmann 1987, J. Pharmacokinetics and Biopharmaceutics 15, 657-680) by the
    interval of the difference: a p-value is the smallest tail whose limit excludes the margin, for accuracy at least
    that of a score test there (Tango 1998, Statistics in Medicine 17, 891-908), and for NLL that of the likeliest
    distribution with an end that `unlikely` gives, which the interval allows for. So the p-values and the 90 % interval
    never contradict each other. NaN below ten prompts.
    """
    assert margin > 0
    formula = share_limits if metric == "accuracy" else mean_limits
    gain_N = -change_N if metric in FALLING else change_N
    interval = difference_of(metric, change_N, clusters, level=1 - 2 * ALPHA)
    if math.isnan(interval.low):
        none = Significance(p=math.nan, method=interval.method)
        return Equivalence(metric=metric, margin=margin, interval=interval, not_worse=none, equivalent=none)
    scaled_N = (1 + gain_N) / 2 if metric == "accuracy" else gain_N
    totals_C3 = stats.cluster_totals(np.stack([scaled_N, np.square(scaled_N), np.ones_like(scaled_N)], 1), clusters)
    bounds = [(1 - margin) / 2, (1 + margin) / 2] if metric == "accuracy" else [-margin, margin]
    worse = _p_above(formula, totals_C3, bounds[0])
    better = 1 - _p_above(formula, totals_C3, bounds[1])
    ends = _at_ends(gain_N, clusters) if metric == "accuracy" else None
    if unlikely is not None:
        sign = -1.0 if metric in FALLING else 1.0
        ends = replace(unlikely, values=sign * unlikely.values).mean_of(gain_N, stats.numbered(clusters)[0])
    if ends is not None:
        worse, better = max(worse, ends.p_above(-margin)), max(better, ends.p_below(margin))
        low, high = ends.low(ALPHA), ends.high(ALPHA)
        low, high = (-high, -low) if metric in FALLING else (low, high)
        interval = replace(interval, low=min(interval.low, low), high=max(interval.high, high))
    return Equivalence(
        metric=metric,
        margin=margin,
        interval=interval,
        not_worse=Significance(p=worse, method="one-sided, by the interval"),
        equivalent=Significance(p=max(worse, better), method="TOST, by the interval"),
    )


def _at_ends(gain_N: FloatArray, clusters: Sequence[str]) -> Bounded:
    """Return a difference of shares as a mean between −1 and 1, for a score test at a margin.

    Two models that differ on few comparisons show too little variance just when they look alike: with 3 % lost, none
    won and a margin of 0.03 the interval alone found 10 % of 400 pairs not worse, at 5 %. Of m comparisons of a prompt
    √m are taken to come out at an end at once, as in plans.
    """
    count, mean = gain_N.size, float(gain_N.mean())
    sums_C, sizes_C = stats.cluster_totals(np.stack([gain_N, np.ones_like(gain_N)], axis=1), clusters).T
    reach_C = np.sqrt(sizes_C) / count
    moves = Moves(moved_C=(sums_C - sizes_C * mean) / count, down_C=-reach_C * (1 + mean), up_C=reach_C * (1 - mean))
    return Bounded.of([(moves, 1.0)], mean)


def _p_above(formula: Callable[..., Limits], totals_C3: FloatArray, bound: float) -> float:
    """Return the one-sided p-value of the mean being at most `bound`: the tail at which the limit reaches it."""
    totals = totals_C3.T[:, None]

    def limits(tail: float) -> Limits:
        return formula(*totals, level=1 - 2 * tail)

    below = float(limits(0.25).value[0]) <= bound
    low, high = 0.0, 0.5
    for _ in range(_HALVINGS):
        tail = (low + high) / 2
        found = limits(tail)
        # A larger tail gives a narrower interval, which excludes the bound earlier.
        excluded = found.high[0] < bound if below else found.low[0] > bound
        low, high = (low, tail) if excluded else (tail, high)
    return 1 - high if below else high


def _two_of(aligned: Aligned, second: int) -> Aligned:
    """Return the first model and that of number `second` alone."""
    return Aligned(
        names=(aligned.names[0], aligned.names[second]),
        pairs=aligned.pairs,
        rows=aligned.rows,
        difference_MN=aligned.difference_MN[[0, second]],
        betas=(aligned.betas[0], aligned.betas[second]),
        verdicts_only=(aligned.verdicts_only[0], aligned.verdicts_only[second]),
        not_finite=aligned.not_finite,
        missing=aligned.missing,
    )


def compare_metrics(two: Aligned, metrics: Sequence[Metric]) -> Paired:
    """Compare the second of two models with the first by some metrics alone: the tests of others take most of the time
    of `compare_pair`."""
    found: dict[Metric, Difference] = {}
    for name in metrics:
        columns = columns_of(two, name)
        if columns is not None:
            found[name] = compare_metric(name, columns.values_MN[0], columns.values_MN[1], columns.prompt_keys)
    if "nll" in found:
        known = [beta for beta in two.betas if beta is not None]
        first, second = (
            nll_estimate(logits_of(own, beta=beta), two.label_N, two.prompt_keys)
            for own, beta in zip(two.difference_MN, known, strict=True)
        )
        found["nll"] = replace(found["nll"], first=first, second=second)
    outcome = columns_of(two, "accuracy")
    assert outcome is not None
    first_N, second_N = outcome.values_MN
    return Paired(
        first=two.names[0],
        second=two.names[1],
        comparisons=first_N.size,
        metrics=found,
        verdicts=verdicts_of(first_N, second_N),
    )


def compare_pair(
    aligned: Aligned,
    second: int,
    *,
    metric: Metric = "accuracy",
    margin: float | None = None,
) -> PairComparison:
    """Compare the model of number `second` with the first, on the same comparisons.

    `margin` asks for non-inferiority and equivalence in `metric`, which is left out if the metric cannot be computed.
    """
    two = _two_of(aligned, second)
    outcome = columns_of(two, "accuracy")
    assert outcome is not None
    first_N, second_N = outcome.values_MN
    judged = columns_of(two, metric) if margin is not None else None
    unlikely = None
    if judged is not None and metric == "nll":
        known_betas = [beta for beta in two.betas if beta is not None]
        known = zip(two.difference_MN, known_betas, strict=True)
        unlikely = Unlikely.of_nll(np.stack([logits_of(own, beta=beta) for own, beta in known]))
    paired = compare_metrics(two, tuple(METRICS))
    return PairComparison(
        first=paired.first,
        second=paired.second,
        comparisons=paired.comparisons,
        prompts=len(set(outcome.prompt_keys)),
        metrics=paired.metrics,
        verdicts=paired.verdicts,
        mcnemar=mcnemar(first_N, second_N, outcome.prompt_keys),
        smallest=smallest_difference(second_N - first_N, outcome.prompt_keys),
        equivalence=None
        if judged is None or margin is None
        else equivalence(
            metric,
            judged.values_MN[1] - judged.values_MN[0],
            judged.prompt_keys,
            margin=margin,
            unlikely=unlikely,
        ),
    )
