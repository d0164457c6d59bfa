"""What other engines read off a folder says what the loaded model does: weights, names of settings, activations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import old_transformers
from artifacts import refusal, save
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import sha256_text
from rewardlab.data import limits
from rewardlab.serve.verifying.folder import verify
from sealing import edit, edit_weights, seal_again


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("config") / "rm"
    save(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("name", "shape"), [("score.bias", (1,)), ("model.layers.0.self_attn.q_proj.bias", (32,)), ("extra", (3,))]
)
def test_a_weight_that_the_architecture_has_not_is_refused_by_name(copy, name, shape):
    edit_weights(copy, lambda weights: weights.update({name: torch.ones(shape)}))
    assert f"weights that LlamaForSequenceClassification has no place for, and other engines may: {name}" in refusal(
        copy
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("score.weight", (1,)),
        ("score.weight", ()),
        ("model.norm.weight", (31,)),
        ("model.embed_tokens.weight", (384, 64)),
    ],
)
def test_a_weight_of_another_shape_is_refused_by_name(copy, name, shape):
    edit_weights(copy, lambda weights: weights.update({name: torch.ones(shape)}))
    assert name in refusal(copy)


FIELDS = {
    "rope_theta": (5e5, "rope_theta is 500000.0, and by rope_parameters it should be 777.0: older"),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, "rope_scaling is {'rope_type': 'linear'"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor is 0.5, and by rope_parameters it should be 1"),
    "architectures": (
        ["Qwen2ForSequenceClassification"],
        "wanted ['LlamaForSequenceClassification'], the class of these",
    ),
    "dtype": (
        "bfloat16",
        "dtype is 'bfloat16', and the weights are saved in float32; engines that follow this field would round",
    ),
    "torch_dtype": ("bfloat16", "torch_dtype is 'bfloat16', and the weights are saved in float32"),
    "num_labels": (2, "2 labels and problem_type 'regression', wanted 1"),
    "id2label": (None, "0 labels and problem_type 'regression', wanted 1"),
    "sbert_ce_default_activation_function": ("torch.nn.Sigmoid", "names a function that engines would apply to the"),
    "sentence_transformers": ({"activation_fn": "torch.nn.Sigmoid"}, "sentence_transformers names a function"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_by_which_some_engine_gives_another_score_is_refused_by_name(copy, name):
    value, said = FIELDS[name]
    edit(copy / "config.json", lambda config: config.update({name: value}))
    assert said in refusal(copy)
    assert refusal(copy).startswith(f"{copy / 'config.json'}: ")


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("value", [4, 10**9, 10**18, 10**30])
def test_sizes_that_the_weights_have_not_are_told_before_a_model_is_built(copy, field, value):
    """Without end, if transformers were to build it; at once, since nothing of it is."""
    edit(copy / "config.json", lambda config: config.update({field: value}))
    said = refusal(copy)
    assert said.startswith(str(copy))
    assert "config.json" in said or "weights are missing" in said


@pytest.mark.slow
def test_layers_by_another_name_are_told_by_their_number(tmp_path):
    model, renderer = old_transformers.tiny_model(old_transformers.MODELS["GPT-2"]())
    save_reward_model(tmp_path / "rm", model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    edit(tmp_path / "rm/config.json", lambda config: config.update(n_layer=90_000))
    assert "describes a model of more than 1" in refusal(tmp_path / "rm")
    edit(tmp_path / "rm/config.json", lambda config: config.update(n_layer=10**9))
    assert "n_layer: expected at most 100000, found 1e+09" in refusal(tmp_path / "rm")


@pytest.mark.slow
def test_what_a_base_says_of_activations_and_positions_elsewhere_is_not_saved(tmp_path):
    model, renderer = old_transformers.tiny_model(old_transformers.MODELS["Llama, another base"]())
    for name, value in (("rope_theta", 5.0), ("rotary_pct", 0.5), ("sentence_transformers", {"a": 1})):
        setattr(model.config, name, value)
    save_reward_model(tmp_path / "rm", model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    written = json.loads((tmp_path / "rm/config.json").read_text())
    assert written["rope_theta"] == 777.0
    assert not {"rotary_pct", "sentence_transformers"} & written.keys()
    assert load(tmp_path / "rm").beta == 1.0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["Phi-3, longrope", "StableLM, partial rotary", "GPT-NeoX, partial rotary", "GPT-2"])
def test_uncommon_position_settings_agree_with_themselves(tmp_path, name):
    model, renderer = old_transformers.tiny_model(old_transformers.MODELS[name]())
    save_reward_model(tmp_path / "rm", model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    assert verify(tmp_path / "rm").num_canaries > 1


def test_files_too_large_to_be_what_they_are_called_are_not_read(copy):
    with (copy / "chat_template.jinja").open("ab") as file:
        file.truncate((1 << 20) + 1)
    seal_again(copy)
    assert "chat_template.jinja: it has 1048577 bytes, and at most 1048576 are allowed" in refusal(copy)


def test_the_files_of_a_sound_folder_hold_exactly_the_weights_of_its_class(saved):
    names = set(load_file(saved / "model.safetensors"))
    assert names == {f"model.{name}" for name in load(saved).model.backbone.state_dict()} | {"score.weight"}


@pytest.mark.slow
def test_a_template_without_an_end_is_refused_though_its_hashes_fit(copy, monkeypatch, capsys):
    """How it is stopped: tests/data/test_template_limits.py."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)
    template = (copy / "chat_template.jinja").read_text()
    template += "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (copy / "chat_template.jinja").write_text(template)
    seal_again(copy)
    changed = {"chat_template": template, "template_hash": sha256_text(template)}
    edit(copy / "reward_spec.json", lambda spec: spec["renderer"].update(changed))
    with pytest.raises(ArtifactError, match=r"canary 'short' cannot be rendered: .* it was stopped after"):
        load(copy)
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(copy)])
    assert stop.value.code == 2
    assert "it was stopped after" in capsys.readouterr().err
