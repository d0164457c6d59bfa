"""Linear layers, and joined experts, that compute with half-precision copies of their float32 weights, made once a
step.

Autocast rounds every float32 weight to the nearest half-precision value in every forward pass. That costs a cast for
each micro-batch, and it hides small updates from the forward pass (model/rounding.py). Here each layer keeps a copy,
made anew when its weight has changed. The gradient with respect to the copy is given to the float32 weight as it is
(a straight-through estimator).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rewardlab.model.autograd import first_order
from rewardlab.model.config import HalfRounding
from rewardlab.model.half_experts import copy_name, weights_of_experts, with_copies
from rewardlab.model.linear import OneDnnLinear, is_widened, product_with_adapter, summed_product, widened_product
from rewardlab.model.rounding import Part, name_seed, round_together, round_weights

AS_SAVED: Final = ()
"""The draw used for a model that is evaluated or saved: that of `round_weights`, which rounds weights for a file. So a
model scores in evaluation as it will from its folder."""


class Cast(threading.local):
    """The half-precision cast of the latest input, for the other layers that take it: query, key and value, or both
    halves of a gated layer. Layers that keep their input for the backward pass then keep one tensor between them.
    """

    _input: weakref.ref[Tensor] | None = None
    _version: int = -1
    _narrow: Tensor | None = None

    def of(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the input in `dtype`: the earlier cast if it is the same tensor and was not written to since."""
        if input.dtype is dtype or torch.compiler.is_compiling() or input.is_inference():
            # A compiler joins equal casts by itself, and inference tensors do not count their changes.
            return input.to(dtype)
        narrow = self._narrow
        known = self._input is not None and self._input() is input and self._version == input._version
        if not known or narrow is None or narrow.dtype is not dtype:
            narrow = input.to(dtype)
            # The cast is dropped with the input.
            self._input, self._version, self._narrow = weakref.ref(input, self._drop), input._version, narrow
        return narrow

    def _drop(self, input: weakref.ref[Tensor]) -> None:
        if self._input is input:
            self._input = self._narrow = None


CAST: Final = Cast()


def half_product(
    narrow: Float[Tensor, "N in"],
    half: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None = None,
    update: Float[Tensor, "N out"] | None = None,
) -> Float[Tensor, "N out"]:
    """Compute `F.linear` of half-precision tensors as layers with a copy do, without a gradient.

    `update` is added before the sum is rounded.
    """
    bias = None if bias is None else bias.to(half.dtype)
    output: Tensor
    if is_widened(half):
        output = widened_product(narrow, half.t(), bias, update)
    elif update is None:
        output = F.linear(narrow, half, bias)
    elif half.device.type == "cuda":
        output = summed_product(narrow, half.t(), update, bias)
    else:
        output = torch.addmm(update, narrow, half.t())
        # Not in place: selective checkpointing keeps the product for the backward pass.
        output = output if bias is None else output + bias
    return output


def half_product_with_adapter(
    narrow: Float[Tensor, "N in"],
    half: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None,
    inner: Float[Tensor, "N r"],
    second: Float[Tensor, "out r"],
    *,
    by_kernels: bool,
) -> Float[Tensor, "N out"]:
    """Compute `half_product` plus `inner` times `second` transposed, which is added before the sum is rounded; on a GPU
    by Triton's kernel if `by_kernels`.
    """
    if half.device.type == "cuda":
        return product_with_adapter(narrow, half.t(), inner, second, bias, by_kernels=by_kernels)
    return half_product(narrow, half, bias, half_product(inner, second))


def gradient_product(left: Tensor, right: Tensor, dtype: torch.dtype, *, widened: bool) -> Float[Tensor, "N M"]:
    """Multiply two half-precision matrices in a backward pass, in `dtype`: float32 is not rounded on the way where the
    product can be had in it. `widened` says that the CPU computes it in float32 anyway.
    """
    if widened:
        with torch.autocast("cpu", enabled=False):
            return (left.float() @ right.float()).to(dtype)
    if left.is_cuda and dtype is torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.mm(left, right).to(dtype)


