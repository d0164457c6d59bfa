"""Memory of the device: how much was used, how much is free, and what to do when it runs out."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import torch

from rewardlab.core.libc import give_back_freed_memory, resident

Result = TypeVar("Result")
_REFUSALS: Final = (
    "DefaultCPUAllocator",
    "out of memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # no room for a handle's workspace
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""What the RuntimeErrors of torch say where memory is meant but the type is not its own."""
_ONEDNN_REFUSALS: Final = ("could not create a primitive", "could not create a memory object")
"""All that oneDNN says, as in bf16 on the CPU; of what it cannot compute it speaks as of `a primitive descriptor`."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the machine has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return str(error) in _ONEDNN_REFUSALS or any(text in str(error) for text in _REFUSALS)


def unless_out_of_memory(compute: Callable[[], Result]) -> Result | None:
    """What `compute` returns, or None if memory ran out on the way; other errors pass.

    The error is gone when this returns, and with it what its traceback held.
    """
    try:
        return compute()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def release_cached(device: torch.device) -> None:
    """Give back what the allocator keeps for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_freed_memory()


_TAKEN: Final[dict[torch.device, int]] = {}
"""The most that `take_peak` saw, which the counters of torch have forgotten."""


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a GPU, or that the process took of the machine; 0 where nobody counts."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _TAKEN.get(device, 0))
    if (high_water := process_peak()) is not None:
        return high_water
    if sys.platform == "win32":
        return 0
    import resource

    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def take_peak(device: torch.device) -> int:
    """Bytes: the most that tensors took on a GPU since the last call; `peak_memory` goes on counting from the start."""
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _TAKEN[device] = max(peak, _TAKEN.get(device, 0))
    return peak


def free_memory(device: torch.device) -> int | None:
    """Bytes that a run may still take, what the allocator keeps included; None where it cannot be told."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available()


def available(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a process may still take: what the machine has, or what its control group allows; None off Linux."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        (machine,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return None
    return min([machine, *_left_in_groups(proc, cgroups)])


def _left_in_groups(proc: Path, cgroups: Path) -> list[int]:
    """What is left in every control group above the process, in version 1 and 2; those not to be read are left out."""
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
                # Cached files count as used but go when memory is wanted.
                stat = dict(line.split() for line in (level / "memory.stat").read_text(encoding="ascii").splitlines())
                taken = int((level / used).read_text(encoding="ascii")) - int(stat.get(reclaimable, 0))
                left.append(int((level / limit).read_text(encoding="ascii")) - taken)
            except (OSError, ValueError):  # no such group here, or `max`
                continue
    return left


def process_peak(process: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """Bytes: the most of the machine that a process had at once; None where /proc does not say, or it is no more.

    Not getrusage: what that tells survives exec, so a run started from a large process would have its size.
    """
    try:
        lines = (proc / str(process) / "status").read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    except (OSError, ValueError):
        return None


class HighWater:
    """The most memory in use inside a `with`, in bytes: of tensors on a GPU, else of the whole process.

    The process is looked at again and again by a thread, so a peak of less than a millisecond can be missed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> HighWater:
        if self.device.type == "cuda":
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
    """Bytes in use now, in the sense of HighWater."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident() or 0
