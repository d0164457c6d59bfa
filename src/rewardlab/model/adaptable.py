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

WITHOUT_GRADIENT: Final = frozenset({"correction_coefs", "dt_proj", "indexer"})
"""Words in the paths of linear layers whose output gets no gradient: Mamba and Gemma 3n's AltUp
multiply by the weight itself, and what an indexer gives only selects tokens."""
FUSED_OUTPUTS: Final = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Model types of which PEFT refuses adapters for `out_proj`: fused kernels multiply by its weight themselves."""


def not_adaptable(backbone: nn.Module, *, named: bool) -> list[str]:
    """Return the paths of linear layers that can have no adapter: those that no text goes through, in a model that
    reads images too, routers, which return more than a product, and layers of several products at once (DeepSeek V4).

    Unless layers were `named`, also those that get no gradient. Of these a named one is an error after the first step.
    """
    model_type = getattr(getattr(backbone, "config", None), "model_type", "")
    unseen = WITHOUT_GRADIENT | ({"out_proj"} if model_type in FUSED_OUTPUTS else set())
    text = f"{path}." if (path := text_path(backbone)) else ""
    return [
        path
        for path, module in backbone.named_modules()
        if isinstance(module, nn.Linear)
        and (
            not path.startswith(text)
            or any(word in type(module).__name__ for word in ("Router", "Grouped"))
            or not (named or unseen.isdisjoint(path.split(".")))
        )
    ]


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