class _Product(torch.autograd.Function):
    """`F.linear` with a half-precision copy of the weight; the weight is an input only to receive the gradient.

    `update`, if there is one, is added before the sum is rounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        half: Tensor,
        bias: Tensor | None,
        update: Tensor | None,
        half_bias: Tensor | None,
        cast: Cast,
    ) -> Tensor:
        # Flattened to two dimensions: PyTorch would compute a batch of one with unusual strides as a batched product.
        narrow = cast.of(input, half.dtype).reshape(-1, input.shape[-1])
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        # The input is only needed for the weight's gradient, and the copy only for the input's. Not keeping what nobody
        # needs saves the activations of frozen layers.
        ctx.save_for_backward(narrow if needs_weight else None, half if needs_input else None)
        ctx.dtypes = input.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.widened = is_widened(half)
        added = bias if half_bias is None else half_bias
        output = half_product(narrow, half, added, None if update is None else update.reshape(-1, update.shape[-1]))
        return output.view(*input.shape[:-1], output.shape[-1])

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, half = ctx.saved_tensors
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_input, needs_weight, _, needs_bias, needs_update = ctx.needs_input_grad[:5]
        flat = gradient.reshape(-1, gradient.shape[-1])
        multiply = partial(gradient_product, widened=ctx.widened)
        return (
            multiply(flat, half, input_dtype).view(*gradient.shape[:-1], half.shape[1]) if needs_input else None,
            multiply(flat.t(), input, weight_dtype) if needs_weight else None,
            None,
            flat.sum(0).to(bias_dtype) if needs_bias else None,
            gradient if needs_update else None,
            None,
            None,
        )


def product(
    input: Float[Tensor, "... in"],
    weight: Float[Tensor, "out in"],
    half: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None,
    update: Float[Tensor, "... out"] | None,
    half_bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "... out"]:
    """Compute `F.linear` by `half`, a half-precision copy of the weight, plus `update`; `weight` gets the gradient.

    `half_bias` is a copy of the bias, where there is one.
    """
    function: Any = _Product
    output: Tensor = function.apply(input, weight, half, bias, update, half_bias, CAST)
    return output


class _Copying(nn.Module):
    """A layer that computes with a half-precision copy of its weight. `HalfWeights.refresh` brings it up to date."""

    half_weight: Tensor | None = None
    """The copy; without one the layer computes as its own class does."""
    half_bias: Tensor | None = None
    """The bias rounded to the nearest, as autocast rounds it in every forward pass."""

    def _apply(self, fn: Any, recurse: bool = True) -> _Copying:
        """Move or cast the parameters as any layer does, and drop the copy, which is made again when it is needed."""
        self.half_weight = self.half_bias = None
        base: Any = super()
        base._apply(fn, recurse)
        return self


class HalfLinear(_Copying, nn.Linear):
    """An nn.Linear with the same parameters and names that computes with a half-precision copy of its weight."""

    def forward(self, input: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Compute as nn.Linear does, in the dtype of the copy."""
        return F.linear(input, self.weight, self.bias) if self.half_weight is None else self.by_copy(input)

    def by_copy(
        self, input: Float[Tensor, "... in"], update: Float[Tensor, "... out"] | None = None
    ) -> Float[Tensor, "... out"]:
        """Compute with the copy; `update` is added before the sum is rounded to its dtype."""
        assert self.half_weight is not None
        return product(input, self.weight, self.half_weight, self.bias, update, self.half_bias)


