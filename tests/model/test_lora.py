"""LoRA, rsLoRA and DoRA, alone and with modules that train whole: what trains, what is saved, who reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from adapted import KINDS, SAVED, config_for, load_model, moved_model, save, write_ordinary_base
from common import make_groups, set_layout
from merged_adapters import merged_state
from rewardlab.artifact.load import load
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.core.types import TokenGroup
from rewardlab.model.applying import checkpoint_activations
from rewardlab.model.config import ModelConfig
from rewardlab.model.lora import adapted_layers, merge_update, require_adapter_gradients
from rewardlab.model.reward import RewardModel
from rewardlab.model.selftest import leak

ALL = [(kind, saved) for kind in KINDS for saved in SAVED]
GROUPS = make_groups(6, seed=3, replies=3, vocabulary=340)


def settings_of(kind: str, saved: str) -> dict:
    return KINDS[kind] | {"lora_modules_to_save": SAVED[saved]}


def scores(model: RewardModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(pack(GROUPS))


def scores_of_rows(classifier, groups: Sequence[TokenGroup]) -> torch.Tensor:
    """One conversation at a time, as plain transformers computes it."""
    classifier.eval()
    rows = [
        torch.tensor(group.conversation(n)[None], dtype=torch.long)
        for group in groups
        for n in range(group.num_replies)
    ]
    with torch.no_grad():
        return torch.stack([classifier(input_ids=row).logits[0, 0] for row in rows])


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance in units of max(1, |score|)."""
    return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())


# --- what trains -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "saved"), ALL)
def test_adapters_head_and_named_modules_train_in_float32_and_nothing_else(base_model, kind, saved):
    model = load_model(config_for(base_model, precision="bf16", **settings_of(kind, saved)))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds = {name.rpartition(".lora_")[2].split(".")[0] if ".lora_" in name else "whole" for name in trained}
    assert kinds == {"A", "B", "whole"} | ({"magnitude_vector"} if "dora" in kind else set())
    whole = {name for name in trained if ".lora_" not in name}
    norms = {f"backbone.layers.{n}.input_layernorm.weight" for n in range(2)} | {"backbone.norm.weight"}
    assert whole == {"head.weight"} | (norms if saved == "with norms" else set())
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert {parameter.dtype for parameter in frozen if parameter.ndim == 2} == {torch.bfloat16}
    assert {parameter.dtype for parameter in frozen if parameter.ndim < 2} == {torch.float32}
    assert not isinstance(model.head, LoraLayer)
    assert len(adapted_layers(model)) == 14


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_is_alpha_over_r_or_its_root_here_and_in_peft(base_model, tmp_path, kind):
    config = config_for(base_model, **KINDS[kind])
    wanted = 6.0 / math.sqrt(3) if config.rslora else 6.0 / 3
    model = load_model(config)
    base = AutoModelForSequenceClassification.from_pretrained(base_model, num_labels=1, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, save(tmp_path / "saved", model, config) / "adapter")
    for layers in (model, theirs):
        scalings = [module.scaling["default"] for module in layers.modules() if isinstance(module, LoraLayer)]
        assert scalings == pytest.approx([wanted] * 14)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["score", "head", "classifier"])
def test_naming_the_head_among_the_modules_to_save_changes_nothing(base_model, tmp_path, name):
    config = config_for(base_model, lora_modules_to_save=(name,))
    model, plain = moved_model(config), moved_model(config_for(base_model))
    assert [(n, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.requires_grad) for n, p in plain.named_parameters()
    ]
    folder = save(tmp_path / "saved", model, config)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert sum(key.endswith("score.weight") for key in load_file(folder / file)) == 1
    assert json.loads((folder / "adapter/adapter_config.json").read_text())["modules_to_save"] == ["score"]


