"""Frozen weights in fewer bits: what is refused, and, where bitsandbytes is installed, a run on the CPU.

The command line wants a CUDA device; bitsandbytes computes on a CPU too, slowly, so the path is tested there.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

import rewardlab.model.quantization as quantization_module
from adapted import config_for, load_model, moved_model, save
from common import GROUPED, SIZES, make_groups, make_tokenizer
from merged_adapters import merged_state
from rewardlab.artifact.load import load
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.model.lora import adapted_layers
from rewardlab.model.quantization import (
    is_quantized,
    loading_options,
    num_weights,
    require_quantization,
    weight_shape,
)
from rewardlab.model.selftest import leak
from rewardlab.training.cost.flops import linear_shapes, shape_of
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

CPU = torch.device("cpu")
KINDS = ["nf4", "int8"]
installed = pytest.mark.skipif(
    find_spec("bitsandbytes") is None or find_spec("accelerate") is None,
    reason='bitsandbytes is not installed (pip install "rewardlab[quantization]")',
)


@pytest.fixture(autouse=True)
def _no_repacking(monkeypatch):
    """On processors with AVX512-BF16, bitsandbytes packs weights for inference when a model is judged, and cannot train
    after it. Nothing is like that on CUDA.
    """
    if find_spec("bitsandbytes") is not None:
        modules = pytest.importorskip("bitsandbytes.nn.modules")
        monkeypatch.setattr(modules, "has_avx512bf16", lambda: False, raising=False)


@pytest.fixture
def wide_base(tmp_path):
    """A base whose matrices have whole blocks of 64 weights a row, with weights as large as real ones."""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 192, "initializer_range": 0.05}
    config = LlamaConfig(**sizes, **GROUPED)
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "wide")
    make_tokenizer().save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


# --- what is refused, and when ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_without_cuda_or_the_packages_it_is_refused_and_says_what_to_install(monkeypatch, kind):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"--quantization {kind}: it needs a CUDA device, and there is none"):
        require_quantization(kind)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(quantization_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes and accelerate: pip install 'rewardlab\[quantization\]'"):
        require_quantization(kind)
    require_quantization("none")


def test_a_run_is_refused_before_its_model_and_its_data_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for settings in ({"lora": True, "quantization": "nf4"}, {"optimizer": "adamw8bit"}):
        config = RewardTrainerConfig.of(model="nosuch", dataset=("nosuch",), output_dir=tmp_path / "run", **settings)
        with pytest.raises(ConfigError, match="it needs a CUDA device"):
            train(config)
    assert not (tmp_path / "run").exists()


def test_nothing_is_asked_of_transformers_where_nothing_is_quantised():
    assert loading_options("none", compute_dtype=torch.bfloat16, keep=["norm"], device=CPU) == {}


@installed
def test_the_settings_are_those_of_qlora_and_keep_head_and_named_modules_whole():
    options = loading_options("nf4", compute_dtype=torch.bfloat16, keep=["o_proj"], device=CPU)
    settings = options["quantization_config"]
    assert (settings.bnb_4bit_quant_type, settings.bnb_4bit_use_double_quant) == ("nf4", True)
    assert settings.bnb_4bit_compute_dtype == torch.bfloat16
    assert (settings.llm_int8_skip_modules, options["device_map"]) == (["score", "o_proj"], {"": CPU})
    eight = loading_options("int8", compute_dtype=torch.bfloat16, keep=[], device=CPU)["quantization_config"]
    assert (eight.load_in_8bit, eight.llm_int8_threshold, eight.llm_int8_skip_modules) == (True, 0.0, ["score"])


# --- the path itself -----------------------------------------------------------------------------------------------


@installed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_adapted_layer_is_quantised_and_head_and_what_else_trains_is_float32(wide_base, kind, precision):
    saved = ("input_layernorm", "layers.1.self_attn.o_proj")
    model = load_model(config_for(wide_base, quantization=kind, precision=precision, lora_modules_to_save=saved))
    layers = [model.get_submodule(name) for name in adapted_layers(model)]
    assert len(layers) == 13
    assert all(is_quantized(layer.get_base_layer().weight) for layer in layers)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = {name for name in trained if ".lora_" not in name}
    norms = {f"backbone.layers.{n}.input_layernorm.weight" for n in range(2)}
    assert whole == {"head.weight", "backbone.layers.1.self_attn.o_proj.weight", *norms}
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    wanted = torch.bfloat16 if precision == "bf16" else torch.float32
    assert model.backbone.embed_tokens.weight.dtype == wanted
    assert model.backbone.norm.weight.dtype == torch.float32


@installed
@pytest.mark.parametrize(("kind", "dora"), [("nf4", False), ("nf4", True), ("int8", False)])
def test_in_half_precision_adapted_layers_give_what_kernels_take(wide_base, kind, dora, monkeypatch):
    model = load_model(config_for(wide_base, quantization=kind, precision="bf16", dora=dora))
    # PEFT asks this of CUDA, where autocast is on during such a run; DoRA's sums are float32 there.
    monkeypatch.setattr("peft.tuners.lora.bnb.torch", SimpleNamespace(is_autocast_enabled=lambda: True))
    given: set[torch.dtype] = set()
    for path in adapted_layers(model):
        model.get_submodule(path).register_forward_hook(lambda _layer, _inputs, output: given.add(output.dtype))
    model(pack(make_groups(2, vocabulary=340)))
    assert given == {torch.bfloat16}


@installed
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_counted_as_they_were_before(wide_base, kind):
    plain, packed = load_model(config_for(wide_base)), load_model(config_for(wide_base, quantization=kind))
    assert sorted(linear_shapes(packed)) == sorted(linear_shapes(plain))
    assert shape_of(packed) == shape_of(plain)
    weight = packed.get_submodule(adapted_layers(packed)[0]).get_base_layer().weight
    assert (weight_shape(weight), num_weights(weight)) == ((128, 128), 128 * 128)


@installed
@pytest.mark.parametrize(("kind", "dora"), [("nf4", False), ("nf4", True), ("int8", False)])
def test_what_is_saved_is_the_original_base_plus_the_update(wide_base, tmp_path, kind, dora):
    settings = {"lora_modules_to_save": ("norm",), "dora": dora}
    config = config_for(wide_base, quantization=kind, **settings)
    packed = moved_model(config)
    plain = load_model(config_for(wide_base, **settings))
    trained = {name: p.detach().clone() for name, p in packed.named_parameters() if p.requires_grad}
    plain.load_state_dict(trained, strict=False)
    wanted, merged = merged_state(plain), merged_state(packed)
    assert set(merged) == set(wanted)
    for name, tensor in merged.items():
        assert torch.allclose(tensor, wanted[name], rtol=0, atol=1e-6), name
    folder = save(tmp_path / "saved", packed, config)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float32}
    batch = pack(make_groups(4, vocabulary=340))
    with torch.no_grad():
        live, canonical, again = packed.eval()(batch), plain.eval()(batch), load(folder).model(batch)
    assert torch.allclose(again, canonical, rtol=1e-6, atol=1e-6)
    assert 1e-4 < float((live - canonical).norm() / canonical.norm()) < 0.5, "quantised, and not something else"


@installed
@pytest.mark.parametrize("kind", KINDS)
def test_siblings_stay_invisible_in_fewer_bits(wide_base, kind):
    assert leak(moved_model(config_for(wide_base, quantization=kind)).eval()) <= 1e-6


@installed
def test_a_base_that_is_another_one_is_not_merged_into(wide_base):
    model = load_model(config_for(wide_base, quantization="nf4"))
    torch.manual_seed(1)
    other = AutoModelForCausalLM.from_config(AutoModelForCausalLM.from_pretrained(wide_base).config)
    other.save_pretrained(wide_base)
    with pytest.raises(ModelError, match=r"weight of the base model is not what the run started from"):
        merged_state(model)


@installed
@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize(
    ("kind", "precision"),
    # Not int8 in fp16: on the CPU alone bitsandbytes has no product of integers, and one in float16 overflows.
    [("nf4", "bf16"), ("nf4", "fp16"), ("nf4", "fp32"), ("int8", "bf16"), ("int8", "fp32")],
)
def test_a_run_from_data_to_a_verified_folder(wide_base, pairs_file, tmp_path, monkeypatch, kind, precision):
    monkeypatch.setattr(quantization_module, "require_bitsandbytes", lambda *_: None)
    config = RewardTrainerConfig.of(
        **{"model": str(wide_base), "dataset": (str(pairs_file),), "output_dir": tmp_path / "run", "steps": 4},
        **{"batch_size": 8, "lr": 1e-2, "eval_fraction": 0.2, "max_seq_len": 128, "precision": precision},
        **{"lora": True, "quantization": kind, "lora_modules_to_save": ("norm",)},
    )
    result = train(config)
    assert load(result.last)
    assert (result.last / "adapter").is_dir()
    # The evaluations that chose the model were of quantised weights, its folder is not quantised: by how much they
    # differ is said. Half precision as such moves the saved model less.
    assert result.live is not None
    arithmetic = "float32" if precision == "fp32" else precision
    moved = result.live.measures[f"{arithmetic} on {kind} weights, as it trains"]["margin error"].value
    assert 1e-3 < moved < 1
    if kind == "nf4" and result.card is not None:
        assert moved > 2 * result.card.measures[precision]["margin error"].value
