"""`rewardlab card` and `rewardlab push`, the latter against a hub that only remembers what it was sent."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from command_line import refusal, tiny_reward_model
from rewardlab.artifact.load import READ_BY_ENGINES
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.spec import read_spec
from rewardlab.serve.folders.push import Hub, push
from run_folders import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, whose model is none."""
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny reward model."""
    return tiny_reward_model(tmp_path_factory.mktemp("saved") / "rm")


@pytest.fixture
def model(saved, tmp_path) -> Path:
    """A copy of it, with a card and a file that is no part of it."""
    shutil.copytree(saved, tmp_path / "rm")
    (tmp_path / "rm/README.md").write_text("---\nlibrary_name: transformers\n---\n")
    (tmp_path / "rm/notes [1].txt").write_text("secret")
    return tmp_path / "rm"


class FakeHub:
    """Remembers repositories and what they were sent."""

    def __init__(self, *, public: bool = False, failing: Exception | None = None) -> None:
        self.public, self.failing = public, failing
        self.created: list[tuple[str, bool]] = []
        self.files: dict[str, bytes] = {}
        self.deleted: list[str] = []

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> Any:
        assert exist_ok
        if self.failing is not None:
            raise self.failing
        self.created.append((repo_id, private))

    def repo_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=not self.public)

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str,
        allow_patterns: list[str],
        delete_patterns: list[str],
        commit_message: str,
    ) -> Any:
        self.deleted = delete_patterns
        for path in Path(folder_path).rglob("*"):
            name = path.relative_to(folder_path).as_posix()
            if path.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                self.files[name] = path.read_bytes()
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")


@pytest.mark.slow
def test_the_card_of_a_run_and_of_the_model_in_it_is_the_same(run, capsys):
    main(["card", str(run)])
    assert capsys.readouterr().out == f"wrote {run / 'best/README.md'}\n"
    card = (run / "best/README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["model-index"][0]["results"]
    main(["report", str(run), "--card"])
    assert (run / "best/README.md").read_text() == card
    (run / "best/README.md").unlink()
    main(["card", str(run / "best")])
    assert (run / "best/README.md").read_text() == card
    (run / "best/README.md").write_text("mine")
    assert "replace it with --overwrite" in refusal(capsys, "card", run)
    main(["card", str(run), "--overwrite"])
    assert (run / "best/README.md").read_text() == card


def test_a_model_without_numbers_gets_no_card(run, saved, capsys, tmp_path):
    assert "a reward model that lies in no run, so there are no numbers for a card" in refusal(capsys, "card", saved)
    shutil.copytree(run, tmp_path / "mine")
    shutil.copytree(tmp_path / "mine/best", tmp_path / "mine/other")
    assert "the numbers of its run are those of" in refusal(capsys, "card", tmp_path / "mine/other")
    assert "not found" in refusal(capsys, "card", tmp_path / "nowhere")


def test_exactly_the_model_and_its_card_are_pushed_to_a_private_repository(model):
    hub = FakeHub()
    assert isinstance(hub, Hub)
    made = push(model, "me/rm", hub=hub)
    assert hub.created == [("me/rm", True)]
    assert hub.files.keys() == {*read_spec(model).files, "reward_spec.json", "README.md"}
    assert hub.files["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert made.left_out == ["notes [1].txt"]
    assert made.address == "https://hub.example/me/rm/commit/1"
    assert any(fnmatch("model-00001-of-00002.safetensors", pattern) for pattern in hub.deleted)
    for name in ("chat_template.jinja", "vocab.json", "special_tokens_map.json", "tokenizer.model", "merges.txt"):
        assert any(fnmatch(name, pattern) for pattern in hub.deleted), "an older one would be read beside the new ones"
    for pattern in READ_BY_ENGINES:
        assert any(fnmatch(pattern.replace("*", "x"), deleted) for deleted in hub.deleted), pattern
    for name in ("README.md", ".gitattributes", "notes.txt"):
        assert not any(fnmatch(name, pattern) for pattern in hub.deleted)
    assert push(model, "me/rm", private=False, hub=FakeHub(public=True)).address


def test_a_dry_run_prints_what_would_be_sent_and_sends_nothing(model, capsys):
    main(["push", str(model), "--repo", "me/rm", "--dry-run"])
    out = capsys.readouterr().out
    assert "would go to me/rm (private if it is new); nothing was sent" in out
    assert f"  model.safetensors  {(model / 'model.safetensors').stat().st_size:,}" in out
    assert "left here, since they are not part of the model: notes [1].txt" in out


def test_a_dry_run_lists_what_readers_learn_about_the_place_of_training(tmp_path, capsys):
    config = {"data": {"dataset": ["/data/secret/pairs.jsonl"]}, "seed": 1, "publish_to": "http://10.0.0.7:8000"}
    command = ["rewardlab", "train", "--output-dir", "runs/" + "x" * 80]
    facts = {"config": config, "command": command, "platform": "Linux-6.1-x86_64", "export": {"folder": "mine"}}
    folder = tiny_reward_model(tmp_path / "rm", provenance=facts)
    main(["push", str(folder), "--repo", "me/rm", "--dry-run", "--no-card"])
    _, _, told = capsys.readouterr().out.partition("every reader of the repository will see how and where")
    assert told.splitlines()[1:] == [
        "  provenance.config.data.dataset[0]: /data/secret/pairs.jsonl",
        "  provenance.config.publish_to: http://10.0.0.7:8000",
        f"  provenance.command: rewardlab train --output-dir runs/{'x' * 26} …",
        "  provenance.export.folder: mine",
    ]


def test_a_folder_that_fails_verification_is_not_pushed(model):
    hub = FakeHub()
    with (model / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ArtifactError, match="was changed after the model was saved"):
        push(model, "me/rm", hub=hub)
    assert not hub.created


def test_a_model_without_a_card_is_pushed_only_if_that_is_meant(saved, capsys):
    said = refusal(capsys, "push", saved, "--repo", "me/rm", "--dry-run")
    assert "it has no model card (README.md). Write one with `rewardlab card RUN`, or say --no-card." in said
    hub = FakeHub()
    push(saved, "me/rm", card=False, hub=hub)
    assert "README.md" not in hub.files


def test_a_public_repository_gets_nothing_that_was_to_be_private(model):
    hub = FakeHub(public=True)
    with pytest.raises(ConfigError, match="it is there and public. Nothing was sent"):
        push(model, "me/rm", hub=hub)
    assert not hub.files


@pytest.mark.parametrize("name", ["rm", "a/b/c", "me/../rm", "https://hub.example/me/rm", ""])
def test_names_that_no_repository_has_are_refused(model, name):
    with pytest.raises(ConfigError, match="must be OWNER/NAME"):
        push(model, name, hub=FakeHub())


class NetworkError(Exception):
    """As those of the packages that carry the bytes, of no class that Python has."""


def broken_off() -> RuntimeError:
    """As the hub's client says that a large file did not arrive."""
    error = RuntimeError("Error while uploading 'model.safetensors' to the Hub.")
    error.__cause__ = NetworkError("Server disconnected.")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("401 Unauthorized\nmore"), "401 Unauthorized"),
        (NetworkError("Server disconnected."), "Server disconnected"),
        (NetworkError(), "NetworkError"),
        (broken_off(), "Error while uploading 'model.safetensors' to the Hub (Server disconnected)"),
        (KeyError("commitUrl"), "KeyError: 'commitUrl'"),
    ],
)
def test_what_the_hub_refuses_is_told_in_a_sentence(error, said, model):
    with pytest.raises(ConfigError) as refused:
        push(model, "me/rm", hub=FakeHub(failing=error))
    assert f"the hub refuses: {said}. Check the name, the network" in str(refused.value)
    assert str(refused.value).endswith("The same command may be given again.")
