"""A decorator for the backward passes of custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd.function import once_differentiable

Backward = TypeVar("Backward", bound=Callable[..., Any])


def first_order(backward: Backward) -> Backward:
    """Make a backward pass raise an error when it is differentiated again, instead of giving a wrong second derivative.

    The backward passes here compute on plain tensors or write gradients in place, which autograd cannot follow.
    """
    make: Any = once_differentiable
    made: Backward = make(backward)
    return made
