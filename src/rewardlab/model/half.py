"""Linear layers over half-precision copies of float32 weights, made once a step.

Autocast rounds every float32 weight to the nearest half-precision value in every forward pass: a cast for each
micro-batch, and a forward pass that hardly sees small updates (model/rounding.py). Here each layer keeps a copy, which
is made when its weight has changed; the gradient goes straight through the rounding to the float32 weight.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rewardlab.model.autograd import first_order
from rewardlab.model.config import HalfRounding
from rewardlab.model.linear import OneDnnLinear
from rewardlab.model.rounding import name_seed, round_stochastically, round_weights

AS_SAVED: Final = ()
"""The draw of a model that is judged or saved: the one by which its weights are rounded for a file (round_weights)."""
LINEAR: Final = (nn.Linear, OneDnnLinear)
"""Layers that can compute by a copy; other subclasses of nn.Linear compute in a way of their own."""


class _Product(torch.autograd.Function):
    """`F.linear` by the copy of a weight; the weight itself is there to be given the gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, half: Tensor, bias: Tensor | None) -> Tensor:
        # Flat, since a batch of one with odd strides would be multiplied as a batch of matrices.
        narrow = input.to(half.dtype).reshape(-1, input.shape[-1])
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        # A frozen weight needs no input kept for it, and the first trained layer no weight.
        ctx.save_for_backward(narrow if needs_weight else None, half if needs_input else None)
        ctx.dtypes = input.dtype, weight.dtype, None if bias is None else bias.dtype
        output = F.linear(narrow, half, None if bias is None else bias.to(half.dtype))
        return output.view(*input.shape[:-1], output.shape[-1])

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        input, half = ctx.saved_tensors
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_input, needs_weight, _, needs_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            (flat @ half).view(*gradient.shape[:-1], half.shape[1]).to(input_dtype) if needs_input else None,
            (flat.t() @ input).to(weight_dtype) if needs_weight else None,
            None,
            flat.sum(0).to(bias_dtype) if needs_bias else None,
        )


