"""Those who watch: told in order, dropped when they fail, and never a reason for another number. Memory, profiler."""

from __future__ import annotations

import csv
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import rewardlab.training.monitoring.memory_watch as memory_watch_module
import runs
from common import make_groups, make_model
from rewardlab.core.errors import ConfigError
from rewardlab.data.groups import Datasets
from rewardlab.training.cost import memory
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.monitoring.memory_watch import COLUMNS, MemoryWatch
from rewardlab.training.monitoring.observers import EVENTS, Cadence, Observer, Observers
from rewardlab.training.monitoring.profiler import StepProfiler
from rewardlab.training.monitoring.records import Records
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

CADENCE = Cadence(num_steps=4, every=2)
config_for = partial(runs.config_for, steps=6, log_every=2, eval_every=2, baselines=False)


def trainer_on(folder: Path, observers: Observers | None, *, num_steps: int = 3, **changes) -> RewardTrainer:
    folder.mkdir(exist_ok=True)
    settings = {"batch_size": 8, "lr": 1e-3, "micro_token_budget": 80, "log_every": 2, "eval_every": 2, **changes}
    return reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), **settings),
        make_model("llama").train(),
        Datasets(train=make_groups(16), eval=make_groups(4, seed=1)),
        num_steps=num_steps,
        records=Records(folder),
        save=lambda folder, step: None,
        observers=observers,
    )


def listener(told: list, name: str = "me", **instead) -> Observer:
    """Writes down everything."""
    callbacks = {event: lambda *what, event=event: told.append((event, *what)) for event in EVENTS}
    return Observer(name=name, **{**callbacks, **instead})


def test_observers_are_told_of_every_step_pass_and_row_in_order(tmp_path):
    told: list = []
    trainer = trainer_on(tmp_path, Observers([listener(told)]))
    passes = [len(trainer.steps.plan(step, trainer.token_budget)) for step in range(3)]
    with trainer.observers:
        trainer.fit()
    events = [entry[0] for entry in told]
    wanted = ["row"]
    for step, count in enumerate(passes, start=1):
        wanted += ["step_begins", *["forward_done", "backward_done"] * count, "step_done"]
        wanted += ["row", "row"] * (step in (2, 3))
    assert events == [*wanted, "close"]
    assert [entry[1] for entry in told if entry[0] == "step_done"] == [1, 2, 3]
    assert told[-1] == ("close", False)
    merged: dict[int, dict] = {}
    for _, step, values in (entry for entry in told if entry[0] == "row"):
        merged.setdefault(step, {"step": step}).update(values)
    recorded = trainer.records.rows
    assert set(merged) == set(recorded) == {0, 2, 3}
    for step, row in recorded.items():
        assert {name: value for name, value in merged[step].items() if value == value} == {
            name: value for name, value in row.items() if value is not None
        }


@pytest.mark.slow
def test_watching_changes_no_number(tmp_path, monkeypatch):
    told: list = []
    alone, watched = trainer_on(tmp_path / "a", None), trainer_on(tmp_path / "b", Observers([listener(told)]))
    alone.fit()
    watched.fit()
    assert told
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(tensor, watched.model.state_dict()[name]), name


@pytest.mark.parametrize("event", EVENTS)
def test_an_observer_that_fails_anywhere_is_dropped_with_one_warning_and_the_others_go_on(tmp_path, event, caplog):
    told: list = []

    def fail(*what: object) -> None:
        told.append("failed")
        raise RuntimeError("no room\nfor more")

    observers = Observers([listener([], "the bad one", **{event: fail}), listener(told)])
    trainer = trainer_on(tmp_path, observers)
    with caplog.at_level("WARNING", logger="rewardlab"), observers:
        trainer.fit()
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert line.startswith("the bad one failed (RuntimeError: no room) and is left out from here on; the run goes on")
    assert told.count("failed") == 1
    assert told[-1] == ("close", False)
    assert trainer.step == 3


def test_an_interrupt_is_no_failure_of_an_observer_and_all_are_told_that_the_run_failed(tmp_path):
    told: list = []

    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    observers = Observers([listener([], step_done=interrupt), listener(told)])
    with pytest.raises(KeyboardInterrupt), observers:
        trainer_on(tmp_path, observers).fit()
    assert told[-1] == ("close", True)
    observers.step_done(9)
    assert told[-1] == ("close", True), "nothing after the end"


# --- memory ----------------------------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV file."""
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_on_a_cpu_the_process_is_measured_and_what_is_not_known_stays_empty(base_model, pairs_file, tmp_path, log):
    train(config_for(base_model, pairs_file, tmp_path / "run", profile_memory=True))
    rows = rows_of(tmp_path / "run/memory.csv")
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in rows] == list("123456")
    for row in rows:
        assert 0 < float(row["process_gib"]) <= float(row["process_peak_gib"]) * 1.001
        assert {row[name] for name in COLUMNS if "process" not in name and name != "step"} == {""}
    lines = [line for line in log.messages if "MEMORY" in line]
    assert [line.split("  ")[0] for line in lines] == ["step 2/6", "step 4/6", "step 6/6"]
    assert all("process" in line and "its peak so far" in line for line in lines)


