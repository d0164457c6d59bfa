"""`rewardlab score` reads a prompt as the model's training did."""

from __future__ import annotations

import csv
import gzip
import json
import math
import threading
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from common import make_model, make_tokenizer
from rewardlab.artifact import load as artifact_load
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Message
from rewardlab.data.chat import Renderer
from rewardlab.data.config import RenderingConfig
from rewardlab.data.rows import MAX_CHARACTERS
from rewardlab.data.templates import build_renderer
from rewardlab.score import Scorer
from rewardlab.serve.file_scoring import rows as rows_module
from rewardlab.serve.file_scoring.backends import LocalScorer
from rewardlab.serve.file_scoring.file import ScoreSettings, score_file
from rewardlab.serve.file_scoring.journal import partial_of

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
        make_tokenizer(None, pad="<|unused|>"), RenderingConfig(max_seq_len=128, chat_template=template)
    )
    save_reward_model(tmp_path / "model", make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    source = tmp_path / "replies.jsonl"
    source.write_text(json.dumps({"prompt": OPEN, "responses": [REPLY]}) + "\n", encoding="utf-8")
    score_file(str(tmp_path / "model"), source, tmp_path / "scored.jsonl")
    scorer = load(tmp_path / "model")
    assert json.loads((tmp_path / "scored.jsonl").read_text())["scores"] == pytest.approx(scorer.score([conversation]))
    both = scorer.score([(Message("user", OPEN), Message("assistant", REPLY)), conversation])
    assert template == "concat" or abs(both[0] - both[1]) > 1e-3, "the two readings are told apart"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=64))
    folder = tmp_path_factory.mktemp("score") / "model"
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return str(folder)


def test_each_conversation_is_encoded_once(model, tmp_path, monkeypatch):
    source, encoded, encode_all = tmp_path / "rows.jsonl", [], Renderer.encode_all
    source.write_text(
        "".join(json.dumps({"prompt": f"How {n % 3}?", "responses": ["No.", "So.", "No."]}) + "\n" for n in range(6))
    )

    def counted(self, conversations, texts):
        encoded.extend(prompt[-1].content + reply.content for *prompt, reply in conversations)
        return encode_all(self, conversations, texts)

    monkeypatch.setattr(Renderer, "encode_all", counted)
    score_file(model, source, tmp_path / "scored.jsonl")
    assert sorted(text for text in encoded if text.startswith("How ")) == [
        f"How {n}?{reply}" for n in range(3) for reply in ("No.", "So.")
    ]


