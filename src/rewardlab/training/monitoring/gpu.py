"""Samples the GPU of this process through NVML, in a thread of its own.

CUDA and NVML number devices differently: CUDA_VISIBLE_DEVICES hides some, and CUDA sorts by speed where NVML sorts by
slot. So the device is found by its UUID, which CUDA gives for the device in use, or by the name of the MIG slice in
CUDA_VISIBLE_DEVICES.
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
"""Columns of gpu.csv: seconds since the start, steps done, and what NVML measures; empty where it does not."""
GIB: Final = 2**30
PATIENCE_S: Final = 5.0
"""Seconds to wait for the last sample, so that a driver that hangs cannot hold up the end of a run."""


def require_nvml(cuda_available: bool) -> None:
    """Raise ConfigError unless there is a GPU to watch and a package to do it with."""
    if not cuda_available:
        raise ConfigError("--track-gpu: there is no CUDA device, the run is on the CPU. Leave it out.")
    if importlib.util.find_spec("pynvml") is None:
        raise ConfigError(
            "--track-gpu: the package is not installed. Install it with `pip install nvidia-ml-py`, or leave it out."
        )


def visible_slice(index: int, visible: str | None) -> str | None:
    """Return the name of the MIG slice that is CUDA's device `index`; None for a whole GPU.

    `visible` is CUDA_VISIBLE_DEVICES.
    """
    names = [name.strip() for name in (visible or "").split(",")]
    return names[index] if index < len(names) and names[index].startswith("MIG-") else None


class Gpu:
    """A device of NVML."""

    def __init__(self, nvml: Any, uuid: str, name: str | None) -> None:
        """`uuid` is CUDA's, without a prefix; `name` is that of a MIG slice as in CUDA_VISIBLE_DEVICES, else None.

        Raises ConfigError if NVML cannot be started or does not know the device.
        """
        self._nvml = nvml
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise ConfigError(
                f"--track-gpu: NVML, a part of the driver, cannot be started ({error}). Leave it out."
            ) from error
        self.handle = self._find(uuid, name)
        self.card = self.handle
        """The whole GPU, since a slice has no power and temperature of its own."""
        if self._ask(nvml.nvmlDeviceIsMigDeviceHandle, self.handle):
            self.card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self.handle)

    def values(self) -> dict[str, float | None]:
        """Return the columns of gpu.csv as they are now; None for what this device does not measure."""
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
        """Shut NVML down."""
        self._nvml.nvmlShutdown()

    def _find(self, uuid: str, name: str | None) -> Any:
        # CUDA leaves out the prefix that says whether a UUID is of a whole GPU or of a slice, so both are tried.
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
        """Return a slice by its older name, MIG-GPU-<uuid>/<GPU instance>/<compute instance>; None if there is none."""
        nvml = self._nvml
        card, *instances = name.removeprefix("MIG-").split("/")
        parent = self._ask(nvml.nvmlDeviceGetHandleByUUID, card)
        if parent is None or len(instances) != 2:
            return None
        for index in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
            part = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, index)
            if part is None:
                continue
            numbers = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
            if [str(number) for number in numbers] == instances:
                return part
        return None

    def _ask(self, question: Callable[..., Any], *about: object) -> Any:
        """Return the answer of an NVML function, or None if it has none for this device."""
        try:
            return question(*about)
        except self._nvml.NVMLError:
            return None


class GpuWatch:
    """Samples a Gpu into a CSV file until it is closed, and logs the means since the last time."""

    def __init__(self, gpu: Gpu, path: Path, cadence: Cadence, *, interval_s: float) -> None:
        """The means are logged where `cadence` is due."""
        self.gpu = gpu
        self.cadence = cadence
        self.step = 0
        self._interval_s = interval_s
        # Line buffering: a run that is killed leaves whole rows.
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
        """Start the sampling thread and return the observer to be told what happens."""
        self._thread.start()
        return Observer(name="--track-gpu", step_done=self._step_done, row=self._row, close=lambda failed: self.close())

    def close(self) -> None:
        """Stop sampling and close the file."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        self._file.close()
        self.gpu.close()

    def sample(self) -> None:
        """Take one sample and write it as a row."""
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
        # Kept, and raised on the training thread in _step_done, where Observers drops this watch with a warning.
        except Exception as error:
            self._error = error

    def _step_done(self, step: int) -> None:
        self.step = step
        if self._error is not None:
            raise self._error

    def _row(self, step: int, values: Mapping[str, Any]) -> None:
        # A row is reported once with values of training steps and once with those of an evaluation; one line is enough.
        if "train_loss" not in values or not self.cadence.is_due(step):
            return
        with self._lock:
            # The sampling thread appends to this list while the training thread empties it.
            since, self._since = self._since, []
        if text := means(since):
            logger.info("%s  GPU   %s", self.cadence.label(step), text)


def means(samples: list[Mapping[str, float | None]]) -> str:
    """Return the means over samples in a line, without values that no sample has."""

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
    """Return an observer of this run's GPU; `visible` is CUDA_VISIBLE_DEVICES. Raises ConfigError as `Gpu` does."""
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-")
    gpu = Gpu(importlib.import_module("pynvml"), uuid, visible_slice(index, visible))
    return GpuWatch(gpu, path, cadence, interval_s=interval_ms / 1000).observer()