class HalfConv1D(_Copying, Conv1D):  # type: ignore[misc]  # transformers has no types for it
    """The same for GPT-2's linear layer, whose weight is [in, out]."""

    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Compute as Conv1D does, in the dtype of the copy."""
        if self.half_weight is None:
            base: Any = super()
            plain: Tensor = base.forward(x)
            return plain
        return self.by_copy(x)

    def by_copy(
        self, input: Float[Tensor, "... in"], update: Float[Tensor, "... out"] | None = None
    ) -> Float[Tensor, "... out"]:
        """Compute as `HalfLinear.by_copy` does."""
        assert self.half_weight is not None
        return product(input, self.weight.t(), self.half_weight.t(), self.bias, update, self.half_bias)


COPYING: Final[dict[type[nn.Module], type[_Copying]]] = {
    nn.Linear: HalfLinear,
    OneDnnLinear: HalfLinear,
    Conv1D: HalfConv1D,
}
"""Layer class -> the one that computes with a copy; other subclasses may have a forward method of their own."""


def weights_with_copies(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, layer, name in the layer) of each weight that has a half-precision copy where the model computes in
    half precision; of linear layers their biases, which are never drawn, are left out. `prefix` is put before the
    names.
    """
    for path, layer in module.named_modules(prefix=prefix):
        for own in ["weight"] if type(layer) in COPYING else weights_of_experts(layer):
            yield f"{path}.{own}", layer, own


@dataclass(slots=True)
class _Copied:
    """A weight with a copy, and what is looked up for it in every step: attributes of a module are slow to set."""

    layer: Any
    kind: type[nn.Module]
    """The layer's class before it had a copy."""
    own: str
    """The name of the weight in the layer."""
    name_seed: tuple[int, int]
    made_of: tuple[object, ...] = ()
    """What the copy was made from: the weight's version, its storage and the draw."""
    bias_made_of: tuple[object, ...] = ()
    """The same of the bias, which no draw rounds; the draw only of one that trains."""


