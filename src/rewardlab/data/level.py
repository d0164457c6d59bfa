"""Token-budget plans whose micro-batches are of like size: less memory at the peak, even work on all ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from rewardlab.core.types import TokenGroup
from rewardlab.data.pack import Plan, cost, deal, plan_groups, plan_packed


def plan_level(num_tokens: Sequence[int], budget: int, *, num_ranks: int = 1) -> list[Plan]:
    """As many rows on each rank as `plan_packed` makes, but filled evenly: the largest group first, each to the row
    with the least so far (Graham 1969). Where that gives a larger row than `plan_packed` has, its plan is kept.

    Rows that would be empty on some ranks are filled too, so that a rank has a dummy only where groups are too few.

    Raises ConfigError if one group is larger than the budget.
    """
    packed = plan_packed(num_tokens, budget, num_ranks=num_ranks)
    if not num_tokens:
        return packed
    num_rows = min(len(num_tokens), sum(map(len, packed)))
    rows: Plan = [[] for _ in range(num_rows)]
    loads = [(0, row) for row in range(num_rows)]
    for index in sorted(range(len(num_tokens)), key=lambda index: (-num_tokens[index], index)):
        load, row = loads[0]
        rows[row].append(index)
        heapq.heapreplace(loads, (load + num_tokens[index], row))
    largest = max(sum(num_tokens[index] for index in row) for plan in packed for row in plan)
    if max(load for load, _ in loads) > largest:
        return packed
    return deal(rows, [load for load, _ in sorted(loads, key=lambda entry: entry[1])], num_ranks)


def plan_micro_batches(groups: Sequence[TokenGroup], budget: int, *, layout: str, num_ranks: int = 1) -> list[Plan]:
    """The micro-batches of a training step: level rows, or in the padded layout groups of like length together."""
    if layout == "padded":
        return plan_groups(groups, budget, layout=layout, num_ranks=num_ranks)
    return plan_level([cost(group, layout) for group in groups], budget, num_ranks=num_ranks)
