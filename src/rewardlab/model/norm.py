"""RMSNorm in training: on the CPU a few rows at a time, on a GPU by PyTorch's one kernel.

transformers computes an RMSNorm as half a dozen operations, each of which reads and writes the whole tensor, and twice
as many in the backward pass. On the CPU they run here on as many rows as fit the processor's cache (`blockwise`); on a
GPU PyTorch has one kernel for each pass (`fused`). Both keep only the input for the backward pass, where transformers
also keeps the normalised rows.

Legend: T tokens, W width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rewardlab.model.autograd import first_order, in_parts
from rewardlab.model.trials import alike, beyond_rounding, failed, times_as_fast, trial_on_cpu

MIN_WIDTH: Final = 256
"""Narrower norms stay with PyTorch: they are a small part of a step."""
SPEED_ROWS: Final = 3000
"""Rows with which the two are timed: about those of a micro-batch."""
BARELY: Final = 1e-6
"""Largest relative difference of a gradient (L2) at which a layer counts as this norm; of an output too, where it need
not have the same bits."""
BESIDE_TORCH: Final = {"cpu": "blockwise", "cuda": "fused"}
"""Type of device -> what there is beside transformers' own operations."""

Compute = Callable[[Tensor, Tensor, float], Tensor]
"""(rows, weight, epsilon) -> the norm"""


class BlockwiseNorm(torch.autograd.Function):
    """w · x / √(mean(x²) + ε) of rows [..., W], in the dtype of the rows; w is [W]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        output, scale = torch.empty_like(rows), rows.new_empty(len(rows), 1)
        squares: Tensor | None = None
        for part, own, target in in_parts(rows, scale, output):
            squares = torch.empty_like(part) if squares is None else squares[: len(part)]
            torch.mul(part, part, out=squares)
            torch.mean(squares, -1, keepdim=True, out=own)
            own.add_(epsilon).rsqrt_()
            # In the order in which PyTorch's RMSNorm multiplies, so that every bit of the output is the same.
            torch.mul(part, own, out=target).mul_(weight)
        ctx.save_for_backward(rows, weight, scale)
        return output.view_as(input)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, scale = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, rows.shape[1])
        needs_input, needs_weight, _ = ctx.needs_input_grad
        d_input = torch.empty_like(rows) if needs_input else None
        d_weight = torch.zeros_like(weight) if needs_weight else None
        product: Tensor | None = None
        for part, own, incoming, target in in_parts(rows, scale, gradient, gradient if d_input is None else d_input):
            product = torch.empty_like(part) if product is None else product[: len(part)]
            torch.mul(part, incoming, out=product)
            if d_weight is not None:
                d_weight.addmv_(product.t(), own[:, 0])
            if d_input is not None:
                # What the scale of a row, which depends on all of its values, adds to each: − x · s³ · mean(g · w · x).
                shared = torch.mv(product, weight)[:, None] * own.pow(3) / rows.shape[1]
                torch.mul(incoming, weight, out=target).mul_(own).addcmul_(part, shared, value=-1)
        return None if d_input is None else d_input.view_as(gradients[0]), d_weight, None


def _blockwise(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    norm: Any = BlockwiseNorm
    output: Tensor = norm.apply(rows, weight, epsilon)
    return output


def _fused(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(rows, weight.shape, weight, epsilon)


COMPUTE: Final[dict[str, Compute]] = {"blockwise": _blockwise, "fused": _fused}


class ReplacedNorm(nn.Module):
    """An RMSNorm of transformers that computes in another way; the layer's own class follows in the inheritance."""

    weight: nn.Parameter
    variance_epsilon: float
    backend: ClassVar[str]
    """Which of COMPUTE."""

    def forward(self, hidden_states: Float[Tensor, "... W"]) -> Float[Tensor, "... W"]:
        """Compute as the layer's own class does; by that class when compiled, sharded or not in float32, and blockwise
        without a gradient, where the bits are the same.
        """
        weight = self.weight
        trains = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        known = hidden_states.dtype is weight.dtype is torch.float32 and not isinstance(weight, DTensor)
        if not known or torch.compiler.is_compiling() or not (trains or self.backend == "fused"):
            base: Any = super()
            plain: Tensor = base.forward(hidden_states)
            return plain
        return COMPUTE[self.backend](hidden_states, weight, self.variance_epsilon)


