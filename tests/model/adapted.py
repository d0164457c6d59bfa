"""What tests of adapters share: a tiny model with adapters that have moved, and what it should be on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from common import CONFIGS, make_tokenizer
from rewardlab.artifact.save import Trained, save_reward_model
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.model.config import ModelConfig
from rewardlab.model.load import load_reward_model
from rewardlab.model.reward import RewardModel

KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "rsdora": {"dora": True, "rslora": True}}
SAVED = {"alone": (), "with norms": ("score", "input_layernorm", "norm")}


def write_ordinary_base(folder: Path, family: str = "llama") -> Path:
    """A base whose weights are as small as real ones: where 1e-6 is asked for, the large ones of other tests give
    float32 rounding of 4e-6.
    """
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.initializer_range = 0.02
    config.eos_token_id = config.pad_token_id = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def config_for(base: Path, **changes) -> ModelConfig:
    """LoRA of rank 3 at alpha 6 in float32."""
    settings = {"model": str(base), "lora": True, "lora_rank": 3, "lora_alpha": 6.0, "precision": "fp32"}
    return ModelConfig(**{**settings, **changes})


def load_model(config: ModelConfig, *, layout="shared", log=lambda line: None) -> RewardModel:
    """The model as a run has it before its first step."""
    return load_reward_model(config.model, config, seed=0, layout=layout, device=torch.device("cpu"), log=log)


def moved_model(config: ModelConfig, **settings) -> RewardModel:
    """The same after a walk: everything that trains is somewhere else, B no longer zero."""
    model = load_model(config, **settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.02)
    return model


def save(folder: Path, model: RewardModel, config: ModelConfig) -> Path:
    """The model's folder, adapters included."""
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    save_reward_model(
        folder,
        model,
        renderer,
        beta=1.0,
        save_dtype=torch.float32,
        provenance={},
        source=Trained(adapter=(config, config.model)),
    )
    return folder
