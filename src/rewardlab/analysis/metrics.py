"""Metrics of a reward model from its score rows, and the table of their names.

Legend: N comparisons. Every comparison is first turned so that its raw label is at least ½. Otherwise a metric could
tell (i, j, y) from (j, i, 1 − y) and would depend on the order of replies in a file. Comparison weights matter for the
training loss only: every metric here counts each comparison once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from rewardlab.analysis import stats
from rewardlab.analysis.calibration import ece_estimate
from rewardlab.analysis.ceiling import Ceiling, of_score_rows
from rewardlab.analysis.distributions import standard_deviation
from rewardlab.analysis.influence import area_under_curve
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.losses import nll_estimate
from rewardlab.analysis.score_table import outcome_of
from rewardlab.core.errors import DataError
from rewardlab.core.terminal import brief
from rewardlab.core.types import Estimate, ScoredComparison, ScoreRow, Sums, join_comparisons
from rewardlab.core.values import convert, require

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "eval_accuracy": "share of comparisons ranked as labelled; score ties count one half, label ties are left out",
        "eval_loss": "mean negative log-likelihood of the raw labels under σ(β d), without smoothing or regularisers",
        "eval_margin": "mean score difference, preferred minus other; label ties are left out",
        "eval_ece": "expected calibration error of σ(β d) over symmetrised pairs, 10 equal-width bins",
        "eval_margin_std": "standard deviation of the margins",
        "eval_negative_margin_rate": "share of comparisons whose preferred reply scores lower; score ties do not count",
        "eval_roc_auc": "chance that a preferred reply outscores the other reply of any comparison; ties count ½",
    }
)
"""Name of every metric computed here -> what it means, in one line."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "accuracy": "eval_accuracy",
        "eval_acc": "eval_accuracy",
        "pairwise_accuracy": "eval_accuracy",
        "eval_pairwise_accuracy": "eval_accuracy",
        "eval_rewards/accuracies": "eval_accuracy",
        "loss": "eval_loss",
        "nll": "eval_loss",
        "eval_nll": "eval_loss",
        "margin": "eval_margin",
        "mean_margin": "eval_margin",
        "eval_mean_margin": "eval_margin",
        "eval_rewards/margins": "eval_margin",
        "ece": "eval_ece",
        "eval_expected_calibration_error": "eval_ece",
        "margin_std": "eval_margin_std",
        "negative_margin_rate": "eval_negative_margin_rate",
        "roc_auc": "eval_roc_auc",
        "auc": "eval_roc_auc",
        "eval_auc": "eval_roc_auc",
    }
)
"""Names that others use -> our name."""


EARLIER_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        f"{part}_acc{end}": f"{part}_accuracy{end}"
        for part in ("train", "eval", "train_eval", "gap")
        for end in ("", "_low", "_high")
    }
)
"""Columns of metrics.csv in runs of earlier versions, and their names today."""
Cell = TypeVar("Cell")


def column_of(metric: str) -> str:
    """Return the column of metrics.csv that a metric's name stands for, also by a name in use elsewhere or earlier."""
    return EARLIER_COLUMNS.get(metric, ALIASES.get(metric, metric))


def current_column(name: str) -> str:
    """Return the name today of a column of metrics.csv, perhaps of an earlier version."""
    return EARLIER_COLUMNS.get(name, name)


