"""Joined experts of a mixture that compute with half-precision copies of their float32 weights, made once a step.

transformers holds one matrix of all experts of a layer in one tensor [experts, out, in], and multiplies it in the dtype
in which it is held: autocast does not know that product. With float32 weights the experts, most of a mixture, were
multiplied in float32. Here they have copies as linear layers do (model/half.py), and so does their input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from rewardlab.model.autograd import first_order

ALIGNED: Final = 8
"""Widths of matrices have to be multiples of this: PyTorch takes rows that begin at multiples of 16 bytes alone."""


def are_joined_experts(layer: nn.Module) -> bool:
    """Return whether a layer is one of joined experts, by what transformers gives classes whose product it chooses."""
    return hasattr(layer, "is_transposed") and hasattr(layer, "has_gate")


def weights_of_experts(layer: nn.Module) -> list[str]:
    """Return the names of the parameters of a layer of joined experts that have half-precision copies: matrices of all
    of them, and their biases. None of other layers, nor of experts whose widths half precision cannot multiply.
    """
    if not are_joined_experts(layer):
        return []
    joined = {name: weight for name, weight in layer.named_parameters(recurse=False) if weight.ndim > 1}
    widths = {width for weight in joined.values() if weight.ndim > 2 for width in weight.shape[1:]}
    return [] if any(width % ALIGNED for width in widths) else list(joined)


def copy_name(own: str) -> str:
    """Return the attribute that holds the copy of a layer's parameter `own`: `half_weight` of `weight`."""
    return f"half_{own}"


class _Copied(torch.autograd.Function):
    """The copy of a weight; the weight is an input only to receive the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, half: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return half.view_as(half)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


class _Seen:
    """A layer as its class's forward method sees it: copies stand in the place of weights."""

    def __init__(self, layer: nn.Module, copies: Mapping[str, Tensor]) -> None:
        self._layer = layer
        for name, copy in copies.items():
            setattr(self, name, copy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class HalfExperts(nn.Module):
    """Joined experts with the same parameters and names that compute with half-precision copies of them. The layer's
    own class follows in the inheritance."""

    kind: type[nn.Module]
    """The layer's own class."""

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Compute as the layer's own class does, in the dtype of the copies; without copies in that of the weights."""
        function: Any = _Copied
        copies: dict[str, Tensor] = {}
        for own in weights_of_experts(self):
            if (half := getattr(self, copy_name(own), None)) is not None:
                copies[own] = function.apply(getattr(self, own), half)
        forward: Any = self.kind.forward
        output: Tensor = forward(_Seen(self, copies) if copies else self, *inputs, **named)
        return output

    def _apply(self, fn: Any, recurse: bool = True) -> HalfExperts:
        """Move or cast the parameters as any layer does, and drop the copies, which are made again when needed."""
        for own in weights_of_experts(self):
            setattr(self, copy_name(own), None)
        base: Any = super()
        base._apply(fn, recurse)
        return self


@cache
def with_copies(kind: Any) -> type[HalfExperts]:
    """Return the class of layers of joined experts of this kind that compute with copies."""

    def reduced(layer: HalfExperts, _protocol: Any) -> tuple[Any, ...]:
        # The class has no name by which pickle would find it, in this process or another one; it is made again there.
        return _remade, (kind,), layer.__dict__.copy()

    names = {"kind": kind, "__reduce_ex__": reduced}
    made: type[HalfExperts] = type(f"Half{kind.__name__}", (HalfExperts, kind), names)
    return made


def _remade(kind: Any) -> HalfExperts:
    """Return an empty layer of this kind that computes with copies."""
    made = with_copies(kind)
    empty: HalfExperts = made.__new__(made)
    return empty