# --- what is saved, and who reads it -----------------------------------------------------------------------------


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "saved"), ALL)
def test_merged_adapter_and_live_scores_are_the_same(tmp_path, family, kind, saved):
    base_model = write_ordinary_base(tmp_path / "base", family)
    names = (
        {"lora_modules_to_save": ("head", "final_layer_norm", "embed_in")}
        if family == "gpt_neox" and SAVED[saved]
        else {}
    )
    config = config_for(base_model, **settings_of(kind, saved) | names)
    model = moved_model(config)
    before, live = scores(load_model(config)), scores(model)
    assert apart(before, live) > 1e-2, "a walk that moves no score shows nothing"
    folder = save(tmp_path / "saved", model, config)
    assert apart(scores(load(folder).model), live) <= 1e-6
    alone = scores(set_layout(model, "padded"))
    merged = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(base_model, num_labels=1, dtype=torch.float32)
    merged.config.pad_token_id = base.config.pad_token_id = None
    theirs = PeftModel.from_pretrained(base, folder / "adapter")
    found = scores_of_rows(theirs, GROUPS)
    assert apart(found, scores_of_rows(merged, GROUPS)) <= 1e-6
    assert apart(found, alone) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_those_of_the_formula(base_model, kind):
    config = config_for(base_model, **KINDS[kind])
    model = moved_model(config)
    base = {n.removeprefix("model."): t for n, t in load_file(base_model / "model.safetensors").items()}
    merged = merged_state(model)
    for name in adapted_layers(model):
        layer = model.get_submodule(name)
        scale = 6.0 / (math.sqrt(3) if config.rslora else 3)
        update = scale * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        wanted = base[f"{name.removeprefix('backbone.')}.weight"] + update
        if config.dora:
            rows = zip(wanted, layer.lora_magnitude_vector["default"].weight, strict=True)
            wanted = torch.stack([row / row.norm() * length for row, length in rows])
        assert torch.allclose(merged[f"{name}.weight"], wanted, rtol=0, atol=1e-6), name
        assert torch.allclose(merge_update(layer, layer.get_base_layer().weight), wanted, rtol=0, atol=1e-6), name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_bf16_run_merges_into_the_weights_as_they_were(base_model, kind):
    """The base lies on no bf16 grid; what is frozen is held in bf16, what trains and what is saved is not."""
    settings = settings_of(kind, "with norms")
    half = moved_model(config_for(base_model, precision="bf16", **settings))
    whole = moved_model(config_for(base_model, **settings))
    assert half.backbone.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.bfloat16
    wanted = merged_state(whole)
    for name, tensor in merged_state(half).items():
        assert tensor.dtype == torch.float32
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_stay_invisible_with_every_kind_of_adapter(base_model, kind):
    assert leak(moved_model(config_for(base_model, **settings_of(kind, "with norms"))).eval()) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_sharing_prompts_changes_neither_scores_nor_gradients(base_model, kind):
    model = moved_model(config_for(base_model, **settings_of(kind, "with norms")))
    found = {}
    for layout in ("shared", "padded"):
        rewards = set_layout(model, layout)(pack(GROUPS))
        model.zero_grad()
        (rewards * torch.linspace(-1, 1, len(rewards))).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        found[layout] = (rewards.detach(), gradient)
    assert apart(found["shared"][0], found["padded"][0]) <= 1e-5
    assert (found["shared"][1] - found["padded"][1]).norm() <= 1e-5 * found["padded"][1].norm()


