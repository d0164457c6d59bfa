"""From scores to advantages: pure functions of their arguments, without torch.

The reward of the environment and that of the model are combined for each rollout before anything is normalised, so
that a group's mean and standard deviation are those of what is trained on.

Legend: R rollouts, K reward functions, G rollouts of one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

import numpy as np

from rewardlab.core.errors import ConfigError
from rewardlab.rl.checking import (
    Groups,
    Numbers,
    as_many,
    centred,
    finite,
    in_order,
    members_of,
    not_negative,
    standard_deviation,
    stated,
    total,
)
from rewardlab.rl.noise import FloatArray, floored

How = Literal["replace", "add", "multiply", "weighted", "bonus"]
"""How the environment's reward e and the model's score s become one, with the coefficient c:

- `replace`: c·s
- `add`: e + c·s
- `multiply`: e·c·s
- `weighted`: (1 - c)·e + c·s, with c from 0 to 1
- `bonus`: e + c·s where e is above 0, and e elsewhere
"""
Baseline = Literal["group", "others"]
Scale = Literal["group", "batch", "batch_deviations", "nonzero", "none"]
ROUNDING: Final = 4 * float(np.finfo(np.float64).eps)
"""How far apart rounding may bring two sums of the same terms, as a share of the sizes of the terms."""
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combined:
    """Rewards made from those of environment and model, and the noise that the model's part brings into them.

    Raises RolloutError, naming the rollout, for a number that is not finite, and for noise below 0.
    """

    rewards_R: FloatArray
    noise_R: FloatArray
    """The largest distance between two observations of each reward."""

    def __post_init__(self) -> None:
        """Check that every number is finite and that there is one noise for each reward."""
        not_negative(self.noise_R, like_R=finite(self.rewards_R, what="reward"))


def combine(
    scores_R: Numbers,
    environment_R: Numbers | None = None,
    *,
    how: How = "replace",
    coefficient: float | None = None,
    noise_R: Numbers | None = None,
) -> Combined:
    """Return the rewards that are trained on, one for each rollout, in order (see `How` for the formulas).

    `coefficient` is 1 if it is left out, except with `weighted`, which has to be given one. `noise_R` is the noise of
    the scores (`Noise.between_scorings`), None for none; the environment's rewards have none.

    Raises RolloutError, naming the rollout, if a number that is used is missing or not finite: `replace` does not use
    the environment's rewards, and `bonus` does not use scores where the environment's reward is 0 or less. Raises
    ConfigError for settings that do not fit together, and for lists of different lengths.
    """
    if how not in get_args(How):
        raise ConfigError(f"how: got {how!r}; wanted one of {', '.join(get_args(How))}.")
    factor = coefficient_of(how, coefficient)
    scores_R = in_order(scores_R, what="scores")
    used_R = np.ones(len(scores_R), dtype=bool)
    environment = np.zeros(len(scores_R))
    if how != "replace":
        if environment_R is None:
            raise ConfigError(f"how={how!r} needs the environment's rewards; got none. Give them, or use 'replace'.")
        as_many(scores_R, environment_R, what="the environment's rewards")
        environment_R = in_order(environment_R, what="the environment's rewards")
        environment = finite(environment_R, what="reward of the environment")
        if how == "bonus":
            used_R = environment > 0
    scores = finite([score if used else 0.0 for score, used in zip(scores_R, used_R, strict=True)], what="score")
    noise = np.zeros(len(scores)) if noise_R is None else _noise(noise_R, used_R)
    share_R: FloatArray = np.where(used_R, factor, 0.0)
    with np.errstate(over="ignore", invalid="ignore"):
        if how == "multiply":
            share_R = share_R * environment
            environment = np.zeros_like(environment)
        elif how == "weighted":
            environment = (1 - factor) * environment
        scores = share_R * scores
        return Combined(
            rewards_R=environment + scores, noise_R=noise_after(np.abs(share_R) * noise, environment, scores)
        )


def noise_after(noise_R: FloatArray, *terms_R: FloatArray | float) -> FloatArray:
    """Return the noise of a sum of terms: the noise of its scores, plus what rounding the sum adds. 0 stays 0.

    A score that is added to something large is rounded to the digits that are left, so two scorings may end further
    apart than they were.
    """
    rounding_R = ROUNDING * np.sum([np.abs(terms) * np.ones_like(noise_R) for terms in terms_R], axis=0)
    return np.where(noise_R > 0, noise_R + rounding_R, 0.0)


def coefficient_of(how: How, coefficient: float | None) -> float:
    """Return the coefficient that holds. Raises ConfigError for one that is missing or out of its range."""
    if how == "weighted":
        return stated(coefficient, "coefficient", wanted="a weight from 0 to 1", allowed=lambda c: 0 <= c <= 1)
    value = 1.0 if coefficient is None else coefficient
    meant = "0 or more (if replies that the model dislikes are to be rewarded, negate its scores)"
    return stated(value, "coefficient", wanted=meant, allowed=lambda c: c >= 0)


def _noise(noise_R: Numbers, used_R: Sequence[bool] | np.ndarray) -> FloatArray:
    """Return the noise of the scores that are used, and 0 for the others."""
    as_many(used_R, noise_R, what="noise")
    return not_negative(
        [noise if used else 0.0 for noise, used in zip(noise_R, used_R, strict=True)], like_R=np.zeros(len(used_R))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageRule:
    """How a library makes advantages from the rewards of a group. Raises ConfigError for a value out of range."""

    baseline: Baseline = "group"
    """Subtracted from each reward: the group's mean, or the mean of the group's other rollouts (RLOO)."""
    scale: Scale = "group"
    """Divisor of the deviation: the standard deviation of the group's rewards, of all rewards (`batch`), or of
    all deviations (`batch_deviations`); the share of rewards that are not 0 (`nonzero`); or nothing (`none`)."""
    ddof: Literal[0, 1] = 1
    """1 is Bessel's correction: squares are divided by one less than their number."""
    epsilon: float = 1e-4
    """Added to the standard deviation."""
    source: str = ""
    """The library's code that the rule is taken from."""

    def __post_init__(self) -> None:
        """Check every field."""
        allowed = {"baseline": get_args(Baseline), "scale": get_args(Scale), "ddof": (0, 1)}
        for name, values in allowed.items():
            if (got := getattr(self, name)) not in values:
                raise ConfigError(f"{name}: got {got!r}; wanted one of {', '.join(map(str, values))}.")
        stated(self.epsilon, "epsilon", wanted="0 or more", allowed=lambda epsilon: epsilon >= 0)


