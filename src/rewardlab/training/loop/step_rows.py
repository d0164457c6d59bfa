"""Which rows make up a step, and which of them are computed as one: those of one prompt.

The run, its forecast and its log ask here, so none of them can differ from the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.core.terminal import number_of
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import prompt_numbers
from rewardlab.data.merging import Limits, members_of, merged
from rewardlab.data.pack import Plan, cost, plan_micro_batches
from rewardlab.data.step_order import Bundles, batch_of_step, bundles_of, steps_per_epoch
from rewardlab.training.settings.config import RewardTrainerConfig

logger = logging.getLogger("rewardlab")
SPREAD: Final = 2
"""`Limits.spread` with gradients, where every layer keeps its copies of the keys. A pair has two conversations, so no
micro-batch of merged rows has more keys than one of pairs may have."""
MOST_STEPS: Final = 100
"""Steps that are looked at to say how many tokens a run computes."""
MOST_ROWS: Final = 4000
"""Rows of these steps."""
FEW_PROMPTS: Final = 4
"""Prompts that a step has at least, with the rows of a prompt together that the log names."""
WORTH_TELLING: Final = 1.1
"""How many times fewer tokens are worth a line of the log."""


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """The rows of a step as they are computed."""

    groups: Sequence[TokenGroup]
    members: Sequence[Sequence[int]]
    """The numbers of the rows in each group."""
    burdens: Sequence[int]
    """What each group takes of a micro-batch's budget, in tokens."""


class StepRows:
    """The rows of each step of a run over `train`."""

    def __init__(
        self, config: RewardTrainerConfig, train: Sequence[TokenGroup], *, layout: str, num_ranks: int = 1
    ) -> None:
        self._config = config
        self._train = train
        self._layout = layout
        self._num_ranks = num_ranks
        self._bundles: Bundles | None = bundles_of(train, config.run.rows_per_prompt)

    @property
    def merges(self) -> bool:
        """Whether rows of one prompt are computed as one.

        Dropout is drawn by preference and reply, so what two of them have in common has two masks.
        """
        return self._layout == "shared" and not self._config.model.lora_dropout

    def of_step(self, step: int) -> list[int]:
        """Return the indices of the rows of a step."""
        run = self._config.run
        return batch_of_step(
            step, num_groups=len(self._train), batch_size=run.batch_size, seed=run.seed, bundles=self._bundles
        )

    def together(self, rows: Sequence[int], budget: int) -> StepGroups:
        """Return rows as groups, those of one prompt as one as far as the budget and the ranks allow.

        Every rank gets rows of its own where all rows have one prompt.
        """
        built: Sequence[TokenGroup] = [self._train[index] for index in rows]
        if not self.merges:
            alone = [[number] for number in range(len(built))]
            return StepGroups(groups=built, members=alone, burdens=[cost(one, self._layout) for one in built])
        share = -(-len(built) // self._num_ranks) if self._num_ranks > 1 else None
        limits = Limits(tokens=budget, spread=SPREAD, groups=share)
        # The loss of a ranking is of the whole; all other losses are sums over comparisons.
        ranked = self._config.loss.kwise_loss == "plackett-luce"
        groups, places = merged(built, limits, keep_rankings=ranked)
        members = members_of(places)
        burdens = [
            one.num_tokens if len(own) == 1 else limits.burden(one.num_tokens, one.num_unshared_tokens)
            for one, own in zip(groups, members, strict=True)
        ]
        return StepGroups(groups=groups, members=members, burdens=burdens)

    def micro_batches(self, found: StepGroups, budget: int) -> list[Plan]:
        """Return for each rank its micro-batches, of about equal size: indices of the groups of a step.

        Raises ConfigError if a preference is larger than `budget`.
        """
        return plan_micro_batches(
            found.groups, budget, layout=self._layout, num_ranks=self._num_ranks, burdens=found.burdens
        )

    def tokens(self) -> float:
        """Return how many tokens a step of the first epoch computes in the mean, padding left out.

        Of a longer epoch some steps are looked at.
        """
        size, budget = self._config.run.batch_size, self._config.run.token_budget
        count = steps_per_epoch(len(self._train), size)
        looked_at = min(count, MOST_STEPS, max(1, MOST_ROWS // size))
        steps = np.unique(np.linspace(0, count - 1, looked_at).round().astype(int)).tolist()
        return sum(
            sum(cost(group, self._layout) for group in self.together(self.of_step(step), budget).groups)
            for step in steps
        ) / len(steps)


def tell_rows_of_prompts(
    config: RewardTrainerConfig, train: Sequence[TokenGroup], *, layout: str, num_ranks: int
) -> None:
    """Log by how many times fewer tokens steps compute since rows of a prompt come together, or would if they did,
    where that is worth it; a warning if it is not, though it was asked for."""
    own, size = config.run.rows_per_prompt, config.run.batch_size
    prompts = len(np.unique(prompt_numbers(train)))
    # What the log names for rows that are drawn one by one.
    other = max(2, size // FEW_PROMPTS)
    has_several = other <= size and prompts * WORTH_TELLING <= len(train)
    may_share = layout == "shared" and not config.model.lora_dropout and not config.model.cache_states
    if own == 1 and not (has_several and may_share):
        return

    def tokens(rows_per_prompt: int) -> float:
        changed = config.replace(rows_per_prompt=rows_per_prompt)
        return StepRows(changed, train, layout=layout, num_ranks=num_ranks).tokens()

    times = tokens(1) / tokens(other if own == 1 else own)
    those = f"tokens: training: these have {number_of(prompts, 'prompt')}"
    if own > 1 and times < WORTH_TELLING:
        cause = (
            f"the layout is {layout}"
            if layout != "shared"
            else "steps have hardly more rows of one prompt than without it"
        )
        logger.warning("--rows-per-prompt %d saves hardly any tokens: %s", own, cause)
    elif own > 1:
        logger.info("%s; %d rows of one come together, for some %.1f times fewer tokens", those, own, times)
    elif times >= WORTH_TELLING:
        logger.info("%s; with --rows-per-prompt %d steps compute some %.1f times fewer tokens", those, other, times)
