"""What the C library does with freed memory, where it can be told (glibc)."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_MAX: Final = -4
"""Parameters of glibc's mallopt(3)."""
NEVER: Final = -1


def can_keep_freed_memory() -> bool:
    """Whether this system's allocator takes orders."""
    return _libc() is not None


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next request instead of giving it back; False if it cannot be told.

    Every freshly mapped page is cleared by the kernel at its first touch, which costs more than writing to it. Holds
    for the whole process, to its end.
    """
    libc = _libc()
    if libc is None:
        return False
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, NEVER))


def give_back_freed_memory() -> None:
    """Return what is free, kept or not, to the system now."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(0))


@cache
def _libc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version") else None
