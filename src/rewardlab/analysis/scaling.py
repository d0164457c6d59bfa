"""Calibration maps of a reward model, fitted on some score rows and judged on others.

Two questions, two maps (docs/design/formulas.md):

- *Which of two replies is preferred?* σ(β d / T) with one temperature T. The order of a pair is arbitrary, so there is
  nothing to shift: every antisymmetric Platt map is a temperature.
- *Is this reply one that is preferred?* σ(a s + b), Platt's map of a single score, fitted on the preferred and the
  other reply of every pair. Its probability is relative to the replies that it was fitted on.

Legend: N comparisons, M = 2N sides of comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit

from rewardlab.analysis import stats
from rewardlab.analysis.bounded import Unlikely
from rewardlab.analysis.calibration import ece_estimate
from rewardlab.analysis.distributions import standard_deviation
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.logistic import calibration_slope
from rewardlab.analysis.losses import brier_estimate, brier_values, nll_estimate, nll_values
from rewardlab.analysis.score_table import Pairs, score_table
from rewardlab.core.errors import DataError
from rewardlab.core.types import Estimate, ScoreRow

MIN_PAIRS: Final = 50
"""Fewest decided comparisons that a map is fitted on; with fewer, T alone is uncertain by a third."""
HOTTEST: Final = 1000.0
"""Temperatures are sought between its inverse and this, and as far below and above the size of the logits."""
EDGE: Final = 0.99
"""A temperature beyond this share of the range (of its logarithm) is at its edge: the best one may lie outside."""
MEASURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NLL": "mean negative log-likelihood of the labels",
        "Brier": "mean squared distance of probability and label",
        "ECE": "expected calibration error, 10 bins; of p and of 1 − p together",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The maps fitted on score rows, and the mean and spread of the scores there."""

    temperature: float
    """σ(β d / temperature) is the calibrated probability of a preference."""
    affine: tuple[float, float]
    """(scale, shift): σ(scale · score + shift) is the probability that a reply is a preferred one."""
    reward_mean: float
    reward_std: float
    """Mean and standard deviation (divisor R − 1) of the finite scores of all replies, for RL."""
    num_replies: int
    num_comparisons: int
    """Finite scores and comparisons that were fitted on."""
    at_edge: bool
    """Whether the temperature is only the lowest that is tried, because no lower one would fit worse: every pair is
    ranked as labelled."""
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    """`temperature`, `reward_mean` and `reward_std` with their intervals, clustered by prompt."""


def require_pairs(count: int, what: str, *, advice: str) -> None:
    """Raise DataError for fewer comparisons than a calibration takes."""
    if count < MIN_PAIRS:
        raise DataError(f"{count} {what} are too few to calibrate on: at least {MIN_PAIRS} are needed. {advice}")


def fit_scaling(rows: Sequence[ScoreRow], *, beta: float, advice: str = "Name more data.") -> Scaling:
    """Fit both maps on score rows by maximum likelihood of the raw labels. `advice` is for those who have too few.

    Raises DataError if there are fewer than `MIN_PAIRS` comparisons with finite scores, if the scores do not vary, or
    if they rank so badly that the best scale would turn their order round.
    """
    table = score_table(rows)
    pairs = table.pairs.finite
    scores = table.replies.finite.score
    require_pairs(pairs.label.size, "comparisons with finite scores", advice=advice)
    if not np.ptp(scores):
        raise DataError("all scores are equal, so there is nothing to calibrate.")
    logits = beta * pairs.difference
    lowest, highest = temperatures(logits)
    temperature = fit_temperature(logits, pairs.label)
    scale, shift = fit_affine(*sides(pairs))
    if scale <= 0 or temperature >= highest / HOTTEST ** (1 - EDGE):
        raise DataError(
            "the scores rank these pairs no better than chance, so the best calibration would turn their order round "
            "or make all of them equal. Look at `rewardlab eval` on the same data first."
        )
    return Scaling(
        temperature=temperature,
        affine=(scale, shift),
        reward_mean=float(scores.mean()),
        reward_std=float(scores.std(ddof=1)),
        num_replies=scores.size,
        num_comparisons=pairs.label.size,
        at_edge=temperature <= lowest * HOTTEST ** (1 - EDGE),
        estimates={
            "temperature": _temperature(temperature, logits, pairs),
            "reward_mean": stats.mean(scores, table.keys(table.replies.finite)),
            "reward_std": standard_deviation(scores, table.replies.finite.prompt),
        },
    )


