"""The token budget that nobody gave: 8,192, and on a GPU what its size, the model's and the data's allow."""

from __future__ import annotations

import json
import logging
from itertools import pairwise

import pytest
import torch
from transformers import Qwen2Config

import rewardlab.training.default_budget as default_budget
import rewardlab.training.run as run_module
from common import make_model
from harness.memory_formula import predict
from harness.workload import random_group
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.data.groups import Datasets
from rewardlab.distributed.ranks import ALONE, Ranks
from rewardlab.model.trainable import choose_trainable, half_frozen
from rewardlab.training.checkpoints.resume import with_decisions
from rewardlab.training.default_budget import FAMILIES, SHARE, SIZES, budget_by_size, decided_early
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import config_for, history_of

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SHAPE = {"hidden_size": 64, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2}
SHORT = [random_group(40, (20, 30), vocabulary=500, seed=number) for number in range(40)]
"""Pairs of 90 tokens; with each prompt twice 130."""
LONG = [random_group(900, (500, 600), vocabulary=500, seed=number) for number in range(40)]
"""Pairs of 2,000 tokens."""


def config_of(**settings) -> RewardTrainerConfig:
    settings = {"attention_backend": "varlen", "precision": "bf16", "batch_size": 32} | settings
    return RewardTrainerConfig.of(model="x", dataset=("y",), **settings)


def model_of(config, **shape):
    """As a run on a GPU holds it."""
    shape = Qwen2Config(**SHAPE | shape, vocab_size=512, num_hidden_layers=2, pad_token_id=None)
    model = make_model(config=shape).train()
    model.compute_dtype = torch.bfloat16
    choose_trainable(model, config.model, seed=0)
    half_frozen(model.backbone, torch.bfloat16)
    return model


def chosen(monkeypatch, total, model, train, config) -> int:
    monkeypatch.setattr(default_budget, "total_memory", lambda device: total)
    return budget_by_size(model, train, config).budget


def taken(model, config, tokens) -> float:
    """By the formulas of the benchmarks, with every matrix that trains as one that is copied."""
    numbers = [(p.requires_grad, p.numel(), p.ndim) for p in model.parameters()]
    predicted = predict(
        model.config,
        trained=sum(count for trains, count, _ in numbers if trains),
        frozen=sum(count for trains, count, _ in numbers if not trains),
        multiplied=sum(count for trains, count, ndim in numbers if trains and ndim > 1),
        tokens=tokens,
        keys=2,
        lora_rank=config.model.lora_rank if config.model.lora else 0,
        checkpointing=config.compute.activation_checkpointing,
    )
    return sum(predicted.values())


@pytest.mark.parametrize(
    "settings", [{}, {"lora": True}, {"activation_checkpointing": "full"}], ids=["full", "lora", "checkpointed"]
)
def test_it_is_the_largest_that_leaves_two_fifths_of_the_device_by_the_formulas(monkeypatch, settings):
    config = config_of(**settings)
    model = model_of(config)
    for smaller, size in pairwise(SIZES):
        # Vectors that do not train are in float32, which the formulas of the benchmarks leave out.
        just = taken(model, config, size) / SHARE
        assert chosen(monkeypatch, int(1.01 * just), model, LONG, config) == size
        assert chosen(monkeypatch, int(0.98 * just), model, LONG, config) == smaller
    assert chosen(monkeypatch, 1, model, LONG, config) == 8192
    assert budget_by_size(model, LONG, config).reason == "by memory: more could take above 60% of 0.0 GiB"


def test_compiled_layers_keep_more(monkeypatch):
    plain, compiled = config_of(), config_of(compile=True)
    model = model_of(plain)
    just = int(taken(model, plain, SIZES[2]) / SHARE * 1.02)
    assert chosen(monkeypatch, just, model, LONG, plain) == SIZES[2]
    assert chosen(monkeypatch, just, model, LONG, compiled) == SIZES[1]


def test_a_step_that_is_smaller_gets_no_more_than_evaluations_use(monkeypatch):
    config = config_of()
    model = model_of(config)
    assert chosen(monkeypatch, 10**15, model, SHORT, config) == 32_768
    assert chosen(monkeypatch, 10**15, model, LONG, config) == 65_536
    assert chosen(monkeypatch, 10**15, model, LONG, config.replace(batch_size=16)) == 32_768


