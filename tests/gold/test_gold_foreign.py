"""Gold models and proxies of other projects: a plain classification folder, and a name on the hub."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

import labelled
from common import CHATML, make_tokenizer
from foreign_models import Made, edit_config, seq_cls, trl_value_head
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import cache_folder
from rewardlab.gold import foreign
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.curving.report import json_report as curve_report
from rewardlab.gold.curving.run import curve
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.foreign import find_model, is_hub_name
from rewardlab.gold.labelling.config import LabelConfig
from rewardlab.gold.labelling.run import Labelled, label
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.report import json_report as match_report
from rewardlab.gold.matching.run import match
from rewardlab.gold.proxies import proxy_scores
from rewardlab.serve.folders import import_model as importing
from rewardlab.serve.verifying.folder import verify

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _imported_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it is quick, and into a cache of its own."""
    monkeypatch.setattr(importing, "verify_in_clean_process", verify)
    monkeypatch.setenv("REWARDLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def plain(tmp_path: Path) -> Made:
    return seq_cls(tmp_path / "plain")


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    rows = [{name: value for name, value in row.items() if name != "gold"} for row in labelled.rows(4)]
    return labelled.write(tmp_path / "samples.jsonl", rows)


def labelled_by(model: Path | str, samples: Path, output: Path) -> Labelled:
    return label(LabelConfig(model=str(model), output=output, rows=InputConfig(input=(samples,))))


def require_own_scores(found: Labelled, made: Made) -> None:
    """The scores are those that the modules give which were saved."""
    renderer = make_tokenizer(CHATML)
    for row in read_gold_rows(found.place.rows, labelled=True):
        for reply, score in zip(row.responses, row.gold or (), strict=True):
            turns = [{"role": turn.role, "content": turn.content} for turn in row.prompt]
            ids = renderer.apply_chat_template([*turns, {"role": "assistant", "content": reply}], return_dict=False)
            assert score == pytest.approx(made.own(ids), abs=1e-4)


@pytest.mark.slow
def test_a_plain_classification_folder_is_gold_and_its_rendering_is_told(plain, samples, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "rewardlab")
    found = labelled_by(plain.folder, samples, tmp_path / "labels.jsonl")
    require_own_scores(found, plain)
    assert "is a model of another project; it is imported as `rewardlab import` does" in caplog.text
    assert "Rendering: tokenizer template, 1 BOS, read at token" in caplog.text
    assert "if it was trained with another rendering" in caplog.text


@pytest.mark.slow
def test_it_is_imported_once_and_again_when_its_files_change(plain, samples, tmp_path, monkeypatch) -> None:
    first = find_model(str(plain.folder))
    with monkeypatch.context() as patched:
        patched.setattr(foreign, "_import", lambda *_: pytest.fail("imported twice"))
        assert find_model(str(plain.folder)) == first
    edit_config(plain.folder, note="another file")
    assert find_model(str(plain.folder)).source != first.source


@pytest.mark.slow
def test_an_import_that_is_there_needs_no_lock_and_one_that_is_not_whole_is_made_again(plain, monkeypatch) -> None:
    first = find_model(str(plain.folder))
    with monkeypatch.context() as patched:
        patched.setattr(foreign, "only_process", lambda *_, **__: pytest.fail("waited for a lock"))
        assert find_model(str(plain.folder)) == first
    shutil.rmtree(first.folder)
    assert find_model(str(plain.folder)) == first
    assert (first.folder / "reward_spec.json").is_file()
    monkeypatch.setattr(foreign, "IMPORT_FORMAT", 2)
    other = find_model(str(plain.folder))
    assert (other.folder == first.folder, other.source == first.source) == (False, False)


@pytest.mark.slow
def test_labels_go_on_where_the_import_was_made_anew(plain, samples, tmp_path) -> None:
    labelled_by(plain.folder, samples, tmp_path / "labels.jsonl")
    shutil.rmtree(cache_folder({"REWARDLAB_CACHE": str(tmp_path / "cache")}))
    assert labelled_by(plain.folder, samples, tmp_path / "labels.jsonl").was_complete


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plain: Made) -> Path:
    """The cache of the hub on this machine, with a model in it."""
    root = tmp_path / "hub"
    place = root / "models--their--model"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    shutil.copytree(plain.folder, place / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root))
    return place


@pytest.mark.slow
def test_a_hub_name_is_gold_and_its_commit_is_in_the_manifest(hub, plain, samples, tmp_path) -> None:
    found = labelled_by("their/model", samples, tmp_path / "labels.jsonl")
    require_own_scores(found, plain)
    told = json.loads(found.place.manifest.read_text())
    assert told["asked"]["settings"]["model"] == f"their/model@{COMMIT}, import format 1"
    assert labelled_by(f"their/model@{COMMIT}", samples, tmp_path / "labels.jsonl").was_complete


@pytest.mark.slow
def test_another_commit_of_a_hub_name_is_another_model(hub, samples, tmp_path) -> None:
    labelled_by("their/model", samples, tmp_path / "labels.jsonl")
    other = COMMIT[::-1]
    shutil.copytree(hub / "snapshots" / COMMIT, hub / "snapshots" / other)
    (hub / "refs" / "main").write_text(other)
    with pytest.raises(ConfigError, match=f"model was their/model@{COMMIT}, .*, now their/model@{other}"):
        labelled_by("their/model", samples, tmp_path / "labels.jsonl")


