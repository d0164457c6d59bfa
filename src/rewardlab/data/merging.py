"""Groups of different requests with equal prompts become one group, where that saves tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rewardlab.core.types import IntArray, TokenGroup
from rewardlab.data.layout import common_prefix_length

Name = tuple[bytes, int]
"""The name of a cluster: its prompt, and its number among the clusters with the same prompt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cluster:
    """Groups with the same prompt that become one."""

    shared: IntArray
    num_replies: int
    num_unshared: int
    """Tokens of all conversations, each with its own prompt."""
    members: tuple[TokenGroup, ...]

    @property
    def cost(self) -> int:
        """Tokens to be computed."""
        return self.num_unshared - (self.num_replies - 1) * len(self.shared)

    def with_group(self, group: TokenGroup) -> _Cluster:
        """Return the cluster with one group more."""
        return _Cluster(
            shared=self.shared[: common_prefix_length([self.shared, group.shared])],
            num_replies=self.num_replies + group.num_replies,
            num_unshared=self.num_unshared + group.num_unshared_tokens,
            members=(*self.members, group),
        )


class Merging:
    """The clusters of a batch to be."""

    def __init__(self) -> None:
        self._clusters: dict[Name, _Cluster] = {}
        # Prompt -> how many clusters have it. A group joins the last one or none.
        self._count: dict[bytes, int] = {}

    def has(self, group: TokenGroup) -> bool:
        """Return whether there is a group with the same prompt."""
        return _prompt(group) in self._count

    def cost_of(self, group: TokenGroup) -> int:
        """Return how many tokens to compute the group adds."""
        cluster = self._last(group)
        return group.num_tokens if cluster is None else min(group.num_tokens, _added(cluster, group))

    def add(self, group: TokenGroup) -> Name:
        """Add a group; return the name of the cluster that it is in."""
        prompt, cluster = _prompt(group), self._last(group)
        # Replies may share more than the prompt. A group that does not share that much would cost them what they save,
        # so it joins only where that is cheaper than computing it by itself.
        if cluster is not None and _added(cluster, group) < group.num_tokens:
            name = prompt, self._count[prompt]
            self._clusters[name] = cluster.with_group(group)
            return name
        self._count[prompt] = self._count.get(prompt, 0) + 1
        name = prompt, self._count[prompt]
        self._clusters[name] = _Cluster(
            shared=group.shared,
            num_replies=group.num_replies,
            num_unshared=group.num_unshared_tokens,
            members=(group,),
        )
        return name

    def groups(self) -> list[TokenGroup]:
        """Return the group of each cluster, in the order in which they began."""
        return [_one_group(cluster) for cluster in self._clusters.values()]

    def _last(self, group: TokenGroup) -> _Cluster | None:
        prompt = _prompt(group)
        return self._clusters[prompt, self._count[prompt]] if prompt in self._count else None


def merged(groups: Sequence[TokenGroup]) -> tuple[list[TokenGroup], list[list[int]]]:
    """Return (groups in which those with equal prompts are joined, the numbers of the groups in each).

    The replies of a joined group come in the order of these numbers.
    """
    merging = Merging()
    members: dict[Name, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(merging.add(group), []).append(number)
    return merging.groups(), list(members.values())


def _added(cluster: _Cluster, group: TokenGroup) -> int:
    return cluster.with_group(group).cost - cluster.cost


def _prompt(group: TokenGroup) -> bytes:
    """Return what is equal for groups with the same prompt."""
    return group.shared[: min(group.prompt_tokens)].tobytes()


def _one_group(cluster: _Cluster) -> TokenGroup:
    """Return the groups of a cluster as one, their replies in the order of the groups."""
    groups, num_shared = cluster.members, len(cluster.shared)
    if len(groups) == 1:
        return groups[0]
    # A group may share more than its cluster does: what it shares beyond that goes back in front of its suffixes.
    return replace(
        groups[0],
        shared=cluster.shared,
        suffixes=tuple(
            np.concatenate([group.shared[num_shared:], suffix]) for group in groups for suffix in group.suffixes
        ),
        prompt_tokens=tuple(number for group in groups for number in group.prompt_tokens),
        truncated_tokens=tuple(number for group in groups for number in group.truncated_tokens),
        truncated_reply_tokens=tuple(number for group in groups for number in group.truncated_reply_tokens),
        numbers=(),
    )
