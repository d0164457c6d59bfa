"""Rewards shaped before they are normalised, by figures that the user states and that never come from the batch.

Every function takes `Combined` rewards and returns new ones with their noise: a penalty that is taken off a reward (for
length, for KL) has no noise, dividing a reward divides its noise, and clipping does not make noise larger.

Legend: R rollouts, T tokens of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from rewardlab.core.errors import ConfigError
from rewardlab.core.spec import CalibrationSpec
from rewardlab.rl.checking import FloatArray, Numbers, as_many, finite, floats, in_order, stated, total
from rewardlab.rl.credit import Combined, noise_after
from rewardlab.rl.rollouts import RolloutError

KLEstimator = Literal["k1", "k2", "k3"]
"""How the divergence of the policy p from the reference q is estimated from a token that p has sampled, with
x = log p - log q (J. Schulman, Approximating KL Divergence, 2020, joschu.net/blog/kl-approx.html):

- `k1`: x. Its mean is the divergence; single tokens may be below 0.
- `k2`: x² / 2. Never below 0; its mean is not the divergence.
- `k3`: exp(-x) - 1 + x. Never below 0; its mean is the divergence.
"""


def clipped(rewards: Combined, *, low: float, high: float) -> Combined:
    """Return rewards no lower than `low` and no higher than `high`.

    Their noise stays as it is, since clipping never brings two observations of a reward further apart.

    Raises ConfigError unless both bounds are finite and `low` is below `high`.
    """
    _require_rewards(rewards)
    stated(low, "low", wanted="a finite number", allowed=lambda _: True)
    stated(high, "high", wanted=f"a finite number above low, which is {low:g}", allowed=lambda bound: bound > low)
    return Combined(rewards_R=np.clip(rewards.rewards_R, low, high), noise_R=rewards.noise_R)


def standardised(rewards: Combined, *, mean: float, std: float) -> Combined:
    """Return (reward - mean) / std, and the noise divided by std.

    Raises ConfigError unless both are finite and `std` is above 0.
    """
    _require_rewards(rewards)
    stated(mean, "mean", wanted="a finite number", allowed=lambda _: True)
    stated(std, "std", wanted="a finite number above 0", allowed=lambda value: value > 0)
    with np.errstate(over="ignore"):
        return Combined(
            rewards_R=(rewards.rewards_R - mean) / std,
            noise_R=noise_after(rewards.noise_R, rewards.rewards_R, mean) / std,
        )


def standardised_by(rewards: Combined, calibration: CalibrationSpec | None) -> Combined:
    """Return scores standardised by the mean and standard deviation that are stored with the model.

    `calibration` is that of the model's spec (`RewardSpec.calibration`). The figures are those of raw scores, so this
    comes before the environment's reward is added. Raises ConfigError if the model has none.
    """
    if calibration is None:
        raise ConfigError(
            "the model's folder holds no mean and standard deviation of its scores; wanted those that "
            "`rewardlab calibrate` writes. Run it on held-out data, or state both figures yourself."
        )
    return standardised(rewards, mean=calibration.reward_mean, std=calibration.reward_std)


def length_penalised(
    rewards: Combined, num_tokens_R: Sequence[int], *, target_tokens: int, per_token: float
) -> Combined:
    """Return reward - per_token·max(0, num_tokens - target_tokens), with the tokens of each reply.

    Raises ConfigError for a target or a penalty below 0, RolloutError for a number of tokens that is missing or below
    0, naming the rollout.
    """
    stated(target_tokens, "target_tokens", wanted="0 or more tokens", allowed=lambda tokens: tokens >= 0)
    stated(per_token, "per_token", wanted="0 or more", allowed=lambda penalty: penalty >= 0)
    over_R = np.maximum(0.0, _lengths(rewards, num_tokens_R) - target_tokens)
    return _less(rewards, over_R, times=per_token)


def overlong_punished(
    rewards: Combined, num_tokens_R: Sequence[int], *, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Combined:
    """Return rewards less the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), times `factor`.

    The punishment is 0 up to max_tokens - buffer_tokens; it then grows in proportion to the tokens beyond that, up to
    `factor` at max_tokens, and stays `factor` above. This is what TRL (`get_soft_overlong_punishment`) and OpenRLHF
    compute; verl goes on in proportion above max_tokens, which replies do not exceed there.

    Raises ConfigError unless 0 < buffer_tokens ≤ max_tokens and `factor` is 0 or more; RolloutError for a number of
    tokens that is missing or below 0, naming the rollout.
    """
    stated(max_tokens, "max_tokens", wanted="1 token or more", allowed=lambda tokens: tokens >= 1)
    wanted = f"1 to {max_tokens} tokens (max_tokens)"
    stated(buffer_tokens, "buffer_tokens", wanted=wanted, allowed=lambda tokens: 0 < tokens <= max_tokens)
    stated(factor, "factor", wanted="0 or more", allowed=lambda value: value >= 0)
    over_R = _lengths(rewards, num_tokens_R) - (max_tokens - buffer_tokens)
    return _less(rewards, np.clip(over_R / buffer_tokens, 0.0, 1.0), times=factor)


def kl_of_tokens(policy_T: Numbers, reference_T: Numbers, *, estimator: KLEstimator) -> FloatArray:
    """Return the estimated KL divergence [T] of the policy from the reference at each token of a reply.

    Both are natural logarithms of the probability of the token that was sampled. Raises ConfigError for an unknown
    estimator, for lists of different lengths and for several rows; RolloutError for a number that is missing or not
    finite.
    """
    if estimator not in get_args(KLEstimator):
        raise ConfigError(f"estimator: got {estimator!r}; wanted one of {', '.join(get_args(KLEstimator))}.")
    policy_T = _one_row(policy_T, "log-probabilities of the policy")
    reference_T = _one_row(reference_T, "log-probabilities of the reference")
    if len(policy_T) != len(reference_T):
        raise ConfigError(
            f"log-probabilities: got {len(policy_T)} of the policy and {len(reference_T)} of the reference; wanted one "
            f"of each for every token of the reply."
        )
    ratio_T = floats(policy_T) - floats(reference_T)
    with np.errstate(over="ignore", invalid="ignore"):
        if estimator == "k2":
            ratio_T = ratio_T**2 / 2
        elif estimator == "k3":
            ratio_T = np.expm1(-ratio_T) + ratio_T
    if not np.isfinite(ratio_T).all():
        token = int(np.flatnonzero(~np.isfinite(ratio_T))[0])
        raise RolloutError(
            f"the KL divergence at token {token} is {ratio_T[token]:g} (log-probabilities {policy_T[token]} of the "
            f"policy, {reference_T[token]} of the reference); wanted a finite number. Find out which model gave it."
        )
    return ratio_T


def kl_of_replies(
    policy_RT: Sequence[Numbers],
    reference_RT: Sequence[Numbers],
    *,
    estimator: KLEstimator,
) -> FloatArray:
    """Return the estimated KL divergence [R] of each reply: the sum over its tokens, which may differ in number.

    Raises as `kl_of_tokens` does, and names the rollout.
    """
    as_many(policy_RT, reference_RT, what="log-probabilities of the reference")
    sums = []
    for number, (policy_T, reference_T) in enumerate(zip(policy_RT, reference_RT, strict=True)):
        try:
            sums.append(total(kl_of_tokens(policy_T, reference_T, estimator=estimator)))
        except RolloutError as error:
            raise RolloutError(f"rollout {number}: {error}", rollouts=(number,)) from error
        except ConfigError as error:
            raise ConfigError(f"rollout {number}: {error}") from error
    return finite(sums, what="KL divergence")


def kl_shaped(rewards: Combined, kl_R: Numbers, *, beta: float) -> Combined:
    """Return reward - beta·KL, with the KL divergence of each reply (`kl_of_replies`).

    With `k1` this is what TRL's RLOOTrainer takes for its reward. The log-probabilities are those of the policy that
    sampled the reply, and count as exact: the noise is that of the reward. Raises ConfigError for a `beta` below 0,
    RolloutError for a divergence that is missing or not finite, naming the rollout.
    """
    stated(beta, "beta", wanted="0 or more", allowed=lambda value: value >= 0)
    _require_rewards(rewards)
    found_R = finite(kl_R, what="KL divergence")
    as_many(rewards.rewards_R, found_R, what="KL divergences")
    return _less(rewards, found_R, times=beta)


def rewards_of_tokens(reward: float, kl_T: Numbers, *, beta: float) -> FloatArray:
    """Return the reward of each token [T] of one reply: -beta·KL, and at the last token the reward of the reply too.

    This is what verl and OpenRLHF make of a reward for PPO (verl clamps `k3`, and OpenRLHF every estimate, to ±10; this
    clamps nothing). The sum over tokens is that of `kl_shaped`. Raises ConfigError for a `beta` below 0, for a reply
    without tokens and for several rows, RolloutError for a reward or a divergence that is not finite.
    """
    stated(beta, "beta", wanted="0 or more", allowed=lambda value: value >= 0)
    kl_T = _one_row(kl_T, "kl_T")
    if len(kl_T) == 0:
        raise ConfigError("kl_T: got a reply without tokens; wanted one token or more, the last of which is rewarded.")
    (own,) = finite([reward], what="reward")
    with np.errstate(over="ignore"):
        shaped_T: FloatArray = -beta * floats(kl_T)
        shaped_T[-1] += own
    if not np.isfinite(shaped_T).all():
        raise RolloutError(
            f"the reward {reward} less a KL divergence of its reply, times {beta:g}, is not finite; wanted finite "
            f"numbers. Find out which of them is missing or too large."
        )
    return shaped_T


def _require_rewards(rewards: object) -> None:
    """Raise ConfigError for what is not a Combined, such as a list of rewards."""
    if not isinstance(rewards, Combined):
        raise ConfigError(
            f"rewards: got a {type(rewards).__name__}; wanted what rewardlab.rl.combine(scores) returns, which holds "
            f"their noise too."
        )


def _one_row(values_T: Numbers, what: str) -> Sequence[Any]:
    """Return the numbers of one reply in order. Raises ConfigError for several rows, such as a batch of one: [1, T]."""
    if len(shape := tuple(getattr(values_T, "shape", ()))) > 1:
        raise ConfigError(
            f"{what}: got numbers of shape {list(shape)}; wanted those of one reply, [T]. Hand over one row at a time."
        )
    return in_order(values_T, what=what, of="token")


def _lengths(rewards: Combined, num_tokens_R: Sequence[int]) -> FloatArray:
    """Return the tokens of each reply. Raises RolloutError for a number that is missing or below 0."""
    _require_rewards(rewards)
    found_R = finite(num_tokens_R, what="number of tokens")
    as_many(rewards.rewards_R, found_R, what="numbers of tokens")
    if below := tuple(np.flatnonzero(found_R < 0).tolist()):
        raise RolloutError(
            f"rollout {below[0]} has {found_R[below[0]]:g} tokens; wanted 0 or more. Count the tokens of the reply.",
            rollouts=below,
        )
    return found_R


def _less(rewards: Combined, penalty_R: FloatArray, *, times: float) -> Combined:
    """Return rewards less a penalty, which has no noise, times a factor. Raises RolloutError if it is not finite."""
    with np.errstate(over="ignore"):
        less_R = times * penalty_R
        return Combined(
            rewards_R=rewards.rewards_R - less_R, noise_R=noise_after(rewards.noise_R, rewards.rewards_R, less_R)
        )
