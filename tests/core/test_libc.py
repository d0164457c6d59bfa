"""Freed memory: kept where asked, and given back on request. In a process of its own, since it holds to its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rewardlab.core.libc import can_keep_freed_memory

PROGRAM = """
import torch
from rewardlab.core.libc import give_back_freed_memory, keep_freed_memory
from rewardlab.training.memory import resident

assert keep_freed_memory()
empty = resident()
pieces = [torch.ones(2**22) for _ in range(24)]  # 16 MiB each
full = resident()
del pieces
kept = resident()
give_back_freed_memory()
print(full - empty, kept - empty, resident() - empty)
"""


@pytest.mark.skipif(not can_keep_freed_memory(), reason="the C library of this system takes no orders")
def test_freed_memory_is_kept_until_it_is_given_back():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, kept, left = (int(word) / 2**20 for word in found.stdout.split())
    assert full > 350
    assert kept > 350
    assert left < 100
