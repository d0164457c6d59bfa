"""Token-budget plans: which groups are computed together.

A plan is lists of indices; it decides speed and memory, never a number (law 1: splitting changes nothing).
"""

from __future__ import annotations

from collections.abc import Sequence

from rewardlab.core.errors import ConfigError
from rewardlab.core.types import TokenGroup

Plan = list[list[int]]


def plan_packed(num_tokens: Sequence[int], budget: int, *, num_ranks: int = 1) -> list[Plan]:
    """Rows of at most `budget` tokens by first-fit decreasing, dealt to `num_ranks` ranks.

    Every rank gets the same number of rows; empty rows (to be filled by dummies) make up the difference, since
    ranks that run different numbers of forward passes wait for each other for ever.

    Raises ConfigError if one group is larger than the budget.
    """
    rows: Plan = []
    loads: list[int] = []
    for index in sorted(range(len(num_tokens)), key=lambda index: (-num_tokens[index], index)):
        size = num_tokens[index]
        if size > budget:
            raise ConfigError(
                f"one preference takes {size} tokens at once, above --micro-token-budget {budget}. "
                f"Raise the budget to at least {size}, or lower --max-seq-len or --max-replies."
            )
        row = next((row for row, load in enumerate(loads) if load + size <= budget), None)
        if row is None:
            row = len(rows)
            rows.append([])
            loads.append(0)
        rows[row].append(index)
        loads[row] += size
    return deal(rows, loads, num_ranks)


def plan_padded(lengths: Sequence[Sequence[int]], budget: int, *, num_ranks: int = 1) -> list[Plan]:
    """Batches of at most `budget` tokens counting padding, groups of like length together.

    ``lengths[i]`` holds the length of every reply of group i with its own copy of the prompt.

    Raises ConfigError if one group is larger than the budget.
    """
    batches: Plan = []
    loads: list[int] = []
    num_rows = longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-max(lengths[index]), index)):
        size, replies = max(lengths[index]), len(lengths[index])
        if size * replies > budget:
            raise ConfigError(
                f"one preference takes {size * replies} padded tokens at once, above --micro-token-budget {budget}. "
                f"Raise the budget to at least {size * replies}, or lower --max-seq-len or --max-replies."
            )
        if not batches or max(longest, size) * (num_rows + replies) > budget:
            batches.append([])
            loads.append(0)
            num_rows = longest = 0
        batches[-1].append(index)
        num_rows, longest = num_rows + replies, max(longest, size)
        loads[-1] = num_rows * longest
    return deal(batches, loads, num_ranks)


def plan_groups(groups: Sequence[TokenGroup], budget: int, *, layout: str, num_ranks: int = 1) -> list[Plan]:
    """The plan for a layout: `shared`, `unshared` (packed, every reply with its own prompt) or `padded`."""
    if layout == "padded":
        return plan_padded([group.lengths for group in groups], budget, num_ranks=num_ranks)
    return plan_packed([cost(group, layout) for group in groups], budget, num_ranks=num_ranks)


def cost(group: TokenGroup, layout: str) -> int:
    """Tokens that a group takes when it is computed alone."""
    if layout == "padded":
        return max(group.lengths) * group.num_replies
    return group.num_tokens if layout == "shared" else group.num_unshared_tokens


def require_fit(groups: Sequence[TokenGroup], budget: int, *, layout: str) -> None:
    """Raise ConfigError if any group is larger than the budget."""
    if groups:
        plan_groups([max(groups, key=lambda group: cost(group, layout))], budget, layout=layout)


def deal(rows: Plan, loads: Sequence[int], num_ranks: int) -> list[Plan]:
    """Give rows to ranks, heaviest first, each to the rank with the least work; fill up with empty rows."""
    ranks: list[Plan] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    limit = -(-len(rows) // num_ranks)
    for row in sorted(range(len(rows)), key=lambda row: (-loads[row], row)):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < limit), key=lambda r: (work[r], r))
        ranks[rank].append(rows[row])
        work[rank] += loads[row]
    for plan in ranks:
        plan.extend([] for _ in range(limit - len(plan)))
    return ranks
