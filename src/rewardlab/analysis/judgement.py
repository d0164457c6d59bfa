"""Everything that score rows say about a reward model, each number with its interval.

Legend: R replies, N comparisons. `docs/metrics.md` has what each number means, its formula and its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rewardlab.analysis import json_form, stats
from rewardlab.analysis.calibration import Calibration, calibrate, ece_estimate
from rewardlab.analysis.combined import widened_to_parts
from rewardlab.analysis.distributions import Distribution, distribution, histogram_edges, quantile, standard_deviation
from rewardlab.analysis.influence import area_under_curve, cluster_sums, share_by_influence, sums_by
from rewardlab.analysis.intervals import FloatArray, weighted_number
from rewardlab.analysis.kwise import KWise, ReplyKey, kwise
from rewardlab.analysis.lengths import length_controlled, length_estimates
from rewardlab.analysis.logistic import calibration_intercept, calibration_slope
from rewardlab.analysis.losses import brier_estimate
from rewardlab.analysis.measures import MARGIN_PERCENTILES, at_threshold, measure_named
from rewardlab.analysis.reliability import NUM_DRAWS, Reliability, reliability
from rewardlab.analysis.score_table import Pairs, ScoreTable, require_computable, score_table
from rewardlab.analysis.slices import Slice, SliceColumn, core_estimates, slice_pairs
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Estimate, ScoreRow

NUM_ROC_POINTS: Final = 201
"""Most points of the ROC curve that are kept; AUC is computed from all."""
OF_ALL_REPLIES: Final = ("eval_gold_spearman",)
OF_GROUPS: Final = (
    "eval_gold_regret",
    "eval_kendall_tau",
    "eval_kwise_spearman",
    "eval_ndcg",
    "eval_best_of_k",
    "eval_regret",
)
"""Numbers that gold scores decide where there are any: of all replies, and of preferences of more than two."""
FEWEST_A_SOURCE: Final = 5
"""Prompts that each source needs for an interval of the mean over sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What was judged, and what had to be left out of which number."""

    replies: int
    non_finite_replies: int
    """Replies with a score of NaN or infinity; they are counted here and left out of everything else."""
    truncated_replies: int
    """Replies of which, or of whose prompt, something was cut."""
    preferences: int
    prompts: int
    sources: int
    comparisons: int
    decided: int
    """Comparisons with two finite scores and a label that is not a tie."""
    label_ties: int
    score_ties: int
    """Decided comparisons with two equal scores, which count one half."""
    non_finite: int
    """Comparisons with a score that is not finite."""
    soft_labels: int
    """Finite comparisons with a label strictly between ½ and 1 once turned."""
    groups: int
    """Preferences of more than two replies that were judged as rankings."""
    unusable_groups: int
    """Preferences of more than two replies that could not be judged as rankings."""
    replies_without_gold: int
    """Replies without a finite gold score, where some have one; 0 without gold scores."""
    length_uncontrolled: int
    """Decided comparisons left out of accuracy with length controlled: with replies of equal length, or in a stratum
    with too few prompts on a side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roc:
    """The ROC curve of preferred against other replies, from (0, 0) to (1, 1), thresholds falling."""

    threshold: tuple[float, ...]
    """Score at or above which a reply counts as preferred; the first point has none and stands at NaN."""
    false_positive: tuple[float, ...]
    true_positive: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Every number about a reward model that its score rows give."""

    beta: float
    level: float
    seed: int
    draws: int
    counts: Counts
    estimates: Mapping[str, Estimate]
    """Name (see `measures.MEASURES`, and ``eval_fpr@0.5`` for thresholds) -> estimate. `n` is the number of independent
    observations: prompts where these repeat. K-wise ones are there if a preference has more than two replies,
    `eval_gold_spearman` if gold scores were given, `eval_gold_regret` if both."""
    num_rows: Mapping[str, int]
    """Name -> comparisons, replies or groups behind the estimate."""
    distributions: Mapping[str, Distribution]
    """``score`` of all replies, ``chosen`` and ``rejected`` (one a decided comparison, bars of the same edges), and
    ``margin``."""
    reliability: Reliability
    calibration: Calibration
    """ECE with its null band and the bins of the reliability diagram."""
    roc: Roc
    slices: Mapping[str, tuple[Slice, ...]]
    """Name of a slicing (`slices.BUILT_IN`, then the columns given) -> its slices."""

    def __getitem__(self, name: str) -> Estimate:
        """Return an estimate by our name or an alias. Raises KeyError if there is none."""
        return self.estimates[measure_named(name)]

    @property
    def by_gold(self) -> dict[str, Estimate]:
        """The numbers that are made with gold scores: those about rankings are among them only if there are gold
        scores. Empty without any."""
        if "eval_gold_spearman" not in self.estimates:
            return {}
        return {name: self.estimates[name] for name in (*OF_ALL_REPLIES, *OF_GROUPS) if name in self.estimates}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON, NaN as null."""
        found: dict[str, Any] = json_form.encode(self)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Judgement:
        """Return the judgement that `as_dict` gave as JSON. Raises KeyError or TypeError for values of another form."""
        return json_form.decode(cls, values)