@pytest.mark.slow
def test_modules_are_named_so_that_peft_finds_these_and_no_others(tmp_path):
    """In PEFT `norm` would be every module whose name ends so."""
    base_model = write_ordinary_base(tmp_path / "base")
    names = ("norm", "layers.1.mlp", "model.layers.0.self_attn.o_proj")
    config = config_for(base_model, lora_modules_to_save=names)
    model = moved_model(config)
    folder = save(tmp_path / "saved", model, config)
    written = json.loads((folder / "adapter/adapter_config.json").read_text())
    parts = [f"model.layers.1.mlp.{part}_proj" for part in ("down", "gate", "up")]
    assert set(written["modules_to_save"]) == {"score", "model.layers.0.self_attn.o_proj", "model.norm", *parts}
    assert sorted(written["target_modules"]) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    assert len(adapted_layers(model)) == 14 - 4
    base = AutoModelForSequenceClassification.from_pretrained(base_model, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = None
    theirs = PeftModel.from_pretrained(base, folder / "adapter")
    assert sum(isinstance(module, LoraLayer) for module in theirs.modules()) == 10
    assert apart(scores_of_rows(theirs, GROUPS), scores(set_layout(model, "padded"))) <= 1e-6


def test_layers_are_named_in_full_where_a_word_would_mean_more(base_model, tmp_path):
    config = config_for(base_model, lora_target_modules=("layers.0.self_attn.q_proj", "k_proj"))
    folder = save(tmp_path / "saved", moved_model(config), config)
    written = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["k_proj", "model.layers.0.self_attn.q_proj"]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora_modules_to_save": ("input_layernrm",)},
            r"input_layernrm: this model has no module of that name. Did you mean 'input_layernorm'\?",
        ),
        ({"lora_modules_to_save": ("orm",)}, r"--lora-modules-to-save orm: this model has no module of that name"),
        ({"lora_modules_to_save": ("lm_head",)}, r"lm_head: this model has no module of that name. The reward's head"),
        ({"lora_modules_to_save": ("rotary_emb",)}, r"rotary_emb: it has no weights that could train"),
        (
            {"lora_target_modules": ("q_proj", "k_porj")},
            r"--lora-target-modules q_proj k_porj: this model has no layer called k_porj\. Did you mean 'k_proj'\?",
        ),
        (
            {"lora_modules_to_save": ("q_proj",), "lora_target_modules": ("q_proj", "k_proj")},
            r"layers.0.self_attn.q_proj is named by --lora-target-modules and by --lora-modules-to-save",
        ),
    ],
)
def test_names_that_mean_nothing_or_two_things_are_refused(base_model, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(config_for(base_model, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dora": True}, "--dora: it needs adapters. Add --lora"),
        ({"lora_modules_to_save": ("norm",)}, "--lora-modules-to-save: it needs adapters"),
        ({"quantization": "nf4"}, "--quantization nf4: it needs adapters"),
        ({"lora": True, "train_head_only": True}, "--train-head-only: with --lora adapters train too"),
        ({"lora": True, "freeze_layers": 1}, "--freeze-layers 1: with --lora every layer is frozen"),
        ({"train_head_only": True, "freeze_layers": 1}, "--freeze-layers 1: with --train-head-only every layer"),
        ({"freeze_layers": -1}, "--freeze-layers -1: must not be negative"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**changes)


# --- gradients, and the line about them ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_every_adapter_gets_a_gradient_however_activations_are_kept(base_model, kind, mode):
    model = load_model(config_for(base_model, **settings_of(kind, "with norms")))
    checkpoint_activations(model, mode)
    model(pack(GROUPS)).sum().backward()
    require_adapter_gradients(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    # B starts at zero, so the gradient of A is there, and zero; those of B and of everything else are not.
    assert all(float(gradient.abs().max()) == 0.0 for name, gradient in gradients.items() if ".lora_A." in name)
    assert all(float(gradient.abs().max()) > 0.0 for name, gradient in gradients.items() if ".lora_A." not in name)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_adapters_that_a_checkpoint_cuts_off_are_named(base_model):
    """Reentrant checkpoints give frozen inputs, and so everything inside, no gradient."""
    model = load_model(config_for(base_model))
    backbone = model.backbone
    # Its name since transformers 5.2x, and before.
    newer = getattr(backbone, "activation_checkpointing_enable", None)
    if newer is not None:
        newer(activation_checkpointing_kwargs={"use_reentrant": True})
    else:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    if getattr(backbone, "_require_grads_hook", None) is not None:  # which would save them
        backbone.disable_input_require_grads()
    model(pack(GROUPS)).sum().backward()
    with pytest.raises(ModelError, match=r"left 28 of 29 trained tensors .* backbone.layers.0.self_attn.q_proj.lora_A"):
        require_adapter_gradients(model)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_line_counts_what_trains_by_kind(base_model, kind):
    lines: list[str] = []
    model = load_model(config_for(base_model, **settings_of(kind, "with norms")), log=lines.append)
    widths = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    adapters = 2 * sum(3 * (outputs + inputs) + (outputs if kind == "dora" else 0) for outputs, inputs in widths)
    total = sum(parameter.numel() for parameter in model.parameters())
    (line,) = [line for line in lines if line.startswith("parameters: ")]
    assert line.startswith(f"parameters: {adapters + 3 * 32 + 32:,} of {total:,} trained (")
    assert line.endswith(f": adapters {adapters:,}, modules to save 96, head 32")
