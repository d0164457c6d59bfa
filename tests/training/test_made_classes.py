"""Families for which transformers has no sequence-classification class: one is made, and the rest is as for others."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BambaConfig,
    BertGenerationConfig,
    Cohere2Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GitConfig,
    GraniteConfig,
    LlamaConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
    WhisperConfig,
)

import runs
from common import make_tokenizer, write_pairs
from harness import family_sizes
from harness.tiny import GROUPED, SIZES
from rewardlab.artifact.load import load
from rewardlab.core.errors import ModelError
from rewardlab.core.spec import read_spec
from rewardlab.model.disk_class import disk_class_of, is_foreign, is_made
from rewardlab.model.load import read_classifier
from rewardlab.training.run import train

TOKENS: dict[str, Any] = {"vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
TEXT: dict[str, Any] = {**SIZES, **TOKENS, **GROUPED, "initializer_range": 0.2}
FAMILIES: dict[str, Callable[[], Any]] = {
    "granite": lambda: GraniteConfig(
        **TEXT, attention_multiplier=0.5, residual_multiplier=0.5, embedding_multiplier=2.0
    ),
    "cohere2": lambda: Cohere2Config(**TEXT, sliding_window=16),
    "olmoe": lambda: OlmoeConfig(**TEXT, num_experts=4, num_experts_per_tok=2),
    "gemma3n": lambda: Gemma3nTextConfig(
        **{**TEXT, "intermediate_size": [48, 64, 48, 64], "num_hidden_layers": 4},
        head_dim=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=384,
        laurel_rank=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.5, 0.0] * 2,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **TEXT,
        head_dim=8,
        global_head_dim=8,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=384,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma4 with wider heads": lambda: Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 4},
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=384,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "bamba": lambda: BambaConfig(
        **TEXT, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, attn_layer_indices=[1]
    ),
}
PADDED = {"bamba"}
NAMES = {"gemma3n": "Gemma3n", "gemma4": "Gemma4", "gemma4 with wider heads": "Gemma4"}
config_for = partial(runs.config_for, steps=2, batch_size=6, lr=1e-2, eval_fraction=0.0)


def saved_base(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]()).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.usefixtures("verified_here")
def test_a_family_without_a_class_trains_and_gives_its_own_scores(tmp_path: Path, caplog, family: str, lora: bool):
    base = saved_base(family, tmp_path / "base")
    with caplog.at_level("INFO", logger="rewardlab"):
        folder = train(config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run", lora=lora)).last
    config = json.loads((folder / "config.json").read_text())
    name = NAMES.get(family, type(FAMILIES[family]()).__name__.removesuffix("Config"))
    assert config["architectures"] == [f"{name}ForSequenceClassification"]
    assert f"no sequence-classification class for {config['model_type']}" in caplog.text
    assert f"layout: {'padded' if family in PADDED else 'shared'}" in caplog.text
    scorer = load(folder)
    disk_class = disk_class_of(scorer.model.config)
    plain = [disk_class.from_pretrained(folder).eval()]
    if lora:
        bare = disk_class.from_pretrained(base, num_labels=1)
        bare.config.pad_token_id = config["pad_token_id"]
        plain.append(PeftModel.from_pretrained(bare, folder / "adapter").eval())
    for canary in read_spec(folder).canaries:
        with torch.no_grad():
            alone = [float(model(input_ids=torch.tensor([canary.token_ids])).logits) for model in plain]
        scores = [*alone, scorer.score([canary.messages])[0]]
        assert scores == pytest.approx([canary.score] * len(scores), abs=1e-5 * max(1, abs(canary.score)))


@pytest.mark.usefixtures("verified_here")
def test_a_reward_model_of_a_made_class_is_trained_further_and_pickled(tmp_path: Path, caplog):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    first = train(config_for(saved_base("granite", tmp_path / "base"), pairs, tmp_path / "run")).last
    with caplog.at_level("INFO", logger="rewardlab"):
        train(config_for(first, pairs, tmp_path / "further"))
    assert "head: kept from" in caplog.text
    scorer = load(first)
    conversation = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "Certainly."}]
    again = pickle.loads(pickle.dumps(scorer)).score([conversation])
    assert again == pytest.approx(scorer.score([conversation]), abs=1e-5)


def test_plain_transformers_says_that_it_cannot_read_such_a_folder(tmp_path: Path):
    base = saved_base("granite", tmp_path / "base")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_pretrained(base)


def test_a_class_is_made_once_and_only_where_there_is_none():
    made, there = disk_class_of(GraniteConfig()), disk_class_of(LlamaConfig())
    assert made is disk_class_of(GraniteConfig(hidden_size=64))
    assert [is_made(made), is_made(there)] == [True, False]
    assert not any(map(is_foreign, (made, there)))
    assert is_foreign(type("Own", (there,), {"__module__": "transformers_modules.own"}))
    assert made.config_class is GraniteConfig


@pytest.mark.parametrize("family", ["dory", "hy_v4", "bailing_hybrid"])
def test_weights_that_have_other_names_in_files_are_read(tmp_path: Path, family: str):
    config = family_sizes.config_of(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _, missing, _ = read_classifier(disk_class_of(config), str(tmp_path), "eager")
    assert missing == {"score.weight"}


def test_experts_of_a_made_class_are_multiplied_as_those_of_the_family():
    with torch.device("meta"):
        own, made = (
            kind._from_config(FAMILIES["olmoe"]()) for kind in (OlmoeForCausalLM, disk_class_of(FAMILIES["olmoe"]()))
        )
    assert made.config._experts_implementation == own.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("config", [WhisperConfig, BertGenerationConfig, GitConfig])
def test_models_that_are_no_decoders_of_text_alone_get_none(config: type):
    with pytest.raises(ModelError, match="neither a sequence-classification class nor a causal model of text"):
        disk_class_of(config())
