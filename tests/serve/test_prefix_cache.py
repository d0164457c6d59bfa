"""The cache of prompts: what it gives back is what was put in, for the same tokens only, and scores stay the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, GptOssConfig

from common import CONFIGS, make_model
from rewardlab.core.types import TokenGroup
from rewardlab.model import attention_backends
from rewardlab.model.past import PromptStates
from rewardlab.model.reward import RewardModel
from rewardlab.score import score_groups
from rewardlab.serve.engine.prefix_cache import BLOCK, MIN_TOKENS, PrefixCache
from rewardlab.serve.engine.scoring_model import ScoringModel

BUDGET = 512
TINY = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {
    "gpt_oss": lambda: GptOssConfig(
        **TINY,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=0,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **TINY,
        num_key_value_heads=4,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        pad_token_id=0,
    ),
}
"""Models whose attention has more than keys, values and a window."""


def group(prompt: np.ndarray, lengths: list[int], draw: np.random.Generator) -> TokenGroup:
    return TokenGroup(
        preference_id="",
        source="",
        prompt_key="",
        shared=prompt,
        suffixes=tuple(draw.integers(1, 300, length).astype(np.int32) for length in lengths),
        prompt_tokens=(len(prompt),) * len(lengths),
        truncated_tokens=(0,) * len(lengths),
        comparisons=(),
    )


@pytest.mark.parametrize(("family", "window"), [*((family, None) for family in CONFIGS), ("gemma2", 40), ("gemma3", 9)])
def test_scores_with_the_cache_are_those_without_it(family, window, monkeypatch):
    """Prompts that are new, known, known in part, and longer than what is known, beside each other."""
    monkeypatch.setattr(attention_backends, "LEAST_BLOCK", 8)
    config = CONFIGS[family]()
    if window:
        config.sliding_window = window
        config.layer_types = ["sliding_attention", "full_attention"]
    require_equal_scores(make_model(config=config))


@pytest.mark.parametrize("family", SPECIAL)
def test_so_are_those_of_models_with_sinks_and_with_latent_attention(family, monkeypatch):
    monkeypatch.setattr(attention_backends, "LEAST_BLOCK", 8)
    model = make_model(config=SPECIAL[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
    require_equal_scores(model)


def require_equal_scores(model: RewardModel) -> None:
    cached = ScoringModel(model, PrefixCache(2000))
    assert cached.cache_off == ""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(1, 300, length).astype(np.int32) for length in (100, 64, 37, 5)]
    prompts += [np.concatenate([prompts[0][:70], prompts[1]]), prompts[0][:50], prompts[0][:96]]
    pick = random.Random(0)
    taken = 0
    for _ in range(12):
        groups = [group(pick.choice(prompts), [pick.randrange(1, 9) for _ in range(3)], draw) for _ in range(4)]
        got, known = cached.score(groups, budget=BUDGET)
        for ours, plain in zip(got, score_groups(model, groups, budget=BUDGET), strict=True):
            np.testing.assert_allclose(ours, plain, atol=1e-5)
        taken += sum(known)
    assert taken > 1000


def test_in_half_precision_it_is_as_near_as_the_arithmetic_allows():
    from rewardlab.model.half import HalfWeights

    model = make_model()
    model.compute_dtype = torch.bfloat16
    model.half_weights = HalfWeights(model.backbone, "backbone", torch.bfloat16, "stochastic")
    cached = ScoringModel(model, PrefixCache(2000))
    assert cached.cache_off == ""
    draw = np.random.default_rng(0)
    prompt = draw.integers(1, 300, 100).astype(np.int32)
    for _ in range(3):
        groups = [group(prompt, [5, 9], draw)]
        got, _ = cached.score(groups, budget=BUDGET)
        np.testing.assert_allclose(got[0], score_groups(model, groups, budget=BUDGET)[0], atol=0.05)


def test_models_of_one_cache_do_not_see_each_others_prompts():
    cache = PrefixCache(2000)
    first, second = make_model(), make_model("qwen2")
    draw = np.random.default_rng(0)
    groups = [group(draw.integers(1, 300, 100).astype(np.int32), [5, 9], draw)]
    models = [ScoringModel(model, cache) for model in (first, second)]
    for _ in range(2):
        for model, cached in zip((first, second), models, strict=True):
            np.testing.assert_allclose(
                cached.score(groups, budget=BUDGET)[0][0], score_groups(model, groups, budget=BUDGET)[0], atol=1e-5
            )
    held = cache.num_tokens
    models[0].forget()
    assert cache.num_tokens == held // 2
    assert models[0].num_known(groups[0]) == 0
    assert models[1].num_known(groups[0]) == 96
    models[0].score(groups, budget=BUDGET)
    assert models[0].num_known(groups[0]) == 0, "what is no longer served is not kept again"


def test_a_cache_that_changes_scores_is_off_with_the_reason(monkeypatch):
    from rewardlab.model.past import Past

    own = Past.before

    def shifted(past, number, layer):
        states = own(past, number, layer)
        return None if states is None else (states[0] + 0.1, states[1] + 0.1)

    monkeypatch.setattr(Past, "before", shifted)
    cached = ScoringModel(make_model(), PrefixCache(2000))
    assert "its scores differ by" in cached.cache_off
    draw = np.random.default_rng(0)
    assert cached.score([group(draw.integers(1, 300, 100).astype(np.int32), [5], draw)] * 2, budget=BUDGET)[1] == [0, 0]


def test_layouts_without_shared_prompts_have_no_cache():
    cached = ScoringModel(make_model(layout="padded"), PrefixCache(2000))
    assert cached.cache_off == "prompts are not shared: the layout is padded"


def test_models_and_blocks_are_numbered_apart():
    """Models are loaded while prompts are kept; a number given twice would join the blocks of two prompts."""
    cache = PrefixCache(100 * BLOCK)
    owner = cache.new_owner()
    for number in range(5):
        prompt = np.full(3 * BLOCK, number, np.int32)
        cache.add(owner, prompt, states_of(prompt))
        assert cache.new_owner() == owner - 1 - number
    numbers = [block.number for block in cache._blocks.values()]
    assert sorted(numbers) == list(range(1, 16))


def states_of(token_ids: np.ndarray) -> PromptStates:
    """Made-up states that say which token is where."""
    tagged = torch.tensor([[[t * 1000.0 + n] for n, t in enumerate(token_ids.tolist())]])
    return PromptStates(keys=(tagged,), values=(-tagged,))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=30))
@settings(max_examples=100, deadline=None)
def test_what_is_found_is_what_was_kept_for_these_tokens_and_never_more_than_fits(asked):
    cache = PrefixCache(8 * BLOCK)
    owners = [cache.new_owner(), cache.new_owner()]
    for owner, blocks in asked:
        token_ids = np.repeat(np.array(blocks, np.int32), BLOCK)
        found = cache.longest(owners[owner], token_ids)
        known = 0 if found is None else found.num_tokens
        assert known == 0 or known >= MIN_TOKENS
        whole = states_of(token_ids)
        if found is not None:
            torch.testing.assert_close(found.keys, whole.part(0, known).keys)
            torch.testing.assert_close(found.values, whole.part(0, known).values)
        if known < len(token_ids):
            cache.add(owners[owner], token_ids, whole.part(known, len(token_ids)))
        assert cache.num_tokens <= cache.max_tokens
        if len(token_ids) >= MIN_TOKENS:
            assert cache.num_known(owners[owner], token_ids) == len(token_ids), "the latest is always kept"


def test_the_least_recently_used_prompt_goes_first():
    cache = PrefixCache(6 * BLOCK)
    owner = cache.new_owner()
    prompts = [np.full(2 * BLOCK, n, np.int32) for n in range(4)]
    for prompt in prompts[:3]:
        cache.add(owner, prompt, states_of(prompt))
    assert cache.longest(owner, prompts[0]) is not None
    cache.add(owner, prompts[3], states_of(prompts[3]))
    assert [cache.num_known(owner, prompt) for prompt in prompts] == [2 * BLOCK, 0, 2 * BLOCK, 2 * BLOCK]