@cache
def _replaced(name: str, kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of an RMSNorm of this kind that computes as `name` says."""
    return type(f"{name.capitalize()}{kind.__name__}", (ReplacedNorm, kind), {"backend": name})


def use_norms(module: nn.Module, name: str) -> int:
    """Make every RMSNorm inside that has the numbers of `name` ("blockwise", "fused") compute by it, in place; return
    how many do.
    """
    layers = [child for child in module.modules() if _is_plain_rms_norm(child)]
    kinds = {alike(child): child for child in layers}
    found = {kind: _agrees(child, name) for kind, child in kinds.items()}
    agreeing = [child for child in layers if found[alike(child)]]
    # The class is swapped and the module kept, so that parameter names and references to the module stay valid.
    for child in agreeing:
        kind: Any = type(child)
        child.__class__ = _replaced(name, kind)
    return len(agreeing)


def _is_plain_rms_norm(layer: nn.Module) -> bool:
    """Return whether a layer has the name and the parts of an RMSNorm as LLaMA's and Qwen's are."""
    named = type(layer).__name__.endswith("RMSNorm") and not isinstance(layer, ReplacedNorm)
    return named and hasattr(layer, "variance_epsilon") and [name for name, _ in layer.named_parameters()] == ["weight"]


def _agrees(layer: nn.Module, name: str) -> bool:
    """Return whether a layer of random weights gives the outputs of `name`, of BlockwiseNorm bit for bit, and its
    gradients nearly."""
    draw = torch.Generator().manual_seed(0)
    own: Any = copy.deepcopy(layer)
    with trial_on_cpu():
        # A new weight, because one of ones would hide what the layer does with it, and one not read yet holds no
        # numbers.
        own.weight = nn.Parameter(torch.randn(own.weight.shape, generator=draw))
        rows, gradient = (torch.randn(1, 5, own.weight.shape[0], generator=draw) for _ in range(2))
        rows.requires_grad_()
        try:
            outputs = own(rows), COMPUTE[name](rows, own.weight, own.variance_epsilon)
            plain, other = (torch.autograd.grad(output, (rows, own.weight), gradient) for output in outputs)
        except Exception:  # it takes more arguments, or gives more than the norm
            return False
    same = torch.equal(*outputs) if name == "blockwise" else _is_near(*outputs)
    return same and all(map(_is_near, plain, other))


def _is_near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= BARELY * a.norm())


def trial(name: str, width: int, device: torch.device) -> str:
    """Return why norms computed by `name` on this device are off by more than rounding, or "".

    They are compared with transformers' operations, in float64 and in float32 (`beyond_rounding`).
    """
    try:
        exact, plain, tried = (
            _computed(compute, width, device, dtype)
            for compute, dtype in (
                (_by_operations, torch.float64),
                (_by_operations, torch.float32),
                (COMPUTE[name], torch.float32),
            )
        )
    except Exception as error:
        return failed(error)
    return beyond_rounding(("output", "dx", "dw"), exact, plain, tried, least=BARELY)


def _computed(compute: Compute, width: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return a norm of random rows and its gradients."""
    rows, weight, gradient = _drawn(width, device, dtype)
    output = compute(rows, weight, 1e-6)
    return [output.detach(), *torch.autograd.grad(output, (rows, weight), gradient)]


def _drawn(width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows, gradient = (torch.randn(1, SPEED_ROWS, width, generator=draw).to(device, dtype) for _ in range(2))
    weight = (1 + torch.randn(width, generator=draw)).to(device, dtype)
    return rows.requires_grad_(), weight.requires_grad_(), gradient


@cache  # a process that loads many models measures each width once
def norm_speed(name: str, width: int, device: torch.device, *, repeats: int = 5) -> float:
    """Measure how many times as fast as transformers' operations norms by `name` are, forward and backward."""
    rows, weight, gradient = _drawn(width, device, torch.float32)

    def passes(compute: Compute) -> None:
        torch.autograd.grad(compute(rows, weight, 1e-6), (rows, weight), gradient)

    return times_as_fast(partial(passes, COMPUTE[name]), partial(passes, _by_operations), device, repeats=repeats)


def _by_operations(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return what transformers computes in an RMSNorm."""
    return weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon))
