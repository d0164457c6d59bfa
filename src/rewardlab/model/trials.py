"""Trials: whether another way to compute something gives the same numbers, before it takes the place of the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

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
