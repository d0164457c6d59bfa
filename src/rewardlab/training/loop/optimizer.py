"""The optimiser over float32 master weights: which learning rate and which decay every weight gets."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from rewardlab.core.errors import ModelError
from rewardlab.model.quantization import require_bitsandbytes
from rewardlab.training.settings.config import OptimizerConfig

BETAS: Final = (0.9, 0.999)
EPSILON: Final = 1e-8


def require_optimizer(name: str) -> None:
    """Raise ConfigError if an optimiser cannot run here, for want of a device or a package."""
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
    """The optimiser that `config` names, over every trainable parameter.

    `lr` is the head's learning rate, `config.backbone_share` of it the backbone's. `head` names the parameters of the
    head, whose group is the first; `decay_exempt` names those without decay.

    Raises ModelError if a trainable parameter is narrower than float32: its updates would be rounded away. Raises
    ConfigError if the optimiser cannot run here.
    """
    require_optimizer(config.optimizer)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    narrow = [name for name, parameter in trainable if parameter.dtype.itemsize < 4]
    if narrow:
        raise ModelError(f"trainable parameters must be float32 or wider; {narrow[0]} is not.")
    members: dict[tuple[float, float], list[nn.Parameter]] = {}
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
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, fused=True)


def state_bytes(parameters: Iterable[nn.Parameter], optimizer: str) -> int:
    """Bytes that an optimiser keeps for those of the parameters that train, as good as exactly."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if optimizer == "sgd":
        return 0
    if optimizer == "adafactor":  # one number a row and one a column
        return sum(
            p.itemsize * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.ndim > 1 else p.numel())
            for p in trained
        )
    return sum(2 * p.numel() * (1 if optimizer == "adamw8bit" else max(4, p.itemsize)) for p in trained)


def create_state(optimizer: torch.optim.Optimizer, model: nn.Module, held: Collection[str]) -> None:
    """Make the state that a first step would make, without moving a weight, for a checkpoint of tensors with the names
    `held` to be read into: a weight that never had a gradient has none.
    """
    moved = {name.removeprefix("optimizer.").rpartition(".")[0] for name in held if name.startswith("optimizer.")}
    chosen: set[Tensor] = {parameter for name, parameter in model.named_parameters() if name in moved}
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter in chosen else None
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


def optimizer_numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """What an optimiser keeps as plain numbers, by `NAME.KEY`: a count of steps, where it is not a tensor."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    return {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, (int, float))
    }


def restore_numbers(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Mapping[str, float]) -> None:
    """Inverse of `optimizer_numbers`, once there is a state."""
    parameters = dict(model.named_parameters())
    for place, value in numbers.items():
        name, _, key = place.rpartition(".")
        optimizer.state[parameters[name]][key] = value
