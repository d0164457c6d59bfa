"""The GPU that is sampled is the one that the run uses, whatever hides or sorts devices; NVML by its own names."""

from __future__ import annotations

import csv
import inspect
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import runs
from rewardlab.core.errors import ConfigError
from rewardlab.training.monitoring import gpu as module
from rewardlab.training.monitoring.gpu import COLUMNS, Gpu, GpuWatch, means, require_nvml, visible_slice, watch_gpu
from rewardlab.training.monitoring.observers import Cadence
from rewardlab.training.run import train

GIB = 2**30
CADENCE = Cadence(num_steps=4, every=2)


class NVMLError(Exception):
    """As in pynvml."""


class Nvml:
    """pynvml as far as it is called: two GPUs, the second cut into two slices. A handle is a tuple of names."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, started: bool = True) -> None:
        self.slices = {"MIG-aa": (1, 0), "MIG-bb": (2, 0)}
        self.started = started
        self.open = 0
        self.samples = 0
        self.sampled = threading.Event()

    def nvmlInit(self):
        if not self.started:
            raise NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid in ("GPU-one", "GPU-two"):
            return (uuid,)
        if uuid in self.slices:
            return ("GPU-two", uuid)
        raise NVMLError("Not Found")

    def nvmlDeviceIsMigDeviceHandle(self, device):
        return len(device) > 1

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice):
        return migDevice[:1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if device != ("GPU-two",) or index >= 2:
            raise NVMLError("Not Found")
        return ("GPU-two", list(self.slices)[index])

    def nvmlDeviceGetGpuInstanceId(self, device):
        return self.slices[device[1]][0]

    def nvmlDeviceGetComputeInstanceId(self, device):
        return self.slices[device[1]][1]

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        self.samples += 1
        if self.samples >= 3:
            self.sampled.set()
        total = 10 * GIB if len(handle) > 1 else 80 * GIB
        return SimpleNamespace(used=2 * GIB, total=total)

    def nvmlDeviceGetUtilizationRates(self, handle):
        if len(handle) > 1:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle):
        if len(handle) > 1:
            raise NVMLError("Not Supported")
        return {"GPU-one": 500_000, "GPU-two": 300_000}[handle[0]]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        if len(handle) > 1:
            raise NVMLError("Not Supported")
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61


def test_the_fake_has_the_names_of_nvml_and_takes_what_they_take():
    real = pytest.importorskip("pynvml")
    assert issubclass(real.NVMLError, Exception)
    assert real.NVML_TEMPERATURE_GPU == Nvml.NVML_TEMPERATURE_GPU
    functions = [name for name in vars(Nvml) if name.startswith("nvml")]
    assert len(functions) == 13
    for name in functions:
        ours = list(inspect.signature(getattr(Nvml(), name)).parameters)
        theirs = inspect.signature(inspect.unwrap(getattr(real, name)))
        if "args" not in theirs.parameters:  # those that take a UUID are wrapped without a trace
            assert ours == list(theirs.parameters), name


def test_a_whole_gpu_is_found_by_the_uuid_that_cuda_gives():
    gpu = Gpu(Nvml(), "two", None)
    assert gpu.handle == gpu.card == ("GPU-two",)
    assert gpu.values() == {
        "utilization_percent": 87,
        "memory_used_gib": 2.0,
        "memory_total_gib": 80.0,
        "power_w": 300.0,
        "temperature_c": 61,
    }


@pytest.mark.parametrize(
    ("uuid", "name"),
    [("two", "MIG-bb"), ("bb", None), ("two", "MIG-GPU-two/2/0")],
    ids=["by its name", "by CUDA's UUID", "by its older name"],
)
def test_a_slice_has_its_own_memory_and_the_power_of_its_card(uuid, name):
    gpu = Gpu(Nvml(), uuid, name)
    assert gpu.handle == ("GPU-two", "MIG-bb")
    assert gpu.values() == {
        "utilization_percent": None,
        "memory_used_gib": 2.0,
        "memory_total_gib": 10.0,
        "power_w": 300.0,
        "temperature_c": 61,
    }


@pytest.mark.parametrize(("uuid", "name"), [("three", None), ("one", "MIG-cc"), ("one", "MIG-GPU-two/5/0")])
def test_a_device_that_nvml_does_not_know_is_an_error(uuid, name):
    with pytest.raises(ConfigError, match=f"--track-gpu: NVML does not know the device of this run .*{name or uuid}"):
        Gpu(Nvml(), uuid, name)


def test_nvml_that_does_not_start_is_an_error():
    with pytest.raises(
        ConfigError, match=r"--track-gpu: NVML, .*cannot be started \(Driver Not Loaded\)\. Leave it out"
    ):
        Gpu(Nvml(started=False), "one", None)


@pytest.mark.parametrize(
    ("index", "visible", "name"),
    [
        (0, None, None),
        (0, "", None),
        (1, "3,1", None),
        (1, "GPU-8932f937,GPU-1c5e", None),
        (0, "MIG-aa", "MIG-aa"),
        (1, "MIG-aa, MIG-GPU-two/2/0", "MIG-GPU-two/2/0"),
        (2, "MIG-aa,MIG-bb", None),
    ],
)
def test_cuda_visible_devices_names_slices_only(index, visible, name):
    assert visible_slice(index, visible) == name


def test_the_device_of_the_run_is_asked_for_its_uuid(monkeypatch, tmp_path):
    """CUDA's device 1 under CUDA_VISIBLE_DEVICES=5,GPU-one,3 has the UUID that CUDA says, not the index of NVML."""
    nvml = Nvml()
    asked = []

    def properties(index: int) -> Any:
        asked.append(index)
        return SimpleNamespace(uuid={0: "two", 1: "one"}[index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: {"pynvml": nvml}[name])
    for device, power in ((torch.device("cuda:1"), "500.0"), (torch.device("cuda"), "300.0")):
        path = tmp_path / f"{power}.csv"
        watch_gpu(device, "5,GPU-one,3", path, CADENCE, interval_ms=10_000).close(False)
        (row,) = rows_of(path)
        assert row["power_w"] == power
    assert asked == [1, 0]
    assert nvml.open == 0, "let go of"


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


def test_samples_are_written_until_the_end_and_their_means_said_where_they_are_due(tmp_path, log):
    nvml = Nvml()
    watch = GpuWatch(Gpu(nvml, "one", None), tmp_path / "gpu.csv", CADENCE, interval_s=0.001)
    observer = watch.observer()
    assert nvml.sampled.wait(60)
    observer.step_done(1)
    observer.row(1, {"train_loss": 0.7})
    assert log.messages == [], "not due"
    observer.row(2, {"eval_loss": 0.7})
    observer.row(2, {"train_loss": 0.7})
    observer.close(False)
    observer.row(4, {"train_loss": 0.7})
    assert log.messages[0] == "step 2/4  GPU   87 % busy  2.0 GiB  500 W  61 °C"
    found = rows_of(tmp_path / "gpu.csv")
    assert tuple(found[0]) == COLUMNS
    assert len(found) >= 3
    assert {row["step"] for row in found} <= {"0", "1"}
    assert (found[0]["utilization_percent"], found[0]["memory_total_gib"]) == ("87", "80.0")
    assert not watch._thread.is_alive()
    assert watch._thread.daemon, "it keeps no process alive"


def test_what_a_device_does_not_tell_is_an_empty_cell_and_in_no_mean(tmp_path):
    path = tmp_path / "gpu.csv"
    GpuWatch(Gpu(Nvml(), "two", "MIG-aa"), path, CADENCE, interval_s=60).observer().close(False)
    assert rows_of(path)[0]["utilization_percent"] == ""
    assert (
        means([{**dict.fromkeys(COLUMNS), "power_w": 100.0}, {**dict.fromkeys(COLUMNS), "power_w": 200.0}]) == "150 W"
    )
    assert means([]) == ""


def test_a_sampler_that_fails_is_told_of_on_the_training_thread(tmp_path, monkeypatch):
    gpu = Gpu(Nvml(), "one", None)
    monkeypatch.setattr(gpu, "values", lambda: (_ for _ in ()).throw(OSError(28, "full")))
    watch = GpuWatch(gpu, tmp_path / "gpu.csv", CADENCE, interval_s=60)
    observer = watch.observer()
    watch._thread.join(60)
    with pytest.raises(OSError, match="full"):
        observer.step_done(1)
    observer.close(False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_tracking_a_gpu_without_one_or_without_nvml_is_an_error_before_anything_is_read(tmp_path, monkeypatch):
    config = partial(runs.config_for, Path("nowhere"), Path("no.jsonl"), tmp_path / "run")
    with pytest.raises(ConfigError, match="--track-gpu: there is no CUDA device, the run is on the CPU. Leave it out"):
        train(config(track_gpu=True))
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--track-gpu: .*`pip install nvidia-ml-py`"):
        require_nvml(True)
