"""What custom autograd functions share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PLACES: Final = 1 << 17
"""Values computed at a time by each thread of a CPU, half a megabyte of float32: they stay in the cache of a core, and
there are enough of them that a call costs little beside its work."""

Backward = TypeVar("Backward", bound=Callable[..., Any])


def first_order(backward: Backward) -> Backward:
    """Make a backward pass raise an error when it is differentiated again, instead of giving a wrong second derivative.

    The backward passes here compute on plain tensors or write gradients in place, which autograd cannot follow.
    """
    make: Any = once_differentiable
    made: Backward = make(backward)
    return made


def in_parts(*tensors: Tensor, dim: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of all tensors together, cut along `dim`: on a GPU all of them at once, on a CPU as much of the first
    as its caches hold.
    """
    first = tensors[0]
    length = first.shape[dim]
    count = length
    if first.device.type == "cpu" and first.numel():
        count = max(1, PLACES * torch.get_num_threads() * length // first.numel())
    if count >= length:
        yield tensors
    else:
        yield from zip(*(torch.split(tensor, count, dim) for tensor in tensors), strict=True)