_GRPO = "TRL 1.16, GRPOTrainer"
_RLOO = "TRL 1.16, RLOOTrainer"
_VERL = "verl, compute_{}_outcome_advantage"
_OPENRLHF = "OpenRLHF, compute_advantages_and_returns, {}"
RULES: Final[Mapping[str, AdvantageRule]] = MappingProxyType(
    {
        "trl": AdvantageRule(source=f"{_GRPO}, scale_rewards='group' (its default)"),
        "trl-batch": AdvantageRule(scale="batch", source=f"{_GRPO}, scale_rewards='batch'"),
        "trl-none": AdvantageRule(scale="none", source=f"{_GRPO}, scale_rewards='none' (Dr. GRPO)"),
        "trl-async": AdvantageRule(ddof=0, epsilon=1e-8, source="TRL 1.16, AsyncGRPOTrainer"),
        "trl-rloo": AdvantageRule(baseline="others", scale="none", source=f"{_RLOO}, by default"),
        "trl-rloo-normalized": AdvantageRule(
            baseline="others", scale="batch_deviations", source=f"{_RLOO}, normalize_advantages=True"
        ),
        "verl-grpo": AdvantageRule(epsilon=1e-6, source=_VERL.format("grpo")),
        "verl-grpo-no-std": AdvantageRule(
            scale="none", source=f"{_VERL.format('grpo')}, norm_adv_by_std_in_grpo=False (Dr. GRPO)"
        ),
        "verl-rloo": AdvantageRule(baseline="others", scale="none", source=_VERL.format("rloo")),
        "verl-gpg": AdvantageRule(scale="nonzero", source=_VERL.format("gpg")),
        "openrlhf-group-norm": AdvantageRule(epsilon=1e-9, source=_OPENRLHF.format("group_norm")),
        "openrlhf-rloo": AdvantageRule(baseline="others", scale="none", source=_OPENRLHF.format("rloo")),
        "openrlhf-dr-grpo": AdvantageRule(scale="none", source=_OPENRLHF.format("dr_grpo")),
    }
)
"""Name of a library's rule -> what it does: TRL 1.16.0, verl at commit 1dda039b9c63, OpenRLHF at 3c3be6234e0c."""
NOT_OF_REWARDS_ALONE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "verl-opo": "its baseline weighs each reward by the length of the reply",
        "verl-grpo-passk": "it gives the best reply of a group its lead over the second, and the others nothing",
        "verl-reinforce-plus-plus-baseline": "it normalises over the tokens of the batch",
        "verl-gdpo": "it normalises over the tokens of the batch",
        "openrlhf-reinforce-baseline": "it normalises over the tokens of the batch, the KL penalty included",
        "openrlhf-flash-reinforce": "its baseline is the mean of the batch. openrlhf-dr-grpo gives the same where all "
        "rollouts are one group",
    }
)
"""Name of a library's rule -> why its advantages do not add up to 0 in each group, so that it has no place here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages of rollouts and what became of their groups."""

    advantages_R: FloatArray
    rewards_R: FloatArray
    """Rewards that the advantages were made from, after the noise floor."""
    num_groups: int
    num_groups_single: int
    """Groups of one rollout: its advantage is 0."""
    num_groups_below: int
    """Larger groups within the noise, or with equal rewards: every advantage is 0."""
    num_rollouts_below: int
    """Rollouts with advantage 0 in the other groups, since noise could turn its sign around or they are at the mean."""


