"""Measures memory of the device: how much was used, and how much is free."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from rewardlab.core.libc import resident

# The base trainer asks for them here: it knows no model.
from rewardlab.model.out_of_memory import release_cached as release_cached
from rewardlab.model.out_of_memory import unless_out_of_memory as unless_out_of_memory

_TAKEN: Final[dict[torch.device, int]] = {}
"""The largest peak of each device that `take_peak_memory` saw; the counters of torch are reset there.

Of the process, as torch's counters are: whoever resets them takes the peak away from everybody who asks for it later.
"""


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: of tensors on a GPU, else of the process; 0 where nothing counts it."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _TAKEN.get(device, 0))
    if (high_water := process_peak()) is not None:
        return high_water
    if sys.platform == "win32":
        return 0
    # Imported here, since the module does not exist on Windows.
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS reports bytes, other systems kibibytes.
    return largest if sys.platform == "darwin" else largest * 1024


def take_peak_memory(device: torch.device) -> int:
    """Return the peak of tensors on a GPU since the last call, in bytes; `peak_memory` still counts from the start."""
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _TAKEN[device] = max(peak, _TAKEN.get(device, 0))
    return peak


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that a run can still take, with what the allocator keeps; None where that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds but no tensor uses can be taken too, without asking the driver.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available()


def total_memory(device: torch.device) -> int:
    """Return the bytes of memory that a GPU has."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that a process can still take, limited by machine and control groups; None outside Linux."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        (machine,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return None
    return min([machine, *_left_in_groups(proc, cgroups)])


def _left_in_groups(proc: Path, cgroups: Path) -> list[int]:
    """Return the bytes left in every control group above the process (versions 1 and 2) that can be read."""
    try:
        entries = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    left = []
    for entry in entries:
        _, controllers, name = entry.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        limit, used, reclaimable = names
        folder = root / name.lstrip("/")
        for level in (folder, *folder.parents):
            if not level.is_relative_to(root):
                break
            try:
                # Cached files count as used, but the kernel drops them when memory is needed.
                stat = dict(line.split() for line in (level / "memory.stat").read_text(encoding="ascii").splitlines())
                taken = int((level / used).read_text(encoding="ascii")) - int(stat.get(reclaimable, 0))
                left.append(int((level / limit).read_text(encoding="ascii")) - taken)
            except (OSError, ValueError):  # the group does not exist, or its limit is the word `max`
                continue
    return left


def process_peak(process: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """Return the most memory that a process had at once, in bytes; None where /proc does not say, or the process has
    ended.

    It is not taken from getrusage, whose value survives exec: a run started from a large process would show that size.
    """
    try:
        lines = (proc / str(process) / "status").read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    except (OSError, ValueError):
        return None


class HighWater:
    """The peak of memory in use inside a `with`, in bytes: of tensors on a GPU, else of the whole process.

    The process is sampled by a thread, so a peak of less than a millisecond can be missed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> HighWater:
        if self.device.type == "cuda":
            # Work launched before must have ended, or its memory would count as this block's.
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._done.set()
            self._watch.join()

    def _look(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, resident() or 0)
        self.bytes = max(self.bytes, resident() or 0)


def in_use(device: torch.device) -> int:
    """Return the bytes in use now, counted as in HighWater."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident() or 0
