"""Importing a model where it stands: `verify` asks how it was trained, and the original is kept beside the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from command_line import refusal
from foreign_models import linear_head, seq_cls
from rewardlab.cli import main
from rewardlab.core.spec import read_spec
from rewardlab.serve.folders import import_model as importing
from rewardlab.serve.verifying.folder import verify


@pytest.fixture(autouse=True)
def _verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is quick."""
    monkeypatch.setattr(importing, "verify_in_clean_process", verify)


def answering(monkeypatch, *answers: str) -> list[str]:
    """A terminal at which these answers are typed; returns the questions as they are asked."""
    asked: list[str] = []
    left = iter(answers)

    def answer(question: str) -> str:
        asked.append(question)
        return next(left)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    return asked


@pytest.mark.slow
def test_verify_asks_for_the_rendering_of_a_foreign_model_and_verifies_what_it_made(tmp_path, capsys, monkeypatch):
    made = linear_head(tmp_path / "source", statistics=(0.5, 2.0), normalize=None)
    asked = answering(monkeypatch, "", "", "", "Be brief.", "yes", "100", "")
    main(["verify", str(made.folder)])
    out = capsys.readouterr().out
    assert "How were conversations rendered in training? ([template], its tokenizer's own" in asked[0]
    assert "Are scores normalised by them?" in asked[4]
    assert f"{made.folder}: verified." in out
    spec = read_spec(made.folder)
    assert (spec.renderer.system_prompt, spec.renderer.max_length) == ("Be brief.", 100)
    assert spec.provenance["import"]["std"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "source.original"]
    assert "value_head.weight" in load_file(tmp_path / "source.original/model.safetensors")
    main(["verify", str(made.folder)])


@pytest.mark.slow
def test_a_template_that_is_missing_has_to_be_named_and_the_folder_may_be_another(tmp_path, capsys, monkeypatch):
    made = seq_cls(tmp_path / "source", template=None)
    asked = answering(monkeypatch, "", "plain", "", "", str(tmp_path / "rm"))
    main(["verify", str(made.folder)])
    assert "its tokenizer has no template" in asked[0]
    assert asked[0] == asked[1], "an empty answer is none"
    assert read_spec(tmp_path / "rm").renderer.template_source == "plain"
    assert f"{tmp_path / 'rm'}: verified." in capsys.readouterr().out


def test_where_nobody_can_be_asked_verify_says_what_to_do(tmp_path, capsys, monkeypatch):
    made = seq_cls(tmp_path / "source")
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    said = refusal(capsys, "verify", made.folder)
    assert f"`rewardlab import {made.folder} --output-dir NEW`" in said
    answering(monkeypatch, "", "twice", "", "", "", "")
    assert "'twice'" in refusal(capsys, "verify", made.folder)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("after", ["original", "imported"])
def test_an_import_in_place_that_is_interrupted_leaves_the_original(tmp_path, monkeypatch, log, error, after):
    made = seq_cls(tmp_path / "source")
    before = (made.folder / "model.safetensors").read_bytes()
    rename, ended = Path.rename, []

    def ending(path: Path, target: Path) -> Path:
        here = after == ("imported" if path.name == "source.imported" else "original")
        if here and not ended and path.parent == target.parent == tmp_path and not path.name.startswith("."):
            ended.append(path)
            if error is KeyboardInterrupt and after == "original":
                rename(path, target)  # the signal arrives behind the call
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", ending)
    with pytest.raises(error):
        importing.import_in_place(made.folder)
    assert ended
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert (made.folder / "model.safetensors").read_bytes() == before
    assert f"the original is {made.folder}" in log.text


def test_what_an_import_in_place_left_is_named(tmp_path, capsys):
    made = seq_cls(tmp_path / "source")
    (tmp_path / "source.imported").mkdir()
    words = refusal(capsys, "import", made.folder, "--in-place")
    assert "source.imported: it is there already, as an import that was ended would leave it" in words
    assert "--overwrite" not in words
    made.folder.rename(tmp_path / "source.original")
    words = refusal(capsys, "import", made.folder, "--in-place")
    assert f"{tmp_path / 'source.original'} is the original, and {tmp_path / 'source.imported'} is the new" in words


@pytest.mark.slow
def test_an_import_in_place_keeps_the_files_beside_it(tmp_path, capsys):
    made = seq_cls(tmp_path / "source")
    assert "--output-dir is missing: name the new folder, or say --in-place" in refusal(capsys, "import", made.folder)
    (tmp_path / "source.original").mkdir()
    assert "source.original: it is there already" in refusal(capsys, "import", made.folder, "--in-place")
    (tmp_path / "source.original").rmdir()
    main(["import", str(made.folder), "--in-place"])
    assert verify(made.folder).num_canaries
    assert not (tmp_path / "source.original/reward_spec.json").exists()
