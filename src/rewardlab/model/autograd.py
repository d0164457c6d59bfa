"""What our autograd functions have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd.function import once_differentiable

Backward = TypeVar("Backward", bound=Callable[..., Any])


def first_order(backward: Backward) -> Backward:
    """A backward pass that refuses to be differentiated itself, where it would give a wrong second derivative."""
    make: Any = once_differentiable
    made: Backward = make(backward)
    return made
