"""Whether what trains can learn: a few preferences, again and again, until the model knows them by heart.

A set-up that cannot fit eight preferences will not learn from thousands: its rate is far too low or too high, or next
to nothing trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import expit

from rewardlab.core.errors import NonFiniteError
from rewardlab.core.terminal import number_of
from rewardlab.core.types import TokenGroup
from rewardlab.data.pack import costs
from rewardlab.model.reward import RewardModel
from rewardlab.training.loop.reward_trainer import RewardSteps, RewardTrainer
from rewardlab.training.loop.schedule import build_schedule
from rewardlab.training.settings.config import RewardTrainerConfig, ScheduleConfig

FEW: Final = 8
"""Preferences to learn."""
MOST: Final = 30
"""Updates at most."""
KNOWN: Final = 0.15
"""Preferences are known by heart with this share of the NLL of chance, both counted from the least NLL."""
CHANCE: Final = math.log(2)
"""The NLL of a model that knows nothing."""
WORSE: Final = 1.1
"""`ByHeart.left` above which the rate is too high."""
HARDLY: Final = 0.9
"""The share above which next to nothing was learned."""
LEARNED: Final = 0.5
"""The share below which a model clearly learns."""
WILD: Final = 3.0
"""First NLL above which the steps before have gone astray."""
SMALLEST: Final = 0.005
"""Least NLL that is mentioned."""
SAYING: Final = 1e-3
"""How far below that of chance the NLL of a preference can be brought, if it says something."""
_MOST_SCORE: Final = 20.0
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ByHeart:
    """How the NLL of a few preferences fell while the model trained on them alone, at the full rate."""

    preferences: int
    updates: int
    nll_before: float
    nll_after: float
    """After the updates; infinite if it was not finite any more."""
    nll_least: float
    """Of any scores: about 0, but for soft labels, ties, and annotators who disagree."""

    @property
    def known(self) -> bool:
        """Whether the model knows them by heart in the end."""
        return self.nll_after - self.nll_least <= KNOWN * (CHANCE - self.nll_least)

    @property
    def left(self) -> float:
        """The share that is left of what could be learned, at first or by a model that knows nothing: above 1 if it got
        worse than that."""
        return (self.nll_after - self.nll_least) / (min(self.nll_before, CHANCE) - self.nll_least)

    def line(self, lr: float) -> str:
        """Return what was found, in a line, with advice on the learning rate where one follows from it."""
        said = f"{number_of(self.preferences, 'preference')} alone at the full rate: NLL {self.nll_before:.2f}"
        if self.known and not self.updates:
            return f"{said}, which the model knows already"
        least = f", of at least {self.nll_least:.2f}" if self.nll_least >= SMALLEST else ""
        said += f" to {self.nll_after:.2f}{least} in {number_of(self.updates, 'update')}"
        if self.nll_before > WILD:
            return f"{said}. It begins far above that of chance, {CHANCE:.2f}: lower --lr, which is {lr:g}"
        if self.known or self.left < LEARNED:
            return f"{said}; so it can learn"
        if self.left > WORSE:
            return f"{said}. It does not settle: lower --lr, which is {lr:g}"
        if self.left > HARDLY:
            return f"{said}. That is hardly less: raise --lr, which is {lr:g}, or look at what trains"
        return said


def learn_by_heart(
    trainer: RewardTrainer, model: RewardModel, config: RewardTrainerConfig, train: Sequence[TokenGroup]
) -> ByHeart | None:
    """Train on the shortest of the preferences alone, and return how far they were learned; None if none is decided.

    It goes on with the weights and the optimiser of a trainer that is done, which are of no use afterwards. All ranks
    call it. Raises what `Trainer.train_step` does, but for a loss that is not finite.
    """
    few = _shortest(train, FEW, model.layout)
    if not few:
        return None
    rows = few * -(-trainer.ranks.size // len(few))  # so that every process has some
    least = sum(map(_least, few)) / sum(len(group.comparisons) for group in few)
    own = config.replace(batch_size=len(rows), rows_per_prompt=1)
    done, trainer.steps = trainer.step, RewardSteps(own, model, rows, trainer.ranks)
    trainer.schedule = build_schedule(trainer.optimizer, ScheduleConfig(lr_scheduler="constant"), MOST)
    found: ByHeart | None = None
    try:
        for updates in range(MOST + 1):
            after = _step(trainer, updates)
            before = after if found is None else found.nll_before
            found = ByHeart(preferences=len(few), updates=updates, nll_before=before, nll_after=after, nll_least=least)
            if found.known or math.isinf(after):
                break
    finally:
        trainer.step = done
    return found


def _step(trainer: RewardTrainer, number: int) -> float:
    """Take a step with all of the preferences; return their mean NLL before it, infinite if it is not finite."""
    try:
        report = trainer.train_step(trainer.steps.plan(number, trainer.token_budget))
    except NonFiniteError:
        return math.inf
    trainer.step += 1  # other random numbers in every step
    return float(report.sums.mean_nll)


def _shortest(train: Sequence[TokenGroup], number: int, layout: str) -> list[TokenGroup]:
    """Return the shortest preferences that say which of two different replies is better, of a prompt one.

    All their comparisons count the same and have no margin, so that the loss is least where the NLL is.
    """
    found: dict[str, TokenGroup] = {}
    for index in np.argsort(costs(train, layout), kind="stable"):
        group = train[int(index)]
        if group.prompt_key not in found and _says_something(group):
            equal = tuple(replace(one, weight=1.0, margin=0.0) for one in group.comparisons)
            found[group.prompt_key] = replace(group, comparisons=equal)
        if len(found) == number:
            break
    return list(found.values())


def _says_something(group: TokenGroup) -> bool:
    count, replies = len(group.comparisons), {suffix.tobytes() for suffix in group.suffixes}
    if not count or len(replies) < group.num_replies or not all(one.weight > 0 for one in group.comparisons):
        return False
    return _least(group) < count * (CHANCE - SAYING)


def _least(group: TokenGroup) -> float:
    """Return the least NLL, summed over the comparisons of a preference, that any scores of its replies have."""
    first_C = np.array([one.first for one in group.comparisons])
    second_C = np.array([one.second for one in group.comparisons])
    label_C = np.array([one.label for one in group.comparisons])

    def nll(score_R: FloatArray) -> tuple[float, FloatArray]:
        difference_C = score_R[first_C] - score_R[second_C]
        slope_C, size = expit(difference_C) - label_C, len(score_R)
        slope_R = np.bincount(first_C, slope_C, size) - np.bincount(second_C, slope_C, size)
        return float((np.logaddexp(0.0, difference_C) - label_C * difference_C).sum()), slope_R.astype(np.float64)

    limits = [(-_MOST_SCORE, _MOST_SCORE)] * group.num_replies
    return float(minimize(nll, np.zeros(group.num_replies), jac=True, method="L-BFGS-B", bounds=limits).fun)
