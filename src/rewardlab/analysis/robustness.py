"""What a change of the texts does to scores and verdicts: the same pairs before and after, by prompt.

Legend: R changed replies, N decided comparisons.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from rewardlab.analysis import stats
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.paired import change_of_shares, significance_of, significance_of_means
from rewardlab.core.types import Estimate, ScoreRow, join_comparisons

ReplyKey = tuple[str, str, int]
"""Source, id of the preference, number of the reply."""
MEASURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "shift": "mean change of the score of a changed reply, in standard deviations of the scores",
        "size": "mean size of that change, whatever its sign",
        "flipped": "share of decided pairs whose order by score changes; a tie that comes or goes counts one half",
        "accuracy": "change of the accuracy where every reply that can be is changed, paired",
        "other only": "change of the accuracy where the reply that is not preferred alone is changed, paired",
    }
)
"""Column -> what it means."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What one perturbation does."""

    estimates: Mapping[str, Estimate]
    """One for each of `MEASURES`; `other only` has no data if the prompt was perturbed."""
    p_shift: float
    """p-value of no mean change of the score: the larger of those by sign flips of prompts and by the interval of the
    mean; NaN below ten prompts. It is not corrected for the number of tests."""
    p_accuracy: float
    """p-value of no change of the accuracy, by sign flips of prompts alone; likewise."""
    num_preferences: int
    num_replies: int
    """Preferences and replies that were changed and scored."""
    not_applicable: int
    """Preferences without anything to change, such as a list."""
    lost: int
    """Preferences left out since a changed reply has no score: above the length limit, or not finite."""


def effect_of(
    before: Sequence[ScoreRow],
    after: Sequence[ScoreRow],
    changed: Collection[ReplyKey],
    *,
    not_applicable: int,
    lost: int,
    of_prompt: bool = False,
    seed: int = 0,
) -> Effect:
    """Compare score rows of the same replies before and after a change.

    `before` are all rows of the evaluation, whose spread is the unit and whose pairs are compared; `after` those of the
    perturbed preferences; `changed` are the replies whose texts differ. `of_prompt` says that the prompt was perturbed,
    and the replies were not. Preferences with a score that is not finite are left out and added to `lost`.
    """
    finite_rows = [row for row in before if math.isfinite(row.score)]
    whole_W = np.array([row.score for row in finite_rows])
    unit = float(whole_W.std()) if whole_W.size else math.nan
    first = {(row.source, row.preference_id, row.reply): row.score for row in before}
    second = {(row.source, row.preference_id, row.reply): row.score for row in after}
    bad = {key[:2] for key, score in second.items() if not math.isfinite(score - first[key])}
    kept = [row for row in after if (row.source, row.preference_id) not in bad]
    # A prompt that was perturbed has another key, so the clusters are those of the unperturbed rows.
    prompt_of = {(row.source, row.preference_id): row.prompt_key for row in before}
    moved, keys = [], []
    for row in kept:
        key = (row.source, row.preference_id, row.reply)
        if key in changed:
            moved.append((second[key] - first[key]) / unit if unit else math.nan)
            keys.append(prompt_of[key[:2]])
    moved_R = np.array(moved)
    pairs = _pairs(_judged_before(kept, before), first, second, changed)
    keys_N = [prompt_of[key] for key in pairs.preferences]
    finite = bool(moved_R.size) and bool(np.isfinite(moved_R).all())
    change_N = pairs.after - pairs.before
    whole_keys = [row.prompt_key for row in finite_rows]
    shift, size = (
        _in_units(values_R, keys, whole_W, whole_keys) if finite else stats.without_interval(math.nan, 0)
        for values_R in (moved_R, np.abs(moved_R))
    )
    estimates = {
        "shift": _known(shift, moved_R, keys),
        "size": _known(replace(size, low=0.0) if size.low < 0 else size, moved_R, keys),
        "flipped": stats.proportion(np.abs(change_N), keys_N),
        "accuracy": change_of_shares(change_N, keys_N),
        "other only": stats.without_interval(math.nan, 0) if of_prompt else change_of_shares(*pairs.other_only(keys_N)),
    }
    return Effect(
        estimates=estimates,
        p_shift=_significance_of_shift(moved_R, keys, seed=seed) if finite else math.nan,
        p_accuracy=_significance(change_N, keys_N, seed=seed),
        num_preferences=len({(row.source, row.preference_id) for row in kept}),
        num_replies=len(moved),
        not_applicable=not_applicable,
        lost=lost + len(bad),
    )


def _judged_before(after: Sequence[ScoreRow], before: Sequence[ScoreRow]) -> list[ScoreRow]:
    """Return the rows `after` with the comparisons alone that `before` has too.

    Replies whose tokens were equal before the change are not compared there, so there is no verdict to move.
    """
    judged = {(row.source, row.preference_id, row.reply, c.second) for row in before for c in row.comparisons}
    return [
        replace(
            row,
            comparisons=tuple(
                c for c in row.comparisons if (row.source, row.preference_id, row.reply, c.second) in judged
            ),
        )
        for row in after
    ]


