"""Trials: whether another way to compute something gives the same numbers, before it takes the place of the first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

ROUNDING: Final = 2.0
"""How many times as large as that of the plain way the error of another may be."""


def beyond_rounding(
    parts: Sequence[str],
    exact: Sequence[Tensor],
    plain: Sequence[Tensor],
    tried: Sequence[Tensor],
    *,
    least: float = 1e-6,
) -> str:
    """Return which of the tensors that were tried is off by more than rounding, and by how much; "" if none is.

    Each may err ROUNDING times as much as the plain one in the same precision, plus `least`, as a part of its size.
    """
    for part, truth, reference, tensor in zip(parts, exact, plain, tried, strict=False):
        distance, allowed = _distance(tensor, truth), ROUNDING * _distance(reference, truth) + least
        if not distance <= allowed:  # also true of a NaN, which `distance > allowed` would let pass
            return f"its {part} is off by {distance:.1e}, where {allowed:.1e} would be rounding"
    return ""


def _distance(tensor: Tensor, truth: Tensor) -> float:
    """Return the relative L2 distance of a tensor from the true one."""
    return float((tensor.double() - truth.double()).norm() / truth.double().norm())


def failed(error: Exception) -> str:
    """Return in words that a trial ended with an error, which is of any class: kernels, compilers and drivers raise
    their own.
    """
    return f"it failed here, {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@contextmanager
def trial_on_cpu() -> Iterator[None]:
    """Meanwhile gradients are recorded and float32 stays float32, wherever this is called from."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


def alike(module: nn.Module) -> tuple[object, ...]:
    """Return what two modules of a model have in common if a trial of one, but for its weights, speaks for the other:
    the class and all settings.
    """
    settings = {
        name: value if isinstance(value, bool | int | float | str) else id(value)
        for name, value in vars(module).items()
        if not name.startswith("_")
    }
    return type(module), *sorted(settings.items())


def times_as_fast(
    tried: Callable[[], object], plain: Callable[[], object], device: torch.device, *, repeats: int = 5, calls: int = 1
) -> float:
    """Measure how many times as fast as `plain` another computation is, by the shortest time of `calls` calls of each.

    The two take turns, so that other load on the machine slows both alike. The shortest time is the one with the least
    of it; the first repeat only warms up.
    """
    best = [math.inf, math.inf]
    with current(device):
        for _ in range(repeats + 1):
            for number, compute in enumerate((plain, tried)):
                wait_for(device)
                started = time.perf_counter()
                for _ in range(calls):
                    compute()
                wait_for(device)
                best[number] = min(best[number], time.perf_counter() - started)
    return best[0] / best[1]


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one. On another's memory a kernel may end the whole process."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has computed what it was given: without this, only the launch of its kernels would be timed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
