"""Whether what trains can learn: a few preferences, again and again, until the model knows them by heart.

A set-up that cannot fit eight preferences will not learn from thousands: its rate is far too low or too high, or next
to nothing trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import entr

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


@dataclass(frozen=True, kw_only=True)
class ByHeart:
    """How the NLL of a few preferences fell while the model trained on them alone, at the full rate."""

    preferences: int
    updates: int
    nll_before: float
    nll_after: float
    """After the updates; infinite if it was not finite any more."""
    nll_least: float
    """Of any model: the mean entropy of the labels, 0 where none is soft."""

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
    labels = np.array([comparison.label for group in few for comparison in group.comparisons])
    least = float(np.mean(entr(labels) + entr(1 - labels)))
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
    """Return the shortest preferences that say which of two different replies is better, of a prompt one."""
    found: dict[str, TokenGroup] = {}
    for index in np.argsort(costs(train, layout), kind="stable"):
        group = train[int(index)]
        if group.prompt_key not in found and _says_something(group):
            found[group.prompt_key] = group
        if len(found) == number:
            break
    return list(found.values())


def _says_something(group: TokenGroup) -> bool:
    replies = {suffix.tobytes() for suffix in group.suffixes}
    decided = all(one.label != 0.5 and one.weight > 0 for one in group.comparisons)
    return bool(group.comparisons) and decided and len(replies) == group.num_replies
