"""Finds the most FLOP/s of the device in the arithmetic of the run, from a table or by a short measurement."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from rewardlab.model.linear import WIDENED, widened_product
from rewardlab.model.trials import wait_for
from rewardlab.training.cost.throughput import PeakFlops, known_peak_flops

LIMIT_S: Final = 1.0
"""Seconds after which no more is measured, except the few products that always are."""
TRIAL_ROWS: Final = 128
"""Rows with which all kernels and shapes are compared, to spend the time on the fastest first."""
MIN_ROWS: Final = 1024
"""Rows that are measured however slow the device is: with fewer a product is well below the peak."""
MAX_ROWS: Final[Mapping[str, int]] = {"cpu": 4096, "cuda": 8192}
CALLS: Final[Mapping[str, int]] = {"cpu": 1, "cuda": 10}
"""Products between two readings of the clock: on a GPU a launch and a wait would be a large part of one product."""
MAX_REPEATS: Final = 6
MAX_SIDE: Final = 4096
"""Larger matrices are cut to this: above it the rate no longer rises."""
Linear = Callable[[Tensor, Tensor], Tensor]


def peak_flops_of(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], *, count: int = 1
) -> PeakFlops:
    """Return the peak of `count` devices like this one for matmuls in `dtype`.

    A GPU in the table has its maker's number. For any other device it is measured on `shapes`, the (outputs, inputs) of
    the model's weights.
    """
    peak = makers_peak_flops(device, dtype)
    if peak is None:
        flops, (rows, outputs, inputs) = measure(device, dtype, shapes)
        peak = PeakFlops(
            flops=flops, source=f"measured, {_arithmetic(device, dtype)} matmul of {rows}x{inputs}x{outputs}"
        )
    return peak if count == 1 else PeakFlops(flops=count * peak.flops, source=f"{count} x {peak.source}")


def makers_peak_flops(device: torch.device, dtype: torch.dtype) -> PeakFlops | None:
    """Return the peak of a GPU in the table for matmuls in `dtype`; None for every other device."""
    if device.type != "cuda":
        return None
    name, arithmetic = torch.cuda.get_device_name(device), _arithmetic(device, dtype)
    known = known_peak_flops(name, arithmetic)
    return None if known is None else PeakFlops(flops=known, source=f"{name}, {arithmetic} dense, by its maker")


def _arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    if dtype.itemsize < 4:
        return "fp16" if dtype is torch.float16 else "bf16"
    fast = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if fast else "fp32"


def measure(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int]]
) -> tuple[float, tuple[int, int, int]]:
    """Return (best FLOP/s, the rows, outputs and inputs that gave it) over the two largest shapes, in about a second.

    The kernel and shape that is fastest in a short trial is measured first, with at least MIN_ROWS rows and up to
    MAX_ROWS if there is time; the others follow. No global random number is drawn.
    """
    deadline = time.perf_counter() + LIMIT_S
    cut = {(min(outputs, MAX_SIDE), min(inputs, MAX_SIDE)) for outputs, inputs in shapes}
    largest = sorted(cut, key=lambda shape: (-shape[0] * shape[1], shape))[:2]
    candidates = [(linear, shape) for linear in _linears(device, dtype) for shape in largest]
    rates: list[tuple[float, tuple[int, int, int]]] = []
    trials = []
    for linear, (outputs, inputs) in candidates:
        product = _product(linear, TRIAL_ROWS, outputs, inputs, device, dtype)
        seconds = _seconds(product, device, repeats=2, deadline=deadline)
        trials.append(2 * TRIAL_ROWS * outputs * inputs / seconds)
        rates.append((trials[-1], (TRIAL_ROWS, outputs, inputs)))
    for place, number in enumerate(sorted(range(len(candidates)), key=lambda number: -trials[number])):
        linear, (outputs, inputs) = candidates[number]
        # The rows that can be measured twice in the time left. The trial's rate is below that of more rows, so this is
        # rather too few than too many.
        fitting = trials[number] * (deadline - time.perf_counter()) / (2 * CALLS[device.type] * 2 * outputs * inputs)
        if place and fitting < MIN_ROWS:
            continue
        rows = MIN_ROWS
        while 2 * rows <= min(fitting, MAX_ROWS[device.type]):
            rows *= 2
        product = _product(linear, rows, outputs, inputs, device, dtype)
        seconds = _seconds(product, device, repeats=MAX_REPEATS, deadline=deadline)
        rates.append((2 * rows * outputs * inputs / seconds, (rows, outputs, inputs)))
    return max(rates)


def _linears(device: torch.device, dtype: torch.dtype) -> list[Linear]:
    """Return the ways to multiply: torch's own and, on a CPU in float32, oneDNN's, on some machines twice as fast.

    Half precision that a processor has no fast instructions for is multiplied as the layers of a model do it.
    """
    if device.type == "cpu" and dtype in WIDENED:
        return [lambda x, weight: widened_product(x, weight.t())]
    linears: list[Linear] = [F.linear]
    if device.type == "cpu" and dtype is torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        linears.append(lambda x, weight: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
    return linears


def _product(
    linear: Linear, rows: int, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """Return a function that computes a product of [rows, inputs] and [outputs, inputs]."""
    numbers = torch.Generator(device).manual_seed(0)
    row = torch.rand(1, inputs, generator=numbers, device=device).to(dtype)
    x, weight = row.repeat(rows, 1), row.repeat(outputs, 1)
    return lambda: linear(x, weight)


def _seconds(product: Callable[[], object], device: torch.device, *, repeats: int, deadline: float) -> float:
    """Return the best time of one call, measured at least once, and not again where that would end after `deadline`."""
    best = math.inf
    for _ in range(repeats):
        wait_for(device)
        started = time.perf_counter()
        for _call in range(CALLS[device.type]):
            product()
        wait_for(device)
        now = time.perf_counter()
        # The best time counts, since other processes can only make a product slower. A coarse clock may say that it
        # took none.
        best = min(best, max(now - started, 1e-9) / CALLS[device.type])
        if 2 * now - started > deadline:
            break
    return best
