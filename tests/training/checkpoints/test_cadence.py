"""When a checkpoint is due: by steps, or by minutes since the last one; and which step lacks one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rewardlab.core.signals import STUCK, StopRequests
from rewardlab.distributed.ranks import ALONE
from rewardlab.training.checkpoints.cadence import Keeper
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig


def keeper_in(folder: Path, **settings: Any) -> Keeper:
    """What keeps the checkpoints of a run in this folder."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    config = RewardTrainerConfig.of(model="x", dataset=("y",), **settings)
    return Keeper(config.run, Records(folder), ALONE, StopRequests())


def test_a_checkpoint_is_due_so_many_minutes_after_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    keeper = keeper_in(tmp_path, checkpoint_minutes=5.0)
    for minutes, due in ((4.9, False), (5.1, True)):
        clock[0] = 1000.0 + 60 * minutes
        assert keeper.is_due(7) is due
    keeper.keep(7, {}, {})
    assert not keeper.is_due(8)
    clock[0] += 60 * 5.1
    assert keeper.is_due(8)


def test_a_checkpoint_is_due_every_so_many_steps_whatever_the_clock_says(tmp_path: Path) -> None:
    keeper = keeper_in(tmp_path, checkpoint_every=3, checkpoint_minutes=1e-9)
    assert [step for step in range(1, 8) if keeper.is_due(step)] == [3, 6]


def test_a_step_lacks_a_checkpoint_unless_it_has_one_or_none_are_wanted(tmp_path: Path) -> None:
    keeper = keeper_in(tmp_path)
    keeper.begin(4)
    assert (keeper.lacks(4), keeper.lacks(5)) == (False, True)
    without = keeper_in(tmp_path, checkpoints=False)
    without.begin(4)
    assert (without.lacks(4), without.lacks(5)) == (False, False)


@pytest.mark.parametrize(
    ("step", "kept", "said", "stuck"),
    [
        (4, 4, "Not one step was done in that time; raise --max-hours.", True),
        (5, 5, "Start the same command again with --resume auto to go on.", False),
        (5, 4, "It cannot be resumed from here, because of --no-checkpoints.", True),
    ],
)
def test_a_run_that_the_hours_ended_is_queued_again_only_where_that_leads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, kept: int, said: str, stuck: bool
) -> None:
    monkeypatch.setattr(StopRequests, "reason", property(lambda stops: "--max-hours 1"))
    keeper = keeper_in(tmp_path)
    keeper.begin(4)
    keeper.kept_step = kept
    ended = keeper.interruption(step, 8)
    assert str(ended).endswith(said)
    assert (ended.exit_status == STUCK) is stuck


def test_of_a_run_that_has_finished_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    keeper = keeper_in(tmp_path, checkpoint_limit=3)
    kept = [keeper.keep(step, {}, {})[0] for step in (2, 4, 6)]
    assert all(folder.is_dir() for folder in kept)
    keeper.finish()
    assert [folder.is_dir() for folder in kept] == [False, False, True]
