"""Fits heads on frozen states, cross-validates and bootstraps them, and computes their learning curve.

Roots, which are all training prompts that belong together (see `rewardlab.data.splits`), are held out and drawn as a
whole.

Legend: R replies, C comparisons, W hidden width, F fitted features, B heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.linear import (
    Comparisons,
    FloatArray,
    Judgements,
    bootstrap_weights,
    compare,
    cross_validate,
    fit,
    fold_of_prompts,
    nested_subsets,
    nll_of,
)
from rewardlab.core.types import Estimate, TokenGroup
from rewardlab.data.groups import num_replies, roots_of
from rewardlab.evaluation.evaluate import EvalResult, judge
from rewardlab.score import score_rows

CURVE = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the training data in the learning curve."""
DRAWS = 3
"""Nested draws of roots over which the points of the curve are averaged."""
ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""Differences below this share of a dimension's largest state are treated as rounding."""
SURE = 0.95
"""Share of the bootstrap heads that must agree for a comparison to count as sure."""
FEWEST_HEADS = 100
"""Bootstrap heads below which the central 95 % of their accuracies hang on one or two of them, so no range is told."""


@dataclass(frozen=True, kw_only=True)
class LayerFit:
    """A head on one layer, judged by cross-validation."""

    layer: int
    penalty: float
    """Ridge penalty on features of mean square 1, chosen by the loss on held-out prompts."""
    at_edge: bool
    """Whether the smallest or largest penalty tried was the best."""
    num_folds: int
    result: EvalResult
    """Evaluation of the held-out scores: each prompt is scored by a head that saw nothing of its root."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The head fitted to all training data, and those fitted to bootstrap samples of its roots."""

    head_W: FloatArray
    bootstrap_WB: FloatArray


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The accuracy and loss of heads fitted on a share of the training data, on held-out prompts."""

    share: float
    comparisons: float
    """Number of comparisons that a head was fitted on, averaged over folds and draws."""
    accuracy: Estimate
    loss: Estimate


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """The uncertainty of the judged comparisons by the bootstrap heads."""

    over_heads: Estimate
    """Accuracy of the head, and how far another sample of training data would move it.

    The interval is the central range of the bootstrap heads' accuracies, moved from their mean to the head's accuracy;
    there is none with fewer than `FEWEST_HEADS`.
    Each bootstrap head sees about 63 % of the roots, so they are worse than the head by `bias`.
    """
    bias: float
    """Mean accuracy of the bootstrap heads minus that of the head."""
    sure: Estimate
    """Accuracy where at least `SURE` of the heads agree with the head."""
    num_sure: int
    """Number of comparisons behind `sure`."""
    unsure: Estimate
    """Accuracy on the other comparisons."""
    num_unsure: int
    comparisons: Sequence[Mapping[str, object]]
    """One row for each comparison: its replies, margin, standard deviation over heads, share of heads that agree."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """States as they are fitted: centred, scaled by the root mean square of their differences, rotated to their axes.

    The rotation changes neither the answer nor the penalty. It makes the curvature at zero diagonal, so a fit takes few
    steps. Dimensions whose differences are no more than float32 rounding of the states are left out.
    """

    groups: Sequence[TokenGroup]
    data: Comparisons
    features_RF: FloatArray
    axes_WF: FloatArray
    scale_W: FloatArray

    @classmethod
    def of(cls, groups: Sequence[TokenGroup], states_RW: Any, judged: Judgements | None = None) -> Features:
        """Return the features of the states [R, W] of all replies, in the order of the groups.

        `judged` is what `judged_of` says of the groups, for callers that have features of several layers.
        """
        judged = judged_of(groups) if judged is None else judged
        # A copy, which is then centred and scaled in place: of 100,000 wide replies each further one is gigabytes.
        states_RW = np.array(states_RW, dtype=np.float64)
        differences_CW = judged.by(states_RW).differences
        spread_W = np.sqrt((differences_CW**2).mean(0))
        largest_W = np.maximum(states_RW.max(0, initial=0.0), -states_RW.min(0, initial=0.0))
        # Dividing by infinity makes a dimension zero, so it is left out without changing any shape.
        scale_W = np.where(spread_W > ROUNDING * largest_W, spread_W, np.inf)
        differences_CW /= scale_W
        axes_WF = np.linalg.eigh(differences_CW.T @ differences_CW)[1]
        del differences_CW
        states_RW -= states_RW.mean(0)
        states_RW /= scale_W
        features_RF = states_RW @ axes_WF
        del states_RW
        return cls(
            groups=groups,
            data=judged.by(features_RF),
            features_RF=features_RF,
            axes_WF=axes_WF,
            scale_W=scale_W,
        )

    def heads(self, theta_FB: FloatArray) -> FloatArray:
        """Return [W, B] the heads for the states themselves, from those for the features."""
        heads: FloatArray = (self.axes_WF @ theta_FB) / self.scale_W[:, None]
        return heads


def judged_of(groups: Sequence[TokenGroup]) -> Judgements:
    """Return what was judged of groups, with the roots that are held out as a whole."""
    return Judgements.of(groups, roots_of(groups)[0])


def fit_layer(features: Features, *, layer: int, num_folds: int, seed: int) -> LayerFit:
    """Choose the penalty by cross-validation, and judge the held-out scores.

    Raises DataError if no comparison has weight, or if the fit does not converge.
    """
    groups = features.groups
    validated = cross_validate(features.data, num_folds=num_folds, seed=seed)
    number = {key: index for index, key in enumerate(features.data.prompt_keys)}
    fold_R = np.array(
        # A group without comparisons is not judged, so it may get any fold.
        [validated.fold_P[number.get(group.prompt_key, 0)] for group in groups for _ in range(group.num_replies)],
        dtype=np.intp,
    )
    scores_R = np.take_along_axis(features.features_RF @ validated.theta_FK, fold_R[:, None], axis=1)[:, 0]
    return LayerFit(
        layer=layer,
        penalty=validated.penalty,
        at_edge=validated.at_edge,
        num_folds=validated.num_folds,
        result=judge_scores(groups, scores_R),
    )


def fit_heads(features: Features, chosen: LayerFit, *, num_draws: int, seed: int) -> Heads:
    """Fit the head on all data, and `num_draws` heads on samples of the roots drawn with replacement.

    The penalty keeps its weight relative to the sum of the losses (see `learning_curve`).
    """
    data = features.data
    # The penalty is relative to the weight of the data, and was chosen with one fold held out. All data weigh more, so
    # it is made smaller.
    penalty = chosen.penalty * (1 - 1 / chosen.num_folds)
    theta_F1 = fit(data, data.weights[:, None], np.array([penalty]))
    theta_FB = np.zeros((len(theta_F1), 0))
    if num_draws:
        weights_CB = bootstrap_weights(data, num_draws=num_draws, seed=seed)
        # Start from the head on all data: each of these is close to it, so a fit takes few steps.
        theta_FB = fit(data, weights_CB, np.full(num_draws, penalty), start_FB=np.repeat(theta_F1, num_draws, axis=1))
    return Heads(head_W=features.heads(theta_F1)[:, 0], bootstrap_WB=features.heads(theta_FB))


def learning_curve(features: Features, chosen: LayerFit, *, seed: int) -> list[CurvePoint]:
    """Return accuracy and loss on held-out prompts by the share of the other roots that a head was fitted on.

    The penalty keeps its weight relative to the sum of the losses, like a prior that does not depend on how much data
    there is. Shares too small to leave a weighted comparison in every fold are left out.
    """
    data = features.data
    fold_C = fold_of_prompts(data.roots, chosen.num_folds, seed)[data.prompts]
    folds = range(fold_C.max() + 1)
    keys = [data.prompt_keys[prompt] for prompt in data.prompts]
    # The sum of weights with which the penalty was chosen.
    reference = data.weights.sum() * (1 - 1 / len(folds))
    points = []
    subsets = [list(nested_subsets(data.num_roots, CURVE, seed=seed + draw)) for draw in range(DRAWS)]
    for number, share in enumerate(CURVE):
        # At the full share all draws contain the same data, so one of them is enough.
        kept = [draw[number][data.roots_C] for draw in (subsets if share < 1 else subsets[:1])]
        weights_CB = np.stack([data.weights * part * (fold_C != fold) for part in kept for fold in folds], axis=1)
        totals_B = weights_CB.sum(0)
        if not (totals_B > 0).all():
            continue
        theta_FB = fit(data, weights_CB, chosen.penalty * reference / totals_B)
        logits_DC = np.stack(
            [(data.differences * theta_FB[:, draw * len(folds) + fold_C].T).sum(1) for draw in range(len(kept))]
        )
        points.append(_curve_point(share, data, logits_DC, (weights_CB > 0).sum(0).mean(), keys))
    return points


def _curve_point(
    share: float, data: Comparisons, logits_DC: FloatArray, comparisons: float, keys: Sequence[str]
) -> CurvePoint:
    """Return means over D draws for each comparison, with intervals over the judged prompts, not over the draws."""
    sign_C = np.where(data.labels >= 0.5, 1.0, -1.0)
    decided = data.labels != 0.5
    # A tie of scores counts as half a win.
    right_C = np.heaviside(logits_DC * sign_C, 0.5).mean(0)
    losses_C = nll_of(data.labels, logits_DC).mean(0)
    return CurvePoint(
        share=share,
        comparisons=float(comparisons),
        accuracy=stats.mean_share(right_C[decided], [key for key, kept in zip(keys, decided, strict=True) if kept]),
        loss=stats.mean_loss(losses_C, keys),
    )


def uncertainty(groups: Sequence[TokenGroup], states_RW: Any, heads: Heads) -> Uncertainty | None:
    """Return how certain the head is of each judged comparison, and how often it is right when it is certain.

    Label ties are left out; None if there are no other comparisons.
    """
    data = compare(groups, np.asarray(states_RW, dtype=np.float64))
    named = [(group, comparison) for group in groups for comparison in group.comparisons]
    decided = data.labels != 0.5
    if not decided.any():
        return None
    sign_C = np.where(data.labels >= 0.5, 1.0, -1.0)
    margin_C = (data.differences @ heads.head_W) * sign_C
    margins_CB = (data.differences @ heads.bootstrap_WB) * sign_C[:, None]
    agree_C = (np.sign(margins_CB) == np.sign(margin_C)[:, None]).mean(1)
    right_C = np.heaviside(margin_C, 0.5)
    keys = np.array([group.prompt_key for group, _ in named])
    accuracy = float(right_C[decided].mean())
    over_heads_B = np.heaviside(margins_CB[decided], 0.5).mean(0)
    bias = float(over_heads_B.mean()) - accuracy
    sure, unsure = decided & (agree_C >= SURE), decided & (agree_C < SURE)

    def judged(which: Any) -> Estimate:
        return stats.proportion(right_C[which], keys[which].tolist())

    return Uncertainty(
        over_heads=_range_over(over_heads_B, accuracy, bias=bias, n=int(decided.sum())),
        bias=bias,
        sure=judged(sure),
        num_sure=int(sure.sum()),
        unsure=judged(unsure),
        num_unsure=int(unsure.sum()),
        comparisons=[
            {
                "preference_id": group.preference_id,
                "source": group.source,
                "first": comparison.first,
                "second": comparison.second,
                "label": comparison.label,
                "margin": float(margin * sign),
                "margin_sd": float(spread),
                "heads_that_agree": float(agree),
            }
            for (group, comparison), margin, sign, spread, agree in zip(
                named, margin_C, sign_C, margins_CB.std(1), agree_C, strict=True
            )
        ],
    )


def _range_over(accuracies_B: FloatArray, accuracy: float, *, bias: float, n: int) -> Estimate:
    """Return the accuracy of the head with the central range of those of the bootstrap heads, moved to it."""
    if (count := len(accuracies_B)) < FEWEST_HEADS:
        few = f"too few bootstrap heads ({count}; a range needs {FEWEST_HEADS})"
        return stats.without_interval(accuracy, n, method=few)
    low, high = np.quantile(accuracies_B, [0.025, 0.975]) - bias
    method = f"range over {count} bootstrap heads, moved to the head"
    return Estimate(value=accuracy, low=max(float(low), 0.0), high=min(float(high), 1.0), n=n, method=method)


def judge_scores(groups: Sequence[TokenGroup], scores_R: Any) -> EvalResult:
    """Return the evaluation of one score for each reply, at β = 1."""
    sizes = np.cumsum(num_replies(groups))[:-1]
    return judge(score_rows(groups, np.split(np.asarray(scores_R, dtype=np.float64), sizes)), beta=1.0)
