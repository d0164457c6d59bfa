"""Models that compute in half precision, by autocast as yet."""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config

from common import make_model
from rewardlab.model.config import ModelConfig
from rewardlab.model.lora import add_adapters
from rewardlab.model.trainable import half_frozen


def make_gpt2():
    """Its linear layers are transformers' Conv1D, whose weights are the transpose of nn.Linear's."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 384, "n_positions": 256}
    config = GPT2Config(**sizes, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return make_model(layout="padded", config=config)


def half_model(family="llama", *, lora=False, dtype=torch.bfloat16):
    """A model that computes in half precision, by autocast as yet."""
    model = make_gpt2() if family == "gpt2" else make_model(family)
    if lora:
        torch.manual_seed(0)
        add_adapters(model.backbone, ModelConfig(model="m", lora=True))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        half_frozen(model.backbone, dtype)
    model.compute_dtype = dtype
    return model