def judge_rows(
    rows: Sequence[ScoreRow],
    *,
    beta: float,
    thresholds: Sequence[float] = (),
    slices: Mapping[str, SliceColumn] | None = None,
    gold: Mapping[ReplyKey, float] | None = None,
    seed: int = 0,
    draws: int = NUM_DRAWS,
) -> Judgement:
    """Judge a reward model by its score rows, with probabilities σ(β d), in any order of the rows.

    `thresholds` are scores from which on a reply counts as preferred. `slices` maps the name of a column to its value
    for each preference, keyed by source and id. `gold` maps source, id and reply to a reference score, with which the
    scores of all replies are correlated and by which rankings are judged; without it these are judged by the
    comparisons. `seed` and `draws` are those of the resamples behind the reliability curve, its parts and ECE.

    Raises ConfigError for β or thresholds that are not finite numbers, DataError for rows that cannot be judged: none,
    a reply twice, an invalid comparison (see `score_table`), no finite score at all, a score or β d beyond `LARGEST`,
    gold scores of other replies.
    """
    if not (math.isfinite(beta) and beta > 0):
        raise ConfigError(f"β is {beta}, but probabilities σ(β d) need a finite number above 0.")
    for threshold in thresholds:
        if not math.isfinite(threshold):
            raise ConfigError(f"the threshold {threshold} is not a finite score.")
    table = score_table(rows)
    if not np.isfinite(table.replies.score).any():
        raise DataError(f"none of the {len(rows):,} scores is finite. A model that gives NaN cannot be judged.")
    require_computable(table.replies.score)
    finite, decided = table.pairs.finite, table.pairs.decided
    groups = kwise(table, gold=gold)
    probability = finite.probability(beta=beta)
    curve = reliability(finite.logit(beta=beta), finite.label, finite.prompt, seed=seed, draws=draws)
    distributions = _distributions(table, decided)
    estimates = {
        **_accuracies(table, finite, decided),
        **_margins(table, decided),
        **_probabilities(table, finite, curve, beta=beta, seed=seed),
        "eval_roc_auc": area_under_curve(decided.preferred, decided.other, decided.prompt),
        "eval_score_mean": distributions["score"].mean,
        "eval_score_std": distributions["score"].std,
        "eval_chosen_mean": distributions["chosen"].mean,
        "eval_rejected_mean": distributions["rejected"].mean,
        **length_estimates(table.replies.finite, finite, decided, beta=beta),
        **_of_groups(groups),
        **_at_thresholds(table, decided, thresholds),
    }
    counts = _counts(table, groups)
    return Judgement(
        beta=beta,
        level=0.95,
        seed=seed,
        draws=draws,
        counts=counts,
        estimates=estimates,
        num_rows={name: _num_rows(name, table, groups) for name in estimates},
        distributions=distributions,
        reliability=curve,
        calibration=calibrate(probability, finite.label, seed=seed),
        roc=roc_curve(decided.preferred, decided.other),
        slices=slice_pairs(table, beta=beta, columns=slices),
    )


def _of_groups(groups: KWise) -> dict[str, Estimate]:
    """Return the estimates about groups if there are groups, and that about all replies if there are gold scores."""
    every = bool(groups.num_groups or groups.num_unusable)
    return {name: found for name, found in groups.estimates.items() if every or name == "eval_gold_spearman"}


def _accuracies(table: ScoreTable, finite: Pairs, decided: Pairs) -> dict[str, Estimate]:
    outcome = decided.outcome
    certainty = 2 * decided.label - 1
    agreed = finite.label * finite.outcome + (1 - finite.label) * (1 - finite.outcome)
    keys, plain = table.keys(finite), stats.proportion(outcome, table.keys(decided))
    return {
        "eval_accuracy": plain,
        "eval_accuracy_soft": weighted_accuracy(outcome, certainty, decided) if (certainty < 1).any() else plain,
        "eval_agreement": stats.mean_share(agreed, keys),
        "eval_agreement_ceiling": stats.mean_share(finite.label, keys),
        "eval_accuracy_macro": macro_accuracy(outcome, decided),
        "eval_accuracy_by_prompt": _by_prompt(outcome, decided),
        "eval_negative_margin_rate": stats.proportion((outcome == 0).astype(np.float64), table.keys(decided)),
    }