@dataclass(frozen=True, kw_only=True)
class _Outcomes:
    """[N] 1 where the preferred reply scores higher, ½ for a tie, else 0."""

    before: FloatArray
    after: FloatArray
    alone: FloatArray
    """Outcome with the other reply alone changed; NaN where it was not changed."""
    preferences: Sequence[tuple[str, str]]

    def other_only(self, keys_N: Sequence[str]) -> tuple[FloatArray, list[str]]:
        """Return the change of the outcome where the other reply alone is changed, and its prompt keys."""
        known = ~np.isnan(self.alone)
        return (self.alone - self.before)[known], [key for key, keep in zip(keys_N, known, strict=True) if keep]


def _pairs(
    rows: Sequence[ScoreRow],
    first: Mapping[ReplyKey, float],
    second: Mapping[ReplyKey, float],
    changed: Collection[ReplyKey],
) -> _Outcomes:
    before, after, alone, preferences = [], [], [], []
    for joined in join_comparisons(rows):
        if joined.comparison.label == 0.5:
            continue
        preferred, other = ((joined.source, joined.preference_id, row.reply) for row in (joined.first, joined.second))
        if joined.comparison.label < 0.5:
            preferred, other = other, preferred
        before.append(np.heaviside(first[preferred] - first[other], 0.5))
        after.append(np.heaviside(second[preferred] - second[other], 0.5))
        alone.append(np.heaviside(first[preferred] - second[other], 0.5) if other in changed else math.nan)
        preferences.append((joined.source, joined.preference_id))
    return _Outcomes(before=np.array(before), after=np.array(after), alone=np.array(alone), preferences=preferences)


def _in_units(values_R: FloatArray, keys_R: Sequence[str], scores_W: FloatArray, keys_W: Sequence[str]) -> Estimate:
    """Return the mean of values [R] that were divided by the standard deviation of the scores [W] of all replies.

    That unit is itself known from these prompts only, and moves the mean θ by −θ(z² − 1)/2 for each score, z in
    standard deviations (the delta method; van der Vaart 1998, Asymptotic Statistics, chapter 3). The prompts with a
    value say all of their part, those without one only of the unit; the two parts are independent.
    """
    alone = stats.mean(values_R, keys_R)
    if math.isnan(alone.low) or not (unit := float(scores_W.std())):
        return alone
    pull_W = alone.value / 2 * (np.square((scores_W - scores_W.mean()) / unit) - 1) / scores_W.size
    with_value = set(keys_R)
    inside_W = np.array([key in with_value for key in keys_W], dtype=bool)
    if len({key for key, inside in zip(keys_W, inside_W.tolist(), strict=True) if not inside}) < stats.MIN_CLUSTERS:
        inside_W[:] = True
    # One value for each row: those of replies that changed, then those of scores.
    values = np.concatenate([(values_R - alone.value) / values_R.size, -pull_W[inside_W]])
    inside_keys = [key for key, inside in zip(keys_W, inside_W.tolist(), strict=True) if inside]
    own = stats.mean(alone.value + values * values.size, [*keys_R, *inside_keys])
    if not inside_W.all():
        outside_keys = [key for key, inside in zip(keys_W, inside_W.tolist(), strict=True) if not inside]
        own = stats.difference(own, stats.mean(pull_W[~inside_W] * len(outside_keys), outside_keys))
    return replace(alone, low=min(own.low, alone.value), high=max(own.high, alone.value))


def _known(estimate: Estimate, moved_R: FloatArray, keys_R: Sequence[str]) -> Estimate:
    """Return the estimate, without its interval if the score moved on fewer than ten prompts.

    How far it moves where it does is then hardly known: with no score that moves, the interval would have no width.
    """
    moving = len(set(itertools.compress(keys_R, (moved_R != 0).tolist())))
    if moving >= stats.MIN_CLUSTERS or math.isnan(estimate.low):
        return estimate
    return replace(estimate, low=math.nan, high=math.nan, method=f"too few prompts whose score moves ({moving})")


def _significance(values: FloatArray, keys: Sequence[str], *, seed: int) -> float:
    """Return the two-sided p-value of a mean of 0, under sign flips of whole prompts; NaN below ten prompts."""
    return significance_of(values, keys, seed=seed).p if len(set(keys)) >= stats.MIN_CLUSTERS else math.nan


def _significance_of_shift(moved_R: FloatArray, keys: Sequence[str], *, seed: int) -> float:
    """Return the p-value of a mean shift of 0; NaN below ten prompts."""
    return significance_of_means(moved_R, keys, seed=seed).p if len(set(keys)) >= stats.MIN_CLUSTERS else math.nan
