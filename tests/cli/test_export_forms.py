"""Exported folders in shards, with a bias of zero, and as adapters: the same scores wherever they are loaded."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from command_line import refusal, tiny_reward_model
from common import write_base_model, write_pairs
from foreign_models import edit_config
from rewardlab.artifact.load import load
from rewardlab.artifact.shards import bytes_of_size
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.core.spec import read_spec
from rewardlab.serve.verifying.folder import verify

FLAGS = ["--max-seq-len", "256", "--precision", "fp32", "--eval-fraction", "0", "--report-to", "none"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model in float32."""
    return tiny_reward_model(tmp_path_factory.mktemp("made") / "rm")


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is quick."""
    for place in ("serve.folders.export", "training.run"):
        monkeypatch.setattr(f"rewardlab.{place}.verify_in_clean_process", verify)


@pytest.fixture
def shards(made, tmp_path, verified_here) -> Path:
    """The model in float32 shards of at most 20 kB."""
    export(made, tmp_path / "shards", "--max-shard-size", "20KB")
    return tmp_path / "shards"


def export(source: Path, target: Path, *flags: str) -> None:
    main(["export", str(source), "--dtype", "float32", "--output-dir", str(target), *flags])


@torch.no_grad()
def plain_scores(folder: Path) -> list[float]:
    """The canaries by plain transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return [float(model(torch.tensor([one.token_ids])).logits[0, 0]) for one in read_spec(folder).canaries]


