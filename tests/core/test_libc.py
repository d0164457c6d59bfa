"""Freed memory: kept where asked, and given back on request. In a process of its own, since it holds to its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rewardlab.core import libc
from rewardlab.core.libc import can_keep_freed_memory, offers_huge_pages

PROGRAM = """
import torch
from rewardlab.core.libc import give_back_freed_memory, keep_freed_memory
from rewardlab.training.cost.memory import resident

assert keep_freed_memory()
empty = resident()
pieces = [torch.ones(2**22) for _ in range(24)]  # 16 MiB each
full = resident()
del pieces
kept = resident()
give_back_freed_memory()
print(full - empty, kept - empty, resident() - empty)
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_keep_freed_memory(), reason="the C library of this system takes no orders")
def test_freed_memory_is_kept_until_it_is_given_back():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, kept, left = (int(word) / 2**20 for word in found.stdout.split())
    assert full > 350
    assert kept > 350
    assert left < 100


HUGE = """
from pathlib import Path
import torch
from rewardlab.core.libc import give_back_freed_memory, keep_freed_memory, use_huge_pages
from rewardlab.training.cost.memory import resident

keep_freed_memory()
before = resident()
taken = use_huge_pages(1 << 30)
reserved = resident() - before
give_back_freed_memory()  # and with it the pages that were to be huge
tensor = torch.ones(2**25)  # 128 MiB
lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
(huge,) = [int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")]
print(int(taken), reserved, huge)
"""


@pytest.mark.slow
@pytest.mark.skipif(not offers_huge_pages(), reason="this system offers no transparent huge pages")
def test_the_heap_gets_huge_pages_and_takes_no_memory_before_it_is_used():
    found = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True)
    taken, reserved, huge = (int(word) for word in found.stdout.split())
    assert taken
    assert reserved < 2**26
    assert huge * 1024 > 100 * 2**20


def test_a_system_without_huge_pages_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(libc, "HUGE_PAGES", tmp_path / "none")
    assert not libc.use_huge_pages(1 << 20)
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(libc, "HUGE_PAGES", tmp_path / "enabled")
    assert not libc.use_huge_pages(1 << 20)
