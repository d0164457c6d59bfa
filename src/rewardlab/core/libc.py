"""The memory of this process, and control over what glibc does with freed memory (without glibc: no effect)."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_MAX: Final = -4
"""Parameters of glibc's mallopt(3)."""
NEVER: Final = -1
"""Value of M_TRIM_THRESHOLD that turns trimming off."""
MADV_HUGEPAGE: Final = 14
"""Advice of madvise(2)."""
PAGE: Final = mmap.PAGESIZE
"""Bytes of an ordinary page."""
_HUGE: Final[list[int]] = []
"""Bytes of the heap for which huge pages were requested (at most one entry), to request them again after a trim.

Of the process, which has one heap: a trim gives back the pages of everybody.
"""
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def can_keep_freed_memory() -> bool:
    """Return whether `keep_freed_memory` works on this system, that is, whether its C library is glibc."""
    return _libc() is not None


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next request. Return False where that cannot be set.

    The kernel clears every newly mapped page at its first access, which costs more than writing to it. The setting
    holds for the whole process until it ends.
    """
    libc = _libc()
    if libc is None:
        return False
    return bool(libc.mallopt(M_MMAP_MAX, 0)) and bool(libc.mallopt(M_TRIM_THRESHOLD, NEVER))


def use_huge_pages(num_bytes: int) -> bool:
    """Grow the heap by `num_bytes` of address space now, and request huge pages there (Linux, THP `madvise`).

    A matrix of many megabytes then needs a few entries of the processor's page tables instead of thousands. No memory
    is used before it is written to. Call `keep_freed_memory` first, otherwise the heap shrinks again. Return False
    where the system does not support it.
    """
    libc = _libc()
    if libc is None or num_bytes < PAGE or not offers_huge_pages():
        return False
    for function in (libc.malloc, libc.sbrk):
        function.restype = ctypes.c_void_p
    # Allocating and freeing one block makes the heap grow, and `keep_freed_memory` keeps it from shrinking.
    block = libc.malloc(ctypes.c_size_t(num_bytes))
    if not block:
        return False
    libc.free(ctypes.c_void_p(block))
    start = -(-block // PAGE) * PAGE
    end = libc.sbrk(ctypes.c_ssize_t(0)) // PAGE * PAGE
    # The block did not come from the heap but from a mapping of its own, which is gone again.
    if end - start < num_bytes // 2:
        return False
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE) != 0:
        return False
    _HUGE[:] = [num_bytes]
    return True


def spare_memory() -> int:
    """Return the bytes of the machine's memory that are free at the moment; 0 where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * PAGE
    except (ValueError, OSError, AttributeError):
        return 0


def offers_huge_pages() -> bool:
    """Return whether the kernel gives huge pages on request."""
    try:
        return "[never]" not in HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False


def give_back_freed_memory() -> None:
    """Return all freed memory to the system now, and request huge pages again if they were requested before."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(0))
        for num_bytes in _HUGE:
            use_huge_pages(num_bytes)


@cache
def _libc() -> Any:
    """Return glibc, or None where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version") else None


def resident() -> int | None:
    """Return the resident memory of this process in bytes; None off Linux.

    It gives up Python's lock (the GIL) nowhere itself: reading a file the usual way would let another thread take more
    memory before the caller could act on what was read.
    """
    libc = _libc_with_lock()
    if libc is None:
        return None
    handle = libc.open(b"/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    if handle < 0:
        return None
    text = ctypes.create_string_buffer(256)
    try:
        libc.read(handle, text, ctypes.c_size_t(len(text) - 1))
    finally:
        libc.close(handle)
    pages = text.value.split()
    return int(pages[1]) * PAGE if len(pages) > 1 else None


@cache
def _libc_with_lock() -> Any:
    """Return the C library, whose functions keep Python's lock (the GIL) when they are called; None off Linux."""
    return ctypes.PyDLL(None) if sys.platform.startswith("linux") else None
