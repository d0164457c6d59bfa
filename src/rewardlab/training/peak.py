"""The most FLOP/s that the device can do in the arithmetic of the run: from a table, else by a short measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from rewardlab.training.throughput import Peak, known_peak

LIMIT_S: Final = 0.3
MAX_ROWS: Final = 4096
MAX_REPEATS: Final = 6
MAX_SIDE: Final = 4096
"""Larger matrices are cut to this: the rate no longer rises with them."""
Linear = Callable[[Tensor, Tensor], Tensor]


def peak_of(device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int]]) -> Peak:
    """The peak of a device for matmuls in `dtype`; `shapes` are (outputs, inputs) of the model's weights.

    A GPU of the table has its maker's number, everything else is measured, on those shapes.
    """
    arithmetic = _arithmetic(device, dtype)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if (known := known_peak(name, arithmetic)) is not None:
            return Peak(flops=known, source=f"{name}, {arithmetic} dense, by its maker")
    flops, (rows, outputs, inputs) = measure(device, dtype, shapes)
    return Peak(flops=flops, source=f"measured, {arithmetic} matmul of {rows}x{inputs}x{outputs}")


def _arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    if dtype.itemsize < 4:
        return "bf16"
    fast = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if fast else "fp32"


def measure(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int]]
) -> tuple[float, tuple[int, int, int]]:
    """(best FLOP/s, the rows, outputs and inputs that gave it) over the two largest shapes, in under half a second.

    Rows double from 64 while there is time. No global random number is drawn.
    """
    cut = {(min(outputs, MAX_SIDE), min(inputs, MAX_SIDE)) for outputs, inputs in shapes}
    largest = sorted(cut, key=lambda shape: (-shape[0] * shape[1], shape))[:2]
    candidates = [(linear, shape) for linear in _linears(device, dtype) for shape in largest]
    best, best_at = 0.0, (0, 0, 0)
    for linear, (outputs, inputs) in candidates:
        for rows, seconds in _timings(linear, outputs, inputs, device, dtype, LIMIT_S / len(candidates)):
            if (flops := 2 * rows * outputs * inputs / seconds) > best:
                best, best_at = flops, (rows, outputs, inputs)
    return best, best_at


def _linears(device: torch.device, dtype: torch.dtype) -> list[Linear]:
    """Ways to multiply: torch's own and, on a CPU in float32, oneDNN's, which on some machines is twice as fast."""
    found: list[Linear] = [F.linear]
    if device.type == "cpu" and dtype is torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found.append(lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    return found


def _timings(
    linear: Linear, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype, limit_s: float
) -> Iterator[tuple[int, float]]:
    """(rows, seconds of one matmul), larger and larger, then the largest again; at least one."""
    numbers = torch.Generator(device).manual_seed(0)
    weight = torch.rand(1, inputs, generator=numbers, device=device).to(dtype).repeat(outputs, 1)
    rows, repeats, taken = 64, 0, 0.0
    with torch.no_grad():
        linear(weight[:1], weight)  # the first call of a shape prepares its kernel
        deadline = time.perf_counter() + limit_s
        while repeats < MAX_REPEATS and time.perf_counter() + taken < deadline:
            x = weight[:1].repeat(rows, 1)
            _wait(device)
            started = time.perf_counter()
            linear(x, weight)
            _wait(device)
            taken = max(time.perf_counter() - started, 1e-9)
            yield rows, taken
            if rows < MAX_ROWS and time.perf_counter() + 4 * taken < deadline:
                rows *= 2
            else:
                repeats += 1


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
