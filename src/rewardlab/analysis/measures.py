"""Names of everything that a judgement holds, and the names that others use for the same."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from rewardlab.analysis.metrics import ALIASES, METRICS

MARGIN_PERCENTILES: Final = (5, 25, 50, 75, 95)
"""Percentiles of the margin that have a name; others are in the distribution."""

MEASURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "eval_accuracy": METRICS["eval_accuracy"],
        "eval_accuracy_soft": "share ranked as labelled, each comparison weighted by how decided it is, |2y − 1|",
        "eval_agreement": "chance that one judge drawn by the label y agrees with the model; ties of either count ½",
        "eval_agreement_ceiling": "agreement of a model that ranks every pair as its label does",
        "eval_accuracy_macro": "mean of the accuracies of the sources, each source counted once",
        "eval_accuracy_by_prompt": "mean of the accuracies of the prompts, each prompt counted once",
        "eval_negative_margin_rate": METRICS["eval_negative_margin_rate"],
        "eval_margin": METRICS["eval_margin"],
        "eval_margin_std": METRICS["eval_margin_std"],
        **{
            f"eval_margin_p{percent}": f"{percent}th percentile of the margins" if percent != 50 else "median margin"
            for percent in MARGIN_PERCENTILES
        },
        "eval_loss": METRICS["eval_loss"],
        "eval_brier": "mean of (p − y)² with p = σ(β d); ¼ for a model that says ½ to all",
        "eval_brier_miscalibration": "part of the Brier score that recalibration by isotonic regression removes",
        "eval_brier_discrimination": "how much better than ½ for all the recalibrated probabilities are",
        "eval_brier_uncertainty": "Brier score of ½ for all: ¼ for hard labels",
        "eval_ece": METRICS["eval_ece"],
        "eval_calibration_slope": "logistic slope of the labels on β d: 1 if calibrated, below 1 if too sure",
        "eval_calibration_intercept": "logit by which the model's favourite wins more often than it says; 0 is right",
        "eval_roc_auc": METRICS["eval_roc_auc"],
        "eval_score_mean": "mean score of all replies",
        "eval_score_std": "standard deviation of the scores of all replies",
        "eval_chosen_mean": "mean score of preferred replies, once a comparison",
        "eval_rejected_mean": "mean score of the other replies, once a comparison",
        "eval_score_length_pearson": "correlation of score and tokens of the reply",
        "eval_score_length_spearman": "rank correlation of score and tokens of the reply",
        "eval_margin_length_pearson": "correlation of score difference and length difference, pairs in both orders",
        "eval_margin_length_spearman": "rank correlation of score difference and length difference, in both orders",
        "eval_accuracy_length_controlled": "accuracy where longer and shorter preferred replies count alike, in strata "
        "of length difference; ½ for any rule that sees length alone",
        "eval_length_controlled_slope": "logistic slope of the labels on β d with the length difference held",
        "eval_length_coefficient": "log odds that a standard deviation more length adds to what the score says; below "
        "0 if the model overrates length",
        "eval_kendall_tau": "mean Kendall τ-b of scores and reference, by group of more than two replies",
        "eval_ndcg": "mean normalised discounted cumulative gain of the order by score",
        "eval_best_of_k": "share of groups whose highest score is on a best reply; score ties are shared",
        "eval_regret": "mean loss of choosing by score: 0 the best reply, 1 the worst",
        "eval_kwise_spearman": "mean Spearman correlation of scores and reference, by group",
        "eval_gold_regret": "mean gold score lost by choosing by score, in units of the gold score",
        "eval_gold_spearman": "Spearman correlation of scores and gold scores over all replies",
    }
)
"""Name of every number of a judgement -> what it means, in one line. Those at thresholds follow `AT_THRESHOLD`."""

AT_THRESHOLD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "eval_tpr": "share of preferred replies that score at least the threshold (TPR)",
        "eval_fnr": "share of preferred replies that score below the threshold (FNR)",
        "eval_fpr": "share of other replies that score at least the threshold (FPR)",
    }
)
"""Name before ``@threshold`` -> what it means."""

MEASURE_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **ALIASES,
        "eval_mean_loss": "eval_loss",
        "eval_median_margin": "eval_margin_p50",
        "median_margin": "eval_margin_p50",
        "brier": "eval_brier",
        "brier_score": "eval_brier",
        "eval_brier_score": "eval_brier",
        "calibration_slope": "eval_calibration_slope",
        "calibration_intercept": "eval_calibration_intercept",
        "kendall_tau": "eval_kendall_tau",
        "tau": "eval_kendall_tau",
        "ndcg": "eval_ndcg",
        "best_of_k": "eval_best_of_k",
        "eval_rewards/chosen": "eval_chosen_mean",
        "eval_rewards/rejected": "eval_rejected_mean",
        "eval_mean_reward": "eval_score_mean",
    }
)
"""Names that others use -> our name."""


def measure_named(name: str) -> str:
    """Return our name of a measure, by any name in use; unknown names come back as given.

    A rate at a threshold is found by any spelling of the number: ``fpr@0.50`` is ``eval_fpr@0.5``.
    """
    stem, at, threshold = name.partition("@")
    own = MEASURE_ALIASES.get(stem, stem)
    if at and f"eval_{own}" in AT_THRESHOLD:
        own = f"eval_{own}"
    if own in AT_THRESHOLD:
        with contextlib.suppress(ValueError):
            return at_threshold(own, float(threshold))
    return f"{own}{at}{threshold}"


def at_threshold(stem: str, threshold: float) -> str:
    """Return the name of a rate at a threshold, such as ``eval_fpr@0.5``."""
    return f"{stem}@{threshold + 0.0:.12g}"
