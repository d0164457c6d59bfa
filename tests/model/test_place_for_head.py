"""Models that cannot become reward models are refused before a row of data is read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForSequenceClassification, LlamaForSequenceClassification, Mxfp4Config

from common import CONFIGS, make_tokenizer, write_base_model
from rewardlab.core.errors import ModelError
from rewardlab.data import reading
from rewardlab.model import load
from rewardlab.model.config import ModelConfig
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig


@pytest.fixture
def refused(tmp_path, pairs_file, monkeypatch):
    """What is said of a model, before data are read."""

    def read(*_args, **_named):
        raise AssertionError("data were read")

    monkeypatch.setattr(reading, "_prepare", read)

    def say(folder, **changes) -> str:
        make_tokenizer().save_pretrained(folder)
        config = RewardTrainerConfig.of(
            model=str(folder), dataset=(str(pairs_file),), output_dir=tmp_path / "run", max_seq_len=64, **changes
        )
        with pytest.raises(ModelError) as caught:
            train(config)
        return str(caught.value)

    return say


def save_labels(folder, count):
    config = CONFIGS["llama"]()
    config.num_labels = count
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("count", [2, 5])
def test_a_head_of_several_outputs(refused, tmp_path, count):
    words = refused(save_labels(tmp_path / "theirs", count))
    assert f"its head has {count} outputs, a reward model has one. Make one of them by `rewardlab" in words


def test_a_new_head_takes_the_place_of_one_of_several_outputs(refused, tmp_path):
    folder = save_labels(tmp_path / "theirs", 2)
    with pytest.raises(AssertionError, match="data were read"):
        refused(folder, new_head=True)


def quantised(folder, settings):
    write_base_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return folder


@pytest.mark.parametrize("kind", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_files_of_quantised_weights(refused, tmp_path, kind):
    words = refused(quantised(tmp_path / "theirs", {"quant_method": kind, "bits": 4}))
    assert f"the weights in its files are quantised ({kind})." in words
    assert "Give the model that it was quantised from" in words


def test_files_in_fp8_are_read_as_the_plain_weights_that_they_stand_for(refused, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    folder = quantised(tmp_path / "theirs", {"quant_method": "fp8", "weight_block_size": [128, 128]})
    held, wanted = load_file(folder / "model.safetensors"), {}
    for name in [name for name in held if name.endswith("proj.weight")]:
        scale = held[name].abs().max() / 448
        held[name] = (held[name] / scale).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = scale.reshape(1, 1)
        wanted[name.removeprefix("model.")] = held[name].float() * scale
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="data were read"):
        refused(folder)
    settings = ModelConfig(model=str(folder), precision="fp32")
    model = load.load_reward_model(
        str(folder), settings, seed=0, layout="padded", device=torch.device("cpu"), log=print
    )
    assert len(wanted) == 14
    assert all(torch.equal(model.backbone.get_parameter(name), weight) for name, weight in wanted.items())


def test_weights_that_stayed_quantised_when_they_were_read(tmp_path, monkeypatch):
    folder = quantised(tmp_path / "theirs", {"quant_method": "mxfp4"})
    read = load.read_classifier

    def left_quantised(*arguments, **named):
        classifier, missing, superfluous = read(*arguments, **named)
        classifier.is_quantized = True
        classifier.config.quantization_config = Mxfp4Config()
        return classifier, missing, superfluous

    monkeypatch.setattr(load, "read_classifier", left_quantised)
    settings = ModelConfig(model=str(folder), precision="fp32")
    with pytest.raises(ModelError, match=r"the weights in its files are quantised \(mxfp4\)"):
        load.load_reward_model(str(folder), settings, seed=0, layout="padded", device=torch.device("cpu"), log=print)


def test_an_attention_that_is_not_installed_is_none_of_the_head_s_business(refused, tmp_path):
    folder = save_labels(tmp_path / "theirs", 1)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attn_implementation": "flash_attention_2"}))
    with pytest.raises(AssertionError, match="data were read"):
        refused(folder)


def test_an_encoder(refused, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=512, max_position_embeddings=64, num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "theirs")
    words = refused(tmp_path / "theirs")
    assert "BertForSequenceClassification has no linear head `score`. Encoders, and models with both" in words


def test_an_architecture_that_is_code_in_its_folder(refused, tmp_path):
    folder = save_labels(tmp_path / "theirs", 1)
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "theirs", "auto_map": {"AutoConfig": "configuration_theirs.TheirConfig"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    words = refused(folder)
    assert "theirs: its architecture is Python code that comes with the model, and none that transformers has" in words
    assert "`rewardlab compare` reads files of scores" in words
