"""Several reward models as one: their scores on one scale, combined, and whether their disagreement predicts errors.

Legend: M members, R replies, N decided comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

import numpy as np

from rewardlab.analysis.influence import auroc
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.stats import numbered
from rewardlab.core.errors import DataError
from rewardlab.core.types import Estimate, ScoreRow

How = Literal["mean", "minimum", "lower"]
COMBINATIONS: Final[Mapping[How, str]] = MappingProxyType(
    {
        "mean": "mean over the members",
        "minimum": "score of the member that likes the reply least",
        "lower": "mean minus λ standard deviations over the members",
    }
)
"""Name of a combination -> what it makes of the members' scores."""
_ROUNDING: Final = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One of the combinations, with its λ."""

    how: How = "mean"
    penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Where a member's scores lie: it is brought to mean 0 and standard deviation 1."""

    mean: float
    std: float
    beta: float = 1.0
    """β of the member, divided by its temperature if it has one: probabilities are σ(β · difference)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensemble:
    """Members and their combinations on the replies that all of them have scored."""

    rows: Mapping[How, tuple[ScoreRow, ...]]
    """Combination -> score rows, in standard deviations of a member."""
    beta: float
    """σ(β · difference) of combined scores: the mean of the members' β times their standard deviations."""
    scores_MR: FloatArray
    """Scores of the members on one scale, in the order of the rows."""
    left_out: int
    """Preferences that some member has not scored, or has scored for other replies than the first member."""


def scale_of(rows: Sequence[ScoreRow], *, beta: float) -> Scale:
    """Return the scale of a member's scores on the data at hand. Raises DataError if they do not vary."""
    scores = np.array([row.score for row in rows if math.isfinite(row.score)])
    if scores.size < 2 or not np.ptp(scores):
        raise DataError("a member gives all replies the same score, so it cannot be put on the scale of the others.")
    return Scale(mean=float(scores.mean()), std=float(scores.std(ddof=1)), beta=beta)


def combine(members: Sequence[Sequence[ScoreRow]], scales: Sequence[Scale], *, penalty: float = 1.0) -> Ensemble:
    """Combine the score rows of members that have scored the same data, aligned by source, preference and reply.

    A reply without a finite score by some member gets NaN. `penalty` is λ. Preferences for which the members have
    different replies are left out and counted.

    Raises DataError if no preference is left.
    """
    assert len(members) == len(scales) >= 2, "an ensemble has two members or more"
    by_preference = [_by_preference(rows) for rows in members]
    every = dict.fromkeys(key for found in by_preference for key in found)
    shared = [
        key
        for key in every
        if all(key in found for found in by_preference)
        and len({tuple(row.reply for row in found[key]) for found in by_preference}) == 1
    ]
    if not shared and any(all(key in found for found in by_preference) for key in every):
        raise DataError(
            "the members have scored different replies of every preference that they have in common: some are too long "
            "for one member and not for another. Score the data with the same limit of length."
        )
    if not shared:
        raise DataError("the members have no preference in common. Score the same data with all of them.")
    first = [row for key in shared for row in by_preference[0][key]]
    scores_MR = np.array(
        [
            [(row.score - scale.mean) / scale.std for key in shared for row in found[key]]
            for found, scale in zip(by_preference, scales, strict=True)
        ]
    )
    beta = float(np.mean([scale.beta * scale.std for scale in scales]))
    return ensemble_of(first, scores_MR, beta=beta, penalty=penalty, left_out=len(every) - len(shared))


def ensemble_of(
    rows: Sequence[ScoreRow], scores_MR: FloatArray, *, beta: float, penalty: float = 1.0, left_out: int = 0
) -> Ensemble:
    """Return the ensemble of members' scores on one scale, for replies that are described by `rows` [R]."""
    return Ensemble(
        rows=MappingProxyType(
            {
                how: tuple(replace(row, score=float(score)) for row, score in zip(rows, scores_R, strict=True))
                for how, scores_R in combinations(scores_MR, penalty=penalty).items()
            }
        ),
        beta=beta,
        scores_MR=scores_MR,
        left_out=left_out,
    )


