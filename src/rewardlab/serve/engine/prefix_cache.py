"""A cache of prompts across requests: keys and values of their first tokens, in blocks, the least used dropped first.

A block belongs to a model and is known by the tokens in it and by the block before it, so that two prompts share the
blocks of their common beginning. Only whole blocks are kept. Legend: P tokens.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rewardlab.batch import PackedBatch
from rewardlab.core.types import IntArray, TokenGroup
from rewardlab.model.past import Past, PromptStates, joined
from rewardlab.model.reward import RewardModel

BLOCK: Final = 16
"""Tokens of a block."""
MIN_TOKENS: Final = 32
"""Fewest tokens of a prompt that are taken from the cache: with fewer there is little to gain."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    owner: int
    number: int
    """Identifies the block; the next blocks of a prompt refer to it by this number, which no other block ever gets."""
    states: PromptStates


class PrefixCache:
    """Keys and values of at most `max_tokens` tokens. Only the thread that computes may use it, except for `new_owner`,
    which any thread may call."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        # Ordered from the least to the most recently used block. Whenever a block is touched, the blocks before it in
        # its prompt are touched after it. So no block is dropped before those behind it, which cannot be found without
        # it.
        self._blocks: OrderedDict[tuple[int, bytes], _Block] = OrderedDict()
        # Each has its own atomic counter, since models are loaded in other threads: a number given twice would mix up
        # prompts.
        self._owners = itertools.count(-1, -1)
        self._numbers = itertools.count(1)
        self._dropped: set[int] = set()

    @property
    def num_tokens(self) -> int:
        """Tokens that it holds."""
        return len(self._blocks) * BLOCK

    def new_owner(self) -> int:
        """Return a number for a model, under which its blocks are kept."""
        return next(self._owners)

    def num_known(self, owner: int, token_ids: IntArray) -> int:
        """Return how many of the first tokens [P] are in the cache, without counting that as a use."""
        found = sum(1 for _ in self._find(owner, token_ids)) * BLOCK
        return found if found >= MIN_TOKENS else 0

    def longest(self, owner: int, token_ids: IntArray) -> PromptStates | None:
        """Return the states of as many of the first tokens [P] as there are, None if there are too few."""
        found = list(self._find(owner, token_ids))
        if len(found) * BLOCK < MIN_TOKENS:
            return None
        self._touch([key for key, _ in found])
        return joined([block.states for _, block in found])

    def add(self, owner: int, token_ids: IntArray, states: PromptStates) -> None:
        """Keep the states of the last whole blocks of these tokens [P]; those before them must be in the cache.

        `states` are those of the tokens behind what `longest` found. Blocks that nobody used for longest make room.
        """
        found = [key for key, _ in self._find(owner, token_ids)]
        start = len(token_ids) - states.num_tokens
        parent = owner if not found else self._blocks[found[-1]].number
        for begin in range(len(found) * BLOCK, len(token_ids) - BLOCK + 1, BLOCK):
            # The rest of the prompt is not kept if an earlier block has been dropped meanwhile or the room ends.
            if begin < start or owner in self._dropped or begin + BLOCK > self.max_tokens:
                break
            number = next(self._numbers)
            key = (parent, _bytes(token_ids[begin : begin + BLOCK]))
            part = states.part(begin - start, begin - start + BLOCK)
            self._blocks[key] = _Block(owner=owner, number=number, states=part)
            parent = number
            found.append(key)
        self._touch(found)
        while self.num_tokens > self.max_tokens:
            self._blocks.popitem(last=False)

    def drop(self, owner: int) -> None:
        """Forget a model's blocks, and keep none of it from now on."""
        self._dropped.add(owner)
        for key in [key for key, block in self._blocks.items() if block.owner == owner]:
            del self._blocks[key]

    def clear(self) -> None:
        """Forget everything, to free memory."""
        self._blocks.clear()

    def _find(self, owner: int, token_ids: IntArray) -> Iterator[tuple[tuple[int, bytes], _Block]]:
        """Yield the blocks with which the tokens begin, in order."""
        parent = owner
        for begin in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            key = (parent, _bytes(token_ids[begin : begin + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                return
            yield key, block
            parent = block.number

    def _touch(self, chain: list[tuple[int, bytes]]) -> None:
        for key in reversed(chain):
            self._blocks.move_to_end(key)


class CachedForward:
    """The forward pass of a model whose prompts may begin in a cache; for `score.compute_groups`.

    It counts, for the groups that it was made for, which tokens it took from the cache.
    """

    def __init__(self, model: RewardModel, cache: PrefixCache, owner: int, groups: list[TokenGroup]) -> None:
        self._model = model
        self._cache = cache
        self._owner = owner
        self._groups = groups
        self.cached_tokens = [0] * len(groups)
        """For each group, tokens of its prompt that were taken from the cache."""

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return float32 rewards [R] of a batch, and keep the prompts that are not in the cache yet."""
        prompts = [prompt_of(self._groups[number]) for number in batch.indices]
        known = [self._cache.longest(self._owner, prompt) for prompt in prompts]
        num_known = [0 if states is None else states.num_tokens for states in known]
        num_kept = [
            max(0, len(prompt) // BLOCK * BLOCK - number) for prompt, number in zip(prompts, num_known, strict=True)
        ]
        past = Past(known, num_kept)
        scores_R: Tensor = self._model(without_known(batch, num_known), past).float()
        for place, (group, prompt) in enumerate(zip(batch.indices, prompts, strict=True)):
            self.cached_tokens[group] += num_known[place]
            if (states := past.kept(place)) is not None:
                self._cache.add(self._owner, prompt[: num_known[place] + num_kept[place]], states)
        return scores_R


def prompt_of(group: TokenGroup) -> IntArray:
    """Return the tokens of a group that may be kept: those before its replies that all replies share."""
    return group.shared[: min(group.prompt_tokens)]


def without_known(batch: PackedBatch, num_known: list[int]) -> PackedBatch:
    """Return the batch without the first `num_known` shared tokens of each group; positions stay as they are."""
    if not any(num_known):
        return batch
    kept_T = torch.ones(batch.num_tokens, dtype=torch.bool)
    start = 0
    for number, (num_shared, suffixes) in zip(num_known, batch.groups, strict=True):
        kept_T[start : start + number] = False
        start += num_shared + sum(suffixes)
    new_T = (torch.cumsum(kept_T, 0) - 1).to(batch.read_at_R.device)
    index_T = torch.nonzero(kept_T)[:, 0].to(batch.token_ids_T.device)
    return replace(
        batch,
        token_ids_T=batch.token_ids_T[index_T],
        positions_T=batch.positions_T[index_T],
        keys_T=batch.keys_T[index_T],
        groups=tuple(
            (num_shared - number, suffixes)
            for number, (num_shared, suffixes) in zip(num_known, batch.groups, strict=True)
        ),
        read_at_R=new_T[batch.read_at_R],
    )


def _bytes(token_ids: IntArray) -> bytes:
    return np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
