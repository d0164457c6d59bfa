"""A data source that stalls is an error that names what was being read; one that does not changes nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from common import make_groups, make_model, stored
from rewardlab.core.errors import DataError
from rewardlab.core.pending import Pending
from rewardlab.core.types import TokenGroup
from rewardlab.data.groups import Datasets, Part, origin
from rewardlab.data.step_order import batch_of_step
from rewardlab.data.store import StoreWriter, open_store
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import MonitorConfig, RewardTrainerConfig


class Stalling(Sequence[TokenGroup]):
    """Groups of which one is never read until `go` is set, but for the type checker, which looks on the main thread."""

    def __init__(self, groups: Sequence[TokenGroup], at: int) -> None:
        self.groups = groups
        self.at = at
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> TokenGroup:
        thread = threading.current_thread()
        if index == self.at and thread is not threading.main_thread():
            self.threads.append(thread)
            self.go.wait()
        return self.groups[index]

    def __iter__(self) -> Iterator[TokenGroup]:
        raise AssertionError("only what a step needs is read")


def trainer_on(folder: Path, groups: Sequence[TokenGroup], **changes) -> RewardTrainer:
    settings = {"batch_size": 4, "lr": 1e-3, "micro_token_budget": 80, **changes}
    return reward_trainer(
        RewardTrainerConfig.of(model="x", dataset=("y",), **settings),
        make_model("llama").train(),
        Datasets(train=groups),
        num_steps=3,
        records=Records(folder),
        save=lambda folder, step: None,
    )


@pytest.mark.parametrize("step", [0, 2])
def test_a_source_that_stalls_ends_the_run_with_an_error_that_names_the_rows(tmp_path, step):
    rows = batch_of_step(step, num_groups=12, batch_size=4, seed=0)
    groups = Stalling(make_groups(12), at=rows[1])
    trainer = trainer_on(tmp_path, groups, batch_timeout_s=0.2)
    with pytest.raises(DataError, match=f"step {step + 1}: its data could not be read within 0.2 s") as found:
        trainer.fit()
    message = str(found.value)
    assert f"preferences {', '.join(map(str, rows))} of data in memory" in message
    assert "--cache-dir" in message
    assert "--batch-timeout-s. The weights are those of step" in message
    assert trainer.step == step, "the steps before it were finished"
    (thread,) = groups.threads
    assert thread.daemon, "it would keep no process alive"
    groups.go.set()
    thread.join(60)


def test_what_is_read_is_named_without_reading_it(tmp_path):
    groups = make_groups(6)
    assert origin(groups) == "data in memory"
    in_memory = stored(groups)
    assert origin(in_memory) == "random in memory"
    folder = tmp_path / "store"
    folder.mkdir()
    with StoreWriter(folder) as writer:
        writer.append(dict(in_memory.stores[0].columns))
        writer.finish(source="pairs", facts={})
    store = open_store(folder)
    mapped = Part([store], np.arange(6)).groups()
    assert origin(mapped) == f"pairs in {folder}"


def test_a_slow_source_that_comes_in_time_is_waited_for(tmp_path):
    groups = Stalling(make_groups(12), at=batch_of_step(1, num_groups=12, batch_size=4, seed=0)[0])
    trainer = trainer_on(tmp_path, groups, batch_timeout_s=60.0)
    update, released = trainer._update, []

    def release() -> bool:
        released.append(trainer.step)
        groups.go.set()
        return update()

    trainer._update = release
    trainer.fit()
    assert trainer.step == 3
    assert released[0] == 0, "the first step did not wait for the data of the second"


def test_what_planning_raises_is_raised_where_the_plan_is_wanted(tmp_path, monkeypatch):
    trainer = trainer_on(tmp_path, make_groups(12))
    plan = trainer.steps.plan

    def broken(step: int, budget: int):
        if step == 1:
            raise TimeoutError("the share is gone")  # an OSError, not ours
        return plan(step, budget)

    monkeypatch.setattr(trainer.steps, "plan", broken)
    with pytest.raises(TimeoutError, match="the share is gone"):
        trainer.fit()
    assert trainer.step == 1


def test_pending_work_is_waited_for_only_so_long():
    go = threading.Event()
    pending = Pending("a", lambda: go.wait() and 7)
    assert not pending.wait(0.01)
    go.set()
    assert pending.wait(60)
    assert pending.result() == 7
    assert pending.result() == 7, "as often as it is asked for"


def test_the_limit_is_that_of_the_settings(tmp_path):
    assert trainer_on(tmp_path, make_groups(12)).batch_timeout_s == MonitorConfig.batch_timeout_s == 60.0
    assert trainer_on(tmp_path, make_groups(12), batch_timeout_s=7.0).batch_timeout_s == 7.0


@pytest.mark.slow
@pytest.mark.parametrize("seconds", ["0.3", "3600"])
def test_a_process_ends_as_it_wants_to_while_work_goes_on(seconds):
    """Work in torch at that moment would abort it; work that never ends holds it up a little and no more."""
    program = f"""
import sys, time, torch
from rewardlab.core import pending as pending
pending.PATIENCE_S = 2.0
def work():
    end = time.monotonic() + {seconds}
    while time.monotonic() < end:
        torch.cat([torch.arange(10), torch.arange(5)]) if {seconds} < 60 else time.sleep(0.1)
pending.Pending("plan", work)
sys.exit(75)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 75, ended.stderr
