"""AdamW over float32 master weights, with weight decay only where it belongs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

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


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that a first step would make, without moving a weight, for a checkpoint to be read into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that training moves, by name: `model.NAME` and `optimizer.NAME.KEY`. They are the live ones, so what
    is read into them is what the run goes on with.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        tensors |= {
            f"optimizer.{names[parameter]}.{key}": value for key, value in state.items() if isinstance(value, Tensor)
        }
    return tensors
