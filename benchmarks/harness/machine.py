"""The machine: what it is, how busy it is, and how fast it multiplies matrices."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rewardlab.core.files import provenance
from rewardlab.model.load import resolve_precision
from rewardlab.training.cost.memory import process_peak, resident

PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16}


def describe(device: torch.device) -> dict[str, Any]:
    """Processor, memory, threads, versions; nothing that names the place."""
    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_total(),
        "bf16_native": has_bf16(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_gb": properties.total_memory / 2**30, "cuda": torch.version.cuda}
    return facts | {name: value for name, value in provenance().items() if name != "command"}


def has_bf16(device: torch.device) -> bool:
    """Whether bf16 is computed natively."""
    return resolve_precision("auto", device) == "bf16"


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


def memory() -> dict[str, float]:
    """This process's resident memory now and at its peak, in GB (2^30); empty where the system does not say."""
    now, peak = resident(), process_peak()
    return {} if now is None or peak is None else {"now_gb": now / 2**30, "peak_gb": peak / 2**30}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The best rate of a matrix product."""

    gflops: float
    shape: tuple[int, int, int]
    """(rows, in, out)"""
    kernel: str
    rates: Mapping[str, float]
    """Best GF/s of each kernel and shape."""


def matmul_peak(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device, *, rows: int, seconds: float
) -> Peak:
    """Products of [rows, in] and [out, in] for every (in, out): each kernel for `seconds`, its best call counts."""
    rates: dict[str, float] = {}
    best = (0.0, (0, 0, 0), "none")
    for width, out in shapes:
        x, weight = (torch.randn(size, width, dtype=dtype, device=device) for size in (rows, out))
        for name, product in _kernels(x, weight).items():
            rate = 2 * rows * width * out / _best_seconds(product, device, seconds) / 1e9
            rates[f"{name} {rows}x{width}x{out}"] = rate
            best = max(best, (rate, (rows, width, out), name))
    return Peak(gflops=best[0], shape=best[1], kernel=best[2], rates=rates)


def _kernels(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {"F.linear": lambda: F.linear(x, weight)}
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if x.device.type == "cpu" and onednn is not None and torch.backends.mkldnn.is_available():
        found["oneDNN"] = lambda: onednn(x, weight, None, "none", [], "")
    return found


def _best_seconds(product: Callable[[], object], device: torch.device, seconds: float) -> float:
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    calls = 10 if device.type == "cuda" else 1  # a launch is not what is measured
    product()
    sync()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        for _ in range(calls):
            product()
        sync()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def better(first: Peak, second: Peak) -> Peak:
    """The higher of two, with the best of all rates."""
    high = max(first, second, key=lambda peak: peak.gflops)
    names = {**first.rates, **second.rates}
    rates = {name: max(first.rates.get(name, 0.0), second.rates.get(name, 0.0)) for name in names}
    return Peak(gflops=high.gflops, shape=high.shape, kernel=high.kernel, rates=rates)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    if name := facts.get("model name"):
        return f"{name} (family {facts.get('cpu family')}, model {facts.get('model')})"
    return platform.processor() or platform.machine()


def _memory_total() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return None
