"""Low-rank adapters on the backbone through PEFT; the head stays outside, trained and whole.

In memory the adapters are injected into the backbone. On disk they have the layout of PEFT's sequence-classification
wrapper, with the head beside them, so that plain `PeftModel.from_pretrained` reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from rewardlab.core.errors import ModelError
from rewardlab.model.config import ModelConfig
from rewardlab.model.reward import HEAD_ON_DISK, RewardModel, disk_name

ADAPTER: Final = "default"
PEFT_PREFIX: Final = "base_model.model."


def add_adapters(backbone: nn.Module, config: ModelConfig) -> None:
    """Freeze the backbone and inject trainable float32 adapters.

    Raises ModelError if no layer has one of the target names.
    """
    backbone.requires_grad_(False)
    targets = list(config.lora_target_modules)
    special: dict[str, str | None] = {"all-linear": "all-linear", "peft-default": None}
    try:
        inject_adapter_in_model(
            LoraConfig(
                task_type=TaskType.SEQ_CLS,
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=special[targets[0]] if len(targets) == 1 and targets[0] in special else targets,
                use_rslora=config.rslora,
            ),
            backbone,
            adapter_name=ADAPTER,
        )
    except ValueError as error:
        linear = sorted(
            {name.rpartition(".")[2] for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}
        )
        raise ModelError(
            f"--lora-target-modules {' '.join(targets)}: {error} Layers of this model: {', '.join(linear)}."
        ) from error
    for name, parameter in backbone.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of the model carries adapters."""
    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def merged_state(model: RewardModel) -> dict[str, Tensor]:
    """The state dict with adapters merged into their layers in float32, under the names of the bare model.

    Where frozen weights are held rounded, they are the original ones here. The live model is not touched.

    Raises ModelError if the originals are not those that the run started from.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    originals = _originals(model, state)
    state |= originals
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            merged = copy.deepcopy(module).float()
            key = f"{name}.base_layer.weight"
            if key in originals:
                merged.get_base_layer().weight.data = originals[key].to(model.device)
            merged.merge()
            state[key] = merged.get_base_layer().weight.data
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}


def _originals(model: RewardModel, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Frozen weights before they were rounded, under the names of the live model."""
    if model.read_originals is None:
        return {}
    read = model.read_originals()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    originals = {name: read[name.replace(".base_layer.", ".")] for name in frozen}
    for name, tensor in originals.items():
        if not torch.equal(tensor.to(held[name].dtype), held[name].cpu()):
            raise ModelError(
                f"{name} of the base model is not what the run started from, so adapters cannot be merged into it. "
                f"Leave the files of --model as they are while it trains."
            )
    return originals


def adapter_state(model: RewardModel) -> dict[str, Tensor]:
    """Adapters and head under the names of PEFT's sequence-classification layout."""
    state = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or name.startswith("head."):
            state[PEFT_PREFIX + disk_name(name, model.disk_class).replace(f".{ADAPTER}", "")] = tensor.detach().float()
    return state


def adapter_config(config: ModelConfig, model: RewardModel, base: str) -> dict[str, Any]:
    """`adapter_config.json`: the true rank and alpha, the layers by name, and the head as a module to save."""
    targets = sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    )
    peft_config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        use_rslora=config.rslora,
        modules_to_save=[HEAD_ON_DISK],
        base_model_name_or_path=base,
        inference_mode=True,
    )
    values: Mapping[str, Any] = peft_config.to_dict()
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in values.items()
    }


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters."""
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trainable, sum(parameter.numel() for parameter in model.parameters())


def half_frozen(model: nn.Module, dtype: torch.dtype) -> bool:
    """Hold frozen floating-point weights in the dtype they are computed in; what trains is left as it is.

    Returns whether that rounded any: weights that come from a file in this dtype lose nothing.
    """
    rounded = False
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            held = parameter.data.to(dtype)
            rounded = rounded or not torch.equal(held.to(parameter.dtype), parameter.data)
            parameter.data = held
    return rounded
