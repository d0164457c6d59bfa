"""`rewardlab score` puts the columns `system` and `history` before the prompt, as training does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common import make_model, make_tokenizer
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.errors import DataError
from rewardlab.core.types import Message
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.serve.file_scoring.file import ScoreSettings, score_file

SYSTEM, USER, REPLY = Message("system", "more"), Message("user", "Is light water?"), Message("assistant", "no")
EARLIER = (Message("user", "Hi"), Message("assistant", "Hello"))
CONTEXT = {"system": "more", "history": [["Hi", "Hello"]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("score") / "model"
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return str(folder)


def scored(model: str, folder: Path, *rows: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    source, target = folder / "rows.jsonl", folder / "scored.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    score_file(model, source, target, settings=ScoreSettings(**settings))
    return [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]


def test_both_columns_become_turns_before_the_prompt(model, tmp_path):
    rows = [
        {"prompt": USER.content, "response": REPLY.content},
        {"prompt": USER.content, "response": REPLY.content, **CONTEXT},
        {"prompt": [USER.as_dict()], "responses": [REPLY.content], **CONTEXT},
        {"messages": [USER.as_dict(), REPLY.as_dict()], **CONTEXT},
        {"messages": [turn.as_dict() for turn in (SYSTEM, *EARLIER, USER, REPLY)], **CONTEXT},
        {"prompt": "\n\nHuman: Is light water?\n\nAssistant:", "response": " no", **CONTEXT},
        {"prompt": USER.content, "response": REPLY.content, "system": "", "history": []},
    ]
    out = scored(model, tmp_path, *rows)
    alone, whole = load(Path(model)).score([[USER, REPLY], [SYSTEM, *EARLIER, USER, REPLY]])
    assert abs(alone - whole) > 1e-3
    scores = [row.get("score", row.get("scores", [None])[0]) for row in out]
    assert scores == pytest.approx([alone, *[whole] * 5, alone], abs=1e-5)
    assert out[1]["system"] == "more"
    assert out[1]["history"] == [["Hi", "Hello"]]


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({"system": {"os": "linux"}}, "wanted a text; rename it if it means another thing"),
        ({"history": "once"}, "wanted a list of .*; rename it if it means another thing"),
        ({"prompt": [SYSTEM.as_dict(), USER.as_dict()], "system": "less"}, "and the prompt's system turn"),
    ],
)
def test_columns_that_do_not_fit_are_refused_with_what_to_do(context, said, model, tmp_path):
    row = {"prompt": USER.content, "response": REPLY.content, **context}
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: cannot be scored \(.*{said}"):
        scored(model, tmp_path, row)
    out = scored(model, tmp_path, row, {"prompt": "a", "response": "b"}, on_error="write")
    assert out[0]["score"] is None
    assert "system" in out[0]["score_error"] or "history" in out[0]["score_error"]
    assert out[1]["score"] is not None
