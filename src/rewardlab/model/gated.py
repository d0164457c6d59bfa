"""The product of a gated feed-forward part, act(gate) · up, in training: the same numbers with half the memory.

PyTorch keeps gate, up and act(gate) for the backward pass, and the layer that follows keeps the product. Here gate and
up alone are kept; the other two, which are cheap, are computed again. On the CPU it runs on as many rows as fit the
processor's cache.

Legend: T tokens, F width of the feed-forward part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

from rewardlab.model import fused
from rewardlab.model.autograd import first_order, in_parts
from rewardlab.model.trials import alike, times_as_fast, trial_on_cpu

PARTS: Final = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""What a gated feed-forward part has, under the names of transformers, if it is computed here."""
STAND_IN: Final = (8, 64)
"""Widths of the small part with which a class is tried."""
FAR: Final = 30.0
"""Factor of the inputs of that trial. A class that clamps what it multiplies is seen by it."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function and its gradient, each of which writes into a tensor that it is given."""

    forward: Callable[..., Tensor]
    """(input, out=)"""
    backward: Callable[..., Tensor]
    """(gradient, input, grad_input=)"""


ATEN: Final[Any] = torch.ops.aten
SILU: Final = Activation(ATEN.silu.out, ATEN.silu_backward.grad_input)
GELU: Final = Activation(ATEN.gelu.out, ATEN.gelu_backward.grad_input)
GELU_TANH: Final = Activation(
    partial(ATEN.gelu.out, approximate="tanh"), partial(ATEN.gelu_backward.grad_input, approximate="tanh")
)
ACTIVATIONS: Final[dict[type[nn.Module], Activation]] = {
    nn.SiLU: SILU,
    SiLUActivation: SILU,
    GELUActivation: GELU,
    GELUTanh: GELU_TANH,
}


class GatedProduct(torch.autograd.Function):
    """act(gate) · up of tensors [..., F] of one dtype and its gradients, to the bit as PyTorch computes them if F is a
    multiple of 64: of other widths PyTorch computes the end of a tensor, or of a part, by other instructions."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation, by_kernels: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.by_kernels = activation, by_kernels
        return multiply(gate, up, activation, by_kernels=by_kernels)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = (_rows(kept) for kept in ctx.saved_tensors)
        gradient = _rows(gradients[0])
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        shape = gradients[0].shape
        if ctx.by_kernels and fused.can_read(gate, up, gradient):
            silu = ctx.activation is SILU
            fused.load_kernels().multiply_backward(gate, up, gradient, d_gate, d_up, silu=silu)
            return d_gate.view(shape), d_up.view(shape), None, None
        through: Tensor | None = None
        for own_gate, own_up, incoming, to_gate, to_up in in_parts(gate, up, gradient, d_gate, d_up):
            through = torch.empty_like(own_up) if through is None else through[: len(own_up)]
            ctx.activation.forward(own_gate, out=to_up).mul_(incoming)
            torch.mul(incoming, own_up, out=through)
            ctx.activation.backward(through, own_gate, grad_input=to_gate)
        return d_gate.view(shape), d_up.view(shape), None, None


def multiply(
    gate: Float[Tensor, "... F"], up: Float[Tensor, "... F"], activation: Activation, *, by_kernels: bool = False
) -> Float[Tensor, "... F"]:
    """Return act(gate) · up of tensors of one dtype, without a gradient; by Triton's kernel if `by_kernels`."""
    rows_gate, rows_up = _rows(gate), _rows(up)
    output = torch.empty_like(rows_up)
    if by_kernels and fused.can_read(rows_gate, rows_up):
        fused.load_kernels().multiply(rows_gate, rows_up, output, silu=activation is SILU)
        return output.view_as(up)
    for own_gate, own_up, target in in_parts(rows_gate, rows_up, output):
        activation.forward(own_gate, out=target).mul_(own_up)
    return output.view_as(up)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@cache  # a process that loads many models measures each width once
def kernel_speed(width: int, device: torch.device, dtype: torch.dtype) -> float:
    """Measure how many times as fast as PyTorch's operations Triton's kernels compute a product of this width on a GPU,
    forward and backward.
    """
    draw = torch.Generator(device).manual_seed(0)
    gate, up, gradient = (
        torch.randn(fused.SPEED_ROWS, width, generator=draw, device=device).to(dtype) for _ in range(3)
    )
    leaves = gate.requires_grad_(), up.requires_grad_()

    def compute(by_kernels: bool) -> None:
        function: Any = GatedProduct
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.grad(function.apply(*leaves, SILU, by_kernels), leaves, gradient)

    return times_as_fast(partial(compute, True), partial(compute, False), device, calls=fused.CALLS)


@dataclass(frozen=True, slots=True)
class _Again:
    """Takes the place of a tensor that is kept for the backward pass, and computes it again."""

    compute: Callable[[], Tensor]
    shape: torch.Size

    @torch.no_grad()
    def tensor(self) -> Tensor:
        return self.compute().view(self.shape)


