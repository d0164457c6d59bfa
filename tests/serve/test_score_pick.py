"""`rewardlab score --pick best`: the best reply by raw scores, and rows of which nothing is picked."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rewardlab.serve.file_scoring.backends import Answer
from rewardlab.serve.file_scoring.file import ScoreSettings, score_with
from scored_files import read_jsonl, refusal, scored, write_jsonl
from scoring_stub import Stub, score_of


def test_the_best_reply_is_found_by_raw_scores_whatever_is_written(tmp_path):
    """Probabilities near 1 are equal where the scores are not."""
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "responses": ["aa", "b", "c", "aaa", "aaa"]}])

    class ByLength(Stub):
        async def score_rows(self, rows):
            return Answer([[float(len(reply)) for reply in row.replies] for row in rows])

    wanted = ScoreSettings(pick="best", output_as="probability")
    counts = score_with(ByLength(), source, tmp_path / "best.jsonl", wanted, affine=(100.0, 0.0))
    (row,) = read_jsonl(tmp_path / "best.jsonl")
    assert row["scores"] == [1.0] * 5
    assert (row["response"], row["response_index"], counts.tied) == ("aaa", 3, 1)


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("begins", [".jsonl", ".parquet"])
def test_rows_of_which_nothing_is_picked_keep_their_columns(tmp_path, begins, ending):
    """Also those that are called as what picking takes away."""
    own = {"prompt": "p", "response": "kept", "responses": ["x", "y"], "response_index": 7}
    rows = [
        {"prompt": "p", "response": None, "responses": ["a", "b"], "response_index": None, "messages": None},
        {**own, "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]},
        {"prompt": None, "response": None, "responses": ["u"], "response_index": 3, "messages": None},
    ]
    source = tmp_path / f"rows{begins}"
    if begins == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), source)
    else:
        write_jsonl(source, rows)
    target = tmp_path / f"best{ending}"
    first, second, third = scored(source, target, ScoreSettings(pick="best", on_error="write"))
    best = int(score_of("b") > score_of("a"))

    def read(value: object) -> object:
        return json.loads(value) if ending == ".csv" and isinstance(value, str) and value else value or None

    assert (read(first["response_index"]) or 0, read(first.get("responses"))) == (best, None)
    assert [read(second[name]) for name in ("responses", "response_index")] == [["x", "y"], 7]
    assert second["response"] == "kept"
    assert [read(third[name]) for name in ("responses", "response_index")] == [["u"], 3]
    assert "cannot be scored" in third["score_error"]


def test_a_column_that_picking_fills_with_another_type_is_told_before_anything_is_scored(tmp_path):
    rows = [{"prompt": "p", "responses": ["a", "b"]}, {"prompt": "p", "response": "c", "response_index": "first"}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    wanted = ScoreSettings(pick="best")
    said = refusal(source, tmp_path / "best.parquet", wanted)
    assert "the column 'response_index' is string, and --pick best writes whole numbers there" in said
    assert scored(source, tmp_path / "best.jsonl", wanted)[1]["response_index"] == "first"


def test_the_best_reply_is_picked_the_first_of_several_and_failures_are_said(tmp_path):
    rows = [
        {"id": 1, "prompt": "p", "responses": ["a", "b", "loud!"], "response": "old", "scores": [9]},
        {"id": 2, "prompt": "p", "responses": ["same", "same", "same"]},
        {"id": 3, "prompt": "p", "responses": ["x!", "y!"]},
        {"id": 4, "prompt": "p", "response": "alone"},
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    counts = score_with(Stub(), source, tmp_path / "best.jsonl", ScoreSettings(pick="best"))
    first, second, third, fourth = read_jsonl(tmp_path / "best.jsonl")
    scores = [score_of("a"), score_of("b")]
    best = max(range(2), key=scores.__getitem__)
    assert first == {
        "id": 1,
        "prompt": "p",
        "response": "ab"[best],
        "response_index": best,
        "score": scores[best],
        "scores": [*scores, None],
        "score_errors": {"2": "loud! is loud"},
    }
    assert (second["response"], second["response_index"]) == ("same", 0)
    assert (third["response"], third["response_index"], third["score"]) == (None, None, None)
    assert set(third["score_errors"]) == {"0", "1"}
    assert fourth == {"id": 4, "prompt": "p", "response": "alone", "score": score_of("alone")}
    assert (counts.scored, counts.unscored, counts.tied) == (6, 3, 1)
    pq.write_table(pa.Table.from_pylist([{**{"response": None, "responses": None}, **row} for row in rows]), source)
    source = source.rename(tmp_path / "rows.parquet")
    got = scored(source, tmp_path / "best.parquet", ScoreSettings(pick="best"))
    assert [row["response"] for row in got] == ["ab"[best], "same", None, "alone"]
    assert [row["response_index"] for row in got] == [best, 0, None, None]
    assert "responses" not in got[0]
    assert [row["score"] for row in got] == [row["score"] for row in (first, second, third, fourth)]


def test_there_is_nothing_to_pick_from_single_replies(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    assert "no row has `responses`" in refusal(source, tmp_path / "best.jsonl", ScoreSettings(pick="best"))


def turn(text: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_replies_that_are_turns_are_scored_as_their_texts_and_picked_as_texts(tmp_path, ending):
    """TRL keeps a completion as a list with the assistant's turn."""
    prompt = [turn("p", "user")]
    pq.write_table(
        pa.Table.from_pylist([{"prompt": prompt, "responses": [[turn("a")], [turn("bbb")]]}]), tmp_path / "rows.parquet"
    )
    best = max("a", "bbb", key=score_of)
    (row,) = scored(tmp_path / "rows.parquet", tmp_path / f"best{ending}", ScoreSettings(pick="best"))
    assert row["response"] == best
    assert float(row["score"]) == score_of(best)
    alone = [{"prompt": prompt, "response": reply} for reply in ([turn("a")], turn("a"), "a")]
    found = scored(write_jsonl(tmp_path / "alone.jsonl", alone), tmp_path / "scored.jsonl")
    assert found == [{**one, "score": score_of("a")} for one in alone]


@pytest.mark.parametrize("reply", [[turn("a"), turn("b", "user"), turn("c")], [turn("a", "user")], []])
def test_a_reply_of_other_turns_is_refused(tmp_path, reply):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "response": reply}])
    assert "a response as messages has to be one assistant turn" in refusal(source, tmp_path / "scored.jsonl")
