"""The pad token of a saved model: what it may be, and that it moves no score; and what else of a tokenizer would."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from artifacts import save
from common import CHATML, make_model, make_tokenizer
from rewardlab.artifact.save import _write_tokenizer, choose_pad, save_reward_model
from rewardlab.core.errors import ArtifactError
from rewardlab.core.types import Message
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer

FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox"]


def test_pad_is_a_token_that_never_ends_a_rendering():
    chatml = build_renderer(make_tokenizer(CHATML), RenderingConfig())
    chosen = choose_pad(chatml, 384)
    assert chosen != chatml.tokenizer.pad_token_id, "that one ends every turn"
    assert chosen not in chatml.token_ids((Message("user", "Hi"), Message("assistant", "yes")))
    plain = build_renderer(make_tokenizer(None), RenderingConfig())
    assert plain.tokenizer.pad_token_id == plain.spec.final_token_id, "pad = EOS, the trap"
    assert choose_pad(plain, 384) not in (plain.spec.final_token_id, None)
    assert choose_pad(plain, 384) < len(plain.tokenizer), "an existing token: nothing is resized"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_pad_equal_to_eos_does_not_move_the_score_in_plain_transformers(tmp_path, family):
    _, renderer, spec = save(tmp_path / "rm", family, template=None)
    assert renderer.tokenizer.pad_token_id == spec.renderer.final_token_id
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    batch = tokenizer.pad({"input_ids": [c.token_ids for c in spec.canaries]}, return_tensors="pt")
    with torch.no_grad():
        scores = model(**batch).logits[:, 0].tolist()
    assert scores == pytest.approx([canary.score for canary in spec.canaries], abs=2e-5)


@pytest.mark.parametrize(("own", "saved"), [(16, 256), (256, 256), (1024, 1024), (10**30, 10**30)])
def test_no_text_within_the_limit_of_the_model_is_cut_by_the_saved_tokenizer(tmp_path, own, saved):
    make_tokenizer().save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base", model_max_length=own)
    renderer = build_renderer(tokenizer, RenderingConfig(max_seq_len=256))
    (tmp_path / "rm").mkdir()
    _write_tokenizer(tmp_path / "rm", renderer, choose_pad(renderer, 384))
    written = AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert written.model_max_length == saved
    turns = [Message("user", "Why so? " * 8), Message("assistant", "Because. " * 8)]
    text = written.apply_chat_template([turn.as_dict() for turn in turns], tokenize=False)
    token_ids = renderer.token_ids(turns)
    assert 16 < len(token_ids) <= 256
    assert written(text, truncation=True, add_special_tokens=False)["input_ids"] == token_ids.tolist()


@pytest.mark.slow
def test_a_tokenizer_that_pads_left_is_saved_to_pad_right(tmp_path):
    """GPT-2 counts positions from the beginning of the row, so padding there would be another score."""
    config = GPT2Config(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3)
    make_tokenizer().save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base", padding_side="left")
    spec = save_reward_model(
        tmp_path / "rm",
        make_model(config=config),
        build_renderer(tokenizer, RenderingConfig(max_seq_len=256)),
        beta=1.0,
        save_dtype=torch.float32,
        provenance={},
    )
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    saved = AutoTokenizer.from_pretrained(tmp_path / "rm")
    wanted = [canary.score for canary in spec.canaries]

    def scores() -> list[float]:
        batch = saved.pad({"input_ids": [canary.token_ids for canary in spec.canaries]}, return_tensors="pt")
        with torch.no_grad():
            return model(**batch).logits[:, 0].tolist()

    assert scores() == pytest.approx(wanted, abs=2e-5)
    saved.padding_side = "left"
    assert max(abs(a - b) for a, b in zip(scores(), wanted, strict=True)) > 1e-2, "it would have shown"


def test_no_possible_pad_refuses_the_save(tmp_path):
    renderer = build_renderer(make_tokenizer(None), RenderingConfig())
    only = renderer.tokenizer.eos_token

    class OneSpecialToken:
        all_special_tokens = (only,)
        pad_token_id = unk_token_id = eos_token_id = renderer.tokenizer.eos_token_id

        def get_vocab(self):
            return {only: self.eos_token_id, "word": 7}

    renderer.tokenizer = OneSpecialToken()
    with pytest.raises(ArtifactError, match="no token can serve as padding"):
        choose_pad(renderer, 384)
