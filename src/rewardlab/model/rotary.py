"""Rotary position embeddings in three operations a tensor and direction, where transformers takes five forward and ten
backward.

On a GPU a small model's step takes the time in which its operations are started. On a CPU these run on as many tokens
as fit the processor's cache. In float32 every bit is that of transformers on a CPU; in
half precision the gradient is summed in float32 and rounded once.

Legend: B rows of a batch, H heads, T tokens, D width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn

from rewardlab.model import fused
from rewardlab.model.autograd import first_order, in_parts
from rewardlab.model.trials import trial_on_cpu

NAME: Final = "apply_rotary_pos_emb"
"""The function of transformers that attention layers call, one in each module of a model."""
HARMLESS_WRAPPERS: Final = "transformers.utils.deprecation"
"""Module whose decorators only rename arguments; a layer whose `forward` has others is left as it is."""


class Rotation(torch.autograd.Function):
    """x · cos + (−x₂, x₁) · sin of x = (x₁, x₂) [B, H, T, D], with cos and sin [B or 1, T, D], in the dtype of the
    product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, by_kernels: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype, ctx.by_kernels = x.dtype, by_kernels
        output = x.new_empty(x.transpose(1, 2).shape, dtype=torch.promote_types(x.dtype, cos.dtype))
        if by_kernels and fused.can_read(x.transpose(1, 2), cos, sin):
            fused.load_kernels().turn(x.transpose(1, 2), cos, sin, output, forward=True)
        else:
            _turn(x.transpose(1, 2), cos, sin, output, forward=True)
        return output.transpose(1, 2)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0].transpose(1, 2)
        cos, sin = ctx.saved_tensors
        if ctx.by_kernels and fused.can_read(gradient, cos, sin):
            narrow = torch.empty_like(gradient, dtype=ctx.dtype)
            fused.load_kernels().turn(gradient, cos, sin, narrow, forward=False)
            return narrow.transpose(1, 2), None, None, None
        output = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        _turn(gradient, cos, sin, output, forward=False)
        return output.to(ctx.dtype).transpose(1, 2), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, output: Tensor, *, forward: bool) -> None:
    """Write the rotation of x [B, T, H, D] into `output`, or that of a gradient, which turns it back."""
    sign = -1 if forward else 1
    for x_, cos_, sin_, out in in_parts(x, cos.unsqueeze(2), sin.unsqueeze(2), output, dim=1):
        torch.mul(x_, cos_, out=out)
        first, second = x_.chunk(2, -1)
        by_first, by_second = sin_.chunk(2, -1) if forward else reversed(sin_.chunk(2, -1))
        to_first, to_second = out.chunk(2, -1)
        _add_product(to_first, second, by_first, sign)
        _add_product(to_second, first, by_second, -sign)


def _add_product(output: Tensor, left: Tensor, right: Tensor, sign: int) -> None:
    if output.is_cuda:
        output.addcmul_(left, right, value=sign)
    else:
        # In one operation the processor would not round the product, and so give other bits than transformers.
        output.add_(left * right, alpha=sign)


def rotate(original: Callable[..., Any], *given: Any, by_kernels: bool = False, **named: Any) -> Any:
    """Rotate queries and keys [B, _, T, D] by cosines and sines [_, T, _], given in this order, as `original` does.

    When compiled, for other shapes and with other arguments, such as queries alone, it is done by `original`.
    """
    if torch.compiler.is_compiling() or named or len(given) != 4:
        return original(*given, **named)
    q, k, cos, sin = given
    if cos.ndim != 3 or q.shape[-2:] != cos.shape[-2:]:
        return original(q, k, cos, sin)
    function: Any = Rotation
    by_kernels = by_kernels and q.dtype in fused.HALF
    return function.apply(q, cos, sin, by_kernels), function.apply(k, cos, sin, by_kernels)


def use_rotations(module: nn.Module, *, by_kernels: bool = False) -> int:
    """Make every attention layer inside whose rotary embedding has the same numbers compute it here, in place; return
    how many do. With `by_kernels` Triton computes it, in half precision on a GPU.
    """
    changed = 0
    for child in module.modules():
        own: Any = type(child)
        kind = _rotating(own, by_kernels=by_kernels)
        if kind is not None:
            # The class is swapped and the module kept, so that parameter names and references to it stay valid.
            child.__class__ = kind
            changed += 1
    return changed


@cache
def _rotating(kind: type[nn.Module], *, by_kernels: bool = False) -> type[nn.Module] | None:
    """Return the class of a layer of this kind that rotates here; None if it has no such function, or another one."""
    forward: Any = kind.forward
    while _is_wrapped(forward) and forward.__globals__["__name__"] == HARMLESS_WRAPPERS:
        forward = forward.__wrapped__
    if (
        not inspect.isfunction(forward)
        or _is_wrapped(forward)
        or NAME not in forward.__code__.co_names
        or NAME not in forward.__globals__
    ):
        return None
    original = forward.__globals__[NAME]
    if isinstance(original, partial) or not _agrees(original):
        return None
    # The same code with another function under that name: the module of transformers stays as it is for others.
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, NAME: partial(rotate, original, by_kernels=by_kernels)},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__

    def reduced(layer: nn.Module, _protocol: Any) -> tuple[Any, ...]:
        # The class has no name by which pickle would find it, in this process or another one; it is made again there.
        return _remade, (kind, by_kernels), layer.__dict__.copy()

    return type(f"Rotating{kind.__name__}", (kind,), {"forward": changed, "__reduce_ex__": reduced})


def _remade(kind: Any, by_kernels: bool) -> nn.Module:
    """Return an empty layer of this kind that rotates here; where the numbers would be others, one that does not."""
    made: Any = _rotating(kind, by_kernels=by_kernels) or kind
    empty: nn.Module = made.__new__(made)
    return empty


def _is_wrapped(forward: Any) -> bool:
    return inspect.isfunction(forward) and hasattr(forward, "__wrapped__")


def _agrees(original: Callable[..., Any]) -> bool:
    """Return whether a function of transformers gives the bits of Rotation: in float32 forward and backward, in half
    precision forward, where some compute in float32 and round once.
    """
    draw = torch.Generator().manual_seed(0)
    with trial_on_cpu():
        q, k = (torch.randn(2, heads, 7, 8, generator=draw).requires_grad_() for heads in (4, 2))
        cos, sin = (torch.randn(1, 7, 8, generator=draw) for _ in range(2))
        half = [tensor.bfloat16() for tensor in (q, k, cos, sin)]
        found = []
        try:
            for function in (original, partial(rotate, original)):
                a, b = function(q, k, cos, sin)
                gradients = torch.autograd.grad(a.sum() + (b * b).sum(), (q, k))
                found.append((a, b, *gradients, *function(*half[:2], cos, sin), *function(*half)))
        except Exception:  # it takes other arguments, or is a kernel for another device
            return False
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))
