"""Models small enough to try a benchmark with: two layers of random weights and a tokenizer of 600 tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from rewardlab.data.synthetic import generate

TINY: Mapping[str, type] = {"tiny-llama": LlamaConfig, "tiny-qwen2": Qwen2Config}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny(folder: Path, name: str) -> str:
    """A two-layer model with random weights and a small tokenizer, as a folder."""
    texts = [
        turn.content
        for pair in generate(64, seed=1, topics="train")
        for turn in (*pair.preference.prompt, *pair.preference.replies[0])
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHATML,
    )
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
