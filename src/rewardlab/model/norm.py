"""RMSNorm in training on the CPU, a few rows at a time.

PyTorch computes an RMSNorm as half a dozen operations, each of which reads and writes the whole tensor, and twice as
many in the backward pass. Here the operations run on as many rows as fit the processor's cache, and only the input is
kept for the backward pass, where PyTorch also keeps the normalised rows.

Legend: T tokens, W width.
"""

from __future__ import annotations

import copy
import time
from functools import cache
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rewardlab.model.autograd import first_order

PLACES: Final = 1 << 17
"""Values computed at a time by each thread, half a megabyte of float32: they stay in the cache of a core, and there are
enough of them that a call costs little beside its work."""
MIN_WIDTH: Final = 256
"""Narrower norms stay with PyTorch: they are a small part of a step."""
SPEED_ROWS: Final = 3000
"""Rows with which the two are timed: about those of a micro-batch."""
BARELY: Final = 1e-6
"""Largest relative difference of a gradient (L2) at which a layer counts as this norm."""


class BlockwiseNorm(torch.autograd.Function):
    """w · x / √(mean(x²) + ε) of rows [..., W], in the dtype of the rows; w is [W]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        output, scale = torch.empty_like(rows), rows.new_empty(len(rows), 1)
        count = _rows_at_a_time(rows)
        squares = rows.new_empty(min(count, len(rows)), rows.shape[1])
        for start in range(0, len(rows), count):
            part, own = rows[start : start + count], scale[start : start + count]
            torch.mul(part, part, out=squares[: len(part)])
            torch.mean(squares[: len(part)], -1, keepdim=True, out=own)
            own.add_(epsilon).rsqrt_()
            # In the order in which PyTorch's RMSNorm multiplies, so that every bit of the output is the same.
            torch.mul(part, own, out=output[start : start + count]).mul_(weight)
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
        count = _rows_at_a_time(rows)
        products = rows.new_empty(min(count, len(rows)), rows.shape[1])
        for start in range(0, len(rows), count):
            part, own = rows[start : start + count], scale[start : start + count]
            incoming, product = gradient[start : start + count], products[: len(part)]
            torch.mul(part, incoming, out=product)
            if d_weight is not None:
                d_weight.addmv_(product.t(), own[:, 0])
            if d_input is not None:
                # What the scale of a row, which depends on all of its values, adds to each: − x · s³ · mean(g · w · x).
                shared = torch.mv(product, weight)[:, None] * own.pow(3) / rows.shape[1]
                target = d_input[start : start + count]
                torch.mul(incoming, weight, out=target).mul_(own).addcmul_(part, shared, value=-1)
        return None if d_input is None else d_input.view_as(gradients[0]), d_weight, None


def _rows_at_a_time(rows: Tensor) -> int:
    return max(1, PLACES * torch.get_num_threads() // rows.shape[1])


class _Blockwise(nn.Module):
    """An RMSNorm of transformers that trains by BlockwiseNorm; the layer's own class follows in the inheritance."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Float[Tensor, "... W"]) -> Float[Tensor, "... W"]:
        """Compute as the layer's own class does; without gradients, compiled or not in float32, by that class."""
        weight = self.weight
        trains = torch.is_grad_enabled() and (hidden_states.requires_grad or weight.requires_grad)
        known = hidden_states.dtype is weight.dtype is torch.float32 and not isinstance(weight, DTensor)
        if not (trains and known) or torch.compiler.is_compiling():
            base: Any = super()
            plain: Tensor = base.forward(hidden_states)
            return plain
        norm: Any = BlockwiseNorm
        output: Tensor = norm.apply(hidden_states, weight, self.variance_epsilon)
        return output


@cache
def _blockwise(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of an RMSNorm of this kind that trains by BlockwiseNorm."""
    return type(f"Blockwise{kind.__name__}", (_Blockwise, kind), {})


def use_blockwise_norms(module: nn.Module) -> int:
    """Make every RMSNorm inside whose numbers are those of BlockwiseNorm train by it, in place; return how many do."""
    layers = [child for child in module.modules() if _is_plain_rms_norm(child)]
    found = {kind: _agrees(next(one for one in layers if type(one) is kind)) for kind in set(map(type, layers))}
    agreeing = [child for child in layers if found[type(child)]]
    # The class is swapped and the module kept, so that parameter names and references to the module stay valid.
    for child in agreeing:
        kind: Any = type(child)
        child.__class__ = _blockwise(kind)
    return len(agreeing)


def _is_plain_rms_norm(layer: nn.Module) -> bool:
    """Return whether a layer has the name and the parts of an RMSNorm as LLaMA's and Qwen's are."""
    named = type(layer).__name__.endswith("RMSNorm") and not isinstance(layer, _Blockwise)
    return named and hasattr(layer, "variance_epsilon") and [name for name, _ in layer.named_parameters()] == ["weight"]


def _agrees(layer: nn.Module) -> bool:
    """Return whether a layer of random weights gives the outputs of BlockwiseNorm bit for bit, and its gradients
    nearly."""
    draw = torch.Generator().manual_seed(0)
    own: Any = copy.deepcopy(layer)
    # A new weight, because one of ones would hide what the layer does with it, and one not read yet holds no numbers.
    own.weight = nn.Parameter(torch.randn(own.weight.shape, generator=draw))
    rows, gradient = (torch.randn(1, 5, own.weight.shape[0], generator=draw) for _ in range(2))
    rows.requires_grad_()
    norm: Any = BlockwiseNorm
    outputs = own(rows), norm.apply(rows, own.weight, own.variance_epsilon)
    plain, blockwise = (torch.autograd.grad(output, (rows, own.weight), gradient) for output in outputs)
    near = all((a - b).norm() <= BARELY * a.norm() for a, b in zip(plain, blockwise, strict=True))
    return torch.equal(*outputs) and near


@cache  # a process that loads many models measures each width once
def norm_speed(width: int, *, repeats: int = 5) -> float:
    """Measure how many times as fast as PyTorch's operations BlockwiseNorm is, forward and backward."""
    draw = torch.Generator().manual_seed(0)
    rows, gradient = (torch.randn(1, SPEED_ROWS, width, generator=draw) for _ in range(2))
    weight = torch.ones(width).requires_grad_()
    rows.requires_grad_()
    norm: Any = BlockwiseNorm
    best = [float("inf"), float("inf")]
    # Taking turns and keeping the shortest times, for the reasons given in `attention_speed`.
    for _ in range(repeats + 1):
        for number, compute in enumerate((_by_operations, norm.apply)):
            started = time.perf_counter()
            torch.autograd.grad(compute(rows, weight, 1e-6), (rows, weight), gradient)
            best[number] = min(best[number], time.perf_counter() - started)
    return best[0] / best[1]


def _by_operations(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return what transformers computes in an RMSNorm."""
    return weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon))