def test_shards_hold_the_same_weights_and_give_the_same_scores_everywhere(made, shards):
    files = sorted(path.name for path in shards.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole = load_file(made / "model.safetensors")
    index = json.loads((shards / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert index["weight_map"].keys() == whole.keys()
    for name, tensor in whole.items():
        with safe_open(shards / index["weight_map"][name], framework="pt") as weights:
            assert torch.equal(weights.get_tensor(name), tensor)
    for file in files:
        with safe_open(shards / file, framework="pt") as weights:
            names = list(weights.keys())
        assert len(names) == 1 or (shards / file).stat().st_size < 20_000 + 2_000, "the header comes on top"
    assert verify(shards).largest_distance < 1e-5
    canonical = [canary.score for canary in read_spec(shards).canaries]
    saved = {canary.name: canary.score for canary in read_spec(made).canaries}
    assert canonical == [saved[canary.name] for canary in read_spec(shards).canaries]
    assert plain_scores(shards) == pytest.approx(canonical, abs=1e-4)


@pytest.mark.slow
def test_one_file_is_written_as_before_if_everything_fits(made, tmp_path, verified_here):
    export(made, tmp_path / "plain")
    export(made, tmp_path / "large", "--max-shard-size", "1GB")
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert names == {path.name for path in (tmp_path / "large").iterdir()}
    assert "model.safetensors" in names
    assert INDEX not in names


def test_damaged_missing_and_moved_shards_are_named(shards):
    files = sorted(shards.glob("*.safetensors"))
    index = json.loads((shards / INDEX).read_text())
    kept = files[1].read_bytes()
    files[1].write_bytes(kept[:-8])
    with pytest.raises(ArtifactError, match=f"{files[1].name}: damaged, or cut off"):
        load(shards)
    files[1].write_bytes(kept[:-4] + b"\1\2\3\4")
    with pytest.raises(ArtifactError, match=f"{files[1].name} was changed after the model was saved"):
        load(shards)
    files[1].unlink()
    with pytest.raises(ArtifactError, match=f"{files[1].name} is missing, which {INDEX} names"):
        load(shards)
    files[1].write_bytes(kept)
    index["weight_map"]["score.weight"] = files[0].name
    (shards / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=f"{INDEX} was changed"):
        load(shards)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 * 2**19), ("20kb", 20_000), ("77", 77), ("2GiB", 2**31)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert bytes_of_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-5GB", "5 TB", "five"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="must be a size such as 5GB, 500MB or 2GiB"):
        bytes_of_size(text)


@pytest.mark.slow
def test_a_bias_of_zero_changes_no_score_and_another_one_is_refused(made, tmp_path, verified_here):
    out = tmp_path / "biased"
    export(made, out, "--zero-bias")
    weights = load_file(out / "model.safetensors")
    assert weights["score.bias"].tolist() == [0.0]
    assert weights.keys() - {"score.bias"} == load_file(made / "model.safetensors").keys()
    assert verify(out).largest_distance < 1e-5
    canonical = [canary.score for canary in read_spec(out).canaries]
    assert plain_scores(out) == pytest.approx(canonical, abs=1e-4)
    weights["score.bias"] += 0.25
    with safe_open(out / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    save_file(weights, out / "model.safetensors", metadata=metadata)
    with pytest.raises(ArtifactError, match="has no place for, and other engines may: score.bias"):
        load(out, check=False)
    export(made, tmp_path / "both", "--zero-bias", "--max-shard-size", "20KB")
    assert "score.bias" in json.loads((tmp_path / "both" / INDEX).read_text())["weight_map"]
    assert load(tmp_path / "both").beta == 1


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters, beside its base model."""
    home = tmp_path_factory.mktemp("lora")
    base, pairs = write_base_model(home / "base"), write_pairs(home / "pairs.jsonl", 16)
    line = (
        f"train --model {base} --dataset {pairs} --output-dir {home / 'run'} --steps 2 --batch-size 8 --lora --lr 0.01"
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rewardlab.training.run.verify_in_clean_process", verify)
        main([*line.split(), *FLAGS])
    return home


def test_adapters_alone_give_the_merged_scores_through_peft(lora_run, tmp_path, capsys, monkeypatch):
    source, out = lora_run / "run/step_2", tmp_path / "adapter"
    told: list[str] = []
    monkeypatch.setattr(logging.getLogger("transformers"), "handle", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr("transformers.modeling_utils.logger.handle", lambda record: told.append(record.getMessage()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(source, out, "--adapter")
    assert f"{out}: the adapters and the head of {source} for {lora_run / 'base'}" in capsys.readouterr().out
    assert not [line for line in told if "MISSING" in line]
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_CLS"
    assert settings["modules_to_save"] == ["score"]
    base = AutoModelForSequenceClassification.from_pretrained(lora_run / "base", num_labels=1)
    base.config.pad_token_id = 3
    model = PeftModel.from_pretrained(base, out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    for canary in read_spec(source).canaries:
        if canary.name == "control tokens":
            continue
        ids = tokenizer.apply_chat_template(canary.messages, return_dict=False)
        assert ids == canary.token_ids
        with torch.no_grad():
            assert float(model(torch.tensor([ids])).logits[0, 0]) == pytest.approx(canary.score, abs=1e-4)


@pytest.mark.slow
def test_exported_adapters_are_imported_with_the_scores_of_the_run(lora_run, tmp_path, verified_here, monkeypatch):
    monkeypatch.setattr("rewardlab.serve.folders.import_model.verify_in_clean_process", verify)
    source, out = lora_run / "run/step_2", tmp_path / "adapter"
    export(source, out, "--adapter")
    main(["import", str(out), "--output-dir", str(tmp_path / "rm"), "--max-seq-len", "256"])
    before, after = read_spec(source), read_spec(tmp_path / "rm")
    assert [one.token_ids for one in after.canaries] == [one.token_ids for one in before.canaries]
    assert [one.score for one in after.canaries] == pytest.approx([one.score for one in before.canaries], abs=1e-4)


def test_training_on_from_adapters_alone_is_refused_with_the_folder_to_go_on_from(lora_run, tmp_path, capsys):
    source = lora_run / "run/step_2"
    export(source, tmp_path / "adapter", "--adapter")
    rest = ("--dataset", lora_run / "pairs.jsonl", "--output-dir", tmp_path / "run")
    said = refusal(capsys, "train", "--model", tmp_path / "adapter", *rest)
    assert "it holds adapters alone" in said
    assert "Go on from that: the reward-model folder that they were exported from." in said
    said = refusal(capsys, "train", "--model", source / "adapter", *rest)
    assert f"Go on from that: {source}." in said
    assert not (tmp_path / "run").exists()


def test_the_base_model_is_written_as_a_classifier_that_the_adapters_fit(lora_run, tmp_path):
    source, out = lora_run / "run/step_2", tmp_path / "adapter"
    export(source, out, "--adapter", "--with-base")
    config = json.loads((out / "base/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert (config["problem_type"], config["id2label"]) == ("regression", {"0": "reward"})
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert not load_file(out / "base/model.safetensors")["score.weight"].any()
    base = AutoModelForSequenceClassification.from_pretrained(out / "base")
    model = PeftModel.from_pretrained(base, out).eval()
    for canary in read_spec(source).canaries:
        with torch.no_grad():
            logit = float(model(torch.tensor([canary.token_ids])).logits[0, 0])
        assert logit == pytest.approx(canary.score, abs=1e-4)


@pytest.mark.slow
def test_adapters_on_another_base_model_are_refused(lora_run, tmp_path, capsys):
    source, out = lora_run / "run/step_2", tmp_path / "adapter"
    other = write_base_model(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({n: w * 1.2 for n, w in weights.items()}, other / "model.safetensors", metadata={"format": "pt"})
    said = refusal(capsys, "export", source, "--adapter", "--output-dir", out, "--base", other)
    assert f"when PEFT puts the adapters on {other}, and 0.0001 is allowed" in said
    said = refusal(capsys, "export", source, "--adapter", "--output-dir", out, "--base", tmp_path / "gone")
    assert said.startswith("--base: the base model of these adapters is not there: no model at")
    assert not out.exists()
    export(source, out, "--adapter", "--base", str(lora_run / "base"))


def test_a_base_model_that_has_moved_is_asked_for_by_the_file_that_names_it(lora_run, tmp_path, capsys):
    source, base = lora_run / "run/step_2", lora_run / "base"
    base.rename(tmp_path / "moved")
    try:
        said = refusal(capsys, "export", source, "--adapter", "--output-dir", tmp_path / "adapter")
    finally:
        (tmp_path / "moved").rename(base)
    named = source / "adapter/adapter_config.json"
    assert said.startswith(f"{named}: the base model of these adapters is not there: no model at '{base}': there is")
    assert "Name it with --base, where it is now." in said
    said = refusal(capsys, "verify", source / "adapter")
    assert "no reward_spec.json, so these are adapters alone" in said


def test_a_pad_that_ends_every_conversation_in_the_base_model_is_told(lora_run, tmp_path, log):
    base = tmp_path / "base"
    base.symlink_to(lora_run / "base")
    final = read_spec(lora_run / "run/step_2").renderer.final_token_id
    own = json.loads((base / "config.json").read_text())["pad_token_id"]
    edit_config(base, pad_token_id=final)
    log.set_level(logging.WARNING)
    try:
        export(lora_run / "run/step_2", tmp_path / "adapter", "--adapter", "--base", str(base))
    finally:
        edit_config(base, pad_token_id=own)
    assert f"the pad token of {base} ends every conversation" in log.text


def test_a_folder_without_adapters_and_flags_that_contradict_are_refused(made, tmp_path, capsys):
    out = tmp_path / "out"
    assert "it holds no adapters, only merged weights" in refusal(
        capsys, "export", made, "--adapter", "--output-dir", out
    )
    assert "--adapter: its weights are float32 in one file" in refusal(
        capsys, "export", made, "--adapter", "--zero-bias", "--output-dir", out
    )
    assert "--base and --with-base: are for --adapter" in refusal(
        capsys, "export", made, "--base", "x", "--output-dir", out
    )
    for size in ("huge", "9" * 400):
        assert f"--max-shard-size {size[:4]}" in refusal(
            capsys, "export", made, "--max-shard-size", size, "--output-dir", out
        )
    assert not out.exists()
