"""What tiny models and their tokenizers are made from, for benchmarks and tests alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from rewardlab.artifact.canaries import render_canaries
from rewardlab.artifact.canary_states import alone
from rewardlab.data.chat import Renderer
from rewardlab.data.synthetic import generate
from rewardlab.model.reward import RewardModel

TINY: Mapping[str, type] = {"tiny-llama": LlamaConfig, "tiny-qwen2": Qwen2Config}
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large weights, so that scores differ enough for a mistake to show.
    "initializer_range": 0.3,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""Positions scaled as in Llama 3."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused|>")


def byte_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int,
    template: str | None = CHATML,
    pad: str = "<|im_end|>",
    special: Sequence[str] = SPECIAL,
) -> PreTrainedTokenizerFast:
    """`special`, the 256 bytes, and pairs merged on `texts` up to `vocab_size`; pads, by default, with its EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token=pad,
        unk_token="<|endoftext|>",
        chat_template=template,
    )


def write_tiny(folder: Path, name: str) -> str:
    """A two-layer model with random weights and a small tokenizer, as a folder."""
    texts = [
        turn.content
        for pair in generate(64, seed=1, topics="train")
        for turn in (*pair.preference.prompt, *pair.preference.replies[0])
    ]
    fast = byte_tokenizer(texts, vocab_size=600, special=SPECIAL[:3])
    torch.manual_seed(0)
    config = TINY[name](
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    fast.save_pretrained(str(folder))
    return str(folder)


def learn_slightly(model: RewardModel, renderer: Renderer, *, directions: Sequence[float] = (1.0,)) -> RewardModel:
    """Weights of a bfloat16 base, each moved by less than half a step of it, so that the canaries' scores rise, or as
    the `directions` say, which they take in turn.

    It has learned as reward models do: by updates too small for the nearest half-precision value to show.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    for (_, _, token_ids), direction in zip(render_canaries(renderer), cycle(directions), strict=False):
        (direction * model(alone(token_ids)).sum()).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(_less_than_half_a_step(parameter) * parameter.grad.sign())
                parameter.grad = None
    return model


def _less_than_half_a_step(weight: torch.Tensor) -> torch.Tensor:
    """0.4 of the distance of bfloat16 values about each weight."""
    exponent = torch.floor(torch.log2(weight.abs().clamp(min=1e-30)))
    return 0.4 * torch.exp2(exponent) * torch.finfo(torch.bfloat16).eps
