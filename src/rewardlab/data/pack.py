"""Token-budget plans: which groups are computed together in a micro-batch.

A plan is a list of lists of indices. It decides speed and memory, never a result (law 1: splitting changes nothing).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import ConfigError
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Groups
from rewardlab.data.merging import MergedGroups, sizes_of

Plan = list[list[int]]


class Piece(NamedTuple):
    """Replies `first` to `stop` (exclusive) of the group with index `group`. Pieces sort in the order of the
    replies."""

    group: int
    first: int
    stop: int
    num_tokens: int
    """Tokens to compute for them alone, with one copy of what they share."""


def plan_packed(num_tokens: Sequence[int], budget: int, *, num_ranks: int = 1) -> list[Plan]:
    """Plan rows of at most `budget` tokens by first-fit decreasing, dealt to `num_ranks` ranks.

    Every rank gets the same number of rows; empty rows, to be filled by dummies, make up the difference. Ranks that ran
    different numbers of forward passes would wait for each other's collectives for ever.

    Raises ConfigError if one group is larger than the budget.
    """
    largest = max(num_tokens, default=0)
    if largest > budget:
        raise ConfigError(
            f"one preference takes {largest} tokens at once, above --micro-token-budget {budget}. "
            f"Raise the budget to at least {largest}, or lower --max-seq-len or --max-replies."
        )
    room = _Room(len(num_tokens), budget)
    rows: Plan = []
    loads: list[int] = []
    for index in sorted(range(len(num_tokens)), key=lambda index: (-num_tokens[index], index)):
        row = room.take(num_tokens[index])
        if row == len(rows):
            rows.append([])
            loads.append(0)
        rows[row].append(index)
        loads[row] += num_tokens[index]
    return deal(rows, loads, num_ranks)


class _Room:
    """Tokens that still fit into each row, as a tree of maxima, in which the first row with room is found in O(log
    rows).

    Looking at the rows one by one takes time that grows with the square of their number.
    """

    def __init__(self, num_rows: int, budget: int) -> None:
        self._size = 1 << max(num_rows - 1, 0).bit_length()
        self._most = [budget] * (2 * self._size)

    def take(self, size: int) -> int:
        """Return the first row that has room for `size` tokens, and take them."""
        most, node = self._most, 1
        while node < self._size:
            node *= 2
            if most[node] < size:
                node += 1
        row = node - self._size
        most[node] -= size
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
        return row


def plan_padded(lengths: Sequence[Sequence[int]], budget: int, *, num_ranks: int = 1) -> list[Plan]:
    """Plan batches of at most `budget` tokens, padding included, with groups of similar length together.

    ``lengths[i]`` holds the length of every reply of group i with its own copy of the prompt.

    Raises ConfigError if one group is larger than the budget.
    """
    return _plan_padded([max(of) for of in lengths], [len(of) for of in lengths], budget, num_ranks)


def _plan_padded(longest_of: Sequence[int], replies_of: Sequence[int], budget: int, num_ranks: int) -> list[Plan]:
    batches: Plan = []
    loads: list[int] = []
    num_rows = longest = 0
    for index in sorted(range(len(longest_of)), key=lambda index: (-longest_of[index], index)):
        size, replies = longest_of[index], replies_of[index]
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
    """Return the plan for a layout: `shared`, `unshared` (packed, every reply with its own prompt) or `padded`.

    Raises ConfigError if one group is larger than the budget.
    """
    if layout == "padded":
        if isinstance(groups, Groups):
            return _plan_padded(groups.longest().tolist(), groups.num_replies().tolist(), budget, num_ranks)
        return plan_padded([group.lengths for group in groups], budget, num_ranks=num_ranks)
    return plan_packed(costs(groups, layout), budget, num_ranks=num_ranks)


def plan_replies(groups: Sequence[TokenGroup], budget: int, *, layout: str) -> list[list[Piece]]:
    """Plan rows of at most `budget` tokens for scoring, which needs no whole groups: larger ones are split by replies.

    A single conversation above the budget gets a row of its own.
    """
    pieces: list[Piece] = []
    counts_G = sizes_of(groups)[1].tolist()
    for number, (size, count) in enumerate(zip(costs(groups, layout), counts_G, strict=True)):
        pieces += [Piece(number, 0, count, size)] if size <= budget else _cut(number, groups[number], budget, layout)
    fitting = [piece for piece in pieces if piece.num_tokens <= budget]
    if layout == "padded":
        counts = [piece.stop - piece.first for piece in fitting]
        longest = [piece.num_tokens // count for piece, count in zip(fitting, counts, strict=True)]
        (plan,) = _plan_padded(longest, counts, budget, 1)
    else:
        (plan,) = plan_packed([piece.num_tokens for piece in fitting], budget)
    alone = [[piece] for piece in pieces if piece.num_tokens > budget]
    return alone + [[fitting[index] for index in row] for row in plan]


def _cut(number: int, group: TokenGroup, budget: int, layout: str) -> Iterator[Piece]:
    """Yield a group as pieces of as many replies as the budget holds, at least one, in order."""
    first = size = longest = 0
    for reply, length in enumerate(group.lengths):
        longest = max(longest, length)
        if layout == "padded":
            grown = longest * (reply - first + 1)
        else:
            grown = size + (len(group.suffixes[reply]) if layout == "shared" and size else length)
        if grown > budget and size:
            yield Piece(number, first, reply, size)
            first, longest, grown = reply, length, length
        size = grown
    yield Piece(number, first, group.num_replies, size)


def halves_of(
    groups: Sequence[TokenGroup], row: Sequence[Piece], layout: str
) -> tuple[list[Piece], list[Piece]] | None:
    """Return a row of pieces as two of about half the tokens, in order; None for a single conversation."""
    if len(row) > 1:
        sums = np.cumsum([piece.num_tokens for piece in row])
        middle = min(int(np.searchsorted(sums, sums[-1] / 2)) + 1, len(row) - 1)
        return list(row[:middle]), list(row[middle:])
    (piece,) = row
    middle = (piece.first + piece.stop) // 2
    if middle == piece.first:
        return None
    first, second = piece._replace(stop=middle), piece._replace(first=middle)
    one, other = (
        half._replace(num_tokens=cost(part_of(groups[piece.group], half), layout)) for half in (first, second)
    )
    return [one], [other]


def part_of(group: TokenGroup, piece: Piece) -> TokenGroup:
    """Return the replies of a piece as a group to be scored.

    It has no comparisons and no ranking, which may involve replies of other pieces.
    """
    if piece.stop - piece.first == group.num_replies:
        return group
    kept = slice(piece.first, piece.stop)
    return replace(
        group,
        suffixes=group.suffixes[kept],
        prompt_tokens=group.prompt_tokens[kept],
        truncated_tokens=group.truncated_tokens[kept],
        truncated_reply_tokens=group.truncated_reply_tokens[kept],
        numbers=group.numbers[kept],
        comparisons=(),
        ranking=None,
    )


def costs(groups: Sequence[TokenGroup], layout: str) -> list[int]:
    """Return the tokens to compute for each group alone, padding included."""
    costs_G: list[int] = _costs(groups, layout).tolist()
    return costs_G


def _costs(groups: Sequence[TokenGroup], layout: str) -> npt.NDArray[np.int64]:
    """Return [G] `costs` as an array, without building stored groups."""
    if isinstance(groups, MergedGroups):
        assert layout == "shared", "only groups that share their prompts are merged"
        return groups.burdens()
    if not isinstance(groups, Groups):
        return np.array([cost(group, layout) for group in groups], dtype=np.int64)
    if layout == "padded":
        return groups.longest() * groups.num_replies()
    return groups.num_tokens() if layout == "shared" else groups.num_unshared_tokens()


def largest_cost(parts: Iterable[Sequence[TokenGroup]], layout: str) -> int:
    """Return the tokens of the largest group of any part; 0 without groups."""
    return max((int(_costs(part, layout).max(initial=0)) for part in parts), default=0)


def largest_groups(groups: Sequence[TokenGroup], count: int, layout: str) -> list[TokenGroup]:
    """Return the `count` groups that take the most tokens, the largest first, equal ones in their order.

    Of stored groups, only these are built.
    """
    costs_G = _costs(groups, layout)
    count = min(count, len(costs_G))
    if count == 0:
        return []
    # Sorting all costs would take much longer for millions of groups than finding the smallest that counts.
    least = np.partition(costs_G, -count)[-count]
    candidates = np.flatnonzero(costs_G >= least)
    order = np.argsort(-costs_G[candidates], kind="stable")[:count]
    return [groups[int(index)] for index in candidates[order]]


def cost(group: TokenGroup, layout: str) -> int:
    """Return the tokens to compute for a group alone, padding included."""
    if layout == "padded":
        return max(group.lengths) * group.num_replies
    return group.num_tokens if layout == "shared" else group.num_unshared_tokens


def require_fit(parts: Iterable[Sequence[TokenGroup]], budget: int, *, layout: str) -> None:
    """Raise ConfigError if any group of any part is larger than the budget."""
    largest = [group for part in parts for group in largest_groups(part, 1, layout)]
    if largest:
        plan_groups(largest_groups(largest, 1, layout), budget, layout=layout)


def deal(rows: Plan, loads: Sequence[int], num_ranks: int) -> list[Plan]:
    """Deal rows to ranks, the largest first, each to the rank with the least work so far, and fill up with empty
    rows."""
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


def plan_level(num_tokens: Sequence[int], budget: int, *, num_ranks: int = 1) -> list[Plan]:
    """Plan as many rows on each rank as `plan_packed` does, but fill them evenly.

    Groups are taken from the largest on, each for the row with the fewest tokens so far (Graham 1969). If that gives a
    larger row than `plan_packed` has, the plan of `plan_packed` is kept. Level rows need less memory at the peak, and
    let all ranks finish together. Rows that would be empty on some ranks are filled too, so that a rank gets a dummy
    only where there are too few groups.

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


def plan_micro_batches(
    groups: Sequence[TokenGroup],
    budget: int,
    *,
    layout: str,
    num_ranks: int = 1,
    burdens: Sequence[int] | None = None,
) -> list[Plan]:
    """Plan the micro-batches of a training step: level rows, or in the padded layout groups of similar length together.

    `burdens` are what each group takes of the budget where that is not its tokens; the padded layout has none.

    Raises ConfigError if one group is larger than the budget.
    """
    if layout == "padded":
        return plan_groups(groups, budget, layout=layout, num_ranks=num_ranks)
    return plan_level(burdens or [cost(group, layout) for group in groups], budget, num_ranks=num_ranks)
