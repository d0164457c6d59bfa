"""Models that read images too: their text model trains, and all else is kept as it was."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

import families
import runs
from common import make_tokenizer, write_pairs
from harness import family_sizes
from rewardlab.artifact.load import load
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.core.spec import read_spec
from rewardlab.model.disk_class import disk_class_of, is_made, name_for_engines
from rewardlab.model.load import read_config
from rewardlab.model.text_part import freeze_other_parts, text_class, text_path
from rewardlab.serve.folders.export import export
from rewardlab.training.run import train

COMPOSITES = [
    "mistral3",
    "gemma3",
    "gemma4",
    "qwen2_5_vl",
    "qwen3_5_moe",
    "glm4v_moe",
    "mllama",
    "granite4_vision",
    "qwen3_omni_moe_thinker",
]
PADDED = {"qwen2_5_vl", "qwen3_5_moe", "glm4v_moe", "mllama", "qwen3_omni_moe_thinker"}
config_for = partial(runs.config_for, steps=2, batch_size=6, lr=1e-2, eval_fraction=0.0)


def saved_base(family: str, folder: Path, **more: Any) -> Path:
    torch.manual_seed(0)
    config = family_sizes.config_of(family)
    for name, value in more.items():
        setattr(config, name, value)
    model = families.generating_class(config).from_config(config)
    families.fill_padding(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", COMPOSITES)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.usefixtures("verified_here")
def test_the_text_model_trains_and_the_rest_is_saved_as_it_was(tmp_path: Path, caplog, family: str, lora: bool):
    base = saved_base(family, tmp_path / "base")
    with caplog.at_level("INFO", logger="rewardlab"):
        folder = train(config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run", lora=lora)).last
    disk_class = disk_class_of(read_config(str(folder)))
    assert json.loads((folder / "config.json").read_text())["architectures"] == [disk_class.__name__]
    assert is_made(disk_class) == (family != "gemma3")
    assert f"layout: {'padded' if family in PADDED else 'shared'}" in caplog.text
    scorer = load(folder)
    plain = disk_class.from_pretrained(folder).eval()
    for canary in read_spec(folder).canaries:
        with torch.no_grad():
            alone = float(plain(input_ids=torch.tensor([canary.token_ids])).logits)
        scores = [alone, scorer.score([canary.messages])[0]]
        assert scores == pytest.approx([canary.score] * 2, abs=1e-5 * max(1, abs(canary.score)))
    backbone = scorer.model.backbone
    path = text_path(backbone)
    fresh = disk_class.from_pretrained(base, num_labels=1)
    before = getattr(fresh, fresh.base_model_prefix).state_dict()
    changed = {name for name, weight in backbone.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed
    assert all(name.startswith(f"{path}.") for name in changed)
    assert any(not name.startswith(f"{path}.") for name in before)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("family", "name"), [("mistral3", "Mistral"), ("gemma3", "Gemma3"), ("gemma4", "Gemma4")])
@pytest.mark.usefixtures("verified_here")
def test_the_text_model_alone_has_the_scores_of_the_whole(tmp_path: Path, caplog, family: str, name: str):
    base = saved_base(family, tmp_path / "base")
    folder = train(
        config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run", lora=family == "mistral3")
    ).last
    spec = export(folder, tmp_path / "text", dtype="float32", text_only=True)
    values = json.loads((tmp_path / "text/config.json").read_text())
    assert values["architectures"] == [f"{name}ForSequenceClassification"]
    assert not any("vision" in key for key in values)
    for before, now in zip(read_spec(folder).canaries, spec.canaries, strict=True):
        assert now.token_ids == before.token_ids
        assert now.score == pytest.approx(before.score, abs=1e-6 * max(1, abs(before.score)))
    assert not (tmp_path / "text/adapter").exists()
    assert ("adapter/" in caplog.text) == (family == "mistral3")
    with pytest.raises(ConfigError, match="is a model of text alone already"):
        export(tmp_path / "text", tmp_path / "again", dtype="float32", text_only=True)


def test_engines_are_told_the_name_by_which_they_find_their_own_model():
    names = {kind: name_for_engines(disk_class_of(CONFIG_MAPPING[kind]())) for kind in ("gemma3_text", "qwen3_5_text")}
    assert names == {
        "gemma3_text": "Gemma3ForSequenceClassification",
        "qwen3_5_text": "Qwen3_5ForSequenceClassification",
    }
    for kind in ("gemma3", "gpt2", "llama", "granite", "mistral3"):
        disk_class = disk_class_of(CONFIG_MAPPING[kind]())
        assert name_for_engines(disk_class) == disk_class.__name__


@pytest.mark.usefixtures("verified_here")
def test_a_folder_with_the_name_of_an_earlier_version_is_read(tmp_path: Path, monkeypatch):
    base = saved_base("gemma3", tmp_path / "base")
    folder = train(config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run")).last
    monkeypatch.setattr("rewardlab.artifact.save.name_for_engines", lambda disk_class: disk_class.__name__)
    export(folder, tmp_path / "text", dtype="float32", text_only=True)
    values = json.loads((tmp_path / "text/config.json").read_text())
    assert values["architectures"] == ["Gemma3TextForSequenceClassification"]
    load(tmp_path / "text")


@pytest.mark.usefixtures("verified_here")
def test_plain_transformers_pads_a_batch_of_gemma_3_as_we_do(tmp_path: Path):
    base = saved_base("gemma3", tmp_path / "base")
    folder = train(config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run")).last
    values = json.loads((folder / "config.json").read_text())
    assert values["text_config"]["pad_token_id"] == values["pad_token_id"]
    plain = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    canaries = read_spec(folder).canaries
    longest = max(len(canary.token_ids) for canary in canaries)
    pad = values["pad_token_id"]
    rows = [list(canary.token_ids) + [pad] * (longest - len(canary.token_ids)) for canary in canaries]
    mask = [[1] * len(canary.token_ids) + [0] * (longest - len(canary.token_ids)) for canary in canaries]
    with torch.no_grad():
        scores = plain(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask)).logits[:, 0].tolist()
    assert scores == pytest.approx([canary.score for canary in canaries], abs=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen2_5_vl"])
@pytest.mark.usefixtures("verified_here")
def test_a_token_that_stands_for_an_image_is_one_like_any_other(tmp_path: Path, family: str):
    image = make_tokenizer().convert_tokens_to_ids("a")
    base = saved_base(family, tmp_path / "base", image_token_id=image)
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    folder = train(config_for(base, pairs, tmp_path / "run", special_tokens_in_text="keep")).last
    scorer = load(folder)
    replies = ["banana", "b<pad>n<pad>n<pad>", "bbnbnb"]
    scores = scorer.score_replies([{"role": "user", "content": "a?"}], replies)
    assert all(score == score for score in scores)
    assert len(set(scores)) == 3


def test_parts_beside_the_text_model_are_named_as_they_are_frozen():
    config = family_sizes.config_of("mistral3")
    classifier = disk_class_of(config)._from_config(config)
    assert freeze_other_parts(classifier.model) == ["multi_modal_projector", "vision_tower"]
    assert {name.split(".")[0] for name, weight in classifier.model.named_parameters() if weight.requires_grad} == {
        "language_model"
    }


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("granite4_vision", "Granite4VisionTextModel"),
        ("deepseek_ocr2", "DeepseekOcr2TextModel"),
        ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextModel"),
        ("mllama", "MllamaTextModel"),
        ("voxtral_realtime", "VoxtralRealtimeTextModel"),
        ("gemma3", "Gemma3TextModel"),
    ],
)
def test_the_class_of_a_text_model_is_found_although_no_whole_model_of_usual_sizes_can_be_built(family, wanted):
    config = family_sizes.config_of(family)
    assert text_class(config.text_config, type(config)).__name__ == wanted


@pytest.mark.parametrize("family", ["llama4", "blip-2", "blip", "t5gemma2", "voxtral_realtime"])
def test_those_that_cannot_have_a_head_are_refused_before_anything_is_read(tmp_path: Path, family: str):
    said = {
        "llama4": "no backbone of it without the output layer.*'llama4_text': load it by AutoModelForCausalLM",
        "blip-2": "its text model is a OPTForCausalLM, which gives words and no states",
        "blip": "neither a sequence-classification class nor a causal model of text",
        "voxtral_realtime": "VoxtralRealtimeTextModel cannot compute a text by itself",
        "t5gemma2": "Encoders, and models with both an encoder and a decoder, are not supported",
    }
    base = saved_base(family, tmp_path / "base") if family != "blip" else tmp_path / "base"
    if family == "blip":
        family_sizes.config_of(family).save_pretrained(base)
        make_tokenizer().save_pretrained(base)
    with pytest.raises(ModelError, match=said[family]):
        train(config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run"))
