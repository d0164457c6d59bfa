"""What the first study reads: preferences, generated, and a tiny model with random weights to begin from.

    python examples/first_study/make_files.py FOLDER

Writes pairs.train.jsonl, pairs.test.jsonl and tiny-model/. The model knows no language: it shows how a study goes, in
half a minute a run, and its numbers say nothing about real models.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rewardlab.data.synthetic import ceiling, generate, write_dataset

TRAIN, TEST, SEED, WORDS = 600, 400, 0, 1000
END, PAD = "<|end|>", "<|pad|>"


def main(folder: Path) -> None:
    """Write the files."""
    disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    write_dataset(folder, num_train=TRAIN, num_test=TEST, seed=SEED)
    for part in ("train", "test"):
        (folder / f"{part}.jsonl").replace(folder / f"pairs.{part}.jsonl")
    text = (folder / "pairs.train.jsonl").read_text(encoding="utf-8")
    size = write_model(folder / "tiny-model", text)
    best = ceiling(generate(TEST, seed=SEED, topics="test"))
    print(f"{TRAIN} training and {TEST} test pairs; the best model expects an accuracy of {best.bayes_accuracy:.3f}")
    print(f"{folder / 'tiny-model'}: {size:,} random weights")


def write_model(folder: Path, text: str) -> int:
    """Write a model of two layers with a tokenizer that is made from a text; return how many weights it has."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=[END, PAD], initial_alphabet=letters, show_progress=False
    )
    words.train_from_iterator(text.splitlines(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, pad_token=PAD).save_pretrained(folder)
    torch.manual_seed(SEED)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=1024, **sizes, **ends))
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
