"""Models that cannot become reward models are refused before a row of data is read."""

from __future__ import annotations

import json

import pytest
from transformers import BertConfig, BertForSequenceClassification, LlamaForSequenceClassification

from common import CONFIGS, make_tokenizer
from rewardlab.core.errors import ModelError
from rewardlab.data import reading
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