def combinations(scores_MR: FloatArray, *, penalty: float) -> dict[How, FloatArray]:
    """Return combination -> [R] scores; NaN where a member has no finite score."""
    finite_R = np.isfinite(scores_MR).all(axis=0)
    safe = np.where(finite_R, scores_MR, 0.0)
    mean_R, std_R = safe.mean(axis=0), safe.std(axis=0, ddof=1)
    found: dict[How, FloatArray] = {
        "mean": mean_R,
        "minimum": safe.min(axis=0),
        "lower": mean_R - penalty * std_R,
    }
    return {how: np.where(finite_R, scores, np.nan) for how, scores in found.items()}


def on_one_scale(scores_MR: FloatArray, prompts_R: Sequence[str]) -> FloatArray:
    """Return [M, R] scores of members with mean 0 for every prompt and one standard deviation within prompts of 1.

    A reward model that is trained on comparisons says nothing across prompts: a constant that a member adds to all
    replies to a prompt means nothing, but would move the minimum and the spread over members. The standard deviation is
    pooled over prompts, so that a member that scores all replies to a prompt nearly alike has little say there.

    Raises DataError for a member whose scores do not vary within any prompt.
    """
    prompt_R, count = numbered(prompts_R)
    sizes = np.bincount(prompt_R, minlength=count)
    means = np.stack([np.bincount(prompt_R, scores_R) / sizes for scores_R in scores_MR])
    centred_MR = scores_MR - means[:, prompt_R]
    # The mean of equal numbers may be off by rounding, which must not pass for variation.
    centred_MR[np.abs(centred_MR) <= _ROUNDING * np.abs(scores_MR).max(axis=1, keepdims=True)] = 0.0
    degrees = len(prompt_R) - len(sizes)
    std_M = np.sqrt(np.square(centred_MR).sum(axis=1) / max(degrees, 1))
    if not std_M.all():
        number = int(np.argmin(std_M))
        raise DataError(
            f"member {number + 1} gives all replies to each prompt the same score, so it cannot be put on the scale of "
            f"the others. Leave it out of the ensemble."
        )
    scaled: FloatArray = centred_MR / std_M[:, None]
    return scaled


def _by_preference(rows: Sequence[ScoreRow]) -> dict[tuple[str, str], list[ScoreRow]]:
    found: dict[tuple[str, str], list[ScoreRow]] = {}
    for row in rows:
        found.setdefault((row.source, row.preference_id), []).append(row)
    return {key: sorted(own, key=lambda row: row.reply) for key, own in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """How well the members' disagreement tells the mistakes of their mean from its right answers."""

    by_spread: Estimate
    """AUROC of the standard deviation of the margin over members: the chance that a mistake has a larger one than a
    right answer; ½ says nothing."""
    by_margin: Estimate
    """AUROC of how small the mean margin is, which one model alone could tell too."""
    num_errors: int
    num_right: int
    """Decided comparisons that the mean ranks wrongly and rightly; ties of the mean are neither."""


def disagreement(ensemble: Ensemble) -> Disagreement:
    """Return what the disagreement of the members says about the errors of their mean, by prompt."""
    rows = ensemble.rows["mean"]
    place = {(row.source, row.preference_id, row.reply): number for number, row in enumerate(rows)}
    first, second, prompts = [], [], []
    for number, row in enumerate(rows):
        for comparison in row.comparisons:
            if comparison.label == 0.5:
                continue
            other = place[row.source, row.preference_id, comparison.second]
            preferred = (number, other) if comparison.label > 0.5 else (other, number)
            first.append(preferred[0])
            second.append(preferred[1])
            prompts.append(row.prompt_key)
    margins_MN = ensemble.scores_MR[:, first] - ensemble.scores_MR[:, second]
    mean_N = margins_MN.mean(axis=0)
    kept_N = np.isfinite(margins_MN).all(axis=0) & (mean_N != 0)
    margins_MN, mean_N = margins_MN[:, kept_N], mean_N[kept_N]
    prompt_N, _ = numbered([key for key, kept in zip(prompts, kept_N.tolist(), strict=True) if kept])
    wrong_N = mean_N < 0
    return Disagreement(
        by_spread=auroc(margins_MN.std(axis=0, ddof=1), wrong_N, prompt_N),
        by_margin=auroc(-np.abs(mean_N), wrong_N, prompt_N),
        num_errors=int(wrong_N.sum()),
        num_right=int((~wrong_N).sum()),
    )
