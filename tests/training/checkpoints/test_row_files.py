"""Checkpoints share the rows of the record that change no more, and each of them still has all rows."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from harming import HARMS
from resuming import config_for, interrupted
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_summed_json, sha256_file, write_json, write_summed_json
from rewardlab.distributed.ranks import ALONE
from rewardlab.training.checkpoints import row_files
from rewardlab.training.checkpoints.checkpoint import checkpoint_at, newest_checkpoint, write_checkpoint
from rewardlab.training.checkpoints.row_files import RowFiles
from rewardlab.training.loop import reward_judge
from rewardlab.training.monitoring.records import Records
from rewardlab.training.run import train
from runs import history_of


@pytest.fixture(autouse=True)
def _two_in_a_file(monkeypatch):
    monkeypatch.setattr(row_files, "ROWS_IN_FILE", 2)


class Run:
    """The record and the checkpoints of a run that computes nothing."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.records = Records(folder, writes=False)
        self.files = RowFiles(self.records)
        for step in range(steps):
            self.add(step)

    def add(self, step: int, loss: float = 0.1) -> None:
        self.records.add(step, {"train_loss": loss / 3 + step})

    def keep(self, step: int) -> Path:
        tensors = {"weight": torch.zeros(2)}
        return write_checkpoint(self.folder, step, tensors, {}, rows=self.files, ranks=ALONE, keep=99)

    def require(self, folder: Path) -> None:
        assert checkpoint_at(folder).state["rows"] == [self.records.rows[step] for step in sorted(self.records.rows)]


def inodes(folder: Path) -> list[int]:
    return [(folder / row_files.name_of(number)).stat().st_ino for number in range(len(list(folder.glob("rows/*"))))]


def test_what_is_written_for_a_checkpoint_does_not_grow_with_the_run(tmp_path, monkeypatch):
    written: list[int] = []
    to_json = row_files.to_json
    monkeypatch.setattr(row_files, "to_json", lambda rows, **how: (written.append(len(rows)), to_json(rows, **how))[1])
    run = Run(tmp_path, 20)
    folders = [run.keep(20), run.keep(21)]
    for step in range(22, 42, 2):
        written.clear()
        run.add(step)
        run.add(step + 1)
        folders.append(run.keep(step + 1))
        assert written in ([2], [2, 2]), "the newest rows, in files of its own"
    states = {len((folder / "state.json").read_text()) for folder in folders}
    assert max(states) - min(states) < 20, "numbers get longer, and rows do not get more"
    held = list(map(inodes, folders))
    for earlier, later in pairwise(held):
        assert not set(earlier) & set(later), "no block is in two checkpoints that follow each other"
    for earlier, later in zip(held, held[2:], strict=False):
        assert later[: len(earlier)] == earlier
    run.require(folders[-1])
    assert len(checkpoint_at(folders[0]).state["rows"]) == 20


def test_the_last_row_of_a_checkpoint_may_change_and_others_are_written_anew(tmp_path):
    run = Run(tmp_path, 4)
    first = run.keep(3)
    run.add(3, loss=0.7)
    run.keep(4)
    second = run.keep(5)
    assert inodes(second) == inodes(first)
    run.require(second)
    run.add(5)
    run.add(0, loss=0.9)
    third = run.keep(6)
    assert not set(inodes(third)) & set(inodes(first))
    run.require(third)
    run.records.rewind(checkpoint_at(first).state["rows"], 3)
    run.require(run.keep(7))


def test_a_block_that_is_damaged_in_place_costs_one_checkpoint(tmp_path):
    run = Run(tmp_path, 6)
    first, second = run.keep(5), run.keep(6)
    file = second / "rows/0.json"
    file.write_bytes(b"?" + file.read_bytes()[1:])
    run.require(first)
    third, fourth = run.keep(7), run.keep(8)
    run.require(third)
    run.require(fourth)
    with pytest.raises(ArtifactError, match=r"rows/0\.json"):
        checkpoint_at(second)


