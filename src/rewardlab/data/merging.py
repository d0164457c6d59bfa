"""Groups with equal prompts become one group, where that saves tokens: the prompt once, and every reply once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from rewardlab.core.types import IntArray, TokenGroup
from rewardlab.data.groups import Groups
from rewardlab.data.layout import common_prefix_length
from rewardlab.data.splits import Numbers

Value = TypeVar("Value", bound=np.generic)


class Place(NamedTuple):
    """Where the replies of a group are after merging."""

    cluster: int
    """The number of the merged group."""
    replies: tuple[int, ...]
    """For each reply of the group, its number there. Replies of the same tokens have one number."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a merged group may be at most. A group that is merged with no other may be more."""

    tokens: int | None = None
    """Its burden; None for no limit."""
    spread: int = 1
    """How many tokens of conversations, each with its own prompt, burden a device as one token that is computed:
    attention copies the keys of the prompt for every reply."""
    groups: int | None = None
    """How many groups are merged."""

    def burden(self, num_tokens: int, num_unshared: int) -> int:
        """Return what computing a group takes, in tokens."""
        return max(num_tokens, -(-num_unshared // self.spread))


class _Cluster:
    """Groups with the same prompt that become one."""

    def __init__(self, group: TokenGroup) -> None:
        self.num_prompt = len(_prompt(group))
        self.num_shared = len(group.shared)
        self.num_groups = self.num_replies = self.num_unshared = 0
        self._shared = group.shared
        # What follows the prompt -> the number of the reply. Emptied once nothing is added any more.
        self._replies: dict[bytes, int] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed."""
        return self.num_unshared - (self.num_replies - 1) * self.num_shared

    def sizes_with(self, group: TokenGroup, replies: Sequence[bytes]) -> tuple[int, int]:
        """Return the tokens (to be computed, of the conversations with a prompt each) with one group more."""
        new = {reply: size for reply, size in zip(replies, group.lengths, strict=True) if reply not in self._replies}
        unshared = self.num_unshared + sum(new.values())
        return unshared - (self.num_replies + len(new) - 1) * self._shared_with(group), unshared

    def add(self, group: TokenGroup, replies: Sequence[bytes]) -> tuple[int, ...]:
        """Add a group; return the numbers of its replies."""
        self.num_groups += 1
        self.num_shared = self._shared_with(group)
        self._shared = self._shared[: self.num_shared]
        numbers = []
        for reply, length in zip(replies, group.lengths, strict=True):
            number = self._replies.setdefault(reply, self.num_replies)
            if number == self.num_replies:
                self.num_replies += 1
                self.num_unshared += length
            numbers.append(number)
        return tuple(numbers)

    def close(self) -> None:
        """Free the texts of the replies; nothing may be added after that."""
        self._replies = {}

    def _shared_with(self, group: TokenGroup) -> int:
        return common_prefix_length([self._shared, group.shared])


class Merging:
    """Takes groups one after the other, and says where each one went."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.clusters: list[_Cluster] = []
        self._limits = limits or Limits()
        # Prompt -> the number of its last cluster. A group joins that one or none.
        self._last: dict[bytes, int] = {}

    def has(self, group: TokenGroup) -> bool:
        """Return whether there is a group with the same prompt."""
        return _prompt(group).tobytes() in self._last

    def cost_of(self, group: TokenGroup) -> int:
        """Return how many tokens to compute the group adds."""
        number = self._last.get(_prompt(group).tobytes())
        if number is None:
            return group.num_tokens
        cluster = self.clusters[number]
        tokens, _ = cluster.sizes_with(group, _replies(group, cluster.num_prompt))
        return min(group.num_tokens, tokens - cluster.num_tokens)

    def add(self, group: TokenGroup, *, alone: bool = False) -> Place:
        """Add a group; return its place. One that is `alone` is merged with no other."""
        if alone:
            self.clusters.append(_Cluster(group))
            return Place(len(self.clusters) - 1, tuple(range(group.num_replies)))
        prompt = _prompt(group)
        replies, key = _replies(group, len(prompt)), prompt.tobytes()
        number = self._last.get(key)
        if number is None or not self._is_joined(self.clusters[number], group, replies):
            if number is not None:
                self.clusters[number].close()
            number = self._last[key] = len(self.clusters)
            self.clusters.append(_Cluster(group))
        return Place(number, self.clusters[number].add(group, replies))

    def _is_joined(self, cluster: _Cluster, group: TokenGroup, replies: Sequence[bytes]) -> bool:
        """Return whether a group becomes a part of a cluster with the same prompt."""
        limits = self._limits
        if limits.groups is not None and cluster.num_groups >= limits.groups:
            return False
        tokens, unshared = cluster.sizes_with(group, replies)
        # Replies may share more than the prompt. A group that does not share that much would cost them what they save,
        # so it joins only where that is cheaper than computing it by itself.
        is_cheaper = tokens - cluster.num_tokens < group.num_tokens
        return is_cheaper and (limits.tokens is None or limits.burden(tokens, unshared) <= limits.tokens)


def merged(
    groups: Sequence[TokenGroup], limits: Limits | None = None, *, keep_rankings: bool = False
) -> tuple[list[TokenGroup], list[Place]]:
    """Return (groups in which those with equal prompts are one, the place of each of `groups` there).

    A merged group has all comparisons, and no ranking: with `keep_rankings`, groups that have one stay as they are.
    """
    merging = Merging(limits)
    places = [merging.add(group, alone=keep_rankings and group.ranking is not None) for group in groups]
    together = [
        _one_group([groups[n] for n in own], [places[n].replies for n in own], cluster.num_shared)
        for own, cluster in zip(members_of(places), merging.clusters, strict=True)
    ]
    return together, places


def members_of(places: Sequence[Place]) -> list[list[int]]:
    """Return, for each merged group, the numbers of the groups in it."""
    members: list[list[int]] = []
    for number, place in enumerate(places):
        # A merged group is begun by its first member, so they come in the order of their numbers.
        if place.cluster == len(members):
            members.append([])
        members[place.cluster].append(number)
    return members


class MergedGroups(Sequence[TokenGroup]):
    """A sequence of groups in which those with equal prompts are one. Each is built at every access.

    Stored groups stay where they are: only numbers are kept in memory.
    """

    def __init__(self, groups: Sequence[TokenGroup], limits: Limits) -> None:
        self._groups = groups
        tokens, replies = sizes_of(groups)
        # Legend: G groups, C merged groups.
        self._cluster_G = np.full(len(groups), -1, dtype=np.int64)
        self._replies_of: dict[int, tuple[int, ...]] = {}
        self._num_shared: list[int] = []
        several: list[tuple[int, int, int]] = []
        for numbers in _candidates(groups):
            merging, start = Merging(limits), len(several)
            for number in numbers:
                cluster, self._replies_of[number] = merging.add(groups[number])
                self._cluster_G[number] = start + cluster
            several += [
                (one.num_tokens, one.num_replies, limits.burden(one.num_tokens, one.num_unshared))
                if one.num_groups > 1
                else (one.num_tokens, one.num_replies, one.num_tokens)
                for one in merging.clusters
            ]
            self._num_shared += [one.num_shared for one in merging.clusters]
        alone = np.flatnonzero(self._cluster_G < 0)
        self._cluster_G[alone] = len(several) + np.arange(len(alone))
        sizes_C = np.array(several, dtype=np.int64).reshape(-1, 3)
        self._num_tokens_C = np.concatenate([sizes_C[:, 0], tokens[alone]])
        self._num_replies_C = np.concatenate([sizes_C[:, 1], replies[alone]])
        self._burdens_C = np.concatenate([sizes_C[:, 2], tokens[alone]])
        # The groups of a cluster are neighbours in this order, in which clusters begin at these places.
        self._order = np.argsort(self._cluster_G, kind="stable")
        self._begins = np.searchsorted(self._cluster_G[self._order], np.arange(len(self) + 1))

    def __len__(self) -> int:
        return len(self._num_tokens_C)

    @overload
    def __getitem__(self, index: int) -> TokenGroup: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenGroup]: ...
    def __getitem__(self, index: int | slice) -> TokenGroup | list[TokenGroup]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        index = range(len(self))[index]
        numbers: list[int] = self._order[self._begins[index] : self._begins[index + 1]].tolist()
        if index >= len(self._num_shared):
            alone: TokenGroup = self._groups[numbers[0]]
            return alone
        members, places = [self._groups[n] for n in numbers], [self._replies_of[n] for n in numbers]
        return _one_group(members, places, self._num_shared[index])

    def num_tokens(self) -> Numbers:
        """Return [C] tokens of each merged group, with shared tokens counted once."""
        return self._num_tokens_C

    def burdens(self) -> Numbers:
        """Return [C] what computing each merged group takes, in tokens (see `Limits`)."""
        return self._burdens_C

    def num_replies(self) -> Numbers:
        """Return [C] the number of replies of each merged group."""
        return self._num_replies_C

    def apart(self, values: Sequence[npt.NDArray[Value]]) -> list[npt.NDArray[Value]]:
        """Return arrays [K, …], one for each of the groups that were merged, from those [K, …] of the merged ones."""
        of_G = zip(self._cluster_G.tolist(), map(self._replies_of.get, range(len(self._cluster_G))), strict=True)
        return [values[cluster] if own is None else values[cluster][np.array(own)] for cluster, own in of_G]


def sizes_of(groups: Sequence[TokenGroup]) -> tuple[Numbers, Numbers]:
    """Return ([G] tokens of each group with shared tokens counted once, [G] its number of replies), without building
    stored groups."""
    if isinstance(groups, Groups | MergedGroups):
        return groups.num_tokens(), groups.num_replies()
    sizes = [(group.num_tokens, group.num_replies) for group in groups]
    tokens_G, replies_G = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    return tokens_G, replies_G


def _candidates(groups: Sequence[TokenGroup]) -> Iterator[list[int]]:
    """Yield the numbers of groups that may have one prompt; of groups in memory also one that has equal replies."""
    if isinstance(groups, Groups):
        # Groups of other keys may have equal tokens too, where their prompts were cut. They are not looked for: reading
        # the tokens of all groups would take too long.
        _, key_G, count = np.unique(groups.prompt_keys(), return_inverse=True, return_counts=True)
        several = np.flatnonzero(count[key_G] > 1)
        order = several[np.argsort(key_G[several], kind="stable")]
        ends = np.flatnonzero(np.diff(key_G[order])) + 1
        yield from (numbers.tolist() for numbers in np.split(order, ends) if len(numbers))
        return
    by_prompt: dict[bytes, list[int]] = {}
    for number, group in enumerate(groups):
        by_prompt.setdefault(_prompt(group).tobytes(), []).append(number)
    yield from (numbers for numbers in by_prompt.values() if len(numbers) > 1 or _repeats(groups[numbers[0]]))


def _repeats(group: TokenGroup) -> bool:
    """Return whether two replies have the same tokens."""
    return len({suffix.tobytes() for suffix in group.suffixes}) < group.num_replies


def _prompt(group: TokenGroup) -> IntArray:
    """Return what is equal for groups with the same prompt."""
    return group.shared[: min(group.prompt_tokens)]


def _replies(group: TokenGroup, num_prompt: int) -> list[bytes]:
    """Return what follows the prompt in each conversation."""
    begin = group.shared[num_prompt:].astype("<i4").tobytes()
    return [begin + suffix.astype("<i4").tobytes() for suffix in group.suffixes]


def _one_group(members: Sequence[TokenGroup], places: Sequence[Sequence[int]], num_shared: int) -> TokenGroup:
    """Return groups as one whose replies have the numbers that `places` gives them.

    Its comparisons are those of all of them; it has no ranking.
    """
    first, count = members[0], max(max(own) for own in places) + 1
    if len(members) == 1 and count == first.num_replies:
        return first
    # (group, reply) of each reply of the merged group: the first one that became it.
    sources: dict[int, tuple[TokenGroup, int]] = {}
    for group, own in zip(members, places, strict=True):
        for reply, number in enumerate(own):
            sources.setdefault(number, (group, reply))
    taken = [sources[number] for number in range(count)]
    return replace(
        first,
        shared=first.shared[:num_shared],
        # A group may share more than all do: what it shares beyond that goes back in front of its replies.
        suffixes=tuple(np.concatenate([group.shared[num_shared:], group.suffixes[reply]]) for group, reply in taken),
        prompt_tokens=tuple(group.prompt_tokens[reply] for group, reply in taken),
        truncated_tokens=tuple(group.truncated_tokens[reply] for group, reply in taken),
        truncated_reply_tokens=tuple(group.truncated_reply_tokens[reply] for group, reply in taken),
        comparisons=tuple(
            replace(comparison, first=own[comparison.first], second=own[comparison.second])
            for group, own in zip(members, places, strict=True)
            for comparison in group.comparisons
        ),
        ranking=None,
        num_typed=sum(group.num_typed for group in members),
        numbers=(),
    )
