"""A run that saves its model many times: what is known already is not computed again, and every folder is the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import runs
from resuming import interrupted
from rewardlab.artifact.load import load
from rewardlab.core.errors import ArtifactError
from rewardlab.core.spec import read_spec
from rewardlab.model.reward import RewardModel
from rewardlab.serve.verifying.folder import verify
from rewardlab.training.checkpoints.model_folders import Saver
from rewardlab.training.run import train

config_for = partial(runs.config_for, steps=8, eval_every=2, lr=1e-2)
HEAD = {"train_head_only": True, "cache_states": True}
WAYS = {
    "head, looked up": HEAD,
    "head": {"train_head_only": True},
    "lora": {"lora": True, "lora_rank": 2, "lr": 1e-4},
}
AGAIN = 2
"""Passes of a save whose backbone is known: one conversation in the live model, one in the folder."""


@pytest.fixture(autouse=True)
def _here(verified_here, monkeypatch, tmp_path):
    """Verify in this process, and keep states in a folder of the test."""
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def saves(monkeypatch) -> list[tuple[str, int, int]]:
    """(name of the folder, step, conversations that a backbone computed alone) of every save."""
    found: list[tuple[str, int, int]] = []
    computed = 0
    read, save = RewardModel.read, Saver.save

    def counts(model, hidden, batch):
        nonlocal computed
        computed += batch.num_replies == 1
        return read(model, hidden, batch)

    def noted(saver, folder, step):
        before = computed
        save(saver, folder, step)
        found.append((folder.name, step, computed - before))

    monkeypatch.setattr(RewardModel, "read", counts)
    monkeypatch.setattr(Saver, "save", noted)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its name in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folders_of(run: Path) -> dict[str, dict[str, bytes]]:
    """The files of every model that a run has saved."""
    return {folder.name: contents(folder) for folder in (run / "best", *run.glob("step_*"))}


def without_help(monkeypatch) -> None:
    """Let every save compute all of its canaries, as the first does."""
    begin = Saver.__init__

    def forgets(saver, *given):
        begin(saver, *given)
        saver._states = None

    monkeypatch.setattr(Saver, "__init__", forgets)
    monkeypatch.setattr(Saver, "_copies", lambda saver, folder, step: False)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_folders_are_the_same_to_the_byte_with_fewer_passes(base_model, pairs_file, tmp_path, monkeypatch, saves, way):
    config = config_for(base_model, pairs_file, tmp_path / "run", overwrite=True, save_every=4, **WAYS[way])
    result = train(config)
    fewer, ours = list(saves), folders_of(tmp_path / "run")
    assert result.best_step is not None
    assert ours.keys() == {"best", "step_4", "step_8"}
    saves.clear()
    without_help(monkeypatch)
    train(config)
    assert folders_of(tmp_path / "run") == ours
    assert [save[:2] for save in saves] == [save[:2] for save in fewer]
    (whole,) = {passes for *_, passes in saves}
    assert whole > 10 * AGAIN
    first, *rest = fewer
    assert first[2] == whole
    steps = [first[1]]
    for _, step, passes in rest:
        known = AGAIN if config.model.train_head_only else whole
        assert passes == (0 if step == steps[-1] else known), step
        steps.append(step)
    assert len(set(steps)) < len(steps), "a step was saved twice"
    for folder in ("best", "step_4", "step_8"):
        verify(tmp_path / "run" / folder)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["head, looked up", "lora"])
def test_a_run_stopped_behind_its_best_model_ends_with_the_folders_of_one_that_was_not(
    base_model, pairs_file, tmp_path, monkeypatch, saves, way
):
    settings = {"lr": 1e-2, **WAYS[way]}
    whole = train(config_for(base_model, pairs_file, tmp_path / "run", save_every=4, **settings))
    assert whole.best_step == 8
    expected = {name: read_spec(tmp_path / "run" / name) for name in ("best", "step_8")}
    saves.clear()
    config = interrupted(base_model, pairs_file, tmp_path / "stopped", monkeypatch, step=5, **settings)
    assert read_spec(tmp_path / "stopped/best").provenance["step"] == 4
    verify(tmp_path / "stopped/best")
    assert load(tmp_path / "stopped/best")
    train(config)
    assert [save[:2] for save in saves] == [
        *(("best", 2), ("best", 4), ("step_4", 4)),
        *(("best", 6), ("best", 8), ("step_8", 8)),
    ]
    assert saves[3][2] == saves[0][2], "another process knows nothing of the first"
    for name, spec in expected.items():
        again = read_spec(tmp_path / "stopped" / name)
        assert (again.canaries, again.cut_canaries) == (spec.canaries, spec.cut_canaries)
        assert (again.files, again.max_rounding_error) == (spec.files, spec.max_rounding_error)


@pytest.mark.slow
def test_a_best_folder_that_was_changed_meanwhile_is_not_copied(
    base_model, pairs_file, tmp_path, monkeypatch, saves, caplog
):
    save = Saver.save

    def spoiled(saver, folder, step):
        save(saver, folder, step)
        if folder.name == "best":
            (folder / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(Saver, "save", spoiled)
    with pytest.raises(ArtifactError, match=r"best: tokenizer.json was changed after the model was saved"):
        train(config_for(base_model, pairs_file, tmp_path / "run", **HEAD))
    assert saves[-2:] == [("best", 8, AGAIN), ("step_8", 8, AGAIN)]
    assert "best cannot be copied, so" in caplog.text
    assert load(tmp_path / "run/step_8")
