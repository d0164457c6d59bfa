"""Compare scores of the same replies in several precisions: how far scores, margins and verdicts differ.

Legend: N comparisons, R replies. Two scores of the same reply are compared, so every difference is paired. It takes far
fewer rows to tell a paired difference from zero than a difference of two independent accuracies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.metrics import OrientedComparisons, oriented
from rewardlab.analysis.paired import change_of_shares
from rewardlab.core.terminal import plural
from rewardlab.core.types import Estimate, ScoreRow, join_comparisons

CANONICAL: Final = "float32"
NEAREST: Final = "nearest "
"""Prefix of the name of a precision whose weights are rounded to the nearest value, as other engines do it."""
CARD_WORTH: Final = 10_000
"""Preferences, those seen again counted again, from which on a training run in float32 ends with a precision card by
itself: fifty times as many as a card is drawn from."""
FEWEST_PROMPTS: Final = 40
"""Below this many prompts a ratio of two spreads gets no interval, since it would be too narrow (coverage of 91 % at 10
and 25 prompts)."""
MEASURES: Final = {
    "accuracy": "share of comparisons ranked as labelled",
    "accuracy − float32's": "paired",
    "NLL": "mean negative log-likelihood",
    "NLL − float32's": "paired",
    "score shift": "mean difference of a score",
    "score spread": "standard deviation of these differences, in standard deviations of a score",
    "margin error": "root mean square of the differences of margins, in standard deviations of a margin",
}
"""Row of a precision card -> what it means."""


Answer = Literal["may be served", "may not be served", "too few pairs to say"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a model may be served in a precision, and why."""

    precision: str
    """Name of its column in the card."""
    answer: Answer
    evidence: str
    """Sentences with the numbers that decided it."""

    def __str__(self) -> str:
        return f"{self.precision}: {self.answer}. {self.evidence}"


@dataclass(frozen=True, kw_only=True)
class PrecisionCard:
    """Scores of one model on one sample, compared between float32 and other precisions."""

    measures: Mapping[str, Mapping[str, Estimate]]
    """Precision -> measure -> estimate. The first precision is float32, the reference, which has no differences."""
    margin_error: Mapping[str, float]
    """Precision -> root mean square of the differences of margins, in units of the score."""
    not_finite: Mapping[str, int]
    """Precision -> number of replies whose score is finite in float32 but not in it. They are left out of
    comparisons."""
    margin: Estimate
    """Mean margin in float32."""
    num_preferences: int
    num_available: int
    """Number of preferences from which the sample was drawn."""
    seed: int

    def off(self) -> list[str]:
        """Return the precisions in which margins typically differ by more than the half width of the interval of the
        mean margin, or in which scores are not finite.
        """
        reach = (self.margin.high - self.margin.low) / 2
        # Without an interval `reach` is NaN, no error is greater, and only scores that are not finite count.
        return [name for name, error in self.margin_error.items() if error > reach or self.not_finite[name]]

    def notable(self) -> list[str]:
        """Return the precisions of `off` in which rewardlab itself computes.

        Those rounded to the nearest are left out, since most trained models would be reported.
        """
        return [name for name in self.off() if not name.startswith(NEAREST)]

    def verdicts(self) -> list[Verdict]:
        """Return for each precision but float32 whether the model may be served in it.

        It may not in those of `off`, nor where it surely ranks fewer pairs right. It may where the interval of the
        margin error is known and nothing speaks against it; fewer than 40 prompts do not say.
        """
        return [self._verdict(name) for name in self.margin_error]

    def _verdict(self, name: str) -> Verdict:
        own, lost = self.measures[name], self.not_finite[name]
        accuracy, reach = own["accuracy − float32's"], (self.margin.high - self.margin.low) / 2
        # A rounded value plus 0 is never "-0.000", which looks like a mistake.
        value, low, high = (f"{round(one, 3) + 0.0:+.3f}" for one in (accuracy.value, accuracy.low, accuracy.high))
        change = f"{value} [{low}, {high}]"
        off = f"Margins are off by {self.margin_error[name]:.2g} (root mean square)"
        known = f"the ±{reach:.2g} to which {self.margin.n} prompts tell the mean margin"
        answer: Answer = "may not be served"
        if lost:
            evidence = f"{lost} {'reply has' if lost == 1 else 'replies have'} no finite score in it."
        elif self.margin_error[name] > reach:
            evidence = f"{off}, more than {known}; accuracy changes by {change}."
        elif accuracy.high < 0:
            evidence = f"It ranks fewer pairs right: accuracy changes by {change}."
        elif math.isnan(own["margin error"].high) or math.isnan(reach):
            answer = "too few pairs to say"
            evidence = (
                f"At least {FEWEST_PROMPTS} prompts are needed, and {self.margin.n} "
                f"{plural(self.margin.n, 'has', 'have')} pairs to judge by."
            )
        else:
            answer = "may be served"
            evidence = f"{off}, less than {known}; accuracy changes by {change}."
        return Verdict(precision=name, answer=answer, evidence=evidence)


