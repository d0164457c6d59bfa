"""Adapters in half precision: what an adapter adds goes into the product of its layer before that is rounded.

PEFT adds it afterwards. By then the layer's output lies on the grid of half precision, and an addition of less than
half a step between its values is rounded away: the forward pass of a young adapter hardly sees it, although the same
update merged into the weights would be seen. Summed inside the product, which accumulates in float32, it is rounded
once, together with the rest: the product begins with the addition instead of with zero. On a GPU, where it cannot, the
product is given out in float32 and rounded after the addition.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from jaxtyping import Float
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rewardlab.model.autograd import first_order
from rewardlab.model.half import (
    CAST,
    COPYING,
    Cast,
    HalfConv1D,
    HalfLinear,
    gradient_product,
    half_product,
    half_product_with_adapter,
    product,
)
from rewardlab.model.linear import is_widened

SUMMED: Final = (*COPYING, *COPYING.values())
"""Layers whose product can begin with an addition: exactly these classes, as others may compute in their own way."""


class SummedLora(LoraLinear):  # type: ignore[misc]  # peft has no types, so mypy sees a base that is Any
    """PEFT's adapted linear layer, whose addition is summed before rounding where it computes in half precision."""

    by_kernels: bool = False
    """Whether Triton's kernel adds it up, on a GPU."""

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
        first, second, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
        frozen = not (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad))
        if frozen and type(dropout) is nn.Identity and has_copy(base) and has_copy(first) and has_copy(second):
            return adapted_product(x, base, first, second, self.scaling[name], by_kernels=self.by_kernels)
        narrowed = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
        update: Tensor = second(first(dropout(narrowed)) * self.scaling[name])
        return product_and(update, x, base)


def has_copy(layer: nn.Module) -> TypeGuard[HalfLinear | HalfConv1D]:
    """Return whether a layer computes by a half-precision copy of its weight."""
    return isinstance(layer, HalfLinear | HalfConv1D) and layer.half_weight is not None


class _Copies(NamedTuple):
    """What a layer and its adapter are computed by."""

    layer: Tensor
    first: Tensor
    second: Tensor
    by_kernels: bool
    """Whether Triton's kernel adds up, on a GPU."""


class _AdaptedProduct(torch.autograd.Function):
    """A frozen layer with its adapter, by the copies of all three weights.

    On a GPU the time of a small model is the processor's, which starts one operation after the other. By itself each of
    the three would be a node of the graph, entered forward and backward. The scale is taken to the adapter's inner
    values, `rank` a token, and not to what it adds, as many as the layer's outputs; on a GPU it is part of their
    product. If it is a power of two, as 32 / 4 and 32 / √4 are, every bit is what PEFT's order gives; otherwise the two
    differ by a rounding. What the adapter adds to the gradient of a float32 input is part of a product there, too: it
    begins with the layer's own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight_a: Tensor,
        weight_b: Tensor,
        copies: _Copies,
        bias: Tensor | None,
        scaling: float,
        cast: Cast,
    ) -> Tensor:
        half, half_a, half_b, by_kernels = copies
        narrow = cast.of(input, half.dtype).reshape(-1, input.shape[-1])
        joined = joins_operations(narrow)
        inner = scaled_product(narrow, half_a.t(), scaling) if joined else half_product(narrow, half_a) * scaling
        output = half_product_with_adapter(narrow, half, bias, inner, half_b, by_kernels=by_kernels)
        ctx.save_for_backward(narrow, inner, half_a, half_b, half if ctx.needs_input_grad[0] else None)
        ctx.scaling, ctx.dtypes = scaling, (input.dtype, weight_a.dtype, weight_b.dtype)
        return output.view(*input.shape[:-1], output.shape[-1])

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        narrow, inner, half_a, half_b, half = ctx.saved_tensors
        dtype, dtype_a, dtype_b = ctx.dtypes
        flat = gradient.reshape(-1, gradient.shape[-1])
        joined = joins_operations(flat)
        by_a, by_b = (partial(gradient_product, widened=is_widened(copy)) for copy in (half_a, half_b))
        if joined:
            to_inner = scaled_product(flat, half_b, ctx.scaling)
        else:
            to_inner = torch.empty_like(inner)
            torch.mul(by_b(flat, half_b, torch.float32), ctx.scaling, out=to_inner)  # scales and rounds in one pass
        to_input = None
        if half is not None:
            to_input = gradient_product(flat, half, dtype, widened=is_widened(half))
            if joined and dtype is torch.float32:
                torch.addmm(to_input, to_inner, half_a, out_dtype=dtype, out=to_input)
            else:
                to_input += by_a(to_inner, half_a, dtype)  # in the dtype of the input, as autograd adds up
            to_input = to_input.view(*gradient.shape[:-1], half.shape[1])
        gradient_a, gradient_b = by_a(to_inner.t(), narrow, dtype_a), by_b(flat.t(), inner, dtype_b)
        return to_input, gradient_a, gradient_b, *[None] * 4


def joins_operations(tensor: Tensor) -> bool:
    """Return whether to scale and add as part of products: on a GPU, where each operation costs the processor's time.

    A compiler joins operations by itself, and PyTorch's has no `addmm` with a dtype for its result.
    """
    return tensor.is_cuda and not torch.compiler.is_compiling()


def scaled_product(left: Float[Tensor, "N in"], right: Float[Tensor, "in out"], scale: float) -> Float[Tensor, "N out"]:
    """Return `scale` times a product of half-precision matrices on a GPU, which is rounded once."""
    return torch.addmm(right[0], left, right, beta=0, alpha=scale)  # times 0 means that nothing is added, not even read


def adapted_product(
    input: Float[Tensor, "... in"], base: Any, first: Any, second: Any, scaling: float, *, by_kernels: bool = False
) -> Float[Tensor, "... out"]:
    """Return the output of a frozen layer plus `scaling` times what its adapter adds; all three have a copy.

    The sum is float32 and rounded once. Gradients are those of `input` and of the adapter's two weights.
    """
    function: Any = _AdaptedProduct
    half = base.half_weight.t() if isinstance(base, Conv1D) else base.half_weight
    copies = _Copies(half, first.half_weight, second.half_weight, by_kernels)
    bias = base.bias if base.half_bias is None else base.half_bias
    output: Tensor = function.apply(input, first.weight, second.weight, copies, bias, scaling, CAST)
    return output


def product_and(
    update: Float[Tensor, "... out"], input: Float[Tensor, "... in"], layer: Any
) -> Float[Tensor, "... out"]:
    """Return the layer's output plus `update`, summed in float32 and rounded once to half precision.

    On the CPU a bias is added afterwards, as one more sum in half precision.
    """
    if has_copy(layer):
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


def sum_before_rounding(module: nn.Module, *, by_kernels: bool = False) -> None:
    """Make every adapted linear layer inside sum before it rounds, in place; on a GPU by Triton's kernel if
    `by_kernels`. Adapted embeddings stay as they are.
    """
    for child in module.modules():
        if type(child) is LoraLinear:
            # The class is swapped and the module kept, so that names and references stay valid.
            child.__class__ = SummedLora
            made: Any = child
            made.by_kernels = by_kernels
