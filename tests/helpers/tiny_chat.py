"""A tiny language model with a chat template, saved as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common import make_tokenizer
from harness.tiny import GROUPED, SIZES


def save_chat_model(folder: Path, **generation: Any) -> Path:
    """Save it; `generation` is what its generation_config.json says besides."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sizes = {**SIZES, "vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end, "initializer_range": 0.1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **GROUPED))
    model.generation_config.update(eos_token_id=end, pad_token_id=end, **generation)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
