"""Products that processors compute faster by another way than PyTorch's own choice.

Float32 through oneDNN: on AMD processors MKL reaches about 40 % of its speed with the same cores; on Intel the two are
equally fast. Which is faster is measured at the start of a run (model/compute.py).

Half precision through float32: where oneDNN has no products of a half-precision dtype, as with AVX2 alone, PyTorch
computes them with plain loops. A training step then takes eleven times as long as with products in float32
(benchmarks/half_products.py). Intel's processors have fast products of bf16 in AMX; where a virtual machine hides it,
the instructions that are left take up to twice the time of float32.

Half precision with an addition, on GPUs: cuBLAS rounds a product before it adds to it, so the sum is made here.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rewardlab.model import fused
from rewardlab.model.trials import times_as_fast

MIN_WIDTH: Final = 64
"""Layers narrower than this, such as the two matrices of an adapter, stay with PyTorch: a call costs more than its
work there."""

MOST_RANK: Final = 128
"""Rank of an adapter up to which one kernel adds it up on a GPU."""
CPUINFO: Final = Path("/proc/cpuinfo")


def _has_fast_products(dtype: str) -> bool:
    """Return whether oneDNN computes products of this dtype ("bf16" or "fp16") fast on this processor.

    It goes by what the processor is and not by a measurement, so that a model computes alike in every process. True
    also where PyTorch was built without the question, which leaves its own products in place.
    """
    supported: Any = getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported", None)
    if supported is not None and not supported():
        return False
    return dtype != "bf16" or not _lacks_amx()


def _lacks_amx() -> bool:
    """Return whether this is one of Intel's processors that have AMX (those with AVX512-FP16), and it is hidden."""
    has_fp16: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    has_amx: Any = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if has_fp16 is None or has_amx is None or has_amx() or not has_fp16():
        return False
    try:
        return "GenuineIntel" in CPUINFO.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


WIDENED: Final = frozenset(
    dtype for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)) if not _has_fast_products(name)
)
"""Half-precision dtypes whose products this processor computes faster in float32."""
MIN_WIDENED: Final = 2304
"""Weights of a matrix below which PyTorch's product is kept. An adapter of rank 4 beside 576 columns has as many: with
512 rows it took three quarters of the time in float32, with 64 rows twice as long, 0.04 ms more."""


