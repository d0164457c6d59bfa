"""A rendering that ends in the token by which engines pad is refused, counted, and never scored one token early."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from common import make_model, make_tokenizer, pair, write_base_model
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, RenderError
from rewardlab.data.bulk import render_all
from rewardlab.data.chat import EndsInPadding
from rewardlab.data.config import RenderingConfig
from rewardlab.data.store import LeftOut
from rewardlab.data.templates import build_renderer
from rewardlab.serve.file_scoring.file import score_file
from rewardlab.serve.verifying.folder import verify
from sealing import edit

OPEN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nassistant: ' }}{% endif %}"
)
"""No end of its own: a reply ends in whatever it ends in."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder whose batches are padded with an exclamation mark, an ordinary token."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("padding") / "rm"
    renderer = build_renderer(make_tokenizer(OPEN, pad="!"), RenderingConfig(max_seq_len=256))
    assert renderer.spec.final_token_id is None
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return folder


def conversation(reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "How?"}, {"role": "assistant", "content": reply}]


def test_plain_transformers_would_read_such_a_reply_one_token_early(saved):
    """Why it is refused: what a batch makes of it is not the score of its last token."""
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    text = tokenizer.apply_chat_template(conversation("So!"), tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert int(ids[0, -1]) == model.config.pad_token_id
    with torch.no_grad():
        early, short = float(model(ids).logits), float(model(ids[:, :-1]).logits)
        model.config.pad_token_id = 3
        right = float(model(ids).logits)
    assert early == pytest.approx(short, abs=1e-5)
    assert abs(right - early) > 0.01


def test_a_loaded_model_refuses_it_and_scores_all_others(saved):
    scorer = load(saved)
    assert len(scorer.score([conversation("So."), conversation("So! Yes")])) == 2
    with pytest.raises(RenderError, match=r"conversation 1: a rendering ends in token \d+, by which .* are padded"):
        scorer.score([conversation("So."), conversation("So!")])
    with pytest.raises(EndsInPadding):
        scorer.renderer.require_known_end(np.array([5, scorer.renderer.pad_token_id], np.int32))


def test_in_a_file_it_has_no_score_and_its_cause(saved, tmp_path):
    rows = [{"prompt": "How?", "response": "So!"}, {"prompt": "How?", "responses": ["So.", "So!"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = score_file(str(saved), tmp_path / "rows.jsonl", tmp_path / "scored.jsonl")
    assert (found.scored, found.unscored) == (1, 2)
    first, second = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert first["score"] is None
    assert "engines would read its score one token too early" in first["score_error"]
    assert second["scores"][0] is not None
    assert list(second["score_errors"]) == ["1"]


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_while_training_such_rows_are_left_out_and_counted(tmp_path):
    folder = write_base_model(tmp_path / "base", template=OPEN)
    make_tokenizer(OPEN, pad="!").save_pretrained(folder)
    rows = [
        {"prompt": f"How {number}?", "chosen": f"Like so, {number}.", "rejected": "No!" if number == 3 else "No."}
        for number in range(24)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = f"train --model {folder} --dataset {tmp_path / 'pairs.jsonl'} --output-dir {tmp_path / 'run'} --steps 1"
    more = "--batch-size 4 --max-seq-len 128 --eval-fraction 0 --no-baselines --precision fp32 --max-drop-fraction 0.1"
    main([*line.split(), *more.split()])
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    found = manifest["tokens"]["training"]
    assert found["dropped"] == {"ends_in_padding": 1}
    assert found["dropped_ids"]["ends_in_padding"][0].startswith("pairs.jsonl:4: a rendering ends in token")


def test_many_at_once_are_told_the_same(saved):
    renderer = load(saved).renderer
    sound, bad = pair("How?", "So.", "No."), pair("How?", "So.", "No!", id="bad")
    group, left = render_all([sound, bad], renderer)
    assert not isinstance(group, LeftOut)
    assert isinstance(left, LeftOut)
    assert left.cause == "ends_in_padding"


def test_a_pad_token_that_ends_a_canary_is_refused(saved, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    spec = json.loads((copy / "reward_spec.json").read_text())
    last = spec["canaries"][0]["token_ids"][-1]
    edit(copy / "config.json", lambda config: config.update(pad_token_id=last))
    for check in (load, verify):
        with pytest.raises(ArtifactError, match=f"pad_token_id {last} must be set and differ"):
            check(copy)
