"""Models whose layers have other widths of heads: all that reads a width reads that of the layer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig

from common import make_groups, make_model
from harness.tiny import GROUPED, SIZES
from rewardlab.batch import pack
from rewardlab.core.errors import ModelError
from rewardlab.model import attention_backends
from rewardlab.model.compute import heads_of, trial
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.layers import cut_off, layer_states
from rewardlab.model.per_layer import largest, layer_overrides
from rewardlab.model.selftest import tiny_config
from rewardlab.score import score_groups
from rewardlab.serve.engine.prefix_cache import PrefixCache
from rewardlab.serve.engine.scoring_model import ScoringModel
from rewardlab.training.cost.activations import layer_bytes_a_token
from rewardlab.training.cost.flops import shape_of

CPU = torch.device("cpu")
SIX = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]


def wider(**more: Any) -> Gemma4TextConfig:
    named = {**SIZES, **GROUPED, "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16}
    named |= {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "layer_types": list(SIX)}
    named |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SIZES["vocab_size"]}
    return Gemma4TextConfig(**{**named, "num_kv_shared_layers": 0, **more})


def test_a_setting_is_the_largest_of_its_layers():
    assert [largest(wider(), name) for name in ("head_dim", "num_key_value_heads", "nothing")] == [16, 2, None]
    assert [largest(LlamaConfig(**SIZES), name) for name in ("num_attention_heads", "nothing")] == [4, None]
    assert layer_overrides(LlamaConfig(**SIZES)) == {}


def test_kernels_are_tried_in_every_shape(monkeypatch):
    handed = set()

    def noted(query, key, value, layout, formula):
        handed.add((query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
        return attention_backends.segments(query, key, value, layout, formula)

    monkeypatch.setitem(attention_backends.BACKENDS, "noted", noted)
    model = make_model(config=wider())
    model.attention_backend = "noted"
    with torch.no_grad():
        model(pack(make_groups(2, replies=2)))
    assert heads_of(model.config) == [(4, 2, 8, 8), (4, 1, 16, 16)]
    assert handed == set(heads_of(model.config))
    handed.clear()
    assert trial("noted", model.config, device=CPU, dtype=torch.float32, train=False) == ""
    assert handed == set(heads_of(model.config))


def test_a_tiny_model_has_a_layer_of_each_kind_with_its_own_widths():
    config = wider()
    small = tiny_config(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert [small.per_layer_config[number].head_dim for number in range(2)] == [8, 16]
    with torch.device("meta"):
        disk_class_of(small)._from_config(small)


def test_costs_are_counted_of_layers_as_they_are():
    model = make_model(config=wider())
    assert shape_of(model).attention_width == (4 * 4 * 8 + 2 * 4 * 16) // 6
    assert layer_bytes_a_token(model.config, lora=False) > 0


def test_prompts_that_are_kept_give_the_same_scores(monkeypatch):
    monkeypatch.setattr(attention_backends, "LEAST_BLOCK", 8)
    model = make_model(config=wider(num_kv_shared_layers=3))
    cached = ScoringModel(model, PrefixCache(2000))
    groups = make_groups(4, seed=3)
    draw = np.random.default_rng(0)
    prompt = draw.integers(1, 300, 70).astype(np.int32)
    pick = random.Random(0)
    known = 0
    for _ in range(3):
        asked = [_with_prompt(group, prompt[: pick.randrange(60, 70)]) for group in groups]
        got, taken = cached.score(asked, budget=500)
        known += sum(taken)
        for ours, plain in zip(got, score_groups(model, asked, budget=500), strict=True):
            np.testing.assert_allclose(ours, plain, atol=1e-5)
    assert known > 0


def _with_prompt(group: Any, prompt: Any) -> Any:
    return replace(group, shared=prompt, prompt_tokens=(len(prompt),) * group.num_replies)


def test_a_model_that_is_cut_off_gives_the_states_of_its_last_layer():
    layers = 3  # transformers has a layer without a window at the end of every Gemma 4
    model = make_model(config=wider(hidden_size_per_layer_input=0))
    batch = pack(make_groups(3))
    with torch.no_grad():
        wanted = layer_states(model, batch, [layers])[:, 0]
        cut_off(model, layers)
        torch.testing.assert_close(model.final_states(batch), wanted)
    # Read from its configuration, it is the same model.
    disk_class = disk_class_of(model.config)
    again = disk_class._from_config(type(model.config).from_dict(model.config.to_dict()))
    assert {name: weight.shape for name, weight in again.model.named_parameters()} == {
        name: weight.shape for name, weight in model.backbone.named_parameters()
    }


@pytest.mark.parametrize("shares", [{"hidden_size_per_layer_input": 8}, {"num_kv_shared_layers": 3}])
def test_a_model_whose_layers_share_weights_is_not_cut_off(shares):
    model = make_model(config=wider(**{"hidden_size_per_layer_input": 0, **shares}))
    cut_off(model, 6)
    with pytest.raises(ModelError, match="'gemma4_text' cannot be cut off after an earlier layer.* --layers last"):
        cut_off(model, 5)
