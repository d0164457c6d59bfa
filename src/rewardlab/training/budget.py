"""`--micro-token-budget auto`: finds the largest micro-batch that fits by computing some.

Memory grows almost linearly with the tokens of a micro-batch, so a few trials show where it ends. The trials are
forward and backward passes over the run's own longest preferences, which are the worst case of any step. They leave
nothing behind: no gradient, no random number drawn, no weight changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from rewardlab.batch import PackedBatch, pack
from rewardlab.core.errors import DeviceMemoryError
from rewardlab.core.types import TokenGroup
from rewardlab.data.pack import cost, largest_groups
from rewardlab.model.config import DEFAULT_BUDGET
from rewardlab.model.out_of_memory import release_cached, unless_out_of_memory
from rewardlab.model.reward import RewardModel
from rewardlab.training.cost.memory import HighWater, free_memory, in_use
from rewardlab.training.cost.throughput import GIB
from rewardlab.training.loop import losses
from rewardlab.training.loop.optimizer import state_bytes
from rewardlab.training.settings.config import LossConfig

CEILING: Final = {"cpu": 8192, "cuda": 65_536}
"""Tokens of a micro-batch above which a device gets no faster and only takes more memory."""
SHARE: Final = 0.85
"""Share of the free memory that a step may take: allocators waste some, and others use the machine too."""
MAX_GROWTH: Final = 4
"""How many times the largest trial the fitted line is trusted to reach."""
MAX_TRIALS: Final = 8
STEP: Final = 256
"""Budgets are rounded to multiples of this number of tokens."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A micro-batch that was computed."""

    tokens: int
    """Tokens that it had; at most the budget tried."""
    bytes: int
    """The most memory that it took beyond what was in use before."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A budget, and why it was chosen."""

    budget: int
    reason: str