def test_a_run_that_keeps_one_checkpoint_links_its_rows_too(tmp_path):
    run = Run(tmp_path, 6)
    run.keep(5)
    shutil.rmtree(tmp_path / "checkpoints/step_5")
    second = run.keep(6)
    assert inodes(run.keep(7)) == inodes(second)


def test_rows_are_written_where_they_cannot_be_linked(tmp_path, monkeypatch):
    run = Run(tmp_path, 6)
    shutil.rmtree(run.keep(5))
    run.require(run.keep(6))
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no links here")))
    run.require(run.keep(7))


def test_the_state_of_a_short_run_is_as_earlier_versions_read_it(tmp_path):
    folder = Run(tmp_path, 2).keep(2)
    assert json.loads((folder / "state.json").read_text())["format"] == 2
    assert not (folder / "rows").exists()


@pytest.mark.parametrize("how", HARMS)
def test_damaged_rows_lead_to_the_checkpoint_before(how, tmp_path):
    run = Run(tmp_path, 4)
    run.keep(3)
    run.add(4)
    folder = run.keep(5)
    HARMS[how](folder / "rows/1.json")
    with pytest.raises(ArtifactError, match=r"rows/1\.json|1\.json"):
        checkpoint_at(folder)
    assert newest_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize("what", ["a list without them", "a link", "another format"])
def test_rows_that_are_not_as_listed_are_damage(what, tmp_path):
    folder = Run(tmp_path, 6).keep(5)
    listed = read_summed_json(folder / "checkpoint.json")
    if what == "a link":
        (folder / "rows").rename(tmp_path / "elsewhere")
        (folder / "rows").symlink_to(tmp_path / "elsewhere")
    elif what == "another format":
        write_summed_json(folder / "checkpoint.json", listed | {"format": 2})
    else:
        del listed["files"]["rows/1.json"]
        write_summed_json(folder / "checkpoint.json", listed)
    with pytest.raises(ArtifactError, match=r"rows is not a folder|is of another format|does not list rows/1\.json"):
        checkpoint_at(folder)


@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("written_by", ["this version", "0.13.0"])
def test_a_run_with_files_of_rows_goes_on_as_if_it_had_never_stopped(
    written_by, base_model, pairs_file, tmp_path, monkeypatch
):
    train(config_for(base_model, pairs_file, tmp_path / "whole", log_every=1))
    config = interrupted(base_model, pairs_file, tmp_path / "parts", monkeypatch, log_every=1)
    folder = tmp_path / "parts/checkpoints/step_5"
    assert inodes(folder)
    if written_by == "0.13.0":
        state = checkpoint_at(folder).state | {"format": 2}
        del state["row_files"]
        shutil.rmtree(folder / "rows")
        (folder / "state.json").write_text(json.dumps(state))
        names = ("tensors/index.json", "tensors/rank_0.safetensors", "state.json")
        write_summed_json(
            folder / "checkpoint.json", {"format": 2, "files": {name: sha256_file(folder / name) for name in names}}
        )
    write_json(tmp_path / "parts/metrics.jsonl", {})
    train(config)
    assert history_of(tmp_path / "whole") == history_of(tmp_path / "parts")
    assert inodes(tmp_path / "parts/checkpoints/step_8")


@pytest.mark.usefixtures("verified_here")
def test_scores_of_earlier_evaluations_are_read_one_evaluation_at_a_time(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    order: list[str] = []
    read, summed = reward_judge.read_scores, reward_judge.distributions
    monkeypatch.setattr(reward_judge, "read_scores", lambda *given: (order.append(given[1]), read(*given))[1])
    monkeypatch.setattr(reward_judge, "distributions", lambda rows: (order.append("taken"), summed(rows))[1])
    train(config)
    assert order[:6] == ["step_0", "taken", "step_2", "taken", "step_4", "taken"]