def test_many_replies_to_a_long_prompt_count_with_their_copies_of_its_keys(monkeypatch):
    config = config_of()
    model = model_of(config, num_key_value_heads=4)
    many = [random_group(800, (10,) * 20, vocabulary=500, seed=number) for number in range(40)]
    just = int(1.01 * taken(model, config, 32_768) / SHARE)
    assert chosen(monkeypatch, just, model, LONG, config) == 32_768
    assert chosen(monkeypatch, just, model, many, config) == 8192


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attention_backend": "segments"}, "for the kernel segments"),
        ({"lora": True, "lora_dropout": 0.1}, "with --lora-dropout"),
        ({"lora": True, "dora": True}, "with --dora"),
        ({"lora": True, "quantization": "nf4"}, "with --quantization"),
        ({"liger": True}, "with --liger"),
        ({"activation_checkpointing": "selective"}, "with --activation-checkpointing selective"),
    ],
)
def test_where_the_formulas_do_not_hold_it_is_8192_and_the_line_says_why(monkeypatch, settings, why):
    monkeypatch.setattr(default_budget, "total_memory", lambda device: 10**15)
    found = budget_by_size(model_of(config_of()), LONG, config_of(**settings))
    assert (found.budget, found.reason) == (8192, f"memory is not predicted {why}")


def test_so_is_that_of_unknown_families_and_of_padded_rows(monkeypatch):
    monkeypatch.setattr(default_budget, "total_memory", lambda device: 10**15)
    model = make_model("gpt_neox")
    assert budget_by_size(model, LONG, config_of()).budget == 65_536
    model.config.model_type = "new"
    found = budget_by_size(model, LONG, config_of())
    assert (found.budget, found.reason) == (8192, "memory is not predicted for models of the type new")
    model = model_of(config_of())
    model.layout = "padded"
    assert "for padded rows" in budget_by_size(model, LONG, config_of()).reason
    assert {"llama", "qwen2"} <= FAMILIES.keys()


@pytest.mark.parametrize(
    ("device", "ranks", "settings", "early"),
    [
        (CPU, 1, {}, 8192),
        (CUDA, 1, {}, None),
        (CUDA, 1, {"train_head_only": True, "cache_states": True}, 8192),
        (CUDA, 2, {}, 8192),
        (CUDA, 2, {"sharding": "hybrid"}, 8192),
        (CUDA, 2, {"sharding": "none"}, None),
        (CPU, 2, {"sharding": "none"}, 8192),
        (CUDA, 1, {"micro_token_budget": 4096}, 4096),
        (CUDA, 1, {"micro_token_budget": "auto"}, "auto"),
    ],
)
def test_a_size_decides_only_on_gpus_that_hold_the_model_whole(device, ranks, settings, early):
    found = decided_early(config_of(**settings), device, Ranks(size=ranks))
    assert found.run.micro_token_budget == early
    assert found.run.token_budget == (early if isinstance(early, int) else 8192)


class Two(Ranks):
    """This rank beside one that finds less."""

    def gather(self, choice):
        return [choice, default_budget.Choice(budget=16_384, reason="a smaller device")]


def test_the_choice_is_logged_and_ranks_take_the_smallest(monkeypatch, caplog):
    monkeypatch.setattr(default_budget, "total_memory", lambda device: 140 * 2**30)
    config = config_of()
    model, data = model_of(config), Datasets(train=LONG)
    with caplog.at_level(logging.INFO, "rewardlab"):
        assert run_module._settle_budget(config, model, data, ALONE).run.micro_token_budget == 65_536
        assert run_module._settle_budget(config, model, data, Two()).run.micro_token_budget == 16_384
    first, second = caplog.messages
    assert first.startswith("micro-token budget: 65536 (by memory: a step takes at most some ")
    assert first.endswith("of 140.0 GiB)")
    assert second == "micro-token budget: 16384 (a smaller device)"


def test_a_preference_that_is_larger_is_an_error_before_the_first_step(monkeypatch):
    monkeypatch.setattr(default_budget, "total_memory", lambda device: 1)
    config = config_of()
    wide = [random_group(900, (8000,), vocabulary=500, seed=0)]
    with pytest.raises(ConfigError, match="one preference takes 8900 tokens at once, above --micro-token-budget 8192"):
        run_module._settle_budget(config, model_of(config), Datasets(train=wide), ALONE)


def test_a_run_that_goes_on_keeps_the_number_it_had():
    """Also one of 0.9.0, whose default was written out."""
    for number in (8192, 32_768):
        begun = config_of(micro_token_budget=number, eval_every=5, precision="bf16")
        assert with_decisions(config_of(), begun).run.micro_token_budget == number
        assert with_decisions(config_of(micro_token_budget=4096), begun).run.micro_token_budget == 4096


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_a_run_on_the_cpu_is_that_with_8192_and_says_so_in_its_files(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=2, baselines=False, micro_token_budget=None)
    train(config)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["micro_token_budget"] == 8192
    again = from_mapping(RewardTrainerConfig, saved, where="config.json")
    train(again.replace(output_dir=tmp_path / "again"))
    assert history_of(tmp_path / "run") == history_of(tmp_path / "again")