def computed_again(tensor: Tensor, compute: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Return a context in which nothing keeps `tensor` for its backward pass: there it is what `compute` returns."""
    storage, numel = tensor.untyped_storage()._cdata, tensor.numel()

    def keep(kept: Tensor) -> Tensor | _Again:
        is_it = kept.untyped_storage()._cdata == storage and kept.numel() == numel and kept.is_contiguous()
        return _Again(compute, kept.shape) if is_it else kept

    def give(kept: Tensor | _Again) -> Tensor:
        return kept.tensor() if isinstance(kept, _Again) else kept

    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    context: AbstractContextManager[None] = hooks(keep, give)
    return context


class _Gated(nn.Module):
    """A feed-forward part that trains by GatedProduct; the part's own class follows in the inheritance."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    keeps_product: bool = False
    """Whether the product is kept for the backward pass. Checkpoints of activations keep track of what is."""
    by_kernels: bool = False
    """Whether Triton's kernels compute the product, in half precision on a GPU."""

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... in"]:
        """Compute as the part's own class does; without gradients and when compiled, by that class."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            base: Any = super()
            plain: Tensor = base.forward(x)
            return plain
        gate, up = self.gate_proj(x), self.up_proj(x)
        # A processor takes half as long again for this backward pass in half precision, to compute act(gate).
        slow = gate.device.type == "cpu" and gate.dtype is not torch.float32
        if slow or gate.dtype is not up.dtype or gate.shape != up.shape:
            plainly: Tensor = self.down_proj(self.act_fn(gate) * up)
            return plainly
        activation = ACTIVATIONS[type(self.act_fn)]
        product: Any = GatedProduct
        by_kernels = self.by_kernels and activation in (SILU, GELU_TANH) and gate.dtype in fused.HALF
        inner: Tensor = product.apply(gate, up, activation, by_kernels)
        compute = partial(multiply, gate, up, activation, by_kernels=by_kernels)
        again = nullcontext() if self.keeps_product else computed_again(inner, compute)
        with again:
            output: Tensor = self.down_proj(inner)
        return output


@cache
def _gated(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a feed-forward part of this kind that trains by GatedProduct."""
    return type(f"Gated{kind.__name__}", (_Gated, kind), {})


def use_gated_products(module: nn.Module, *, keep_product: bool = False, by_kernels: bool = False) -> int:
    """Make every gated feed-forward part inside train by GatedProduct, in place, if its numbers are the same; return
    how many do. With `keep_product` the product is kept for the backward pass, as checkpoints of activations need it;
    with `by_kernels` Triton computes it, in half precision on a GPU.
    """
    parts = [child for child in module.modules() if _is_gated(child)]
    kinds = {_alike(child): child for child in parts}
    agreeing = {kind for kind, child in kinds.items() if _agrees(child)}
    changed = [child for child in parts if _alike(child) in agreeing]
    # The class is swapped and the module kept, so that parameter names and references to the module stay valid.
    for child in changed:
        kind: Any = type(child)
        child.__class__ = _gated(kind)
        made: Any = child
        made.keeps_product, made.by_kernels = keep_product, by_kernels
    return len(changed)


def _is_gated(part: nn.Module) -> bool:
    """Return whether a feed-forward part has the names of a gated one, and an activation function that is known."""
    named = {name for name, _ in part.named_children()} == PARTS and not isinstance(part, _Gated)
    held = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return named and type(part.act_fn) in ACTIVATIONS and not held


def _alike(part: Any) -> tuple[object, ...]:
    """Return what parts have in common of which one is tried: Gemma 3n's differ by layer in what they set to zero."""
    return alike(part), alike(part.act_fn)


def _agrees(part: nn.Module) -> bool:
    """Return whether a part with small layers of random weights gives the same bits by GatedProduct, forward and
    backward; in half precision, those of its operations one by one, which a class that widens between them does not.
    """
    try:
        return all(torch.equal(a, b) for dtype in (torch.float32, torch.bfloat16) for a, b in _tried(part, dtype))
    except Exception:  # it wants other layers, or more arguments
        return False


def _tried(part: nn.Module, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of what a part's own class computes and what is computed here: the output and every gradient."""
    width, inner = STAND_IN
    own: Any = copy.copy(part)
    found = []
    with trial_on_cpu():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            shapes = ((width, inner), (width, inner), (inner, width))
            layers = [nn.Linear(*shape, bias=False, dtype=dtype) for shape in shapes]
            x = (FAR * torch.randn(1, 16, width, dtype=dtype)).requires_grad_()
        own.keeps_product = own.by_kernels = False
        own._modules = dict(zip(("gate_proj", "up_proj", "down_proj"), layers, strict=True), act_fn=own.act_fn)
        trained = (x, *(layer.weight for layer in layers))
        for forward in (type(part).forward, _Gated.forward):
            output = forward(own, x)
            found.append([output, *torch.autograd.grad(output.sum(), trained)])
    return list(zip(*found, strict=True))