@torch.library.custom_op(
    "rewardlab::onednn_linear",
    mutates_args=(),
    schema="(Tensor input, Tensor weight, Tensor? bias) -> Tensor",
)
def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` of float32 [N, in] and [out, in] by oneDNN."""
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return output


@onednn_linear.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    input, weight, _ = inputs
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    # The input is only needed for the weight's gradient, and the weight only for the input's.
    ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    input, weight = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    return (
        onednn_linear(gradient, weight.t(), None) if needs_input else None,
        onednn_linear(gradient.t(), input.t(), None) if needs_weight else None,
        gradient.sum(0) if needs_bias else None,
    )


onednn_linear.register_autograd(_backward, setup_context=_remember)


class OneDnnLinear(nn.Linear):
    """An nn.Linear with the same parameters and names that computes float32 through oneDNN."""

    def forward(self, input: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Compute as nn.Linear does; other dtypes and autocast take PyTorch's path."""
        if (
            input.dtype is not torch.float32
            or self.weight.dtype is not torch.float32
            or torch.is_autocast_enabled("cpu")
        ):
            return F.linear(input, self.weight, self.bias)
        flat = input.reshape(-1, self.in_features)
        output: Tensor = onednn_linear(flat, self.weight, self.bias)
        return output.view(*input.shape[:-1], self.out_features)


def is_widened(weight: Tensor) -> bool:
    """Return whether `widened_product` is to compute products with this half-precision weight, forward and backward.

    It is not the number of rows that decides, so that a conversation is computed alike in any batch.
    """
    return weight.dtype in WIDENED and weight.device.type == "cpu" and weight.numel() >= MIN_WIDENED


@torch.library.custom_op(
    "rewardlab::widened_product",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor? bias=None, Tensor? update=None) -> Tensor",
)
def widened_product(left: Tensor, right: Tensor, bias: Tensor | None = None, update: Tensor | None = None) -> Tensor:
    """Compute left [N, in] times right [in, out], plus `bias` [out] and `update` [N, out], in the dtype of `left`.

    As in a product with native instructions, sums are float32 and rounded once. It has no gradient of its own: who
    calls it computes that.
    """
    with torch.autocast("cpu", enabled=False):  # which would compute in half precision after all
        wide = left.float() @ right.float()
    for added in (bias, update):
        if added is not None:
            wide += added
    return wide.to(left.dtype)


@widened_product.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None = None, update: Tensor | None = None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


torch.library.define("rewardlab::summed_product", "(Tensor left, Tensor right, Tensor update, Tensor? bias) -> Tensor")


def _summed_on_cuda(left: Tensor, right: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
    return _rounded_sum(torch.mm(left, right, out_dtype=torch.float32), update, bias)


def _rounded_sum(wide: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        wide += bias
    return torch.add(wide, update, out=torch.empty_like(wide, dtype=update.dtype))  # adds and rounds in one pass


def _shape_of_sum(left: Tensor, right: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


torch.library.impl("rewardlab::summed_product", "CUDA", _summed_on_cuda)
torch.library.register_fake("rewardlab::summed_product", _shape_of_sum)


def summed_product(left: Tensor, right: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
    """Compute left [N, in] times right [in, out] plus `update` [N, out] and `bias` [out], in half precision on a GPU.

    The sum is float32 and rounded once. `torch.addmm` rounds the product first on a GPU: on an H100 it lost half of an
    addition of 0.001 to products of about 1, which is PEFT's order of the sum. It has no gradient of its own: who calls
    it computes that.
    """
    output: Tensor = torch.ops.rewardlab.summed_product(left, right, update, bias)
    return output


torch.library.define(
    "rewardlab::product_with_adapter",
    "(Tensor left, Tensor right, Tensor inner, Tensor second, Tensor? bias, bool by_kernels) -> Tensor",
)


def _adapted_on_cuda(
    left: Tensor, right: Tensor, inner: Tensor, second: Tensor, bias: Tensor | None, by_kernels: bool
) -> Tensor:
    wide = torch.mm(left, right, out_dtype=torch.float32)
    read = (wide, inner, second) if bias is None else (wide, inner, second, bias)
    if by_kernels and inner.shape[1] <= MOST_RANK and fused.can_read(*read):
        output = torch.empty_like(wide, dtype=left.dtype)
        fused.load_kernels().add_product(wide, inner, second, bias, output)
        return output
    return _rounded_sum(wide, torch.mm(inner, second.t()), None if bias is None else bias.to(left.dtype))


def _shape_of_adapted(
    left: Tensor, right: Tensor, inner: Tensor, second: Tensor, bias: Tensor | None, by_kernels: bool
) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


torch.library.impl("rewardlab::product_with_adapter", "CUDA", _adapted_on_cuda)
torch.library.register_fake("rewardlab::product_with_adapter", _shape_of_adapted)


def product_with_adapter(
    left: Tensor, right: Tensor, inner: Tensor, second: Tensor, bias: Tensor | None, *, by_kernels: bool
) -> Tensor:
    """Compute left [N, in] times right [in, out] plus inner [N, r] times second [out, r] transposed plus `bias` [out],
    in half precision on a GPU.

    The sum is float32 and rounded once; what is added to the product is rounded before too, unless Triton computes it
    (`by_kernels`). It has no gradient of its own: who calls it computes that.
    """
    output: Tensor = torch.ops.rewardlab.product_with_adapter(left, right, inner, second, bias, by_kernels)
    return output


@cache  # a process that loads many models measures each width once
def kernel_speed(width: int, rank: int, device: torch.device, dtype: torch.dtype) -> float:
    """Measure how many times as fast as PyTorch's operations Triton's kernel adds up an adapter on a GPU."""
    draw = torch.Generator(device).manual_seed(0)
    wide = torch.randn(fused.SPEED_ROWS, width, generator=draw, device=device)
    inner, second = (
        torch.randn(count, rank, generator=draw, device=device).to(dtype) for count in (fused.SPEED_ROWS, width)
    )
    kernel = partial(fused.load_kernels().add_product, wide, inner, second, None, torch.empty_like(wide, dtype=dtype))
    return times_as_fast(
        kernel, lambda: _rounded_sum(wide, torch.mm(inner, second.t()), None), device, calls=fused.CALLS
    )


def use_onednn(module: nn.Module) -> int:
    """Make every wide nn.Linear inside compute through oneDNN, in place; return how many do."""
    layers = [
        child
        for child in module.modules()
        if type(child) is nn.Linear and min(child.in_features, child.out_features) >= MIN_WIDTH
    ]
    # The class is swapped and the module kept, so that parameter names and references to the module stay valid.
    for child in layers:
        child.__class__ = OneDnnLinear
    return len(layers)


def onednn_available() -> bool:
    """Return whether this build of PyTorch has oneDNN and its linear operator."""
    available: Any = torch.backends.mkldnn.is_available
    return bool(available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")