def current_columns(row: Mapping[str, Cell]) -> dict[str, Cell]:
    """Return the values of a row of metrics.csv, perhaps of an earlier version, by the columns of today."""
    return {current_column(name): value for name, value in row.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OrientedComparisons:
    """Comparisons turned so that each label is at least ½, as the columns from which every metric is computed."""

    difference: FloatArray
    """[N] score of the preferred reply minus that of the other; not finite if either score is not finite."""
    label: FloatArray
    """[N] raw label in [½, 1]; ½ is a tie."""
    prompt_keys: tuple[str, ...]
    """N prompt keys, the clusters of every interval."""

    @property
    def finite(self) -> OrientedComparisons:
        """The comparisons with two finite scores."""
        return self.where(np.isfinite(self.difference))

    @property
    def decided(self) -> OrientedComparisons:
        """The comparisons with two finite scores and a label that is not a tie."""
        return self.where(np.isfinite(self.difference) & (self.label != 0.5))

    @property
    def outcome(self) -> FloatArray:
        """[N] 1 where the preferred reply scores higher, ½ where the scores tie, else 0; scores must be finite."""
        return outcome_of(self.difference)

    def probability(self, *, beta: float) -> FloatArray:
        """Return [N] σ(β d), the model's probability that the preferred reply is preferred."""
        probability: FloatArray = expit(beta * self.difference)
        return probability

    def nll(self, *, beta: float) -> FloatArray:
        """Return [N] −[y log σ(β d) + (1 − y) log σ(−β d)], numerically stable for any finite d."""
        logits = beta * self.difference
        return self.label * np.logaddexp(0.0, -logits) + (1 - self.label) * np.logaddexp(0.0, logits)

    def where(self, kept: npt.NDArray[np.bool_]) -> OrientedComparisons:
        """Return the comparisons for which `kept` [N] is true."""
        return OrientedComparisons(
            difference=self.difference[kept],
            label=self.label[kept],
            prompt_keys=tuple(key for key, keep in zip(self.prompt_keys, kept, strict=True) if keep),
        )


def oriented(comparisons: Iterable[ScoredComparison]) -> OrientedComparisons:
    """Return the comparisons as columns, turned so that every raw label is at least ½."""
    joined = list(comparisons)
    label = np.array([entry.comparison.label for entry in joined], dtype=np.float64)
    first = np.array([entry.first.score for entry in joined], dtype=np.float64)
    second = np.array([entry.second.score for entry in joined], dtype=np.float64)
    if not ((label >= 0) & (label <= 1)).all():
        raise DataError(
            "a comparison has a label that is not from 0 to 1. Give the probability that `first` is preferred."
        )
    swapped = label < 0.5
    # ∞ − ∞ is NaN, which rightly counts as not finite, so numpy need not warn.
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(swapped, second - first, first - second)
    return OrientedComparisons(
        difference=difference,
        label=np.where(swapped, 1 - label, label),
        prompt_keys=tuple(entry.prompt_key for entry in joined),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The metrics of a set of score rows."""

    sums: Sums
    """Numerators and counts. Those of parts add up to those of the whole."""
    estimates: Mapping[str, Estimate]
    """One entry for each name in `METRICS`."""
    ceiling: Ceiling | None = None
    """What a perfect model would reach, where the rows hold repeated judgements, soft labels or strengths."""
    agreement: Estimate | None = None
    """Agreement of this model with single judges, as `eval_agreement`, where the ceiling bounds it; None elsewhere. If
    the ceiling is from strengths, these take the place of the labels."""
    unit: str = "pairs"
    """What the comparisons are called: `comparisons` where a preference has more than two replies."""


def sums(rows: Sequence[ScoreRow], *, beta: float) -> Sums:
    """Return numerators and counts over all comparisons of the rows, with probabilities σ(β d).

    Comparisons with a score that is not finite are counted in `comparisons` and `non_finite` and nowhere else, so
    comparisons = decided + label_ties + non_finite. `score_ties` are those that count one half in `correct`. The loss
    is the plain negative log-likelihood, and its weight the number of finite comparisons.

    Raises DataError if a reply has two rows.
    """
    return _sums(oriented(join_comparisons(rows)), beta=beta)


def evaluate(rows: Sequence[ScoreRow], *, beta: float, seed: int = 0) -> Evaluation:
    """Return every metric in `METRICS` with its interval, clustered by prompt where prompts repeat.

    `seed` is that of the noise drawn for the interval of ECE, so that the same rows give the same intervals.

    Raises DataError for rows that are none, for a reply with two rows or none and for a label that is not from 0 to 1,
    ConfigError for a `beta` that is not a number above 0 and a `seed` that is not a whole number.
    """
    beta = _above_zero(beta)
    convert(seed, int, "seed")
    if not isinstance(rows, Sequence) or not all(isinstance(row, ScoreRow) for row in rows):
        raise DataError("rows: wanted a list of ScoreRow (rewardlab.ScoreRow), one for each reply.")
    if wrong := [row for row in rows if not isinstance(row.score, Real)]:
        raise DataError(f"rows: the score of {wrong[0].preference_id} is {brief(wrong[0].score)}; wanted a number.")
    joined = list(join_comparisons(rows))
    columns = oriented(joined)
    finite, decided = columns.finite, columns.decided
    estimates = {
        "eval_accuracy": stats.proportion(decided.outcome, decided.prompt_keys),
        "eval_loss": nll_estimate(beta * finite.difference, finite.label, finite.prompt_keys),
        "eval_margin": stats.level_mean(decided.difference, decided.prompt_keys),
        "eval_ece": ece_estimate(finite.probability(beta=beta), finite.label, finite.prompt_keys, seed=seed),
        **_of_decided(joined, columns),
    }
    ceiling = of_score_rows(rows)
    agreement = None
    if ceiling is not None and ceiling.of_agreement:
        sure = oriented(_by_strength(joined)).finite if ceiling.of_strengths else finite
        outcome = sure.outcome
        agreement = stats.mean_share(outcome * sure.label + (1 - outcome) * (1 - sure.label), sure.prompt_keys)
    return Evaluation(
        sums=_sums(columns, beta=beta),
        estimates=estimates,
        ceiling=ceiling,
        agreement=agreement,
        unit="comparisons" if any(row.reply > 1 for row in rows) else "pairs",
    )


def _above_zero(beta: float) -> float:
    number = convert(beta, float, "beta")
    require(isinstance(number, float) and number > 0, f"beta: got {brief(beta)}; wanted a number above 0.")
    return float(beta)


def _of_decided(joined: Sequence[ScoredComparison], columns: OrientedComparisons) -> dict[str, Estimate]:
    """Return the spread of margins, the share below 0, and the area under the ROC curve, as `judge_rows` does."""
    kept = np.isfinite(columns.difference) & (columns.label != 0.5)
    decided = columns.where(kept)
    scores = [(entry.first.score, entry.second.score)[:: -1 if entry.comparison.label < 0.5 else 1] for entry in joined]
    preferred, other = np.array(scores, dtype=np.float64).reshape(-1, 2)[kept].T
    clusters, _ = stats.numbered(decided.prompt_keys)
    below = (decided.outcome == 0).astype(np.float64)
    return {
        "eval_margin_std": standard_deviation(decided.difference, clusters),
        "eval_negative_margin_rate": stats.proportion(below, decided.prompt_keys),
        "eval_roc_auc": area_under_curve(preferred, other, clusters),
    }


def _by_strength(joined: Iterable[ScoredComparison]) -> Iterator[ScoredComparison]:
    """Yield the comparisons that are not ties, with strengths (the probabilities of the labels) as soft labels."""
    for entry in joined:
        own = entry.comparison
        if own.label != 0.5 and own.strength is not None:
            label = own.strength if own.label > 0.5 else 1 - own.strength
            yield replace(entry, comparison=replace(own, label=label))


def by_source(rows: Sequence[ScoreRow], *, beta: float, seed: int = 0) -> dict[str, Evaluation]:
    """Return `evaluate` of each source alone, in the order in which sources first appear. Raises as it does."""
    groups: dict[str, list[ScoreRow]] = {}
    for row in rows:
        groups.setdefault(row.source, []).append(row)
    return {source: evaluate(group, beta=beta, seed=seed) for source, group in groups.items()}


def _sums(columns: OrientedComparisons, *, beta: float) -> Sums:
    finite, decided = columns.finite, columns.decided
    num_comparisons, num_finite, num_decided = len(columns.label), len(finite.label), len(decided.label)
    nll = float(finite.nll(beta=beta).sum())
    return Sums(
        loss=nll,
        weight=float(num_finite),
        nll=nll,
        correct=float(decided.outcome.sum()),
        margin=float(decided.difference.sum()),
        comparisons=num_comparisons,
        decided=num_decided,
        score_ties=int(np.count_nonzero(decided.difference == 0)),
        label_ties=num_finite - num_decided,
        non_finite=num_comparisons - num_finite,
    )
