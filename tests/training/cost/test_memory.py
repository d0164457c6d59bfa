"""Running out of memory: what counts as that, what is free, and a step that starts again with half the budget."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rewardlab.training.cost.memory as memory_module
import rewardlab.training.loop.trainer as trainer_module
from common import arithmetic, make_groups, make_model
from rewardlab.batch import pack
from rewardlab.core.errors import DeviceMemoryError
from rewardlab.data.groups import Datasets
from rewardlab.data.pack import cost
from rewardlab.distributed.ranks import Ranks
from rewardlab.model.out_of_memory import is_out_of_memory, release_cached, unless_out_of_memory
from rewardlab.training.cost.memory import HighWater, available, free_memory, in_use, peak_memory, process_peak
from rewardlab.training.loop import failures, losses
from rewardlab.training.loop.failures import Nouns
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.loop.totals import Accumulated
from rewardlab.training.loop.trainer import ahead
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import LossConfig, RewardTrainerConfig

CPU = torch.device("cpu")


def test_what_the_allocators_say_when_they_have_nothing_left_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as found:
        torch.empty(1 << 55)
    assert is_out_of_memory(found.value), "torch's own words on this machine"
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not create a memory object"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("std::bad_alloc"),
    ):
        assert is_out_of_memory(error)
    for other in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyError()):
        assert not is_out_of_memory(other)


def test_only_running_out_of_memory_is_caught_and_its_tensors_are_let_go():
    held = []

    def compute() -> int:
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert unless_out_of_memory(compute) is None
    assert held[0]() is None
    assert unless_out_of_memory(lambda: 7) == 7
    with pytest.raises(RuntimeError, match="shapes"):
        unless_out_of_memory(lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
class RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_what_a_failed_backward_pass_kept_is_given_back(mode):
    kept = []

    def compute():
        values = torch.randn(10, requires_grad=True) * 2
        kept.append(weakref.ref(values))
        other = values * values
        (other + RunsOut.apply(values * 1)).sum().backward()

    assert unless_out_of_memory(compute) is None
    with mode():
        release_cached(CPU)
    assert kept[0]() is None


def test_the_high_water_mark_sees_what_came_and_went():
    size = 1 << 28
    before = in_use(CPU)
    with HighWater(CPU) as water:
        torch.ones(size // 4).sum()
    assert 0.9 * size <= water.bytes - before <= 2 * size
    assert peak_memory(CPU) >= water.bytes * 0.9
    assert 0 < free_memory(CPU) < 1 << 50


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_peak_is_the_processs_own_however_large_the_one_that_started_it():
    size = 1 << 30
    child = (
        "import torch; from rewardlab.training.cost.memory import peak_memory; print(peak_memory(torch.device('cpu')))"
    )
    parent = f"import os, sys; held = b'1' * {size}; os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    found = subprocess.run([sys.executable, "-c", parent, child], capture_output=True, text=True, check=True)
    assert 0 < int(found.stdout) < 0.8 * size


def test_the_peak_of_a_process_is_read_from_its_status_and_else_told_by_the_system(tmp_path, monkeypatch):
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "status").write_text("VmPeak:\t 9 kB\nVmHWM:\t   12 kB\nVmRSS:\t 5 kB\n")
    assert process_peak(7, tmp_path) == 12 * 1024
    (folder / "status").write_text("Name:\tsome\n")
    assert process_peak(7, tmp_path) is None, "nothing of the kind in it"
    assert process_peak(8, tmp_path) is None, "no such process"
    monkeypatch.setattr(memory_module, "process_peak", lambda: None)
    if sys.platform != "win32":
        assert peak_memory(CPU) > 1 << 20
    monkeypatch.setattr(memory_module, "process_peak", lambda: 5)
    assert peak_memory(CPU) == 5


def write_proc(folder: Path, *, available_kib: int, cgroup: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    (folder / "self/cgroup").write_text(cgroup)
    return folder


def write_group(folder: Path, names: tuple[str, str, str], limit: object, used: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used, f"anon 5\n{names[2]} {files}"), strict=True):
        (folder / ("memory.stat" if value is not limit and name == names[2] else name)).write_text(f"{value}\n")


VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_is_free_is_the_least_of_machine_and_control_groups(tmp_path):
    proc = write_proc(tmp_path / "proc", available_kib=1000, cgroup="0::/job/step\n")
    groups = tmp_path / "groups"
    assert available(proc, groups) == 1000 * 1024, "no limit to be read"
    write_group(groups / "job/step", VERSION_2, "max", 5, 0)
    assert available(proc, groups) == 1000 * 1024
    write_group(groups / "job", VERSION_2, 900_000, 400_000, 100_000)
    assert available(proc, groups) == 600_000, "the job's limit, its cached files to be had"
    write_group(groups / "job/step", VERSION_2, 700_000, 400_000, 0)
    assert available(proc, groups) == 300_000
    older = write_proc(tmp_path / "older", available_kib=1000, cgroup="5:cpu:/\n4:memory:/job\n0::/\n")
    write_group(groups / "memory/job", VERSION_1, 50_000, 40_000, 0)
    assert available(older, groups) == 10_000
    assert available(tmp_path / "nowhere", groups) is None


def test_the_next_batch_is_on_its_way_before_the_present_one_is_computed():
    told = []

    def move(batch: str) -> str:
        told.append(f"move {batch}")
        return batch.upper()

    for batch in ahead("abc", move):
        told.append(f"compute {batch}")
    assert told == ["move a", "move b", "compute A", "move c", "compute B", "compute C"]
    assert list(ahead("", move)) == []


def trainer_on(folder: Path, groups=None, **changes) -> RewardTrainer:
    settings = {"batch_size": 8, "lr": 1e-3, "micro_token_budget": 80, "log_every": 1, **changes}
    folder.mkdir(exist_ok=True)
    return reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), **settings),
        make_model("llama", dtype=torch.float64).train(),
        Datasets(train=groups or make_groups(16)),
        num_steps=2,
        records=Records(folder),
        save=lambda folder, step: None,
    )


def fail_on(trainer: RewardTrainer, calls: set[int], error: Exception, *, after: bool = False) -> list[int]:
    """Let forward passes fail, by their number from 1; returns the number of tokens of each."""
    seen: list[int] = []
    forward = trainer.model.forward

    def planted(batch):
        seen.append(batch.num_tokens)
        if len(seen) in calls and not after:
            raise error
        rewards = forward(batch)
        if len(seen) in calls:
            rewards.register_hook(lambda _: (_ for _ in ()).throw(error))
        return rewards

    trainer.model.forward = planted
    return seen


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("after", [pytest.param(False, marks=pytest.mark.slow), True], ids=["forward", "backward"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()], ids=["cuda", "cpu"])
def test_a_step_that_ran_out_of_memory_is_computed_again_with_half_the_budget_and_the_same_numbers(
    tmp_path, caplog, error, after
):
    smooth, broken = trainer_on(tmp_path / "a"), trainer_on(tmp_path / "b")
    seen = fail_on(broken, {2}, error, after=after)
    with arithmetic(torch.float64), caplog.at_level("WARNING", logger="rewardlab"):
        smooth.fit()
        broken.fit()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "step 1/2  OUT OF MEMORY at --micro-token-budget 80; from here on 40, so set that"
    assert broken.token_budget == 40
    assert max(seen[:2]) > 40 >= max(seen[2:]), "every micro-batch after the failure"
    assert broken.speed().endswith("Out of memory on the way: --micro-token-budget 40 at the end.")
    assert "Out of memory" not in smooth.speed()
    for name in ("train_loss", "grad_norm", "train_accuracy"):
        wanted = [row[name] for row in smooth.records.rows.values()]
        assert [row[name] for row in broken.records.rows.values()] == pytest.approx(wanted, rel=1e-10), name
    for name, tensor in smooth.model.state_dict().items():
        moved = broken.model.state_dict()[name]
        assert torch.allclose(moved, tensor, rtol=1e-8, atol=1e-10), name


def test_the_budget_is_halved_until_a_step_fits(tmp_path, caplog):
    """A default of 65,536 tokens, chosen by the size of a GPU that others use too, may have to become 8,192."""
    groups = make_groups(16)
    least = max(cost(group, "shared") for group in groups)
    plain, trainer = (trainer_on(tmp_path, groups, micro_token_budget=budget) for budget in (80, 8 * least))
    fail_on(trainer, {1, 2}, torch.OutOfMemoryError("CUDA out of memory"))
    with caplog.at_level("WARNING", logger="rewardlab"):
        report = trainer.train_step(trainer._planned(0))
    assert trainer.token_budget == 2 * least
    assert caplog.text.count("OUT OF MEMORY") == 2
    assert report.grad_norm == pytest.approx(plain.train_step(plain._planned(0)).grad_norm)


def test_a_step_that_never_fits_is_an_error_that_names_the_remedies_and_moves_nothing(tmp_path):
    trainer = trainer_on(tmp_path)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    fail_on(trainer, set(range(1, 100)), torch.OutOfMemoryError("CUDA out of memory"))
    least = max(cost(group, "shared") for group in trainer.judge.data.train)
    with pytest.raises(
        DeviceMemoryError, match=f"step 1: .*--micro-token-budget {least}. Lower --max-seq-len"
    ) as found:
        trainer.fit()
    assert "--activation-checkpointing" in str(found.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_where_a_step_cannot_be_tried_again_the_error_says_how_small_the_budget_may_be():
    error = str(failures.no_memory(3, 80, 21, Nouns(weighed="pairs", whole="preference")))
    assert "--micro-token-budget 80. Set a smaller one (at least 21, the largest preference), lower" in error


@pytest.mark.slow
def test_every_step_may_back_off_once_and_never_below_the_largest_preference(tmp_path):
    groups = make_groups(16)
    least = max(cost(group, "shared") for group in groups)
    trainer = trainer_on(tmp_path, groups, micro_token_budget=2 * least - 2)
    seen = fail_on(trainer, {1}, torch.OutOfMemoryError("CUDA out of memory"))
    trainer.train_step(trainer._planned(0))
    assert trainer.token_budget == least
    trainer.step = 1
    fail_on(trainer, {1}, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(DeviceMemoryError, match=f"--micro-token-budget {least}"):
        trainer.train_step(trainer._planned(1))
    assert len(seen) > 2


def test_when_another_rank_runs_out_of_memory_this_one_starts_again_too(tmp_path, monkeypatch):
    trainer = trainer_on(tmp_path)
    asked = []

    class AnotherFailsOnce(Ranks):
        def any(self, *flags):
            asked.extend(flags)
            return (len(asked) == 1,)

    monkeypatch.setattr(trainer, "ranks", AnotherFailsOnce())
    report = trainer.train_step(trainer._planned(0))
    assert asked == [False, False]
    assert trainer.token_budget == 40
    alone = trainer_on(tmp_path)
    assert report.grad_norm == pytest.approx(alone.train_step(alone._planned(0)).grad_norm)


def test_an_optimiser_without_memory_is_an_error_of_its_own(tmp_path, monkeypatch):
    trainer = trainer_on(tmp_path)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.optimizer, "step", full)
    with pytest.raises(DeviceMemoryError, match="step 1: out of memory for the optimiser's state.*--lora"):
        trainer.fit()


def test_other_errors_in_a_step_are_not_taken_for_memory(tmp_path):
    trainer = trainer_on(tmp_path)
    fail_on(trainer, {1}, RuntimeError("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        trainer.fit()
    assert trainer.token_budget == 80


def test_the_next_step_is_planned_before_the_present_one_is_waited_for(tmp_path, monkeypatch):
    trainer = trainer_on(tmp_path)
    planned, begun = [], threading.Event()
    plan, fetch = trainer.steps.plan, Accumulated.fetch

    def note(step: int, budget: int):
        planned.append(step)
        if step == 1:
            begun.set()
        return plan(step, budget)

    monkeypatch.setattr(trainer.steps, "plan", note)
    monkeypatch.setattr(Accumulated, "fetch", lambda found: begun.wait(60) and fetch(found))
    trainer.fit()
    assert begun.is_set(), "before the first step was known to be finite"
    assert planned == [0, 1], "each step once"


def test_a_step_waits_for_the_device_once(tmp_path, monkeypatch):
    """Whatever brings a number to Python makes the host wait: `tolist` once, and nothing else."""
    trainer = trainer_on(tmp_path, make_groups(16, replies=4), kwise_loss="plackett-luce", attention="shared")
    batches = trainer.steps.plan(0, trainer.token_budget)
    weight = sum(trainer.steps.weight(batch) for batch in batches)
    waits = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__", "nonzero", "cpu", "numpy"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args, _own=own, _name=name: waits.append(_name) or _own(self, *args)
        )
    monkeypatch.setattr(trainer_module, "unless_out_of_memory", lambda compute: compute())
    found = trainer._accumulate(batches, weight)
    assert waits == [], waits
    own = found.fetch()
    assert waits == ["tolist"]
    assert (len(own.losses), len(own.statistics)) == (len(batches), 8)


@pytest.mark.parametrize("kwise_loss", ["pairs", "plackett-luce"])
def test_no_shape_in_the_loss_depends_on_what_the_device_holds(kwise_loss):
    """Boolean indexing and the like would wait for the device; tensors without content refuse them."""
    batch = pack(make_groups(5, replies=4))
    config = LossConfig(kwise_loss=kwise_loss, center_lambda=0.1, regularization_lambda=0.1)
    with FakeTensorMode() as mode:
        fake = replace(
            batch,
            **{name: mode.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)},
        )
        rewards = torch.zeros(batch.num_replies, requires_grad=True)
        losses.preference_loss(rewards, fake, config).backward()
        assert losses.statistics(rewards, fake, beta=1.0).shape == (8,)
