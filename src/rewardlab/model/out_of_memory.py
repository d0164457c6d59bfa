"""Running out of memory: whether an error means that, and what makes room for a second, smaller attempt."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final, TypeVar

import torch

from rewardlab.core.libc import give_back_freed_memory

Result = TypeVar("Result")
_REFUSALS: Final = (
    "DefaultCPUAllocator",
    "out of memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no room for a handle's workspace
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts of torch's RuntimeErrors that mean out of memory although the type of the error does not say so."""
_ONEDNN_REFUSALS: Final = ("could not create a primitive", "could not create a memory object")
"""Whole texts of oneDNN's errors, for instance in bf16 on the CPU, when memory runs out.

They are compared as a whole: for what oneDNN cannot compute, it says `could not create a primitive descriptor`.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device or the machine has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return str(error) in _ONEDNN_REFUSALS or any(text in str(error) for text in _REFUSALS)


def unless_out_of_memory(compute: Callable[[], Result]) -> Result | None:
    """Return what `compute` returns, or None if memory ran out; other errors pass through.

    When this returns the error is gone, and with it the tensors that its traceback held.
    """
    try:
        return compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def release_cached(device: torch.device) -> None:
    """Give back the memory that the allocator keeps for later."""
    # A backward pass that failed leaves what it had not come to in its thread's queue, and with it the rest of the
    # graph; the next backward pass empties the queue.
    with torch.inference_mode(False), torch.enable_grad():
        torch.autograd.backward(torch.zeros((), requires_grad=True))
    # Tensors in reference cycles, as exceptions leave them, are freed only by the garbage collector.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_freed_memory()