def weighted_accuracy(outcome: FloatArray, weight: FloatArray, decided: Pairs) -> Estimate:
    """Return the share of outcomes [N] with weights [N], such as |2y − 1|; at least one weight must be above 0.

    Few outcomes of large weight may be all right by chance, so the effective number is at most that of the weights, and
    the interval at least as wide as those of the outcomes above and below the mean weight combined.
    """
    if not outcome.size:
        return stats.without_interval(math.nan, 0)
    share = weight / weight.mean()
    value = min(float((share * outcome).mean()), 1.0)  # shares add up to their number but for rounding
    totals_3C, _ = cluster_sums(outcome, decided.prompt)
    most = math.inf
    if totals_3C.shape[1] >= stats.MIN_CLUSTERS:
        columns = (*totals_3C, *sums_by(decided.prompt, share, np.square(share)))
        most = float(weighted_number(*(column[None] for column in columns))[0])
    found = share_by_influence(value, share * (outcome - value), decided.prompt, most=most)
    parts = [(float(share[own].sum()) / share.size, own) for own in (share > 1, share <= 1) if own.any()]
    return widened_to_parts(found, outcome, decided.prompt, parts) if len(parts) > 1 else found


def macro_accuracy(outcome: FloatArray, decided: Pairs) -> Estimate:
    """Return the mean of the accuracies of the sources that have decided comparisons.

    The interval is at least as wide as those of the sources combined: a small source may be all right by chance.
    """
    if not outcome.size:
        return stats.without_interval(math.nan, 0)
    names, source, count = np.unique(decided.source, return_inverse=True, return_counts=True)
    means = np.bincount(source, outcome) / count
    # The comparisons of each source by their numbers: a mask for each would be a table of sources and comparisons.
    of_source = np.split(np.argsort(source, kind="stable"), np.cumsum(count)[:-1])
    num_prompts = np.array([np.unique(decided.prompt[own]).size for own in of_source])
    value = float(means.mean())
    if num_prompts.min() < FEWEST_A_SOURCE:
        few = f"too few prompts in a source ({num_prompts.min()})"
        return stats.without_interval(value, len(np.unique(decided.prompt)), method=few)
    # The mean of each source is fitted to its few prompts, so their deviations are too small by this factor.
    weight = outcome.size / (names.size * count) * np.sqrt(num_prompts / (num_prompts - 1))
    found = share_by_influence(value, weight[source] * (outcome - means[source]), decided.prompt)
    parts = [(1 / names.size, own) for own in of_source]
    return widened_to_parts(found, outcome, decided.prompt, parts)


def _by_prompt(outcome: FloatArray, decided: Pairs) -> Estimate:
    """Return the mean of the accuracies of the prompts."""
    _, prompt, count = np.unique(decided.prompt, return_inverse=True, return_counts=True)
    share = stats.mean_share(np.bincount(prompt, outcome) / count if outcome.size else outcome)
    few = stats.too_few(share.n) if share.n < stats.MIN_CLUSTERS else "score interval, over prompts"
    return replace(share, method=few)


def _margins(table: ScoreTable, decided: Pairs) -> dict[str, Estimate]:
    margin = decided.difference
    return {
        "eval_margin": stats.level_mean(margin, table.keys(decided)),
        "eval_margin_std": standard_deviation(margin, decided.prompt),
        **{
            f"eval_margin_p{percent}": quantile(margin, decided.prompt, share=percent / 100)
            for percent in MARGIN_PERCENTILES
        },
    }


def _probabilities(
    table: ScoreTable, finite: Pairs, curve: Reliability, *, beta: float, seed: int
) -> dict[str, Estimate]:
    keys, logit, probability = table.keys(finite), finite.logit(beta=beta), finite.probability(beta=beta)
    return {
        "eval_loss": core_estimates(table, finite, beta=beta)["eval_loss"],
        "eval_brier": brier_estimate(logit, finite.label, keys),
        "eval_brier_miscalibration": curve.miscalibration,
        "eval_brier_discrimination": curve.discrimination,
        "eval_brier_uncertainty": curve.uncertainty,
        "eval_ece": ece_estimate(probability, finite.label, keys, seed=seed),
        "eval_calibration_slope": calibration_slope(logit, finite.label, finite.prompt),
        "eval_calibration_intercept": calibration_intercept(logit, finite.label, finite.prompt),
    }