class Allocator:
    """torch's counters of a GPU, driven by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        for name in ("max_memory_allocated", "reset_peak_memory_stats", "memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(memory, "_TAKEN", {})

    def take(self, gib: int) -> None:
        """Allocate, or free."""
        self.now += gib * 2**30
        self.peak = max(self.peak, self.now)

    def max_memory_allocated(self, device):
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.peak = self.now

    def memory_stats(self, device):
        return {"allocated_bytes.all.current": self.now, "reserved_bytes.all.current": 40 * 2**30}


def test_on_a_gpu_forward_and_backward_have_peaks_of_their_own_and_the_runs_peak_is_not_lost(
    tmp_path, monkeypatch, log
):
    device, counters = torch.device("cuda:0"), Allocator(monkeypatch)
    observer = MemoryWatch(device, tmp_path / "memory.csv", CADENCE).observer()
    counters.take(20)  # a trial before the run, and given back
    counters.take(-18)
    for step, (forward, backward) in enumerate([((5, 3), (9, 2)), ((1, 1), (4, 4))], start=1):
        observer.step_begins(step)
        for up, more in zip(forward, backward, strict=True):
            counters.take(up)
            observer.forward_done()
            counters.take(more)
            counters.take(-more - up)
            observer.backward_done()
        observer.step_done(step)
    assert memory.peak_memory(device) == 20 * 2**30, "the most so far, though the counters were set back"
    observer.row(2, {"eval_loss": 1.0})
    observer.row(2, {"train_loss": 1.0})
    observer.close(False)
    found = [[float(row[name]) for name in COLUMNS if row[name]] for row in rows_of(tmp_path / "memory.csv")]
    assert COLUMNS[:5] == ("step", "allocated_gib", "reserved_gib", "forward_peak_gib", "backward_peak_gib")
    assert found == [[1, 2.0, 40.0, 7.0, 16.0], [2, 2.0, 40.0, 3.0, 7.0]]
    (line,) = log.messages
    assert line == (
        "step 2/4  MEMORY  allocated 2.00 GiB  reserved 40.00 GiB  forward peak 7.00 GiB  backward peak 16.00 GiB"
    )


def test_memory_that_nobody_tells_is_an_empty_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_watch_module, "resident", lambda: None)
    monkeypatch.setattr(memory_watch_module, "peak_memory", lambda device: 0)
    observer = MemoryWatch(torch.device("cpu"), tmp_path / "memory.csv", CADENCE).observer()
    observer.step_done(1)
    observer.row(2, {"train_loss": 1.0})
    observer.close(False)
    later = MemoryWatch(torch.device("cpu"), tmp_path / "memory.csv", CADENCE).observer()
    later.step_done(2)
    later.close(False)
    assert (tmp_path / "memory.csv").read_text().splitlines() == [",".join(COLUMNS), "1,,,,,,", "2,,,,,,"]


# --- profiler --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_the_steps_after_the_warm_up_are_traced_with_a_table_of_operators(base_model, pairs_file, tmp_path, log):
    train(config_for(base_model, pairs_file, tmp_path / "run", profile=True, profile_steps=2, eval_every=6))
    trace = json.loads((tmp_path / "run/profile/trace.json").read_text())
    steps = {event["name"] for event in trace["traceEvents"] if str(event.get("name", "")).startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}, "from 0: the third step and the fourth"
    names = {str(event.get("name")) for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::embedding"} <= names
    table = (tmp_path / "run/profile/operators.txt").read_text()
    assert "aten::mm" in table
    assert "Self CPU time total" in table
    assert "profile: 2 steps in" in log.text
    assert "left out" not in log.text


def test_a_run_that_ends_before_the_traced_steps_says_so(tmp_path, caplog):
    profiler = StepProfiler(torch.device("cpu"), tmp_path / "profile", num_traced=2)
    observer = profiler.observer()
    with caplog.at_level("WARNING", logger="rewardlab"), Observers([observer]):
        observer.step_begins(1)
        observer.step_done(1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "--profile: the run ended before 3 steps, so nothing was traced"
    assert not (tmp_path / "profile").exists()


def test_a_run_too_short_to_be_traced_is_refused(base_model, pairs_file, tmp_path):
    with pytest.raises(ConfigError, match="--profile-steps 3: with 2 steps to warm up .* more than the 4 of the run"):
        train(config_for(Path("nowhere"), pairs_file, tmp_path / "run", profile=True, steps=4))
    with pytest.raises(ConfigError, match="--profile-steps 3: .* more than the 2 of the run"):
        train(config_for(base_model, pairs_file, tmp_path / "run", profile=True, steps=None, epochs=0.5))


def test_a_cadence_is_that_of_the_evaluations():
    assert [step for step in range(1, 6) if Cadence(num_steps=5, every=2).is_due(step)] == [2, 4, 5]
    assert Cadence(num_steps=5, every=2).label(4) == "step 4/5"
