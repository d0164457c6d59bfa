"""Builds the optimiser over float32 master weights: which learning rate and weight decay each weight gets."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from rewardlab.core.errors import ModelError
from rewardlab.model.quantization import require_bitsandbytes
from rewardlab.model.sharded_weights import drop_gathered
from rewardlab.training.settings.config import OptimizerConfig

BETAS: Final = (0.9, 0.999)
EPSILON: Final = 1e-8


def require_optimizer(name: str) -> None:
    """Raise ConfigError if an optimiser cannot run here, because a device or a package is missing."""
    if name == "adamw8bit":
        require_bitsandbytes(f"--optimizer {name}")


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    lr: float,
    head: Collection[str],
    decay_exempt: Collection[str],
) -> torch.optim.Optimizer:
    """Return the optimiser that `config` names, over every trainable parameter.

    `head` names the parameters of the head, which form the first group, with learning rate `lr`; the backbone's is
    `config.backbone_share` of it. `decay_exempt` names the parameters without weight decay.

    Raises ModelError if a trainable parameter is narrower than float32, since its updates would be rounded away, and
    ConfigError if the optimiser cannot run here.
    """
    require_optimizer(config.optimizer)
    # After a forward pass FSDP keeps the weights that it gathered last. An optimiser over those would update copies
    # that are thrown away, and the rank's own part of these weights would never change.
    drop_gathered(model)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    narrow = [name for name, parameter in trainable if parameter.dtype.itemsize < 4]
    if narrow:
        raise ModelError(f"trainable parameters must be float32 or wider; {narrow[0]} is not.")
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
    # A stable sort that puts the head first: the learning rate of the first group is the one that is logged.
    for name, parameter in sorted(trainable, key=lambda entry: entry[0] not in head):
        rate = lr if name in head else lr * config.backbone_share
        exempt = name in decay_exempt or (config.head_only_weight_decay and name not in head)
        members.setdefault((rate, 0.0 if exempt else config.weight_decay), []).append(parameter)
    groups = [{"params": list(part), "lr": rate, "weight_decay": decay} for (rate, decay), part in members.items()]
    return _make(config.optimizer, groups, lr)


def _make(name: str, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    if name == "adamw8bit":
        bitsandbytes: Any = importlib.import_module("bitsandbytes")
        made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=lr, betas=BETAS, eps=EPSILON)
        return made
    # Fused: one kernel updates many parameters, instead of several kernels for each.
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, fused=True)


def state_bytes(parameters: Iterable[nn.Parameter], optimizer: str) -> int:
    """Return about how many bytes an optimiser keeps for those of the parameters that train."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if optimizer == "sgd":
        return 0
    # Adafactor keeps one number for each row and one for each column of a matrix.
    if optimizer == "adafactor":
        return sum(
            p.itemsize * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.ndim > 1 else p.numel())
            for p in trained
        )
    # AdamW keeps two moments for each weight, in 8 bits or in at least float32.
    return sum(2 * p.numel() * (1 if optimizer == "adamw8bit" else max(4, p.itemsize)) for p in trained)


def create_state(optimizer: torch.optim.Optimizer, model: nn.Module, held: Collection[str]) -> None:
    """Create the optimiser state that a first step would create, without changing a weight, so that a checkpoint can be
    read into it.

    `held` are the names of the checkpoint's tensors. A weight that never had a gradient has no state among them, and
    gets none.
    """
    moved = {name.removeprefix("optimizer.").rpartition(".")[0] for name in held if name.startswith("optimizer.")}
    chosen: set[Tensor] = {parameter for name, parameter in model.named_parameters() if name in moved}
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # PyTorch's optimisers create their state only inside `step`, so one step is taken with a learning rate of 0.
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter in chosen else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def training_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every tensor that training changes, by name: `model.NAME` and `optimizer.NAME.KEY`.

    They are the live tensors, so reading a checkpoint into them restores the run.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        tensors |= {
            f"optimizer.{names[parameter]}.{key}": value for key, value in state.items() if isinstance(value, Tensor)
        }
    return tensors


def optimizer_numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return what an optimiser keeps as plain numbers, by `NAME.KEY`, such as a step count that is not a tensor."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    return {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, (int, float))
    }


def restore_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Mapping[str, float]) -> None:
    """Restore what `optimizer_numbers` returned; the optimiser must have its state already."""
    parameters = dict(model.named_parameters())
    for place, value in numbers.items():
        name, _, key = place.rpartition(".")
        optimizer.state[parameters[name]][key] = value
