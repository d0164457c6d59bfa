"""Which GPU a process takes, by what it sees of them, and which processes share a machine."""

from __future__ import annotations

import pytest
import torch

from rewardlab.core.errors import ConfigError
from rewardlab.distributed.sharding import device_of_rank, nodes_of


def seeing(monkeypatch, *, gpus: int, local_rank: int, torchrun: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


@pytest.mark.parametrize(
    ("gpus", "local_rank", "torchrun", "taken"),
    [(0, 3, True, "cpu"), (4, 3, True, "cuda:3"), (4, 3, False, "cuda:3"), (1, 3, False, "cuda:0")],
    ids=["no GPU", "torchrun", "srun, all GPUs in sight", "srun, each with a GPU of its own"],
)
def test_a_process_takes_the_gpu_of_its_number_or_the_only_one_it_is_shown(
    gpus, local_rank, torchrun, taken, monkeypatch
):
    seeing(monkeypatch, gpus=gpus, local_rank=local_rank, torchrun=torchrun)
    assert device_of_rank() == torch.device(taken)


@pytest.mark.parametrize(("gpus", "torchrun"), [(1, True), (2, True), (2, False)])
def test_more_processes_than_gpus_are_refused(gpus, torchrun, monkeypatch):
    seeing(monkeypatch, gpus=gpus, local_rank=2, torchrun=torchrun)
    with pytest.raises(ConfigError, match=f"LOCAL_RANK is 2, and this process sees {gpus} GPU"):
        device_of_rank()


@pytest.mark.parametrize(
    ("numbers", "nodes"),
    [
        ("012012", [[0, 1, 2], [3, 4, 5]]),
        ("001122", [[0, 2, 4], [1, 3, 5]]),
        ("010122", [[0, 1, 4], [2, 3, 5]]),
        ("012345", [[0, 1, 2], [3, 4, 5]]),
        ("000000", [[0, 1, 2], [3, 4, 5]]),
    ],
    ids=["in a row", "in turn", "two at a time", "not of nodes", "all alike"],
)
def test_processes_that_share_a_machine_are_found_however_they_were_dealt_to_machines(numbers, nodes):
    assert nodes_of(list(numbers), 3) == nodes
    assert nodes_of([""] * 6, 3) == [[0, 1, 2], [3, 4, 5]]