def test_a_name_that_the_hub_does_not_give_is_told(samples, tmp_path) -> None:
    with pytest.raises(ConfigError, match="--model nobody/nothing: no such folder, and the hub did not give"):
        labelled_by("nobody/nothing", samples, tmp_path / "labels.jsonl")
    assert not is_hub_name(str(tmp_path / "nothing")), "a folder that is not there is no name on the hub"


def test_names_that_look_local_are_not_sought_on_the_hub(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    local = ("runs/typo", "runs/typo@a/b", "./their/model", "~/model", "/their/model", "a/b/c", "their/model/")
    assert not any(map(is_hub_name, local))
    assert is_hub_name("their/model@refs/pr/1")


def test_weights_of_a_model_of_another_kind_are_not_fetched(hub, monkeypatch) -> None:
    asked: list[list[str]] = []

    def noted(repository: str, **more: Any) -> str:
        asked.append(more["allow_patterns"])
        assert "*/*.safetensors" in more["ignore_patterns"]
        return snapshot_download(repository, **more)

    monkeypatch.setattr("huggingface_hub.snapshot_download", noted)
    edit_config(hub / "snapshots" / COMMIT, architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match="names no architecture …ForSequenceClassification"):
        find_model("their/model")
    assert asked == [["config.json", "reward_spec.json"]]


@pytest.mark.parametrize(("template", "labels", "why"), [(None, 1, "no chat template"), (CHATML, 2, "2 outputs")])
def test_what_is_open_is_refused_and_names_the_import(samples, tmp_path, template, labels, why) -> None:
    made = seq_cls(tmp_path / "open", template=template, labels=labels)
    with pytest.raises(ConfigError, match=why) as refused:
        labelled_by(made.folder, samples, tmp_path / "labels.jsonl")
    assert f"Import it with `rewardlab import {made.folder} --output-dir NEW`" in str(refused.value)


@pytest.mark.slow
def test_a_proxy_may_be_a_plain_folder_and_one_with_a_value_head_is_refused(plain, tmp_path, hub) -> None:
    rows = list(read_gold_rows(labelled.write(tmp_path / "labels.jsonl", labelled.rows(3)), labelled=True))
    one, other = proxy_scores([str(plain.folder), "hub=their/model"], rows, tmp_path / "scores")
    assert (one.name, other.name) == ("plain", "hub")
    assert one.scores == other.scores
    model = load(str(find_model(str(plain.folder)).folder))
    prompt = [{"role": turn.role, "content": turn.content} for turn in rows[0].prompt]
    assert one.scores[0] == pytest.approx(model.score_replies(prompt, list(rows[0].responses)), abs=1e-4)
    head = trl_value_head(tmp_path / "head")
    with pytest.raises(ConfigError, match=r"nor a …ForSequenceClassification of another project. `rewardlab import"):
        proxy_scores([str(head.folder)], rows, tmp_path / "scores")


@pytest.mark.slow
def test_the_command_line_takes_a_plain_folder(plain, samples, tmp_path, capsys) -> None:
    words = ["--model_name", str(plain.folder), "--input", str(samples), "--output", str(tmp_path / "x.jsonl")]
    main(["gold", "label", *words])
    out = capsys.readouterr().out
    assert "8 gold scores of 4 prompts" in out
    assert re.search(r"\n[\d,]+ tokens scored now, [\d,]+ a second\n", out)


@pytest.mark.slow
def test_rows_that_cannot_be_read_are_told_before_a_model_is_loaded(plain, tmp_path, monkeypatch) -> None:
    from rewardlab.core.errors import DataError

    bad = labelled.write(tmp_path / "bad.jsonl", [{"prompt": "q"}])
    monkeypatch.setattr(
        "rewardlab.serve.file_scoring.backends.LocalScorer.__init__", lambda *_: pytest.fail("was loaded")
    )
    with pytest.raises(DataError, match=r"bad\.jsonl:1"):
        labelled_by(plain.folder, bad, tmp_path / "labels.jsonl")
    monkeypatch.setattr(foreign, "_import", lambda *_: pytest.fail("was imported"))
    edit_config(plain.folder, note="another file")
    with pytest.raises(DataError, match="no such file"):
        labelled_by(plain.folder, tmp_path / "not-there.jsonl", tmp_path / "labels.jsonl")


@pytest.fixture
def test_and_train(tmp_path: Path) -> dict[str, tuple[Path]]:
    """Files of rows, as flags of `match`."""
    rows = labelled.rows(24)
    parts = {"input": rows[:12], "train_input": rows[12:]}
    return {flag: (labelled.write(tmp_path / f"{flag}.jsonl", own),) for flag, own in parts.items()}


@pytest.mark.slow
def test_a_hub_proxy_scores_the_training_rows_too_and_is_one_commit_throughout(
    hub, test_and_train, monkeypatch
) -> None:
    def moving(repository: str, **asked: Any) -> str:
        found: str = snapshot_download(repository, **asked)
        (hub / "refs" / "main").write_text("no such commit")
        return found

    config = MatchConfig.of(**test_and_train, proxies=("hub=their/model",), num_rescored=0)
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.snapshot_download", moving)
        found = match(config)
    assert match_report(found, config)["sources"] == {"hub": f"their/model@{COMMIT}"}
    assert found.train is not None
    assert found.train.num_rows == 12
    assert list(found.train.matches) == ["hub"]
    (hub / "refs" / "main").write_text(COMMIT)
    rows = {"input": test_and_train["input"], "most": 2}
    drawn = CurveConfig.of(**rows, proxies=("their/model",))
    assert curve_report(curve(drawn), drawn)["sources"] == {"model": f"their/model@{COMMIT}"}
