"""`rewardlab score` reads a prompt as the model's training did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conftest import make_model, make_tokenizer
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.types import Message
from rewardlab.data.chat import build_renderer
from rewardlab.data.config import DataConfig
from rewardlab.serve.score_file import score_file

OPEN = "\n\nHuman: Is light water?\n\nAssistant:"
REPLY = " no, it is more"


@pytest.mark.parametrize(
    ("template", "conversation"),
    [
        ("concat", (Message("user", OPEN), Message("assistant", REPLY))),
        ("plain", (Message("user", "Is light water?"), Message("assistant", REPLY.strip()))),
    ],
)
def test_an_open_transcript_is_scored_as_the_model_was_trained_on_it(tmp_path: Path, template, conversation):
    """Its turns for a model of turns, the text as it is for a model of bare texts."""
    renderer = build_renderer(
        make_tokenizer(None, pad="<|unused|>"), DataConfig(max_seq_len=128, chat_template=template)
    )
    save_reward_model(tmp_path / "model", make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    source = tmp_path / "replies.jsonl"
    source.write_text(json.dumps({"prompt": OPEN, "responses": [REPLY]}) + "\n", encoding="utf-8")
    score_file(str(tmp_path / "model"), source, tmp_path / "scored.jsonl")
    scorer = load(tmp_path / "model")
    assert json.loads((tmp_path / "scored.jsonl").read_text())["scores"] == pytest.approx(scorer.score([conversation]))
    both = scorer.score([(Message("user", OPEN), Message("assistant", REPLY)), conversation])
    assert template == "concat" or abs(both[0] - both[1]) > 1e-3, "the two readings are told apart"
