"""Frozen weights in 4 or 8 bits by bitsandbytes (QLoRA). The head, and all other weights that train, stay as they are.

Quantised weights are only used to compute. What is saved is the base model's own weights plus the trained update
(model/lora.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_bnb_weight
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.model.reward import HEAD_ON_DISK

INSTALL: Final = "pip install 'rewardlab[quantization]'"
FOUR_BIT: Final = "Params4bit"
EIGHT_BIT: Final = "Int8Params"
"""Names of bitsandbytes' parameter classes. They are compared by name, since the package is optional."""
UNPACKED_WITHOUT_GPU: Final = frozenset({"fp8", "mxfp4"})
"""Kinds of quantised files that transformers turns into plain weights while it reads them, where it finds no GPU."""
FARTHEST: Final = 0.25
"""Largest relative L2 distance of quantised weights from their originals. For weights that are nearly normal nf4 gives
about 0.1 and int8 about 0.01; the weights of another model are at a distance of 1 or more."""


def require_plain_files(name: str, config: Any) -> None:
    """Raise ModelError if the files of the model at `name` hold weights that stay quantised when they are read."""
    settings = getattr(config, "quantization_config", None)
    if settings is not None and method_of(settings) not in UNPACKED_WITHOUT_GPU:
        raise quantized_files(name, settings)


def method_of(settings: Any) -> str:
    """Return the name of the method in the quantisation settings of a configuration, of a file or of transformers."""
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings.quant_method
    return str(getattr(method, "value", method))


def quantized_files(name: str, settings: Any) -> ModelError:
    """Return the error for a model whose weights are quantised in its files."""
    return ModelError(
        f"{name}: the weights in its files are quantised ({method_of(settings)}). What is trained could not be saved "
        f"with them, and a new head would be quantised too. Give the model that it was quantised from; where memory "
        f"is short, `rewardlab train --quantization nf4` holds that one in 4 bits (on a GPU)."
    )


def require_bitsandbytes(flag: str, *others: str) -> None:
    """Raise ConfigError, naming the flag, unless there is a CUDA device and bitsandbytes and `others` are installed."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{flag}: it needs a CUDA device, and there is none. Leave the flag out here.")
    if missing := [name for name in ("bitsandbytes", *others) if find_spec(name) is None]:
        raise ConfigError(f"{flag} needs the package {' and '.join(missing)}: {INSTALL}.")


def require_quantization(kind: str) -> None:
    """Raise ConfigError if weights cannot be quantised by `kind` on this machine."""
    if kind != "none":
        require_bitsandbytes(f"--quantization {kind}", "accelerate")


def loading_options(
    kind: str, *, compute_dtype: torch.dtype, keep: Iterable[str], device: torch.device
) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` quantises while it reads; none for the kind `none`.

    `keep` names modules that stay as they are, in addition to the head.
    """
    if kind == "none":
        return {}
    skipped = [HEAD_ON_DISK, *keep]
    if kind == "nf4":
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
            llm_int8_skip_modules=skipped,
        )
    else:
        # bitsandbytes would warn in every product that activations are cast to float16.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        # With a threshold, a column with an outlier anywhere in the batch is computed in float16, so a score would
        # depend on the other conversations in the batch (law 3). 0 switches this off.
        settings = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=skipped)
    return {"quantization_config": settings, "device_map": {"": device}}


def prepare_quantized(backbone: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Tell PEFT which models are quantised, and make quantised layers take their inputs in `dtype`, the one they
    compute in.

    transformers sets PEFT's flags on the classifier, and here PEFT only gets its backbone. bitsandbytes gives outputs
    in the dtype of the input: norms give float32, so everything between two layers would be float32 too.
    """
    marked: Any = backbone
    marked.is_loaded_in_4bit, marked.is_loaded_in_8bit = kind == "nf4", kind == "int8"

    def narrow(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].to(dtype), *inputs[1:])

    for module in backbone.modules():
        if any(is_quantized(parameter) for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(narrow)


def round_sums(backbone: nn.Module) -> None:
    """Make quantised layers with adapters give what autocast computes in.

    PEFT adds what DoRA computes in float32 and leaves the sum so. The kernels on a GPU take half precision alone.
    """

    def narrow(_layer: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        device = output.device.type
        return output.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else output

    for module in backbone.modules():
        if isinstance(module, BaseTunerLayer) and is_quantized(getattr(module.get_base_layer(), "weight", None)):
            module.register_forward_hook(narrow)


def is_quantized(parameter: Tensor | None) -> bool:
    """Return whether bitsandbytes holds this weight in fewer bits."""
    return type(parameter).__name__ in (FOUR_BIT, EIGHT_BIT)


def weight_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the weights in a parameter; 4-bit weights are packed into one column of bytes."""
    held: Any = parameter
    return tuple(held.quant_state.shape if type(parameter).__name__ == FOUR_BIT else parameter.shape)


def num_weights(parameter: Tensor) -> int:
    """Return the number of weights in a parameter, packed or not."""
    return math.prod(weight_shape(parameter))


def far_from(module: nn.Module, original: Tensor) -> bool:
    """Return whether a layer's quantised weight is too far from `original` to have been made from it."""
    held = dequantize_bnb_weight(module.weight, state=getattr(module, "state", None)).detach().float().cpu()
    wanted = original.float().cpu()
    return not float((held - wanted).norm()) <= FARTHEST * float(wanted.norm())
