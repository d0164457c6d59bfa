"""`rewardlab gold run`: what a stage read is known by its hash: files, base models, proxies of others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gold_pipeline import ALL, Tools, go, write_plan
from reward_models import save_tiny
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import read_summed_json, write_summed_json
from rewardlab.gold.pipeline import run as stages
from tiny_chat import save_chat_model


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "gold")
    save_chat_model(folder / "base")
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path / "out")


def test_changed_inputs_are_refused_by_their_hash_and_reports_are_made_again(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x")
    go(path, tools)
    (tmp_path / "out" / "proxy" / "best" / "reward_spec.json").write_text("another")
    assert go(path, tools)[0] == ["sample", "label", "train"], "the same proxy is as good as before"
    (tmp_path / "out" / "pairs" / "labels.test.jsonl").write_text("another")
    assert go(path, tools)[0] == ["sample", "label", "match", "curve", "check"]
    (tmp_path / "out" / "pairs" / "test.jsonl").write_text("another")
    with pytest.raises(ConfigError, match=r"train: what it read has changed: pairs/test\.jsonl"):
        go(path, tools)


def test_another_base_model_of_the_same_name_is_refused(tmp_path, models, tools) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "base", base)
    path = write_plan(tmp_path, models, "http://x", train={"model": str(base)})
    go(path, tools)
    # As a version that did not look at base models wrote it.
    record = tmp_path / "out" / "run.json"
    now = read_summed_json(record)
    inputs = {name: digest for name, digest in now["train"]["inputs"].items() if not name.startswith(str(base))}
    assert len(inputs) < len(now["train"]["inputs"])
    write_summed_json(record, {**now, "train": {**now["train"], "inputs": inputs}})
    assert go(path, tools)[0] == ["sample", "label"]
    write_summed_json(record, now)
    assert go(path, tools)[0] == ["sample", "label"]
    weights = base / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(
        ConfigError, match=r"train: what it read has changed: .*base/model\.safetensors. `--redo train`"
    ):
        go(path, tools)
    assert go(path, tools, redo="train")[0] == ["sample", "label", "train", "match", "curve", "check"]
    assert go(path, tools)[0] == ["sample", "label"]


def test_a_base_model_that_is_gone_or_gets_a_card_is_the_same(tmp_path, models, tools) -> None:
    base = tmp_path / "base"
    shutil.copytree(models / "base", base)
    path = write_plan(tmp_path, models, "http://x", train={"model": str(base)})
    go(path, tools)
    (base / "README.md").write_text("A card.")
    assert go(path, tools)[0] == ["sample", "label"]
    # As a version that looked at every file wrote it.
    record = tmp_path / "out" / "run.json"
    now = read_summed_json(record)
    inputs = {**now["train"]["inputs"], str(base / "README.md"): "0" * 64}
    write_summed_json(record, {**now, "train": {**now["train"], "inputs": inputs}})
    assert go(path, tools)[0] == ["sample", "label"]
    shutil.rmtree(base)
    done, said = go(path, tools)
    assert done == ["sample", "label"]
    assert f"train: {base} is gone, so the base model is not compared with that of the record" in said
    (tmp_path / "out" / "pairs" / "test.jsonl").write_text("another")
    with pytest.raises(ConfigError, match=r"train: what it read has changed: pairs/test\.jsonl\. "):
        go(path, tools)


def test_a_dry_run_reads_no_weights_of_stages_that_are_to_be_done(tmp_path, models, tools, monkeypatch) -> None:
    path = write_plan(tmp_path, models, "http://x")

    def refuse(file: Path) -> str:
        raise AssertionError(file)

    monkeypatch.setattr(stages, "sha256_file", refuse)
    assert len(go(path, tools, dry_run=True)[1]) == len(ALL)


def test_a_text_that_is_too_long_for_a_name_is_not_a_file(tmp_path, models, tools) -> None:
    path = write_plan(tmp_path, models, "http://x", sample={"system_prompt": "Be brief. " * 40})
    assert go(path, tools)[0] == ALL
    assert go(path, tools)[0] == ["sample", "label"]


def test_a_proxy_that_the_plan_names_is_an_input(tmp_path, models, tools) -> None:
    other = tmp_path / "other proxy"
    other.mkdir()
    (other / "reward_spec.json").write_text("1")
    path = write_plan(tmp_path, models, "http://x", match={"proxies": [f"other={other}"]})
    go(path, tools)
    assert "match" not in go(path, tools)[0]
    (other / "reward_spec.json").write_text("2")
    assert "match" in go(path, tools)[0]


def test_proxies_of_other_projects_are_inputs_by_their_files_and_their_commit(
    tmp_path, models, tools, monkeypatch
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text('{"architectures": ["XForSequenceClassification"]}')
    commits = ["a"]
    monkeypatch.setattr(stages, "pinned_name", lambda name, flag: f"{name}@{commits[0]}")
    path = write_plan(tmp_path, models, "http://x", match={"proxies": [f"plain={plain}", "hub=their/model"]}, curve={})
    go(path, tools)
    assert "match" not in go(path, tools)[0]
    (plain / "model.safetensors").write_text("2")
    assert "match" in go(path, tools)[0]
    assert "match" not in go(path, tools)[0]
    commits[0] = "b"
    assert "match" in go(path, tools)[0]
