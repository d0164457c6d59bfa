"""Weights with adapters merged into them, whole."""

from __future__ import annotations

from torch import Tensor

from rewardlab.model.lora import merged_weights
from rewardlab.model.reward import RewardModel


def merged_state(model: RewardModel) -> dict[str, Tensor]:
    """Return the state dict with adapters merged into their layers in float32, under the names of the bare model.

    Raises ModelError if the base model's files have changed, as `merged_weights` does.
    """
    state: dict[str, Tensor] = {}
    for name, weight in merged_weights(model).items():
        tensor = weight.whole(True)
        assert tensor is not None
        state[name] = tensor
    return state