class HalfLinear(nn.Linear):
    """An nn.Linear, same parameters and names, that computes by a half-precision copy of its weight."""

    half_weight: Tensor | None = None
    """The copy; None computes as nn.Linear does."""
    made_of: tuple[object, ...] = ()
    """What the copy was made of."""

    def forward(self, input: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """As nn.Linear, in the dtype of the copy. Whoever changes the weight has the copy made again."""
        if self.half_weight is None:
            return F.linear(input, self.weight, self.bias)
        product: Any = _Product
        output: Tensor = product.apply(input, self.weight, self.half_weight, self.bias)
        return output

    def _apply(self, fn: Any, recurse: bool = True) -> HalfLinear:
        """Moved or cast as nn.Linear is; the copy is made again where it is next wanted."""
        self.half_weight, self.made_of = None, ()
        base: Any = super()
        base._apply(fn, recurse)
        return self


class HalfWeights:
    """The copies of all linear layers of a model, made again where a weight or the draw has changed."""

    def __init__(self, module: nn.Module, prefix: str, dtype: torch.dtype, rounding: HalfRounding) -> None:
        """Every nn.Linear inside computes by a copy from now on; what is frozen in `dtype` is its own copy.

        `prefix` stands before the names of weights, with which stochastic rounding is seeded.
        """
        self.dtype, self.rounding = dtype, rounding
        self._layers: list[tuple[str, Any, type[nn.Linear]]] = []
        for name, layer in module.named_modules(prefix=prefix):
            if (kind := type(layer)) in LINEAR:
                layer.__class__ = HalfLinear
                self._layers.append((f"{name}.weight", layer, kind))

    def refresh(self, draw: tuple[int, ...] = AS_SAVED) -> None:
        """Make the copies that are not of their weights as they are now, or were drawn otherwise.

        `draw` is what stochastic rounding is seeded with beside a weight's name. What is changed behind autograd's back
        (`weight.data.mul_(2)`) is not seen; weights made in inference mode are not counted at all, so their copies are
        made every time.
        """
        for name, layer, _ in self._layers:
            weight = layer.weight
            version = None if weight.is_inference() else weight._version
            made_of = (version, weight.untyped_storage()._cdata, draw)
            if version is not None and layer.made_of == made_of and layer.half_weight is not None:
                continue
            layer.half_weight = self._copy(weight.detach(), layer.half_weight, name, draw)
            layer.made_of = made_of

    def restore(self) -> None:
        """Nothing: the weights themselves were never rounded."""

    def forget_others_than(self, module: nn.Module) -> None:
        """Let go of layers that are no longer inside."""
        inside = set(module.modules())
        self._layers = [entry for entry in self._layers if entry[1] in inside]

    def drop(self) -> None:
        """Give the copies back; the layers are again what they were."""
        for _, layer, kind in self._layers:
            layer.half_weight, layer.made_of = None, ()
            layer.__class__ = kind
        self._layers = []

    def _copy(self, weight: Tensor, earlier: Tensor | None, name: str, draw: tuple[int, ...]) -> Tensor:
        if weight.dtype is self.dtype:
            return weight
        out = torch.empty_like(weight, dtype=self.dtype) if earlier is None else earlier
        if self.rounding == "nearest":
            return out.copy_(weight)
        return round_stochastically(weight, self.dtype, (*draw, *name_seed(name)), out=out)


def line_about_others(module: nn.Module) -> str:
    """What to say of matrices that are in no linear layer and no embedding, such as those of joined experts; empty if
    there are none. Autocast rounds them to the nearest, whatever is done about the others.
    """
    kept = [
        layer for layer in module.modules() if type(layer) in (*LINEAR, HalfLinear) or isinstance(layer, nn.Embedding)
    ]
    covered = {id(parameter) for layer in kept for parameter in layer.parameters(recurse=False)}
    matrices = [p for p in module.parameters() if p.ndim >= 2 and p.dtype is torch.float32]
    others = sum(p.numel() for p in matrices if id(p) not in covered)
    if not others:
        return ""
    share = others / sum(parameter.numel() for parameter in module.parameters())
    return (
        f"half precision: {share:.0%} of the weights are in layers other than nn.Linear. Where they are computed, they "
        f"are rounded to the nearest, so small updates of them are not seen; --precision fp32 sees them"
    )


def hold_half(module: nn.Module, prefix: str, dtype: torch.dtype) -> None:
    """Put in place of the weights of linear layers their copies as rounded for a file: scoring needs nothing else.

    `prefix` is that of `HalfWeights`, which takes them as they are.
    """
    for name, layer in module.named_modules(prefix=prefix):
        if type(layer) in LINEAR:
            layer.weight = nn.Parameter(round_weights(layer.weight.detach(), dtype, f"{name}.weight"), False)


class RoundedParts:
    """The weights of linear layers that FSDP holds in parts: rounded in place while the model computes.

    FSDP casts what it gathers to half precision, and for weights that are rounded already that changes nothing. What
    they were is kept beside them, and is put back before anybody reads or updates them. Every process draws what one
    alone would draw for its part.
    """

    def __init__(self, module: nn.Module, prefix: str, dtype: torch.dtype) -> None:
        """Of every nn.Linear inside, what trains in float32."""
        self.dtype = dtype
        self._weights = [
            (f"{name}.weight", layer.weight)
            for name, layer in module.named_modules(prefix=prefix)
            if type(layer) in LINEAR and layer.weight.requires_grad and layer.weight.dtype is torch.float32
        ]
        self._draw: tuple[int, ...] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def refresh(self, draw: tuple[int, ...] = AS_SAVED) -> None:
        """Round every weight by this draw, unless that was done."""
        if self._draw == draw:
            return
        self.restore()
        for name, weight in self._weights:
            assert isinstance(weight, DTensor)
            part, width = weight.to_local(), weight.shape[1]
            self._kept.append((part, part.clone()))
            start = rows_of(weight).start * width
            seed = (*draw, *name_seed(name))
            round_stochastically(part, self.dtype, seed, out=part, start=start)
        self._draw = draw

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what the weights were."""
        for part, kept in self._kept:
            part.copy_(kept)
        self._kept, self._draw = [], None

    def drop(self) -> None:
        """Put back what the weights were, for good."""
        self.restore()
        self._weights = []


def rows_of(tensor: DTensor) -> slice:
    """The rows of a weight that FSDP leaves with this process: of the first dimension, in equal chunks."""
    mesh = tensor.device_mesh
    (dimension,) = (number for number, placement in enumerate(tensor.placements) if placement.is_shard(0))
    count = tensor.shape[0]
    chunk = -(-count // mesh.size(dimension))
    start = min(count, chunk * mesh.get_local_rank(dimension))
    return slice(start, min(count, start + chunk))