def advantages(
    rewards_R: Numbers,
    groups_R: Groups,
    *,
    rule: str | AdvantageRule = "trl",
    noise_R: Numbers | None = None,
) -> Credit:
    """Return the advantages of rollouts, which sum to 0 in each group.

    `groups_R` names the group of each rollout, and `rule` is one of `RULES` or your own. With `noise_R`, the largest
    distance between two observations of each reward, what noise could turn around has advantage exactly 0 (`floored`).
    Every rule takes a multiple above 0 of the deviation from the group's mean, so signs are those of `floored`.

    Raises RolloutError for a reward that is missing or not finite, and for an advantage that is not finite, naming the
    rollout; ConfigError for an unknown rule.
    """
    how = _rule(rule)
    left = floored(rewards_R, groups_R, noise_R)
    found_R = finite(_scaled(left.rewards_R, left.deviations_R, members_of(groups_R), how), what="advantage")
    return Credit(
        advantages_R=found_R,
        rewards_R=left.rewards_R,
        num_groups=left.num_groups,
        num_groups_single=left.num_groups_single,
        num_groups_below=left.num_groups_below,
        num_rollouts_below=left.num_rollouts_below,
    )


def advantages_of_several(
    rewards_KR: Sequence[Numbers],
    groups_R: Groups,
    *,
    weights_K: Sequence[float] | None = None,
    aggregation: Aggregation = "sum_then_normalize",
    rule: str | AdvantageRule = "trl",
    noise_KR: Sequence[Numbers | None] | None = None,
) -> Credit:
    """Return the advantages of rollouts that several reward functions have rewarded, by TRL's two ways.

    `sum_then_normalize` takes the weighted sum of the rewards, then `rule`. `normalize_then_sum` divides the deviations
    of each function in each group by their standard deviation (and `rule`'s epsilon), takes the weighted sum, and
    divides that by its standard deviation over the batch. Weights are 1 if they are left out. A function that has no
    reward for a rollout is an error here; TRL leaves it out of the sum.

    Raises RolloutError for a reward that is missing or not finite, naming the rollout; ConfigError for an unknown rule,
    for lists of different lengths, and for `normalize_then_sum` with noise, which may turn a sum of quotients around.
    """
    how = _rule(rule)
    if aggregation not in get_args(Aggregation):
        raise ConfigError(f"aggregation: got {aggregation!r}; wanted one of {', '.join(get_args(Aggregation))}.")
    rewards = [finite(rewards_R, what=f"reward of function {k}") for k, rewards_R in enumerate(rewards_KR)]
    if not rewards:
        raise ConfigError("rewards: got those of no function; wanted one function or more.")
    for k, one_R in enumerate(rewards):
        as_many(groups_R, one_R, what=f"rewards of function {k}")
    weights = np.ones(len(rewards)) if weights_K is None else np.array([*weights_K], dtype=np.float64)
    if len(weights) != len(rewards) or not np.isfinite(weights).all():
        raise ConfigError(
            f"weights: got {weights.tolist()}; wanted a finite number for each of {len(rewards)} functions."
        )
    if aggregation == "sum_then_normalize":
        noises = [None] * len(rewards) if noise_KR is None else noise_KR
        if len(noises) != len(rewards):
            raise ConfigError(f"noise: got that of {len(noises)} functions; wanted {len(rewards)}.")
        known = [not_negative(noise, like_R=one) for noise, one in zip(noises, rewards, strict=True)]
        return advantages(_sum(weights, rewards), groups_R, rule=how, noise_R=_sum(np.abs(weights), known))
    if noise_KR is not None or how.scale != "group":
        got = f"a rule with scale {how.scale!r}" if noise_KR is None else "noise, which may turn such a sum around"
        raise ConfigError(
            f"normalize_then_sum: got {got}; wanted rewards without noise and a rule that divides by the group's "
            f"standard deviation. Use sum_then_normalize."
        )
    members = members_of(groups_R)
    each = [_scaled(one_R, floored(one_R, groups_R, None).deviations_R, members, how) for one_R in rewards]
    last = AdvantageRule(scale="batch_deviations", ddof=how.ddof, epsilon=how.epsilon)
    return advantages(_sum(weights, each), groups_R, rule=last)