def search(run: Callable[[int], Trial | None], *, floor: int, ceiling: int, limit: int) -> Choice:
    """Return the largest budget between `floor` and `ceiling` whose trial takes at most `limit` bytes.

    `run(budget)` is a trial; it returns None if memory ran out. The chosen budget has always been tried successfully.
    Only `floor` is also chosen if it takes more than the limit and still runs, since nothing smaller is possible.

    Raises DeviceMemoryError if memory runs out even with `floor`.
    """
    computed: list[Trial] = []
    best, taken = 0, 0
    too_large = ceiling + 1
    # The first trial is small, so that it fits in most cases and gives the line a point.
    budget = max(floor, min(ceiling, _round(ceiling // 8)))
    for _ in range(MAX_TRIALS):
        trial = run(budget)
        computed += [trial] if trial is not None else []
        if trial is not None and trial.bytes <= limit:
            best, taken = budget, trial.bytes
            if budget == ceiling:
                return Choice(budget=best, reason="no micro-batch is larger, or faster")
        else:
            too_large = budget
            if budget == floor:
                if trial is None:
                    raise _does_not_fit(floor)
                return Choice(budget=floor, reason=f"the largest preference; above {SHARE:.0%} of the free memory")
        proposal = _propose(computed, best, too_large, floor=floor, ceiling=ceiling, limit=limit)
        # A gain of a tenth is not worth another trial.
        if proposal <= max(best * 1.1, best + 1) and (proposal < ceiling or best == ceiling):
            break
        budget = proposal
    # All trials were too large; the smallest possible budget is the last chance.
    if best == 0:
        return search(run, floor=floor, ceiling=floor, limit=limit)
    return Choice(budget=best, reason=f"{taken / GIB:.2f} GiB of {limit / GIB:.2f} to be had")


def _propose(computed: Sequence[Trial], best: int, too_large: int, *, floor: int, ceiling: int, limit: int) -> int:
    """Return the next budget to try: twice the best so far, then where the line through the trials meets the limit."""
    if not best:
        return max(floor, _round((floor + too_large) // 2)) if too_large > 2 * floor else floor
    aim = 2 * best
    if len({trial.tokens for trial in computed}) > 1:
        tokens, taken = zip(*((trial.tokens, trial.bytes) for trial in computed), strict=True)
        slope, start = np.polyfit(np.array(tokens, float), np.array(taken, float), 1)
        aim = int((limit - start) / slope) if slope > 0 else MAX_GROWTH * best
    aim = min(aim, MAX_GROWTH * best)
    # Between a budget that fits and one that does not, bisect.
    if aim >= too_large and too_large <= ceiling:
        aim = (best + too_large) // 2
    return ceiling if aim >= ceiling else max(_round(aim), best)


def _round(tokens: int) -> int:
    return tokens // STEP * STEP or tokens


def _does_not_fit(tokens: int) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"out of memory with one preference of {tokens} tokens, the largest. Lower --max-seq-len or --max-replies, "
        f"turn on --activation-checkpointing, or train with --lora."
    )


def choose_budget(
    model: RewardModel,
    groups: Sequence[TokenGroup],
    config: LossConfig,
    *,
    batch_size: int,
    floor: int,
    optimizer: str = "adamw",
    processes: int = 1,
) -> Choice:
    """Return the budget for training `model` on `groups`, found by trial.

    `floor` is the tokens of the largest of the groups. The state of `optimizer`, which does not exist yet, is added to
    what the trials take. `processes` of this machine choose at the same time; on a CPU they share its memory. Weights,
    gradients and random numbers are as before when this returns.

    Raises DeviceMemoryError if the largest preference does not fit.
    """
    device = model.device
    worst = largest_groups(groups, batch_size, model.layout)
    # No micro-batch is larger than a whole step made of the longest preferences.
    ceiling = max(floor, min(CEILING[device.type], _size(worst, model.layout)))
    free = free_memory(device)
    if free is None:
        budget = min(max(DEFAULT_BUDGET, floor), max(ceiling, floor))
        return Choice(budget=budget, reason="the default, since this system does not say how much memory is free")
    if device.type == "cpu":
        free //= processes
    before = in_use(device)
    state = state_bytes(model.parameters(), optimizer)

    def run(budget: int) -> Trial | None:
        chosen = fill(worst, budget, model.layout)
        batch = pack(chosen, share=model.layout != "unshared", indices=range(len(chosen)))
        with HighWater(device) as water:
            finished = unless_out_of_memory(lambda: _compute(model, batch, config))
        model.zero_grad(set_to_none=True)
        # On the CPU, freed memory counts as the process's until it is given back, and would be in the next trial's sum.
        release_cached(device)
        # The optimiser's state is created by the first step, after the trials, so it is added here.
        taken = water.bytes - before + state
        return None if finished is None else Trial(tokens=_size(chosen, model.layout), bytes=taken)

    devices = [device] if device.type == "cuda" else []
    # Trials draw random numbers, such as dropout, and the run must draw the same whether there were trials or not.
    with torch.random.fork_rng(devices=devices):
        return search(run, floor=floor, ceiling=ceiling, limit=int(SHARE * free))


def _compute(model: RewardModel, batch: PackedBatch, config: LossConfig) -> bool:
    """Run forward and backward of a micro-batch that is not the first of its step, so gradients exist already."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    moved = batch.to(model.device)
    torch.autograd.backward(losses.preference_loss(model(moved), moved, config))
    return True


def fill(groups: Sequence[TokenGroup], budget: int, layout: str) -> list[TokenGroup]:
    """Return the groups in order, leaving out those that would exceed the budget."""
    chosen: list[TokenGroup] = []
    for group in groups:
        if _size([*chosen, group], layout) <= budget:
            chosen.append(group)
    return chosen


def _size(groups: Sequence[TokenGroup], layout: str) -> int:
    """Return the tokens computed for groups in one micro-batch, padding included."""
    if layout == "padded":
        return max(max(group.lengths) for group in groups) * sum(group.num_replies for group in groups)
    return sum(cost(group, layout) for group in groups)
