"""The memory of the process, and what the C library does with what is freed, where it can be told (glibc)."""

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
MADV_HUGEPAGE: Final = 14
PAGE: Final = mmap.PAGESIZE
_HUGE: Final[list[int]] = []
"""Bytes of the heap for which huge pages were asked; what is given back loses them."""
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


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


def use_huge_pages(num_bytes: int) -> bool:
    """Let the heap grow by so many bytes of address space now, and ask for huge pages there (Linux, THP `madvise`).

    A matrix of many megabytes then takes a few entries of the processor's address tables instead of thousands. No
    memory is taken before it is written to. Call `keep_freed_memory` first, else the heap shrinks again. Returns False
    where the system does not do it.
    """
    libc = _libc()
    if libc is None or num_bytes < PAGE or not offers_huge_pages():
        return False
    for function in (libc.malloc, libc.sbrk):
        function.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(num_bytes))
    if not block:
        return False
    libc.free(ctypes.c_void_p(block))
    start = -(-block // PAGE) * PAGE
    end = libc.sbrk(ctypes.c_ssize_t(0)) // PAGE * PAGE
    if end - start < num_bytes // 2:  # the block did not come from the heap
        return False
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE) != 0:
        return False
    _HUGE[:] = [num_bytes]
    return True


def spare_memory() -> int:
    """Bytes of the machine's memory that nothing uses at the moment; 0 where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * PAGE
    except (ValueError, OSError, AttributeError):
        return 0


def offers_huge_pages() -> bool:
    """Whether the kernel gives huge pages to who asks for them."""
    try:
        return "[never]" not in HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False


def give_back_freed_memory() -> None:
    """Return what is free, kept or not, to the system now. Huge pages that were asked for are asked for again."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(ctypes.c_size_t(0))
        for num_bytes in _HUGE:
            use_huge_pages(num_bytes)


@cache
def _libc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version") else None


def resident() -> int | None:
    """Bytes of the machine that the process has now; None off Linux."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
