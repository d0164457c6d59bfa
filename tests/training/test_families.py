"""Model families beside those of the laws: each trains from data to a verified folder and loads back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    MODEL_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    DeepseekV3Config,
    Gemma3Config,
    GPTJConfig,
    GPTNeoConfig,
    GptOssConfig,
    MixtralConfig,
    MptConfig,
    PhimoeConfig,
)

import runs
from common import CONFIGS, make_tokenizer, write_pairs
from harness.tiny import GROUPED, SIZES
from rewardlab.artifact.load import load
from rewardlab.core.errors import ModelError
from rewardlab.core.spec import read_spec
from rewardlab.model import attention
from rewardlab.model.config import ModelConfig
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import choose_layout
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig

TOKENS: dict[str, Any] = {"vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
WITHOUT_SDPA: dict[str, Callable[[], Any]] = {
    "bloom": lambda: BloomConfig(**TOKENS, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3),
    "gptj": lambda: GPTJConfig(
        **TOKENS, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=512, initializer_range=0.3
    ),
    "gpt_neo": lambda: GPTNeoConfig(
        **TOKENS,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        max_position_embeddings=512,
        initializer_range=0.3,
    ),
    "mpt": lambda: MptConfig(**TOKENS, d_model=32, n_layers=2, n_heads=4, max_seq_len=512, initializer_range=0.3),
    "gpt_oss": lambda: GptOssConfig(
        **TOKENS,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.3,
    ),
}
LEARNS_SDPA = {"gptj"}
SHARES = {"gpt_oss"}
"""Families whose windows and sinks the kernels of shared prompts know."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", WITHOUT_SDPA)
@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.usefixtures("verified_here")
def test_families_without_sdpa_train_and_load_back(tmp_path: Path, caplog, family: str, lora: bool):
    config = WITHOUT_SDPA[family]()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    data = write_pairs(tmp_path / "pairs.jsonl", 12)
    with caplog.at_level("INFO", logger="rewardlab"):
        result = train(
            RewardTrainerConfig.of(
                model=str(tmp_path / "base"),
                dataset=(str(data),),
                output_dir=tmp_path / "run",
                steps=2,
                batch_size=6,
                lr=1e-2,
                eval_fraction=0.0,
                max_seq_len=128,
                precision="fp32",
                lora=lora,
            )
        )
    spec = read_spec(result.last)
    scorer = load(result.last)
    # A later transformers may have learned SDPA for a family, as it did for GPT-J; what follows must hold all the same.
    learnt = family in LEARNS_SDPA and MODEL_MAPPING[type(config)]._supports_sdpa
    padded = family not in SHARES and not learnt
    assert scorer.model.layout == ("padded" if padded else "shared")
    assert ("attention: padded, because" in caplog.text) == padded
    plain = AutoModelForSequenceClassification.from_pretrained(result.last).eval()
    for canary in spec.canaries:
        with torch.no_grad():
            score = float(plain(torch.tensor([canary.token_ids])).logits)
        assert score == pytest.approx(canary.score, abs=1e-5 * max(1, abs(canary.score)))
    replies = [row["content"] for canary in spec.canaries for row in canary.messages if row["role"] == "assistant"]
    together = scorer.score_replies([{"role": "user", "content": "How?"}], replies)
    alone = [scorer.score_replies([{"role": "user", "content": "How?"}], [reply])[0] for reply in replies]
    assert together == pytest.approx(alone, abs=1e-4)


config_for = partial(runs.config_for, steps=2, batch_size=6, lr=1e-2, eval_fraction=0.0, lora=True)
TEXT: dict[str, Any] = {**SIZES, **TOKENS, **GROUPED, "initializer_range": 0.2}
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
PARTLY_ADAPTED: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: MixtralConfig(**TEXT, num_local_experts=4),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": TEXT["num_attention_heads"]},
        **LATENT,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "phimoe": lambda: PhimoeConfig(**TEXT, num_local_experts=4),
    "gemma3": lambda: Gemma3Config(
        text_config={**TEXT, "sliding_window": 4096},
        vision_config={**EYES, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
    ),
}


def saved_base(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(PARTLY_ADAPTED[family]()).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", PARTLY_ADAPTED)
@pytest.mark.usefixtures("verified_here")
def test_experts_routers_and_vision_get_no_adapters_and_the_rest_loads_back(tmp_path: Path, family: str):
    base = saved_base(family, tmp_path / "base")
    folder = train(config_for(base, write_pairs(tmp_path / "pairs.jsonl", 12), tmp_path / "run")).last
    bare = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    adapted = PeftModel.from_pretrained(bare, folder / "adapter").eval()
    names = [name for name, _ in adapted.named_parameters() if ".lora_A." in name]
    assert any(".self_attn." in name for name in names)
    assert not any(word in name for name in names for word in (".experts.", ".gate.", ".router.", "vision"))
    merged = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for canary in read_spec(folder).canaries:
        ids = torch.tensor([canary.token_ids])
        with torch.no_grad():
            scores = [float(model(input_ids=ids).logits) for model in (merged, adapted)]
        assert scores == pytest.approx([canary.score] * 2, abs=1e-5 * max(1, abs(canary.score)))
    load(folder)


@pytest.mark.slow
def test_adapters_for_joined_experts_are_refused_before_training(tmp_path: Path):
    base = saved_base("deepseek_v3", tmp_path / "base")
    config = config_for(
        base,
        write_pairs(tmp_path / "pairs.jsonl", 12),
        tmp_path / "run",
        lora_target_modules=("gate_proj", "up_proj", "down_proj"),
    )
    with pytest.raises(ModelError, match="gate_proj up_proj down_proj: the experts .* or use all-linear"):
        train(config)


def test_the_reason_for_the_padded_path_is_in_words(monkeypatch):
    def with_more(*parts, **named):
        return attention.shared_prompt_attention(*parts, s_bias=1.0, **named)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, with_more)
    config = CONFIGS["llama"]()
    lines: list[str] = []
    layout = choose_layout(config, disk_class_of(config), ModelConfig(), max_length=128, share=True, log=lines.append)
    assert layout == "padded"
    assert lines == [
        "attention: padded, because LlamaAttention cannot compute a shared-prompt row: it computes with s_bias, which "
        "shared-prompt attention does not; every prompt is computed once per reply"
    ]
