"""The states of canaries that a run keeps, so that a frozen backbone computes them only once.

A score is the head's product with a state, and the state follows from the backbone, the arithmetic and the tokens. As
long as these are the same, only the product is computed again. It equals that of a fresh forward pass bit for bit,
since each state is computed from its conversation alone: in a batch with others its last bits may differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rewardlab.batch import PackedBatch, pack
from rewardlab.core.files import sha256_file, sha256_json
from rewardlab.core.types import IntArray, TokenGroup
from rewardlab.model.reward import RewardModel

logger = logging.getLogger("rewardlab")
_Known = dict[bytes, tuple[PackedBatch, Tensor]]
LIVE: Final = "live"
"""The arithmetic of the model in training."""
SAVED: Final = "float32"
"""The canonical arithmetic of the folder that was read back."""


class CanaryStates:
    """The states of canaries of one backbone, by arithmetic, device and tokens.

    They are kept from one save to the next of a model that is whole in this process; a sharded one gets new ones each
    time.
    """

    def __init__(self) -> None:
        self._backbone = ""
        self._known: dict[tuple[str, torch.device], _Known] = {}

    def begin(self, backbone: str) -> None:
        """Forget all states unless they are those of this backbone, by its `backbone_digest`."""
        if backbone != self._backbone:
            self._backbone, self._known = backbone, {}

    def confirm(self, model: RewardModel, arithmetic: str) -> None:
        """Compute the longest conversation again, and forget all states if any bit of its state differs.

        `model` is in evaluation mode.
        """
        known = self._of(model, arithmetic)
        if not known:
            return
        batch, state = known[max(known, key=len)]
        with torch.no_grad(), model.computing():
            same = torch.equal(model.final_states(batch), state)
        if not same:
            logger.info("canaries: a state came out in other bits than before (%s), so all are computed", arithmetic)
            self._known = {}

    @contextmanager
    def of(self, model: RewardModel, arithmetic: str) -> Iterator[None]:
        """Within the block, let a model look up its states; unknown ones are computed and kept."""
        known = self._of(model, arithmetic)

        def state_of(batch: PackedBatch) -> Tensor:
            tokens = _key(batch)
            if tokens not in known:
                with model.computing():
                    known[tokens] = batch, model.final_states(batch)
            return known[tokens][1]

        before, model.known_states = model.known_states, state_of
        try:
            yield
        finally:
            model.known_states = before

    def hold(self, model: RewardModel, arithmetic: str, sequences: Sequence[IntArray]) -> bool:
        """Return whether the states of all token sequences are known, so that the backbone need not be computed."""
        known = self._of(model, arithmetic)
        return all(_key(alone(token_ids)) in known for token_ids in sequences)

    def _of(self, model: RewardModel, arithmetic: str) -> _Known:
        return self._known.setdefault((arithmetic, model.device), {})


def alone(token_ids: IntArray) -> PackedBatch:
    """Return a batch of one conversation, without padding."""
    group = TokenGroup(
        preference_id="",
        source="",
        prompt_key="",
        shared=np.zeros(0, np.int32),
        suffixes=(token_ids,),
        prompt_tokens=(0,),
        truncated_tokens=(0,),
        comparisons=(),
    )
    return pack([group])


def backbone_digest(written: Mapping[str, str], folder: Path) -> str:
    """Return a SHA-256 that changes with the backbone that a folder holds, and with the threads that compute it.

    `written` are the digests of the weights by their names in the model; the folder's config.json has the backbone's
    settings and the dtype of the weights.
    """
    weights = {name: text for name, text in written.items() if name.startswith("backbone.")}
    config = sha256_file(folder / "config.json")
    return sha256_json({"weights": weights, "config": config, "threads": torch.get_num_threads()})


def _key(batch: PackedBatch) -> bytes:
    return batch.token_ids_T.cpu().numpy().tobytes()
