"""Which linear layers of a model can have an adapter, and which PEFT is not to be given.

Families differ in what their linear layers are used for; what a family needs to be left out is said here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from peft import LoraConfig, TaskType
from torch import nn

from rewardlab.core.errors import ModelError
from rewardlab.model.text_part import text_path

WITHOUT_GRADIENT: Final = frozenset(
    {
        *("classifier", "correction_coefs", "dt_proj", "indexer"),
        *("gate_up_proj_adapter_list", "linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list"),
    }
)
"""Words in the paths of linear layers whose output gets no gradient: Mamba, Gemma 3n's AltUp and LongCat's router
multiply by the weight itself, what an indexer gives only selects tokens, and each place in Zamba 2 uses one of its
shared block's own small adapters and leaves the others."""
FUSED_OUTPUTS: Final = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Model types of which PEFT refuses adapters for `out_proj`: fused kernels multiply by its weight themselves."""


def not_adaptable(backbone: nn.Module, *, named: bool) -> list[str]:
    """Return the paths of layers that can have no adapter: those that no text goes through, in a model that reads
    images too (convolutions among them, which a name such as `proj` may mean); routers, which return more than a
    product; layers of several products at once (DeepSeek V4); and blocks that have the name of a linear layer.

    Unless layers were `named`, also those that get no gradient. Of these a named one is an error after the first step.
    """
    config: Any = getattr(backbone, "config", None)
    unseen = WITHOUT_GRADIENT | ({"out_proj"} if getattr(config, "model_type", "") in FUSED_OUTPUTS else set())
    text = f"{path}." if (path := text_path(backbone)) else ""
    # Layers that look at images are left out for a text.
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    looking = [f"{text}layers.{number}." for number in getattr(text_config, "cross_attention_layers", None) or ()]

    # PEFT goes by the last word of a path. That of a linear layer in a sequence is its number, as that of a block is.
    modules = dict(backbone.named_modules())
    numbers = {
        _last(path) for path, module in modules.items() if isinstance(module, nn.Linear) and _last(path).isdigit()
    }

    def is_left_out(path: str, module: nn.Module) -> bool:
        if _last(path) in numbers and not isinstance(module, nn.Linear):
            return True
        if not path.startswith(text):
            return next(module.parameters(recurse=False), None) is not None
        if not isinstance(module, nn.Linear):
            return False
        several = any(word in type(module).__name__ for word in ("Router", "Grouped"))
        untrained = not unseen.isdisjoint(path.split(".")) or path.startswith(tuple(looking))
        return several or (untrained and not named)

    return [path for path, module in modules.items() if is_left_out(path, module)]


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def without_experts(backbone: nn.Module, targets: str | Sequence[str] | None) -> str | Sequence[str] | None:
    """Return the layers to adapt without those that PEFT would replace by joined experts and their router.

    In some mixtures PEFT takes names such as `gate_proj` for the joined experts, also where it is asked for all linear
    layers. Such adapters cannot be merged or saved here, so experts stay frozen.

    Raises ModelError if a name is given that PEFT takes for them, ValueError if PEFT refuses it.
    """
    try:
        peft: Any = importlib.import_module("peft.utils.transformers_weight_conversion")
        convert, mapping = peft.convert_peft_config_for_transformers, peft.get_model_conversion_mapping
    except (ImportError, AttributeError):  # versions of PEFT before this conversion adapt linear layers alone
        return targets
    trial = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=targets if isinstance(targets, str) else None)
    if targets is not None and not isinstance(targets, str):
        trial.target_modules = set(targets)
    convert(trial, model=backbone, conversions=mapping(backbone))
    if not trial.target_parameters:
        return targets
    kept = sorted(trial.target_modules or ())
    if isinstance(targets, str) and kept:
        return kept
    raise ModelError(
        f"--lora-target-modules {' '.join(targets or ())}: the experts of this model are joined in one tensor, for "
        f"which adapters cannot be saved here, and PEFT takes names such as gate_proj for them. Name layers of "
        f"attention, such as q_proj, or use all-linear, which leaves the experts frozen."
    )
