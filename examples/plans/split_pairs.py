"""A loop that breaks pairs apart: the comparator of examples/plans/baselines.yaml, and nothing to train with.

    python examples/plans/split_pairs.py SETTINGS [--resume auto]

It trains as `rewardlab train` does, but fills micro-batches as a loop would that knows replies and not pairs: reply by
reply, each with its own prompt, up to the token budget. A pair whose replies fall into two micro-batches teaches
nothing, since the loss needs both. And each micro-batch counts the same, however many whole pairs it has, as when
gradients are added up without weighing. Everything else (data, schedule, evaluation, the saved model) is that of
`rewardlab train`, so the arms of the plan differ in this alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from rewardlab.batch import PackedBatch, pack
from rewardlab.commands.training import train
from rewardlab.core.types import TokenGroup
from rewardlab.data.step_order import batch_of_step
from rewardlab.training.loop.reward_trainer import RewardSteps


def whole_pairs(groups: Sequence[TokenGroup], budget: int) -> list[list[int]]:
    """Return for each micro-batch the places of the pairs that lie in it whole; micro-batches without any are left out.

    Replies are taken in order, each with its own prompt, until the next one would exceed the budget.
    """
    where: list[list[int]] = []
    batch, room = 0, budget
    for group in groups:
        mine = []
        for suffix in group.suffixes:
            length = len(group.shared) + len(suffix)
            if length > room and room < budget:
                batch, room = batch + 1, budget
            room -= length
            mine.append(batch)
        where.append(mine)
    found = [[place for place, mine in enumerate(where) if set(mine) == {number}] for number in range(batch + 1)]
    return [pairs for pairs in found if pairs]


def broken_plan(steps: RewardSteps, step: int, budget: int) -> list[PackedBatch]:
    """Return the micro-batches of a step, with the pairs that were not broken apart."""
    run = steps.config.run
    chosen = batch_of_step(step, num_groups=len(steps.train), batch_size=run.batch_size, seed=run.seed)
    groups = [steps.train[index] for index in chosen]
    kept = whole_pairs(groups, budget)
    batches = []
    for pairs in kept or [list(range(len(groups)))]:
        weight = 1.0 / (len(kept or [0]) * len(pairs))
        weighed = [
            replace(groups[n], comparisons=tuple(replace(one, weight=weight) for one in groups[n].comparisons))
            for n in pairs
        ]
        share = steps.model.layout != "unshared"
        batches.append(pack(weighed, share=share, indices=[chosen[n] for n in pairs]))
    return batches


def main(arguments: Sequence[str]) -> None:
    """Train with the settings in a file."""
    RewardSteps.plan = broken_plan
    how = list(arguments[1:]) or ["--resume", "auto"]
    train(["--config", arguments[0], *how])


if __name__ == "__main__":
    main(sys.argv[1:])
