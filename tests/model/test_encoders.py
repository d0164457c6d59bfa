"""Models that are not causal are refused with what is supported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from rewardlab.core.errors import ModelError
from rewardlab.model.config import ModelConfig
from rewardlab.model.load import load_reward_model

TINY = {"vocab_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(vocab_size=384, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: BertForMaskedLM(BertConfig(**TINY)),
        lambda: BertForSequenceClassification(BertConfig(**TINY, num_labels=1)),
        t5,
    ],
    ids=["encoder", "reward model on an encoder", "encoder and decoder"],
)
def test_a_model_that_is_not_causal_is_told_what_is_supported(tmp_path: Path, make) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no .*head .*`score`.* not supported: take a causal model, such as Llama"):
        load_reward_model(str(tmp_path), ModelConfig(), seed=0, layout="padded", device=torch.device("cpu"), log=print)
