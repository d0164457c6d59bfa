"""Those who watch, on a real device: memory by phase without waiting for it, NVML's word on the GPU of this process."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
import torch

from common import make_groups, make_model
from cuda_waits import no_waiting
from rewardlab.data.groups import Datasets
from rewardlab.training.cost.memory import peak_memory
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.monitoring.gpu import watch_gpu
from rewardlab.training.monitoring.memory_watch import MemoryWatch
from rewardlab.training.monitoring.observers import Cadence, Observers
from rewardlab.training.monitoring.profiler import StepProfiler
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CADENCE = Cadence(num_steps=4, every=2)


def trainer_on(folder: Path, observers: Observers) -> RewardTrainer:
    return reward_trainer(
        RewardTrainerConfig.of(
            model="x", dataset=("y",), batch_size=8, micro_token_budget=128, log_every=2, eval_every=2
        ),
        make_model().to("cuda").train(),
        Datasets(train=make_groups(16)),
        num_steps=4,
        records=Records(folder),
        save=lambda folder, step: None,
        observers=observers,
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_forward_and_backward_have_peaks_and_nobody_waits_for_the_device(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    observers = Observers([MemoryWatch(device, tmp_path / "memory.csv", CADENCE).observer()])
    trainer = trainer_on(tmp_path, observers)
    before = peak_memory(device)
    with observers:
        trainer.fit()
        batches = trainer.steps.plan(0, trainer.token_budget)
        weight = sum(map(trainer.steps.weight, batches))
        with no_waiting():
            assert trainer._accumulate(batches, weight) is not None
    rows = rows_of(tmp_path / "memory.csv")
    assert len(rows) == 4
    for row in rows:
        held, forward, backward = (
            float(row[name]) for name in ("allocated_gib", "forward_peak_gib", "backward_peak_gib")
        )
        assert 0 < held <= max(forward, backward) <= float(row["reserved_gib"]) + 1e-3
    assert peak_memory(device) >= before


def test_nvml_finds_the_device_of_this_process(tmp_path):
    pytest.importorskip("pynvml")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    watch_gpu(torch.device("cuda"), visible, tmp_path / "gpu.csv", CADENCE, interval_ms=10).close(False)
    row = rows_of(tmp_path / "gpu.csv")[0]
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    assert float(row["memory_total_gib"]) == pytest.approx(total, rel=0.1), "another device would be another size"


def test_the_trace_has_kernels(tmp_path):
    observers = Observers([StepProfiler(torch.device("cuda"), tmp_path / "profile", num_traced=1).observer()])
    with observers:
        trainer_on(tmp_path, observers).fit()
    events = json.loads((tmp_path / "profile/trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
