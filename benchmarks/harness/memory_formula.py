"""What docs/scaling.md says that a step takes of a device's memory, as numbers."""

from __future__ import annotations

from typing import Any

from rewardlab.training.cost.activations import bytes_a_token


def predict(
    config: Any,
    *,
    trained: int,
    frozen: int,
    multiplied: int,
    tokens: int,
    keys: float,
    lora_rank: int,
    checkpointing: str,
) -> dict[str, float]:
    """Bytes by what they are for, of a step in bf16 on one device, one micro-batch at a time.

    `trained` and `frozen` are numbers of weights, `multiplied` those of the layers' matrices that train. Not for
    selective checkpointing.
    """
    kept = bytes_a_token(config, lora_rank=lora_rank, checkpointing=checkpointing, keys=keys)
    return {
        "weights": 4.0 * trained + 2.0 * frozen,
        "gradients": 4.0 * trained,
        "moments": 8.0 * trained,
        "copies": 2.0 * multiplied,  # kept from step to step
        "activations": kept * tokens,
    }
