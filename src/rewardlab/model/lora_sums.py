"""Adapters in half precision: what an adapter adds goes into the product of its layer before that is rounded.

PEFT adds it afterwards. By then the layer's output lies on the grid of half precision, and an addition of less than
half a step between its values is rounded away: the forward pass of a young adapter hardly sees it, although the same
update merged into the weights would be seen. Summed inside the product, which accumulates in float32, it is rounded
once, together with the rest: the product begins with the addition instead of with zero. On a GPU, where it cannot, the
product is given out in float32 and rounded after the addition.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from jaxtyping import Float
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rewardlab.model.half import COPYING, HalfConv1D, HalfLinear, product

SUMMED: Final = (*COPYING, *COPYING.values())
"""Layers whose product can begin with an addition: exactly these classes, as others may compute in their own way."""


class SummedLora(LoraLinear):  # type: ignore[misc]  # peft has no types, so mypy sees a base that is Any
    """PEFT's adapted linear layer, whose addition is summed before rounding where it computes in half precision."""

    def forward(self, x: Float[Tensor, "... in"], *args: Any, **kwargs: Any) -> Float[Tensor, "... out"]:
        """Compute as PEFT does, but for the order of the sum; in float32, and for DoRA, in PEFT's own."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        base: Any = self.base_layer
        half = torch.is_autocast_enabled(x.device.type) and type(base) in SUMMED
        if not half or args or kwargs or self.disable_adapters or self.merged or len(names) != 1 or self.lora_variant:
            plain: Any = super()
            computed: Tensor = plain.forward(x, *args, **kwargs)
            return computed
        (name,) = names
        narrowed = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
        update: Tensor = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](narrowed))) * self.scaling[name]
        return product_and(update, x, base)


def product_and(
    update: Float[Tensor, "... out"], input: Float[Tensor, "... in"], layer: Any
) -> Float[Tensor, "... out"]:
    """Return the layer's output plus `update`, summed in float32 and rounded once to half precision.

    On the CPU a bias is added afterwards, as one more sum in half precision.
    """
    if isinstance(layer, HalfLinear | HalfConv1D) and layer.half_weight is not None:
        return layer.by_copy(input, update)
    # A sharded layer, or one without a copy: autocast rounds what it multiplies.
    weight = layer.weight if isinstance(layer, Conv1D) else layer.weight.t()
    if input.device.type == "cuda":
        half = weight.t().to(torch.get_autocast_dtype("cuda"))
        return product(input, weight.t(), half, layer.bias, update)
    flat = torch.addmm(update.reshape(-1, update.shape[-1]), input.reshape(-1, input.shape[-1]), weight)
    if layer.bias is not None:
        flat = flat + layer.bias.to(flat.dtype)
    return flat.view(update.shape)


def sum_before_rounding(module: nn.Module) -> None:
    """Make every adapted linear layer inside sum before it rounds, in place. Adapted embeddings stay as they are."""
    for child in module.modules():
        if type(child) is LoraLinear:
            # The class is swapped and the module kept, so that names and references stay valid.
            child.__class__ = SummedLora