def _rule(rule: str | AdvantageRule) -> AdvantageRule:
    """Return a rule by its name. Raises ConfigError, with the names that there are, for an unknown one."""
    if isinstance(rule, AdvantageRule):
        return rule
    if not isinstance(rule, str) or rule not in RULES:
        why = (
            f"It does not make its advantages from the rewards of a group alone: {NOT_OF_REWARDS_ALONE[rule]}. "
            if isinstance(rule, str) and rule in NOT_OF_REWARDS_ALONE
            else ""
        )
        raise ConfigError(f"rule: got {rule!r}. {why}Wanted one of {', '.join(RULES)}, or an AdvantageRule.")
    return RULES[rule]


def _scaled(
    rewards_R: FloatArray, deviations_R: FloatArray, groups: Sequence[np.ndarray], rule: AdvantageRule
) -> FloatArray:
    """Return the advantages [R] of deviations from the mean of their group."""
    found_R = np.zeros_like(deviations_R)
    for members in groups:
        size = len(members)
        # The mean of the others is further away than that of all, by this factor.
        further = size / (size - 1) if rule.baseline == "others" and size > 1 else 1.0
        divisor = 1.0
        if rule.scale == "group":
            divisor = standard_deviation(deviations_R[members], ddof=rule.ddof) + rule.epsilon
        if deviations_R[members].any():
            found_R[members] = deviations_R[members] * further / divisor
    if not found_R.any():
        return found_R
    if rule.scale == "batch":
        found_R /= standard_deviation(centred(rewards_R)[1], ddof=rule.ddof) + rule.epsilon
    elif rule.scale == "batch_deviations":
        found_R /= standard_deviation(found_R, ddof=rule.ddof) + rule.epsilon
    elif rule.scale == "nonzero":
        with np.errstate(over="ignore"):
            found_R *= len(rewards_R) / max(1, int(np.count_nonzero(rewards_R)))
    return found_R


def _sum(weights_K: FloatArray, values_KR: Sequence[FloatArray]) -> FloatArray:
    """Return the weighted sum [R] of what each function gave; NaN where it is too large for a float."""
    with np.errstate(over="ignore"):
        terms_KR = [weight * values for weight, values in zip(weights_K, values_KR, strict=True)]
    return np.array([total(terms) for terms in zip(*terms_KR, strict=True)], dtype=np.float64)
