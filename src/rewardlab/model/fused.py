"""One kernel of Triton in place of several operations of PyTorch, in half precision on a GPU.

Rounding weights, multiplying the two factors of a gated part and adding up an adapter take PyTorch several passes over
a GPU's memory, and the host as many operations to start. Each of them is one kernel here (model/triton_kernels.py).
Triton comes with PyTorch for CUDA; where it is not there, or its numbers are not those of PyTorch's operations, these
take over.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewardlab.model.trials import beyond_rounding, current, failed

HALF: Final = (torch.bfloat16, torch.float16)
PLAIN: Final = (Tensor, nn.Parameter)
"""Classes of tensors that a kernel can read: not those that stand for others, as in tracing or in sharded models."""
MODULE: Final = "rewardlab.model.triton_kernels"
TRIAL_SHAPE: Final = (70, 160)
"""Rows and width of the tensors that kernels are tried with: no multiples of what a program computes."""
TRIAL_HEADS: Final = 3, 16
"""Heads and their width in the trial of rotations."""
LEAST_CAPABILITY: Final = 8, 0
"""Lowest compute capability that Triton is made for. Below, where it computes products without tensor cores, its
compiler took 77 seconds and gigabytes for an adapter of rank 128."""
SPEED_ROWS: Final = 3000
"""Rows with which kernels are timed: about those of a micro-batch."""
CALLS: Final = 4
"""How many calls are timed together, so that the time is not all of it waiting for the GPU."""


@cache
def load_kernels() -> Any:
    """Return the module of kernels. Raises ImportError where there is no Triton."""
    if find_spec("triton") is None:
        raise ImportError("Triton is not installed")
    return importlib.import_module(MODULE)


def can_read(*tensors: Tensor) -> bool:
    """Return whether a kernel can read these tensors of one GPU."""
    first = tensors[0]
    return (
        first.is_cuda
        and all(type(tensor) in PLAIN and tensor.is_contiguous() for tensor in tensors)
        and first.get_device() == torch.cuda.current_device()  # on which Triton starts its kernels
    )


def unsupported(device: torch.device) -> str:
    """Return why Triton does not serve a GPU, or ""."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else LEAST_CAPABILITY
    if capability >= LEAST_CAPABILITY:
        return ""
    least, own = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
    return f"Triton serves GPUs from compute capability {least} on, and this one has {own}"


def trial(
    device: torch.device, dtype: torch.dtype, *, rank: int, heads: tuple[int, int] = TRIAL_HEADS, joined: bool = False
) -> str:
    """Return why kernels cannot take the place of PyTorch's operations in this dtype, or "".

    `rank` is that of the adapters to add up, 0 where there are none; `heads` are how many heads are rotated and their
    width. A kernel is compiled for them. Where others have `joined` all other operations, adapters alone are tried.
    """
    if reason := unsupported(device):
        return reason
    try:
        kernels = load_kernels()
        with current(device):
            reason = _sum_reason(kernels, device, dtype, rank) if rank else ""
            if reason or joined:
                return reason
            return _gated_reason(kernels, device, dtype) or _rotation_reason(kernels, device, dtype, heads)
    except Exception as error:
        return str(error) if isinstance(error, ImportError) else failed(error)


def _drawn(device: torch.device, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return (3 * torch.randn(*shape, generator=draw)).to(device)


def _gated_reason(kernels: Any, device: torch.device, dtype: torch.dtype) -> str:
    gate, up, gradient = (_drawn(device, *TRIAL_SHAPE).roll(number, 1).to(dtype) for number in range(3))
    for silu in (True, False):
        exact = gated_by_operations(gate.float(), up.float(), gradient.float(), silu=silu)
        plain = gated_by_operations(gate, up, gradient, silu=silu)
        tried = gated_by_kernels(kernels, gate, up, gradient, silu=silu)
        if reason := beyond_rounding(("product", "d_gate", "d_up"), exact, plain, tried):
            return reason
    return ""


def _sum_reason(kernels: Any, device: torch.device, dtype: torch.dtype, rank: int) -> str:
    rows, width = TRIAL_SHAPE
    wide, bias = _drawn(device, rows, width), _drawn(device, width).to(dtype)
    inner, second = (_drawn(device, count, rank).to(dtype) for count in (rows, width))
    for own_bias in (None, bias):
        exact = wide + inner.float() @ second.float().t()
        exact = exact if own_bias is None else exact + own_bias.float()
        output = torch.empty_like(wide, dtype=dtype)
        kernels.add_product(wide, inner, second, own_bias, output)
        if reason := beyond_rounding(("sum",), (exact,), (exact.to(dtype),), (output,)):
            return reason
    return ""


def _rotation_reason(kernels: Any, device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> str:
    tokens, (heads, width) = 35, shape
    for batch, kind in ((1, torch.float32), (2, dtype)):
        x = _drawn(device, 2, tokens, heads, width).to(dtype)
        cos, sin = (_drawn(device, batch, tokens, width).roll(number, 1).to(kind) for number in range(2))
        for forward in (True, False):
            exact = _turned(x.float(), cos.float(), sin.float(), forward=forward)
            output = torch.empty_like(x, dtype=kind)
            kernels.turn(x, cos, sin, output, forward=forward)
            if reason := beyond_rounding(("rotation",), (exact,), (exact.to(kind),), (output,)):
                return reason
    return ""


def _turned(x: Tensor, cos: Tensor, sin: Tensor, *, forward: bool) -> Tensor:
    """Return x [B, T, H, D] turned, or turned back, by PyTorch's operations."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = (x if forward else x * sin).chunk(2, -1)
    return x * cos + (torch.cat((-second, first), -1) * sin if forward else torch.cat((second, -first), -1))


def gated_by_operations(gate: Tensor, up: Tensor, gradient: Tensor, *, silu: bool) -> Sequence[Tensor]:
    """Return act(gate) · up and its gradients by PyTorch's operations."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(gate.device.type, enabled=False):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (gate, up)]
        output = (F.silu(leaves[0]) if silu else F.gelu(leaves[0], approximate="tanh")) * leaves[1]
        return output.detach(), *torch.autograd.grad(output, leaves, gradient)


def gated_by_kernels(kernels: Any, gate: Tensor, up: Tensor, gradient: Tensor, *, silu: bool) -> Sequence[Tensor]:
    """Return act(gate) · up and its gradients by kernels."""
    output, d_gate, d_up = (torch.empty_like(gate) for _ in range(3))
    kernels.multiply(gate, up, output, silu=silu)
    kernels.multiply_backward(gate, up, gradient, d_gate, d_up, silu=silu)
    return output, d_gate, d_up
