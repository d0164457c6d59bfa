"""Models of the hub at a revision: read from the cache here, named by repository and commit in what is saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rewardlab.artifact.base import require_inputs
from rewardlab.core.errors import ModelError
from rewardlab.core.spec import read_spec
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.hub import at_revision, commit_of, source_of
from rewardlab.serve.folders.export_adapter import export_adapter
from rewardlab.training.run import train
from runs import config_for

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base_model: Path) -> Path:
    """The cache of the hub on this machine, with a model in it that has a tag and no other revision."""
    root = tmp_path / "hub"
    place = root / "models--their--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "v1").write_text(COMMIT)
    shutil.copytree(base_model, place / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    return place / "snapshots" / COMMIT


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("their/model@v1", ("their/model", "v1")),
        ("gpt2@refs/pr/3", ("gpt2", "refs/pr/3")),
        ("their/model", None),
        ("their/model@", None),
        ("a/b/c@v1", None),
        ("./their/model@v1", None),
    ],
)
def test_names_with_a_revision(name, found):
    assert at_revision(name) == found


def test_a_folder_that_is_there_is_no_model_at_a_revision(tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert at_revision("runs/mine@v1") is None


def test_a_revision_is_the_folder_of_its_commit(hub):
    for revision in ("v1", COMMIT):
        assert resolve_model_name(f"their/model@{revision}", print) == str(hub)
    assert source_of(hub) == ("their/model", COMMIT)
    assert source_of(hub.parent) is None
    with pytest.raises(ModelError, match="their/model@v2: the hub did not give a model .* Check name, revision"):
        resolve_model_name("their/model@v2", print)


def test_a_revision_that_is_not_there_is_told_before_anything_else(hub, pairs_file, tmp_path):
    config = config_for("their/model@v2", pairs_file, tmp_path / "run", steps=1)
    with pytest.raises(ModelError, match="their/model@v2: the hub did not give"):
        require_inputs(config.model, config.data)


@pytest.mark.slow
def test_what_is_trained_on_a_revision_names_its_commit(hub, pairs_file, tmp_path, verified_here):
    folder = train(config_for("their/model@v1", pairs_file, tmp_path / "run", steps=2, lora=True)).last
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["base_commit"] == COMMIT
    assert read_spec(folder).provenance["base_commit"] == COMMIT
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("their/model", COMMIT)

    assert export_adapter(folder, tmp_path / "peft").base == "their/model"
    again = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (again["base_model_name_or_path"], again["revision"]) == ("their/model", COMMIT)
    export_adapter(folder, tmp_path / "moved", base=str(shutil.copytree(hub, tmp_path / "moved_base")))
    moved = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    assert (moved["base_model_name_or_path"], moved["revision"]) == (str(tmp_path / "moved_base"), None)


@pytest.mark.slow
def test_what_is_trained_on_a_name_without_a_revision_names_the_commit_that_was_read(
    hub, pairs_file, tmp_path, verified_here, monkeypatch
):
    (hub.parent.parent / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = train(config_for("their/model", pairs_file, tmp_path / "run", steps=1, lora=True)).last
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["base_commit"] == COMMIT
    assert read_spec(folder).provenance["base_commit"] == COMMIT
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("their/model", COMMIT)


def test_only_models_of_the_hub_have_a_commit(hub, base_model):
    (hub.parent.parent / "refs" / "main").write_text(COMMIT)
    assert (commit_of("their/model"), commit_of(str(hub))) == (COMMIT, COMMIT)
    assert [commit_of(name) for name in (str(base_model), "their/other", "not a name")] == [None] * 3
