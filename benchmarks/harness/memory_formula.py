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
    **kept_by: Any,
) -> dict[str, float]:
    """Bytes by what they are for, of a step in bf16 on one device, one micro-batch at a time.

    `trained` and `frozen` are numbers of weights, `multiplied` those of the layers' matrices that train; `kept_by` are
    the arguments of `bytes_a_token` that say what is kept. Not for selective checkpointing.
    """
    kept = bytes_a_token(config, keys=keys, **kept_by)
    return {
        "weights": 4.0 * trained + 2.0 * frozen,
        "gradients": 4.0 * trained,
        "moments": 8.0 * trained,
        "copies": 2.0 * multiplied,  # kept from step to step
        "activations": kept * tokens,
    }