def _temperature(temperature: float, logits: FloatArray, pairs: Pairs) -> Estimate:
    """Return T with the interval of its inverse, the calibration slope; without an end above where that reaches 0."""
    slope = calibration_slope(logits, pairs.label, pairs.prompt)
    low, high = 1 / slope.high, 1 / slope.low if slope.low > 0 else math.inf
    return replace(slope, value=temperature, low=low, high=math.nan if math.isnan(slope.low) else high)


def temperatures(logits: FloatArray) -> tuple[float, float]:
    """Return the lowest and the highest temperature that are tried for logits [N], so that models of any scale can be
    calibrated: `HOTTEST` below and above both 1 and the logits' root mean square.
    """
    largest = np.abs(logits).max(initial=0.0)
    if not largest:
        return 1 / HOTTEST, HOTTEST
    # Divided by the largest, squares neither overflow nor vanish.
    root = float(largest * np.sqrt(np.square(logits / largest).mean()))
    return min(root, 1.0) / HOTTEST, max(root, 1.0) * HOTTEST


def fit_temperature(logits: FloatArray, labels: FloatArray) -> float:
    """Return the T that minimises the mean NLL of σ(logits / T) under `labels` [N] in [0, 1].

    The NLL is convex in 1/T, so it has one minimum, which is sought within the range of `temperatures`. Where
    every pair is ranked as labelled there is no minimum, and T is the lowest of the range. Source: Guo and others
    (2017), ICML, arXiv 1706.04599.
    """
    lowest, highest = temperatures(logits)
    if _separated(logits, labels):
        # In floating point the loss is 0 long before the edge, so a search could end anywhere.
        return lowest

    def loss(log_temperature: float) -> float:
        scaled = logits * np.exp(-log_temperature)
        return float(np.mean(labels * np.logaddexp(0, -scaled) + (1 - labels) * np.logaddexp(0, scaled)))

    # Most temperatures lie in the usual range. A wider one is searched only where the best may lie outside it.
    for low, high in ((1 / HOTTEST, HOTTEST), (lowest, highest)):
        found = minimize_scalar(loss, bounds=(np.log(low), np.log(high)), method="bounded", options={"xatol": 1e-9})
        if HOTTEST**-EDGE < np.exp(found.x) < HOTTEST**EDGE:
            break
    return float(np.exp(found.x))


def _separated(logits: FloatArray, labels: FloatArray) -> bool:
    """Return whether no finite 1/T is best: every pair with a difference is labelled 0 or 1, and ranked so."""
    return bool(np.where(logits > 0, labels == 1, np.where(logits < 0, labels == 0, True)).all())


def fit_affine(scores: FloatArray, targets: FloatArray) -> tuple[float, float]:
    """Return (a, b) that minimise the mean NLL of σ(a s + b) under `targets` [M] in [0, 1].

    Targets of 1 and 0 become (N₊ + 1)/(N₊ + 2) and 1/(N₋ + 2), those between lie between, N₊ being the sum of the
    targets and N₋ that of their complements: so a and b are finite where a score separates the sides. Source: Platt
    (1999), Advances in Large Margin Classifiers, 61-74.
    """
    centre, spread = scores.mean(), scores.std() or 1.0
    standard = (scores - centre) / spread
    preferred = float(targets.sum())
    highest, lowest = (preferred + 1) / (preferred + 2), 1 / (targets.size - preferred + 2)
    smoothed = lowest + targets * (highest - lowest)

    def loss(theta: FloatArray) -> tuple[float, FloatArray]:
        logits = theta[0] * standard + theta[1]
        nll = smoothed * np.logaddexp(0, -logits) + (1 - smoothed) * np.logaddexp(0, logits)
        error = expit(logits) - smoothed
        return float(nll.mean()), np.array([(error * standard).mean(), error.mean()])

    found = minimize(loss, np.zeros(2), jac=True, method="BFGS", options={"gtol": 1e-9})
    scale = float(found.x[0] / spread)
    return scale, float(found.x[1] - scale * centre)