def _distributions(table: ScoreTable, decided: Pairs) -> dict[str, Distribution]:
    replies, keys = table.replies.finite, table.keys(decided)
    edges = histogram_edges(np.concatenate([decided.preferred, decided.other]))
    return {
        "score": distribution(replies.score, replies.prompt, table.keys(replies)),
        "chosen": distribution(decided.preferred, decided.prompt, keys, edges=edges),
        "rejected": distribution(decided.other, decided.prompt, keys, edges=edges),
        "margin": distribution(decided.difference, decided.prompt, keys),
    }


def _at_thresholds(table: ScoreTable, decided: Pairs, thresholds: Sequence[float]) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    keys = table.keys(decided) if thresholds else []
    for threshold in thresholds:
        positive, false = ((scores >= threshold).astype(np.float64) for scores in (decided.preferred, decided.other))
        found[at_threshold("eval_tpr", threshold)] = stats.proportion(positive, keys)
        found[at_threshold("eval_fnr", threshold)] = stats.proportion(1 - positive, keys)
        found[at_threshold("eval_fpr", threshold)] = stats.proportion(false, keys)
    return found


def roc_curve(preferred: FloatArray, other: FloatArray) -> Roc:
    """Return the ROC curve of scores of preferred [N] and other [N] replies, thinned to `NUM_ROC_POINTS` points."""
    if not preferred.size:
        return Roc(threshold=(), false_positive=(), true_positive=())
    threshold = np.unique(np.concatenate([preferred, other]))[::-1]
    if threshold.size > NUM_ROC_POINTS - 1:
        threshold = threshold[np.linspace(0, threshold.size - 1, NUM_ROC_POINTS - 1).round().astype(np.int64)]
    true, false = (1 - np.searchsorted(np.sort(s), threshold, "left") / s.size for s in (preferred, other))
    return Roc(
        threshold=(math.nan, *threshold.tolist()),
        false_positive=(0.0, *false.tolist()),
        true_positive=(0.0, *true.tolist()),
    )


def _counts(table: ScoreTable, groups: KWise) -> Counts:
    finite, decided = table.pairs.finite, table.pairs.decided
    num_comparisons, num_finite, num_decided = (pairs.label.size for pairs in (table.pairs, finite, decided))
    return Counts(
        replies=table.replies.score.size,
        non_finite_replies=int(np.count_nonzero(~np.isfinite(table.replies.score))),
        truncated_replies=int(table.replies.truncated.sum()),
        preferences=len(table.preferences),
        prompts=len(table.prompts),
        sources=len(table.sources),
        comparisons=num_comparisons,
        decided=num_decided,
        label_ties=num_finite - num_decided,
        score_ties=int(np.count_nonzero(decided.difference == 0)),
        non_finite=num_comparisons - num_finite,
        soft_labels=int(np.count_nonzero((finite.label > 0.5) & (finite.label < 1))),
        groups=groups.num_groups,
        unusable_groups=groups.num_unusable,
        replies_without_gold=groups.num_without_gold,
        length_uncontrolled=num_decided - int(length_controlled(decided).sum()),
    )


_OVER_FINITE: Final = frozenset(
    {"eval_agreement", "eval_agreement_ceiling", "eval_loss", "eval_brier", "eval_brier_miscalibration"}
    | {"eval_brier_discrimination", "eval_brier_uncertainty", "eval_ece", "eval_calibration_slope"}
    | {"eval_calibration_intercept", "eval_margin_length_pearson", "eval_margin_length_spearman"}
    | {"eval_length_controlled_slope", "eval_length_coefficient"}
)
_OVER_REPLIES: Final = frozenset(
    {"eval_score_mean", "eval_score_std", "eval_score_length_pearson", "eval_score_length_spearman"}
)


def _num_rows(name: str, table: ScoreTable, groups: KWise) -> int:
    """Return how many comparisons, replies or groups are behind an estimate."""
    if name == "eval_gold_spearman":
        return groups.num_gold
    if name in groups.estimates:
        return groups.num_groups
    if name == "eval_accuracy_length_controlled":
        return int(length_controlled(table.pairs.decided).sum())
    if name in _OVER_REPLIES:
        return int(np.isfinite(table.replies.score).sum())
    return table.pairs.finite.label.size if name in _OVER_FINITE else table.pairs.decided.label.size