def precision_card(
    rows: Mapping[str, Sequence[ScoreRow]], *, beta: float, num_available: int, seed: int
) -> PrecisionCard:
    """Compare rows of the same replies, in the same order. `rows` maps precisions, `float32` among them, to score rows.

    Raises DataError if a reply has two rows in one precision.
    """
    exact = oriented(join_comparisons(rows[CANONICAL]))
    keys = [row.prompt_key for row in rows[CANONICAL]]
    exact_R = np.array([row.score for row in rows[CANONICAL]])
    measures = {CANONICAL: _alone(exact, beta=beta)}
    errors: dict[str, float] = {}
    lost: dict[str, int] = {}
    for name, own in rows.items():
        if name == CANONICAL:
            continue
        own_R, columns = np.array([row.score for row in own]), oriented(join_comparisons(own))
        decided, exact_decided = _both(columns, exact)
        moved_N = decided.difference - exact_decided.difference
        lost[name] = int((np.isfinite(exact_R) & ~np.isfinite(own_R)).sum())
        errors[name] = math.sqrt(float(np.square(moved_N).mean())) if moved_N.size else math.nan
        measures[name] = {
            **_alone(columns, beta=beta),
            "accuracy − float32's": change_of_shares(
                decided.outcome - exact_decided.outcome, exact_decided.prompt_keys
            ),
            "NLL − float32's": _nll_change(columns, exact, beta=beta),
            **_score_changes(own_R, exact_R, keys),
            "margin error": relative_size(moved_N, exact_decided.difference, exact_decided.prompt_keys, centred=False),
        }
    return PrecisionCard(
        measures=measures,
        margin_error=errors,
        not_finite=lost,
        margin=stats.mean(exact.decided.difference, exact.decided.prompt_keys),
        num_preferences=len({(row.source, row.preference_id) for row in rows[CANONICAL]}),
        num_available=num_available,
        seed=seed,
    )


def _alone(columns: OrientedComparisons, *, beta: float) -> dict[str, Estimate]:
    finite, decided = columns.finite, columns.decided
    return {
        "accuracy": stats.proportion(decided.outcome, decided.prompt_keys),
        "NLL": stats.mean_loss(finite.nll(beta=beta), finite.prompt_keys),
    }


def _both(one: OrientedComparisons, other: OrientedComparisons) -> tuple[OrientedComparisons, OrientedComparisons]:
    """Return the decided comparisons with finite scores in both."""
    kept = np.isfinite(one.difference) & np.isfinite(other.difference) & (one.label != 0.5)
    return one.where(kept), other.where(kept)


def _nll_change(columns: OrientedComparisons, exact: OrientedComparisons, *, beta: float) -> Estimate:
    kept = np.isfinite(columns.difference) & np.isfinite(exact.difference)
    change = columns.where(kept).nll(beta=beta) - exact.where(kept).nll(beta=beta)
    estimate = stats.mean(change, exact.where(kept).prompt_keys)
    return replace(estimate, method=f"{estimate.method}, paired")


def _score_changes(own_R: FloatArray, exact_R: FloatArray, keys: Sequence[str]) -> dict[str, Estimate]:
    kept = np.isfinite(own_R) & np.isfinite(exact_R)
    moved, known = (own_R - exact_R)[kept], [key for key, keep in zip(keys, kept, strict=True) if keep]
    return {
        "score shift": stats.mean(moved, known),
        "score spread": relative_size(moved, exact_R[kept], known, centred=True),
    }


def relative_size(moved: FloatArray, exact: FloatArray, keys: Sequence[str], *, centred: bool) -> Estimate:
    """Return the size of the differences `moved`, in standard deviations of `exact`, clustered by prompt.

    The size is their root mean square or, if `centred`, their standard deviation. The interval is that of the
    logarithm, which to first order is a mean over rows: ½(u²/ū² − v²/v̄²) with u in the numerator and v in the
    denominator (the delta method; van der Vaart 1998, chapter 3).
    """
    u = moved - moved.mean() if centred and moved.size else moved
    v = exact - exact.mean() if moved.size else exact
    if not np.square(v).any():
        return stats.without_interval(math.nan, 0)
    size, spread = float(np.square(u).mean()), float(np.square(v).mean())
    share = np.square(u) / size if size else np.zeros_like(u)
    log = stats.mean((share - np.square(v) / spread) / 2, keys)
    value = math.sqrt(size / spread)
    if log.n < FEWEST_PROMPTS:
        return stats.without_interval(value, log.n, level=log.level)
    low, high = (value * math.exp(limit - log.value) for limit in (log.low, log.high))
    method = log.method.replace("t interval", "t interval of the logarithm")
    return Estimate(value=value, low=low, high=high, n=log.n, method=method, level=log.level)