def sides(pairs: Pairs) -> tuple[FloatArray, FloatArray]:
    """Return (scores, targets) [M] of both sides of every comparison: the preferred ones first, then the others."""
    return np.concatenate([pairs.preferred, pairs.other]), np.concatenate([pairs.label, 1 - pairs.label])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingJudgement:
    """Probabilities before and after a calibration, on rows that it was not fitted on."""

    pairs: Mapping[str, Mapping[str, Estimate]]
    """`before`, `after` and `after − before` -> measure (`MEASURES`) -> estimate, of σ(β d) and σ(β d / T)."""
    replies: Mapping[str, Mapping[str, Estimate]]
    """The same of σ(s), what a server gives that puts a sigmoid on the score, and of σ(a s + b)."""
    num_comparisons: int
    num_non_finite: int
    """Comparisons left out because a score is not finite."""


def judge_scaling(scaling: Scaling, rows: Sequence[ScoreRow], *, beta: float) -> ScalingJudgement:
    """Judge the maps on score rows that they were not fitted on, clustered by prompt; differences are paired.

    Raises DataError if no comparison has two finite scores, and as `score_table` does.
    """
    table = score_table(rows)
    pairs = table.pairs.finite
    if not pairs.label.size:
        raise DataError("no comparison has two finite scores, so there is nothing to judge the calibration on.")
    keys = table.keys(pairs)
    logits = beta * pairs.difference
    scores, targets = sides(pairs)
    scale, shift = scaling.affine
    return ScalingJudgement(
        pairs=_compared(logits, logits / scaling.temperature, pairs.label, keys),
        replies=_compared(scores, scale * scores + shift, targets, [*keys, *keys]),
        num_comparisons=pairs.label.size,
        num_non_finite=table.pairs.label.size - pairs.label.size,
    )


def _compared(
    before: FloatArray, after: FloatArray, labels: FloatArray, keys: Sequence[str]
) -> dict[str, dict[str, Estimate]]:
    """Return the measures of two sets of logits and their paired differences."""
    found = {
        name: {
            "NLL": nll_estimate(logits, labels, keys),
            "Brier": brier_estimate(logits, labels, keys),
            "ECE": ece_estimate(expit(logits), labels, keys),
        }
        for name, logits in (("before", before), ("after", after))
    }
    found["after − before"] = loss_changes(before, after, labels, keys)
    return found


def loss_changes(before: FloatArray, after: FloatArray, labels: FloatArray, keys: Sequence[str]) -> dict[str, Estimate]:
    """Return the paired changes of NLL and Brier score from the logits `before` [M] to those `after`, by prompt.

    A calibration changes most what comes out against its probabilities, and of few pairs none may have done so. So the
    interval holds, too, what is likely if some had (see `_with_unlikely`).
    """
    old, new = _losses(before, labels), _losses(after, labels)
    against = (after < 0).astype(np.float64)
    old_if, new_if = _losses(before, against), _losses(after, against)
    chances = expit(-np.abs(after))
    found = {}
    for measure in new:
        change = new[measure] - old[measure]
        plain = stats.mean(change, keys)
        against_M = new_if[measure] - old_if[measure]
        found[measure] = _with_unlikely(plain, change, Unlikely(values=against_M, chances=chances), keys)
    return found


def _with_unlikely(found: Estimate, values: FloatArray, unlikely: Unlikely, keys: Sequence[str]) -> Estimate:
    """Return a mean of paired changes [M] with its interval widened to that of the likeliest distributions with an end,
    as claims on losses are tested (`crossed_shares.py`)."""
    found = replace(found, method=f"{found.method}, paired")
    if math.isnan(found.low):
        return found
    bounded, tail = unlikely.mean_of(values, stats.numbered(keys)[0]), (1 - found.level) / 2
    return replace(found, low=min(found.low, bounded.low(tail)), high=max(found.high, bounded.high(tail)))


def _losses(logits: FloatArray, labels: FloatArray) -> dict[str, FloatArray]:
    return {"NLL": nll_values(logits, labels), "Brier": brier_values(logits, labels)}
