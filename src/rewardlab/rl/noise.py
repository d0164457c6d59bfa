"""How far apart two scorings of one conversation may be, and rewards without the differences that are no larger.

A reward model in bfloat16 gives a conversation another score in another batch or engine. Dividing by the standard
deviation of a group turns such a difference into an advantage of order 1. So a difference within the noise is removed.

The rule, for a group of G rewards s with noise δ and mean m (the proof is in docs/credit.md):

    d_i = s_i - m                                      the deviation of a reward
    b_i = δ_i (1 - 1/G) + Σ_{j≠i} δ_j / G              the most that noise can move it
    decided: |d_i| > b_i                               no other scoring gives it the other sign
    certain: |d_i| > (1 + GROWTH) b_i                  it is decided in every other scoring too

- Some are decided on both sides of the mean: the others get 0.
- Some are decided on one side only, and one of them is certain: those on the other side bear the counterweight in
  proportion to their deviations; the others get 0.
- Otherwise the whole group gets 0.

Then the heavier side is scaled down to the weight of the lighter one, so that deviations add up to 0 again. None is
larger than it was, and none has another sign.

Legend: R rollouts, G rollouts of one group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.core.errors import ConfigError
from rewardlab.rl.checking import FloatArray as FloatArray
from rewardlab.rl.checking import Groups, Numbers, as_many, centred, finite, members_of, not_negative

LARGEST_TOLERANCE: Final = 0.2
"""A model whose scores are further from their reference than this is not known well enough to be trained on."""
GROWTH: Final = 1.5
"""How many times larger the noise of one observation of a reward may be than that of another: (1 + t) / (1 - t) for the
largest tolerance t."""
ROUNDING: Final = 16 * float(np.finfo(np.float64).eps)
"""Room for the rounding of a deviation and of its bound, for each rollout of a group: as a part of the group's range,
and of the bound."""
SHORT: Final = 14
"""Binary digits of the reward that a group within the noise gets. The sum of up to 1,024 such numbers is exact in
float32, so that a library that takes the mean there finds deviations of exactly 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far a model's score of one conversation may be from its reference, whichever batch or engine computes it."""

    tolerance: float
    """In units of max(1, |reference|), as in the artifact (`core.spec.SCORE_TOLERANCE`) or measured; at most 0.2."""
    source: str
    """Where the tolerance comes from, for messages and logs, such as `bfloat16, by the artifact`."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a tolerance that is negative, not finite, or above 0.2."""
        if not 0 <= self.tolerance <= LARGEST_TOLERANCE:
            raise ConfigError(
                f"tolerance: got {self.tolerance} ({self.source}); wanted 0 to {LARGEST_TOLERANCE}, in units of "
                f"max(1, |score|). Score in an arithmetic that is closer to its reference."
            )

    def between_scorings(self, scores_R: Numbers) -> FloatArray:
        """Return, for each score, the largest distance [R] to another scoring of the same conversation.

        Both are within t·max(1, |reference|) of one reference, with the tolerance t, so they are at most twice that
        apart. The reference is not known, but |reference| ≤ max(1, |score| / (1 - t)). So the distance is at most
        2·t·max(1, |score| / (1 - t)), and that of the other scoring is at most (1 + t) / (1 - t) times as large.

        Raises RolloutError, naming the rollout, for a score or a distance that is not finite.
        """
        size_R = np.abs(finite(scores_R, what="score"))
        with np.errstate(over="ignore"):
            return finite(2 * self.tolerance * np.maximum(1.0, size_R / (1 - self.tolerance)), what="noise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floored:
    """Rewards whose deviations from their group's mean are either beyond the noise or zero."""

    rewards_R: FloatArray
    """Every group keeps its mean (one within the noise, to 14 binary digits); deviations that noise could turn around
    are 0, the others keep their sign, are no larger, and add up to 0."""
    deviations_R: FloatArray
    """Rewards less the mean of their group; exactly 0 where nothing is left."""
    num_groups: int
    num_groups_single: int
    """Groups of one rollout, which has no deviation."""
    num_groups_below: int
    """Larger groups in which no deviation is left; those whose rewards are all equal are among them."""
    num_rollouts_below: int
    """Rollouts without a deviation in groups that have one left."""


def floored(
    rewards_R: Numbers,
    groups_R: Groups,
    noise_R: Numbers | None,
) -> Floored:
    """Return rewards without what noise could turn around. Rewards without noise stay as they are, bit for bit.

    `groups_R` names the group of each rollout; `noise_R` is the largest distance between two observations of each
    reward, None for no noise.

    Law: let each reward be observed again, no further away than the noise of either observation, where the one noise
    is at most 1.5 times the other. A deviation that is left both times has the same sign.

    Raises RolloutError for a reward or a noise that is missing or not finite, naming the rollout; ConfigError if there
    are not as many of each.
    """
    wanted_R = finite(rewards_R, what="reward")
    as_many(wanted_R, groups_R, what="groups")
    bounds_R = not_negative(noise_R, like_R=wanted_R)
    kept_R, deviations_R = wanted_R.copy(), np.zeros_like(wanted_R)
    groups = members_of(groups_R)
    single = below = rollouts_below = 0
    for members in groups:
        mean, before_G = centred(wanted_R[members])
        after_G = _decided(before_G, bounds_R[members])
        deviations_R[members] = after_G
        if len(members) == 1:
            single += 1
        elif not after_G.any():
            below += 1
            if bounds_R[members].any():
                kept_R[members] = _short(mean)
        else:
            rollouts_below += int((after_G == 0).sum())
            if not np.array_equal(after_G, before_G):
                kept_R[members] = mean + after_G
    return Floored(
        rewards_R=kept_R,
        deviations_R=deviations_R,
        num_groups=len(groups),
        num_groups_single=single,
        num_groups_below=below,
        num_rollouts_below=rollouts_below,
    )


def _decided(deviations_G: FloatArray, noise_G: FloatArray) -> FloatArray:
    """Return the deviations of one group that are beyond its noise, balanced; 0 for the others."""
    if not noise_G.any():
        return deviations_G
    size = len(deviations_G)
    rounding = ROUNDING * size
    size_G = np.abs(deviations_G) - rounding * float(np.ptp(deviations_G))
    # The noise is divided by the largest before it is added, since a sum of finite numbers need not be finite.
    largest = float(noise_G.max())
    with np.errstate(over="ignore"):
        moved_G = noise_G * ((size - 2) / size) + largest * (math.fsum(noise_G / largest) / size)
        moved_G = moved_G * (1 + rounding)
        surely_G = (1 + GROWTH) * moved_G
    above_G, below_G = deviations_G > 0, deviations_G < 0
    decided_G, certain_G = size_G > moved_G, size_G > surely_G
    left_G = decided_G
    if not (decided_G & above_G).any() and (certain_G & below_G).any():
        left_G = decided_G | above_G
    elif not (decided_G & below_G).any() and (certain_G & above_G).any():
        left_G = decided_G | below_G
    if np.array_equal(left_G, deviations_G != 0):
        return deviations_G
    return _balanced(np.where(left_G, deviations_G, 0.0))


def _balanced(deviations_G: FloatArray) -> FloatArray:
    """Return deviations with the heavier side scaled down to the weight of the lighter one; all 0 if one is empty."""
    above_G, below_G = deviations_G > 0, deviations_G < 0
    if not above_G.any() or not below_G.any():
        return np.zeros_like(deviations_G)
    part_G = deviations_G / np.abs(deviations_G).max()
    up, down = math.fsum(part_G[above_G]), -math.fsum(part_G[below_G])
    lighter = min(up, down)
    return np.where(above_G, deviations_G * (lighter / up), deviations_G * (lighter / down))


def _short(mean: float) -> float:
    """Return a number rounded to `SHORT` binary digits, toward 0 where it would leave the range of floats."""
    part, power = math.frexp(mean)
    digits = math.ldexp(part, SHORT)
    try:
        return math.ldexp(round(digits), power - SHORT)
    except OverflowError:
        return math.ldexp(math.trunc(digits), power - SHORT)
