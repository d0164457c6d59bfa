"""What the GPU of this process does, sampled through NVML by a thread of its own.

CUDA and NVML number devices differently: CUDA_VISIBLE_DEVICES hides some, and CUDA sorts by speed where NVML sorts by
slot. So the device is found by its UUID, which CUDA tells of the one in use, or by the name of the MIG slice that
CUDA_VISIBLE_DEVICES gives.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rewardlab.core.errors import ConfigError
from rewardlab.training.monitoring.observers import Cadence, Observer

logger = logging.getLogger("rewardlab")

COLUMNS: Final = (
    "seconds",
    "step",
    "utilization_percent",
    "memory_used_gib",
    "memory_total_gib",
    "power_w",
    "temperature_c",
)
"""Columns of gpu.csv: since the start of training, macro-steps done, and what NVML says; empty where it does not."""
GIB: Final = 2**30
PATIENCE_S: Final = 5.0
"""Seconds to wait for a last sample: a driver that hangs does not hold up the end of a run."""


def require_nvml(cuda_available: bool) -> None:
    """Raise ConfigError unless there is a GPU to watch and a package to do it with."""
    if not cuda_available:
        raise ConfigError("--track-gpu: there is no CUDA device, the run is on the CPU. Leave it out.")
    if importlib.util.find_spec("pynvml") is None:
        raise ConfigError(
            "--track-gpu: the package is not installed. Install it with `pip install nvidia-ml-py`, or leave it out."
        )


def visible_slice(index: int, visible: str | None) -> str | None:
    """The MIG slice that CUDA's device `index` is, by CUDA_VISIBLE_DEVICES; None if it is a whole GPU."""
    names = [name.strip() for name in (visible or "").split(",")]
    return names[index] if index < len(names) and names[index].startswith("MIG-") else None


class Gpu:
    """A device of NVML; `values` are what it says now. Raises ConfigError if NVML does not know the device."""

    def __init__(self, nvml: Any, uuid: str, name: str | None) -> None:
        """`uuid` is CUDA's, without a prefix; `name` that of a MIG slice as in CUDA_VISIBLE_DEVICES."""
        self._nvml = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise ConfigError(
                f"--track-gpu: NVML, a part of the driver, cannot be started ({error}). Leave it out."
            ) from error
        self.handle = self._find(uuid, name)
        self.card = self.handle
        """The whole GPU: a slice has no power and temperature of its own."""
        if self._ask(nvml.nvmlDeviceIsMigDeviceHandle, self.handle):
            self.card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self.handle)

    def values(self) -> dict[str, float | None]:
        """Columns of gpu.csv; None for what this device does not tell, utilisation of a slice, say."""
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, self.handle)
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, self.handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, self.card)
        return {
            "utilization_percent": None if busy is None else busy.gpu,
            "memory_used_gib": None if memory is None else memory.used / GIB,
            "memory_total_gib": None if memory is None else memory.total / GIB,
            "power_w": None if power is None else power / 1000,
            "temperature_c": self._ask(nvml.nvmlDeviceGetTemperature, self.card, nvml.NVML_TEMPERATURE_GPU),
        }

    def close(self) -> None:
        """Let go of NVML."""
        self._nvml.nvmlShutdown()

    def _find(self, uuid: str, name: str | None) -> Any:
        names = [name] if name else [f"GPU-{uuid}", f"MIG-{uuid}"]
        for candidate in names:
            if (handle := self._ask(self._nvml.nvmlDeviceGetHandleByUUID, candidate)) is not None:
                return handle
        if name and (handle := self._by_instances(name)) is not None:
            return handle
        raise ConfigError(
            f"--track-gpu: NVML does not know the device of this run ({' or '.join(names)}). Leave it out."
        )

    def _by_instances(self, name: str) -> Any:
        """A slice under its older name, MIG-GPU-<uuid>/<GPU instance>/<compute instance>; None if it is not there."""
        nvml = self._nvml
        card, *instances = name.removeprefix("MIG-").split("/")
        parent = self._ask(nvml.nvmlDeviceGetHandleByUUID, card)
        if parent is None or len(instances) != 2:
            return None
        for index in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            part = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, index)
            if part is None:
                continue
            found = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
            if [str(number) for number in found] == instances:
                return part
        return None

    def _ask(self, question: Callable[..., Any], *about: object) -> Any:
        """What NVML answers, or None if it has no answer for this device."""
        try:
            return question(*about)
        except self._nvml.NVMLError:
            return None


class GpuWatch:
    """Samples a Gpu into a CSV file until it is closed, and says the means of what was since the last time."""

    def __init__(self, gpu: Gpu, path: Path, cadence: Cadence, *, interval_s: float) -> None:
        """The means are said where `cadence` is due."""
        self.gpu = gpu
        self.cadence = cadence
        self.step = 0
        self._interval_s = interval_s
        self._file = path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.DictWriter(self._file, fieldnames=COLUMNS, lineterminator="\n")
        if not self._file.tell():
            self._writer.writeheader()
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._since: list[Mapping[str, float | None]] = []
        self._error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)

    def observer(self) -> Observer:
        """Begins to sample."""
        self._thread.start()
        return Observer(name="--track-gpu", step_done=self._step_done, row=self._row, close=lambda failed: self.close())

    def close(self) -> None:
        """Stop; the file is whole after this."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self._file.close()
        self.gpu.close()

    def sample(self) -> None:
        """One row."""
        values = self.gpu.values()
        row = {"seconds": round(time.perf_counter() - self._started, 3), "step": self.step, **values}
        self._writer.writerow({name: "" if value is None else value for name, value in row.items()})
        with self._lock:
            self._since.append(values)

    def _run(self) -> None:
        try:
            while True:
                self.sample()
                if self._stop.wait(self._interval_s):
                    return
        except Exception as error:  # told, and raised on the training thread, where it is dropped with a warning
            self._error = error

    def _step_done(self, step: int) -> None:
        self.step = step
        if self._error is not None:
            raise self._error

    def _row(self, step: int, values: Mapping[str, Any]) -> None:
        if "train_loss" not in values or not self.cadence.is_due(step):
            return
        with self._lock:
            since, self._since = self._since, []
        if text := means(since):
            logger.info("%s  GPU   %s", self.cadence.label(step), text)


def means(samples: list[Mapping[str, float | None]]) -> str:
    """Means over samples, in a line; what no sample has is left out."""

    def mean(name: str) -> float | None:
        known = [value for sample in samples if (value := sample[name]) is not None]
        return sum(known) / len(known) if known else None

    shown = {
        "utilization_percent": "{:.0f} % busy",
        "memory_used_gib": "{:.1f} GiB",
        "power_w": "{:.0f} W",
        "temperature_c": "{:.0f} °C",
    }
    return "  ".join(text.format(value) for name, text in shown.items() if (value := mean(name)) is not None)


def watch_gpu(device: torch.device, visible: str | None, path: Path, cadence: Cadence, *, interval_ms: int) -> Observer:
    """An observer of the device of this run; `visible` is CUDA_VISIBLE_DEVICES. Raises ConfigError as `Gpu` does."""
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
    gpu = Gpu(importlib.import_module("pynvml"), uuid, visible_slice(index, visible))
    return GpuWatch(gpu, path, cadence, interval_s=interval_ms / 1000).observer()