def test_rows_to_come_are_rendered_while_others_are_computed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 2)
    render, compute = LocalScorer.render, LocalScorer.compute
    begun = [threading.Event() for _ in range(4)]
    computed: list[bool] = []
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"How {n}?", "response": "No."}) + "\n" for n in range(8)))

    def rendering(self, rows):
        begun[int(rows[0].prompt[4]) // 2].set()
        return render(self, rows)

    def computing(self, rows):
        answer = compute(self, rows)
        computed.append(all(event.wait(timeout=60) for event in begun[: len(computed) + 2]))
        return answer

    monkeypatch.setattr(LocalScorer, "render", rendering)
    monkeypatch.setattr(LocalScorer, "compute", computing)
    score_file(model, source, tmp_path / "scored.jsonl")
    assert computed == [True] * 4, "the part after the one that is computed was taken up meanwhile"


def test_typed_control_tokens_are_told_and_score_as_text(model, tmp_path, caplog):
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    rows = [{"prompt": "How?", "response": "No."}, {"prompt": "How?", "response": "No.<|im_end|>"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("WARNING", logger="rewardlab"):
        score_file(model, source, target)
    assert (
        f"{source}: control tokens are typed in 1 of 2 replies or their prompts; they are read as text" in caplog.text
    )
    first, second = written(target)
    assert abs(first["score"] - second["score"]) > 1e-3, "it is part of the reply"


def written(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_reply_above_the_limit_is_an_entry_with_its_cause(model, tmp_path):
    rows = [
        {"prompt": "How?", "response": "So."},
        {"prompt": "How?", "response": "why " * 200},
        {"prompt": "How?", "responses": ["So.", "why " * 200, "No."]},
    ]
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = score_file(model, source, target)
    assert (found.scored, found.unscored) == (3, 2)
    first, second, third = written(target)
    assert isinstance(first["score"], float)
    assert "score_error" not in first
    assert second["score"] is None
    assert "above the limit of 64" in second["score_error"]
    assert third["scores"][1] is None
    assert set(third["score_errors"]) == {"1"}
    assert third["scores"][0] == pytest.approx(first["score"], abs=1e-5)
    assert not list(tmp_path.glob(".*.partial*"))


LONG = [
    {"prompt": "How?", "response": "So."},
    {"prompt": "Why " * 60, "response": "No."},
    {"prompt": "Why " * 60, "responses": ["No.", "why " * 200, "Yes, that is so."]},
]


@pytest.mark.slow
def test_a_prompt_above_the_limit_is_cut_and_said_or_refused_if_asked(model, tmp_path):
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in LONG))
    assert score_file(model, source, target).cut == 2
    first, second, third = written(target)
    scorer = load(model)
    turns = [(Message("user", row["prompt"]), Message("assistant", "No.")) for row in LONG[1:]]
    lengths = [scorer.renderer.render(one[:1], one[1:]).truncated_tokens for one in turns]
    assert "truncated_tokens" not in first
    assert second["truncated_tokens"] == lengths[:1]
    assert second["score"] == pytest.approx(scorer.score(turns[:1])[0], abs=1e-5)
    assert (third["truncated_tokens"][0], third["truncated_tokens"][1]) == (lengths[1], 0), "one has no score at all"
    assert third["truncated_tokens"][2] > lengths[1], "a longer reply takes more of the prompt away"
    found = score_file(model, source, tmp_path / "refused.jsonl", ScoreSettings(overlong="refuse"))
    assert (found.cut, found.scored, found.unscored) == (0, 1, 4)
    first_again, second, third = written(tmp_path / "refused.jsonl")
    assert first_again["score"] == pytest.approx(first["score"], abs=1e-5)
    assert second["score"] is None
    assert f"it takes {64 + lengths[0]} tokens, above the model's limit of 64" in second["score_error"]
    assert set(third["score_errors"]) == {"0", "1", "2"}
    assert "truncated_tokens" not in second


@pytest.mark.slow
def test_what_was_cut_goes_with_a_run_that_goes_on_and_into_every_format(model, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 2)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in LONG))
    score_file(model, source, tmp_path / "whole.jsonl")
    whole = [row.get("truncated_tokens") for row in written(tmp_path / "whole.jsonl")]
    score, calls = Scorer.score, []

    def failing(self, conversations, **named):
        calls.append(conversations)
        if len(calls) == 2:
            raise RuntimeError("the power is out")
        return score(self, conversations, **named)

    monkeypatch.setattr(Scorer, "score", failing)
    with pytest.raises(RuntimeError):
        score_file(model, source, tmp_path / "scored.parquet")
    assert score_file(model, source, tmp_path / "scored.parquet").cut == 2
    assert pq.read_table(tmp_path / "scored.parquet")["truncated_tokens"].to_pylist() == whole
    score_file(model, source, tmp_path / "scored.csv")
    with (tmp_path / "scored.csv").open(newline="") as file:
        cells = [row["truncated_tokens"] for row in csv.DictReader(file)]
    assert [json.loads(cell) if cell else None for cell in cells] == whole


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"deep": [NaN]}'])
def test_what_cannot_be_written_again_is_refused_before_anything_is_scored(model, tmp_path, monkeypatch, value):
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    good = json.dumps({"prompt": "How?", "response": "So."})
    source.write_text(good + "\n" + good[:-1] + f', "note": {value}}}\n')
    monkeypatch.setattr(artifact_load, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the column 'note' holds what cannot be written as JSON"):
        score_file(model, source, target)
    assert not target.exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_line_that_is_too_long_is_refused_and_never_in_memory_as_a_whole(model, tmp_path, monkeypatch, name, line):
    source, target = tmp_path / name, tmp_path / "scored.jsonl"
    size = 20 * MAX_CHARACTERS
    with (gzip.open if name.endswith(".gz") else open)(source, "wt") as file:
        file.write((json.dumps({"prompt": "How?", "response": "So."}) + "\n") * (line - 1) + '{"prompt": "')
        for _ in range(20):
            file.write("x" * MAX_CHARACTERS)
        file.write('", "response": "a"}\n')
    monkeypatch.setattr(artifact_load, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=rf"{name}:{line}: the row has more than 8,000,000 characters. Shorten"):
            score_file(model, source, target)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 4
    assert not target.exists()


def test_what_is_scored_is_kept_before_the_rest_is(model, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rows_module, "ROWS_AT_A_TIME", 2)
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    source.write_text("".join(json.dumps({"prompt": "How?", "response": f"{n}"}) + "\n" for n in range(5)))
    score, calls = Scorer.score, []

    def failing(self, conversations, **named):
        calls.append([turns[-1].content for turns in conversations])
        if len(calls) == 3:
            raise RuntimeError("the power is out")
        return score(self, conversations, **named)

    monkeypatch.setattr(Scorer, "score", failing)
    with pytest.raises(RuntimeError):
        score_file(model, source, target)
    assert not target.exists()
    assert f"4 of 5 rows are scored and kept in {partial_of(target)}; the same command goes on" in caplog.text
    assert score_file(model, source, target).scored == 5
    assert calls == [["0", "1"], ["2", "3"], ["4"], ["4"]], "nothing is scored again but what was lost"
    assert len(written(target)) == 5
    assert not partial_of(target).exists()


def test_a_score_that_is_no_number_has_its_cause_and_old_ones_go(model, tmp_path, monkeypatch):
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    source.write_text(
        json.dumps({"prompt": "How?", "response": "So.", "score_error": "of before", "scores": [1]})
        + "\n"
        + json.dumps({"prompt": "How?", "responses": ["So.", "No."]})
        + "\n"
    )
    monkeypatch.setattr(Scorer, "score", lambda self, conversations, **_: [0.5, math.nan, 0.25])
    found = score_file(model, source, target)
    assert (found.scored, found.unscored) == (2, 1)
    first, second = written(target)
    assert first == {"prompt": "How?", "response": "So.", "score": 0.5}
    assert second["scores"] == [None, 0.25]
    assert second["score_errors"] == {"0": "its score is nan, which is not a finite number"}


def test_a_target_that_comes_to_be_meanwhile_is_not_replaced(model, tmp_path, monkeypatch):
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    source.write_text(json.dumps({"prompt": "How?", "response": "So."}) + "\n")

    def meanwhile(self, conversations, **_):
        target.write_text("of another")
        return [0.5]

    monkeypatch.setattr(Scorer, "score", meanwhile)
    with pytest.raises(ConfigError, match="the file was created while scoring ran"):
        score_file(model, source, target)
    assert target.read_text() == "of another"
    target.unlink()
    monkeypatch.setattr(Scorer, "score", lambda *_, **__: pytest.fail("scored twice"))
    score_file(model, source, target)
    assert written(target)[0]["score"] == 0.5


def test_rows_that_are_looked_at_move_a_bar(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def bar(items, *, title: str, unit: str):
        rows = list(items)
        seen.append((title, len(rows)))
        return rows

    monkeypatch.setattr(rows_module, "bar", bar)
    source = tmp_path / "replies.jsonl"
    source.write_text((json.dumps({"prompt": OPEN, "response": REPLY}) + "\n") * 3, encoding="utf-8")
    score_file(model, source, tmp_path / "scored.jsonl")
    assert seen == [("looking at replies.jsonl", 3)]
