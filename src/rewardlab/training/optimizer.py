"""AdamW over float32 master weights, with weight decay only where it belongs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from rewardlab.core.errors import ModelError


def build_optimizer(
    model: nn.Module, *, lr: float, weight_decay: float, decay_exempt: Collection[str]
) -> torch.optim.Optimizer:
    """AdamW (β 0.9, 0.999; ε 1e-8) over every trainable parameter; `decay_exempt` names those without decay.

    Raises ModelError if a trainable parameter is narrower than float32: its updates would be rounded away.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    narrow = [name for name, parameter in trainable if parameter.dtype.itemsize < 4]
    if narrow:
        raise ModelError(f"trainable parameters must be float32 or wider; {narrow[0]} is not.")
    groups = [
        {"params": [p for name, p in trainable if name not in decay_exempt], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name in decay_exempt], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, fused=True)
