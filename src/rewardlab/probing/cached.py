"""Looks up the last states of conversations instead of computing them, for a head that trains on a frozen model.

A conversation is found by its tokens, so it does not matter to which data and batch it belongs. A run with another
seed, a limit or a mix of the same rows uses the states that are there, and computes only conversations that no run has
computed yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rewardlab.batch import PackedBatch
from rewardlab.core.errors import DataError, ModelError
from rewardlab.core.files import read_summed_json
from rewardlab.core.folders import remove
from rewardlab.core.types import TokenGroup
from rewardlab.model.reward import RewardModel
from rewardlab.probing.states import (
    CHUNK,
    FloatArray,
    conversation_keys,
    hash_of,
    is_whole,
    lists_of,
    state_file,
    states_of,
)

logger = logging.getLogger("rewardlab")


class CachedStates:
    """The last states of conversations, found by their tokens; `RewardModel.known_states` takes it."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[FloatArray, int]] = {}
        self.num_computed = 0
        """Number of replies whose states were computed for this run."""
        self.num_read = 0
        """Number of replies whose states another run, or a probe, had kept."""

    def add(self, keys: Sequence[str], states_RW: FloatArray) -> None:
        """Add states by their `conversation_keys`; states that are known already stay as they are."""
        for number, key in enumerate(keys):
            self._rows.setdefault(key, (states_RW, number))

    def holds(self, group: TokenGroup) -> bool:
        """Return whether the states of all replies of a group are known."""
        return all(key in self._rows for key in conversation_keys(group.shared, group.suffixes))

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return the [R, W] float32 states of a batch, on its device. Raises ModelError for one that is not known."""
        found = [self._rows.get(key) for key in _keys_of(batch)]
        rows = [array[number] for array, number in filter(None, found)]
        if len(rows) < len(found):
            raise ModelError(
                f"the states of {len(found) - len(rows)} of {len(found)} replies were never computed, so they cannot "
                f"be looked up. Leave --cache-states out, and please report this."
            )
        return torch.from_numpy(np.stack(rows)).to(batch.token_ids_T.device)


def cached_states(
    model: RewardModel, parts: Mapping[str, Sequence[TokenGroup]], *, budget: int, cache: Path
) -> CachedStates:
    """Return the last states of every reply of the `parts` (by their names in the log); compute those that are missing.

    They are kept in `cache` part by part, so that an interrupted computation resumes where it ended. Raises DataError
    for a state that is not finite.
    """
    of_model = hash_of(model)
    states = _read(cache, of_model, model)
    layer: int = model.config.num_hidden_layers
    for name, groups in parts.items():
        missing = [number for number, group in enumerate(groups) if not states.holds(group)]
        computed = 0
        for start in range(0, len(missing), CHUNK):
            some = [groups[number] for number in missing[start : start + CHUNK]]
            found = states_of(model, some, [layer], budget=budget, cache=cache, name=name, of_model=of_model)
            keys = [key for group in some for key in conversation_keys(group.shared, group.suffixes)]
            states.add(keys, found[layer])
            computed += len(keys)
        total = sum(group.num_replies for group in groups)
        states.num_computed += computed
        states.num_read += total - computed
        logger.info("states: %s: %d of %d replies looked up, %d computed", name, total - computed, total, computed)
    return states


def _read(cache: Path, of_model: str, model: RewardModel) -> CachedStates:
    """Return all kept and undamaged states of a model; a warning names each damaged list or file."""
    states = CachedStates()
    layer, width = model.config.num_hidden_layers, model.head.in_features
    for path in sorted(lists_of(cache, of_model).glob("*.json")):
        keys = _listed(path)
        file = state_file(cache / "states" / path.stem, layer)
        if keys and is_whole(file, (len(keys), width)):
            states.add(keys, np.load(file, mmap_mode="r"))
        else:
            # The next computation of these states writes the list again.
            remove(path)
    return states


def _listed(path: Path) -> list[str]:
    """Return the keys in a list of conversations; none, with a warning, if it is damaged."""
    try:
        if not path.is_file():
            raise DataError(f"{path} is not a file")
        keys = read_summed_json(path).get("conversations")
    except (DataError, OSError) as error:
        logger.warning("%s; the states that it lists are computed again", error)
        return []
    return [str(key) for key in keys] if isinstance(keys, list) else []


def _keys_of(batch: PackedBatch) -> Iterator[str]:
    """Yield the `conversation_keys` of a batch's replies, in order."""
    tokens_T = batch.token_ids_T.cpu().numpy().astype(np.int32)
    offset = 0
    for num_shared, lengths in batch.groups:
        ends = offset + num_shared + np.cumsum(lengths)
        shared, *suffixes = np.split(tokens_T[offset : ends[-1]], [num_shared, *(ends[:-1] - offset)])
        yield from conversation_keys(shared, suffixes)
        offset = int(ends[-1])