class HalfWeights:
    """The half-precision copies of the weights of linear layers and joined experts of a model, kept up to date with
    them and the draw."""

    def __init__(self, module: nn.Module, prefix: str, dtype: torch.dtype, rounding: HalfRounding) -> None:
        """Make every such layer inside compute with copies from now on; a weight held in `dtype` is its own copy.

        `prefix` is put before the names of weights, which seed stochastic rounding.
        """
        self.dtype, self.rounding = dtype, rounding
        self._layers = [
            _Copied(layer, type(layer), own, name_seed(name))
            for name, layer, own in weights_with_copies(module, prefix)
            # Experts that are held in half precision are multiplied in it by their own class.
            if type(layer) in COPYING or getattr(layer, own).dtype is torch.float32
        ]
        for copied in self._layers:
            kind: Any = copied.kind
            copied.layer.__class__ = COPYING.get(kind) or with_copies(kind)
        self._biased = [copied for copied in self._layers if copied.kind in COPYING and copied.layer.bias is not None]

    def refresh(self, draw: tuple[int, ...] = AS_SAVED) -> bool:
        """Make the copies again whose weight has changed or whose draw was another one; return False, since no weight
        is changed.

        `draw` seeds stochastic rounding, together with the weight's name. A change is recognised by autograd's version
        counter, so changes that bypass it (`weight.data.mul_(2)`, a step of fused AdamW) are missed until the next
        draw. Weights made in inference mode have no counter, so their copies are made every time.
        """
        stale: list[tuple[_Copied, tuple[object, ...]]] = []
        drawn: list[Part] = []
        for copied in self._layers:
            layer, name = copied.layer, copy_name(copied.own)
            weight, half_weight = getattr(layer, copied.own), getattr(layer, name, None)
            version = None if weight.is_inference() else weight._version
            own = weight.dtype is self.dtype
            made_of = (None if own else version, weight.untyped_storage()._cdata, None if own else draw)
            if half_weight is not None and copied.made_of == made_of and (own or version is not None):
                continue
            stale.append((copied, made_of))
            copied.made_of = ()  # until it is rounded: running out of memory may leave a copy of another draw
            if own:
                setattr(layer, name, weight.detach())  # the same memory, so that it follows the weight
                continue
            if half_weight is None:
                half_weight = torch.empty_like(weight, dtype=self.dtype, requires_grad=False)
                setattr(layer, name, half_weight)
            drawn.append(Part(weight.detach(), (*draw, *copied.name_seed), half_weight))
        self._round(drawn)
        for copied, now_made_of in stale:
            copied.made_of = now_made_of
        self._cast_biases(draw)
        return False

    def _cast_biases(self, draw: tuple[int, ...]) -> None:
        stale: list[tuple[_Copied, tuple[object, ...], Tensor]] = []
        for copied in self._biased:
            layer, bias = copied.layer, copied.layer.bias
            version = None if bias.is_inference() else bias._version
            # Every step has another draw. Those that train are cast anew with it: fused optimisers do not count.
            made_of = (version, bias.untyped_storage()._cdata, draw if bias.requires_grad else None)
            if version is None or layer.half_bias is None or copied.bias_made_of != made_of:
                stale.append((copied, made_of, torch.empty_like(bias, dtype=self.dtype, requires_grad=False)))
        if stale:
            casts = [cast for _, _, cast in stale]
            torch._foreach_copy_(casts, [copied.layer.bias.detach() for copied, _, _ in stale])  # all in one operation
        for copied, now_made_of, cast in stale:
            copied.layer.half_bias, copied.bias_made_of = cast, now_made_of

    def _round(self, parts: Sequence[Part]) -> None:
        if self.rounding == "stochastic":
            round_together(parts, self.dtype)
            return
        for part in parts:
            part.out.copy_(part.tensor)

    def restore(self) -> None:
        """Do nothing, because the weights themselves were never rounded; as `RoundedParts.restore`."""

    def forget_others_than(self, module: nn.Module) -> None:
        """Stop keeping copies for layers that are no longer part of `module`."""
        inside = set(module.modules())
        self._layers = [copied for copied in self._layers if copied.layer in inside]
        self._biased = [copied for copied in self._biased if copied.layer in inside]

    def drop(self) -> None:
        """Free the copies and make the layers compute as they did before."""
        for copied in self._layers:
            setattr(copied.layer, copy_name(copied.own), None)
            copied.layer.__class__ = copied.kind
        for copied in self._biased:
            copied.layer.half_bias = None
        self._layers, self._biased = [], []


def line_about_others(module: nn.Module) -> str:
    """Return a line for the log about matrices that have no copies, or "" if there are none: autocast rounds them to
    the nearest, whatever rounding the others have.
    """
    known = (*COPYING, *COPYING.values())
    total = sum(parameter.numel() for parameter in module.parameters())
    nearest = 0
    for layer in module.modules():
        if type(layer) in known or isinstance(layer, nn.Embedding):
            continue
        joined = weights_of_experts(layer)
        nearest += sum(
            parameter.numel()
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.ndim >= 2 and parameter.dtype is torch.float32 and name not in joined
        )
    if not nearest:
        return ""
    return (
        f"half precision: {_share(nearest / total)} of the weights are in layers of other kinds than nn.Linear. Where "
        f"they are computed, they are rounded to the nearest, so small updates of them are not seen; --precision fp32 "
        f"sees them"
    )


def _share(value: float) -> str:
    return "less than 1%" if value < 0.01 else f"{value:.0%}"


def hold_half(module: nn.Module, prefix: str, dtype: torch.dtype) -> None:
    """Replace the weights of linear layers and joined experts by half-precision values, rounded as for a file.

    This halves their memory, and scoring needs no others. `prefix` is as in `HalfWeights`, which then takes these
    weights as their own copies.
    """
    for name, layer, own in weights_with_copies(module, prefix):
        setattr(layer, own, nn.Parameter(round_weights(getattr(layer, own).detach(), dtype, name), False))
