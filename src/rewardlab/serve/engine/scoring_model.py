"""A model as the queue uses it: it scores groups by the one scoring path, with the cache where that is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from rewardlab.artifact.shared_backbone import AdaptedModel
from rewardlab.core.spec import SCORE_TOLERANCE
from rewardlab.core.types import TokenGroup
from rewardlab.model.out_of_memory import release_cached
from rewardlab.model.reward import RewardModel
from rewardlab.model.selftest import probe_groups
from rewardlab.score import compute_groups, score_groups
from rewardlab.serve.engine.prefix_cache import CachedForward, PrefixCache, prompt_of
from rewardlab.serve.engine.queued import MAX_TOTAL

PART_OF_TOLERANCE: Final = 0.2
"""Largest difference that the cache may make, as a part of SCORE_TOLERANCE: 2e-5 in float32, 0.03 in bfloat16, 0.01 in
float16, relative to max(1, |score|)."""
PROBED: Final = ((83, (5, 9, 3)), (48, (11, 2)), (7, (3, 4)), (33, (1, 1)))
"""(tokens of the prompt, tokens of each reply) of the groups with which the cache is tried."""


class ScoringModel:
    """A reward model with its part of the cache."""

    def __init__(self, model: RewardModel, cache: PrefixCache, adapted: AdaptedModel | None = None) -> None:
        """Try the cache on a few random groups; `cache_off` says why it is not used.

        `adapted` is the adapter of a model that shares its backbone.
        """
        self._model = model
        self._adapted = adapted
        self._cache = cache
        self._owner = cache.new_owner()
        self.cache_off = self._refusal()

    def score(self, groups: Sequence[TokenGroup], *, budget: int) -> tuple[list[Any], list[int]]:
        """Return (float32 rewards [K] of each group, how many tokens of each group came from the cache)."""
        self._activate()
        if self.cache_off:
            return list(score_groups(self._model, groups, budget=budget, halves=False)), [0] * len(groups)
        return self._cached(groups, self._cache, budget=MAX_TOTAL * budget)

    def num_known(self, group: TokenGroup) -> int:
        """Return how many first tokens of the group the cache has now."""
        return 0 if self.cache_off else self._cache.num_known(self._owner, prompt_of(group))

    def free_memory(self) -> None:
        """Empty the cache, after memory ran out."""
        self._cache.clear()
        release_cached(self._model.device)

    def is_usable(self) -> bool:
        """Return whether the device still computes: after some errors a CUDA device needs another process."""
        if self._model.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._model.device)
        except RuntimeError:
            return False
        return True

    def forget(self) -> None:
        """Drop everything that the cache holds of this model, which is no longer served."""
        self._cache.drop(self._owner)

    def _activate(self) -> None:
        if self._adapted is not None:
            self._adapted.activate()

    def _cached(self, groups: Sequence[TokenGroup], cache: PrefixCache, *, budget: int) -> tuple[list[Any], list[int]]:
        forward = CachedForward(self._model, cache, self._owner, list(groups))
        # The queue has merged them, and `forward` knows them by their numbers. It also computes what memory does not
        # hold in parts, once the cache is emptied.
        values = compute_groups(self._model, groups, forward, budget=budget, merge=False, halves=False)
        return list(values), forward.cached_tokens

    def _refusal(self) -> str:
        """Return why the cache is not used, or an empty text."""
        if self._cache.max_tokens == 0:
            return "it has no room"
        if self._model.layout != "shared":
            return f"prompts are not shared: the layout is {self._model.layout}"
        self._activate()
        groups = probe_groups(min(64, self._model.config.vocab_size), PROBED)
        longest = max(length for group in groups for length in group.lengths)
        trial = PrefixCache(sum(len(group.shared) for group in groups))
        plain = score_groups(self._model, groups, budget=longest * len(groups))
        error = cached = 0.0
        # The first pass fills the cache, the second one reads from it.
        for _ in range(2):
            found, taken = self._cached(groups, trial, budget=longest * len(groups))
            cached = sum(taken)
            pairs = zip(plain, found, strict=True)
            error = max(error, *(float((abs(a - b) / abs(a).clip(min=1)).max()) for a, b in pairs))
        assert cached > 0
        dtype = str(self._model.compute_dtype).removeprefix("torch.")
        limit = PART_OF_TOLERANCE * SCORE_TOLERANCE[dtype]
        return "" if error <= limit else f"its scores differ by {error:.1e} with it"
