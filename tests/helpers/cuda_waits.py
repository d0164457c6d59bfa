"""Asks CUDA to raise where the host waits for the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """RuntimeError inside where the host waits for the device, as far as PyTorch sees it; never afterwards."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
