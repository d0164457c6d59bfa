"""`rewardlab score` reads and writes JSON Lines, JSON, CSV and Parquet: every column with its type."""

from __future__ import annotations

import csv
import datetime
import json
import math
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import DataError
from rewardlab.data.readers import read_each_row
from rewardlab.serve.file_scoring import parquet as parquet_module
from rewardlab.serve.file_scoring import rows as rows_module
from rewardlab.serve.file_scoring.file import score_with
from rewardlab.serve.file_scoring.journal import partial_of
from scored_files import refusal, scored, write_jsonl
from scoring_stub import Stub, score_of

ROWS = [
    {"id": 1, "prompt": "How?", "response": "So.", "note": {"a": [1, "ü"]}, "score": 3},
    {"id": 2, "prompt": "How?", "responses": ["a", "loud!", "b"], "note": None},
    {"id": 3, "prompt": [{"role": "user", "content": "Why?"}], "response": "Because."},
    {"id": 4, "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No!"}]},
]


WANTED = [
    {"id": 1, "prompt": "How?", "response": "So.", "note": {"a": [1, "ü"]}, "score": score_of("So.")},
    {
        **ROWS[1],
        "scores": [score_of("a"), None, score_of("b")],
        "score_errors": {"1": "loud! is loud"},
    },
    {**ROWS[2], "score": score_of("Because.")},
    {**ROWS[3], "score": None, "score_error": "No! is loud"},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json"])
@pytest.mark.parametrize("output", ["scored.jsonl", "scored.jsonl.gz", "scored", "scored.json"])
def test_rows_of_every_kind_keep_their_columns_in_json(tmp_path, name, output):
    source = tmp_path / name
    if name.endswith(".json"):
        source.write_text(json.dumps(ROWS))
    else:
        write_jsonl(source, ROWS)
    assert scored(source, tmp_path / output) == WANTED
    again = tmp_path / f"again_{output}"
    scored(source, again)
    assert again.read_bytes() == (tmp_path / output).read_bytes(), "gzip too writes no date"


def test_csv_has_every_column_in_every_row_and_lists_as_json(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:2], {"id": 5, "prompt": 'a,\n"b"', "response": ""}])
    first, second, third = scored(source, tmp_path / "scored.csv")
    names = ["id", "prompt", "response", "note", "responses"]
    names += ["score", "score_error", "scores", "score_errors", "truncated_tokens"]
    assert list(first) == names
    assert json.loads(first["note"]) == {"a": [1, "ü"]}
    assert float(first["score"]) == score_of("So.")
    assert json.loads(second["scores"]) == [score_of("a"), None, score_of("b")]
    assert json.loads(second["score_errors"]) == {"1": "loud! is loud"}
    assert third["prompt"] == 'a,\n"b"'
    again = scored(tmp_path / "scored.csv", tmp_path / "again.csv")
    assert again == [first, second, third], "the output of one scoring can be the input of another"


@pytest.mark.slow
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
@example(texts=["a\rb", "\r", "\n\r\n", '"', ",", "\r\n"])
def test_any_text_is_read_back_from_csv_as_it_was(texts: list[str]):
    """By the csv module and by our own reader. Lines end with a line feed alone."""
    rows = [{"prompt": "p", "response": text, "last": text} for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        source, target = write_jsonl(Path(folder) / "rows.jsonl", rows), Path(folder) / "scored.csv"
        got = scored(source, target)
        assert [(row["response"], row["last"]) for row in got] == [(text, text) for text in texts]
        assert [row["response"] for _, row in read_each_row(target)] == texts
        assert target.read_bytes().splitlines(keepends=True)[0].endswith(b"truncated_tokens\n")


def test_a_reply_or_a_note_in_csv_stays_the_text_that_it_is(tmp_path):
    source = tmp_path / "rows.csv"
    with source.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "messages", "response", "responses", "notes"])
        writer.writerow(["p", "", '[{"name": "f"}]', "", '[{"a":  1}]'])
        writer.writerow(['[{"role": "user", "content": "Why?"}]', "", "", '["a", "b"]', "[]"])
        writer.writerow(["", json.dumps(ROWS[3]["messages"]), "", "", ""])
    first, second, third = scored(source, tmp_path / "scored.jsonl")
    assert (first["response"], first["notes"]) == ('[{"name": "f"}]', '[{"a":  1}]')
    assert first["score"] == score_of('[{"name": "f"}]')
    assert second["scores"] == [score_of("a"), score_of("b")]
    assert third["score_error"] == "No! is loud"
    assert scored(source, tmp_path / "again.csv")[0]["notes"] == '[{"a":  1}]'


def test_a_csv_of_both_kinds_of_rows_takes_empty_cells_for_none(tmp_path):
    source = tmp_path / "rows.csv"
    source.write_text('prompt,response,responses,n\nHow?,So.,,007\nHow?,,"[""a"", ""b""]",1e3\n')
    first, second = scored(source, tmp_path / "scored.jsonl")
    assert first == {"prompt": "How?", "response": "So.", "responses": "", "n": "007", "score": score_of("So.")}
    assert second["scores"] == [score_of("a"), score_of("b")]
    assert second["n"] == "1e3"


def table() -> pa.Table:
    return pa.table(
        {
            "prompt": pa.array(["How?", "How?"]).dictionary_encode(),
            "response": pa.array(["So.", None], pa.large_string()),
            "responses": [None, ["a", "b!"]],
            "when": pa.array([datetime.datetime(2026, 1, 2), None], pa.timestamp("ms", "UTC")),
            "x": pa.array([math.nan, 1.0], pa.float32()),
            "raw": pa.array([b"\xff", b""]),
            "score": pa.array([5, 6], pa.int8()),
        },
        metadata={"huggingface": "{}", "mine": "kept"},
    )


def test_parquet_columns_keep_their_types(tmp_path):
    pq.write_table(table(), tmp_path / "rows.parquet")
    score_with(Stub(), tmp_path / "rows.parquet", tmp_path / "scored.parquet")
    got = pq.read_table(tmp_path / "scored.parquet")
    kept = [name for name in table().column_names if name != "score"]
    assert got.select(kept).schema.types == pq.read_table(tmp_path / "rows.parquet").select(kept).schema.types
    assert got.schema.metadata == {b"mine": b"kept"}
    assert str(got.select(kept).to_pylist()) == str(table().select(kept).to_pylist())
    assert got.column_names[len(kept) :] == ["score", "score_error", "scores", "score_errors", "truncated_tokens"]
    assert got["score"].to_pylist() == [score_of("So."), None]
    assert got["scores"].to_pylist() == [None, [score_of("a"), None]]
    assert got["score_errors"].to_pylist() == [None, '{"1": "b! is loud"}']


def test_parquet_to_json_names_times_and_refuses_bytes_and_nan(tmp_path):
    pq.write_table(table().drop_columns(["x", "raw"]), tmp_path / "rows.parquet")
    first, _ = scored(tmp_path / "rows.parquet", tmp_path / "scored.jsonl")
    assert first["when"] == "2026-01-02 00:00:00.000Z"
    for column, words in (("x", "JSON has no NaN"), ("raw", "bytes is not JSON serializable")):
        pq.write_table(table().select(["prompt", "response", "responses", column]), tmp_path / "odd.parquet")
        said = refusal(tmp_path / "odd.parquet", tmp_path / "odd.jsonl")
        assert f"odd.parquet:1: the column '{column}' holds what cannot be written as JSON" in said
        assert words in said


def test_json_to_parquet_finds_one_type_a_column_or_says_which_has_several(tmp_path):
    rows = [{"prompt": "a", "response": "b", "n": 1, "m": {"x": 1}}, {"prompt": "a", "response": "b", "n": 2.5}]
    rows += [{"prompt": "a", "response": "b", "m": {"y": "z"}, "late": [True]}]
    got = scored(write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "scored.parquet")
    assert [row["n"] for row in got] == [1.0, 2.5, None]
    assert got[2]["m"] == {"x": None, "y": "z"}
    assert got[2]["late"] == [True]
    odd = write_jsonl(tmp_path / "odd.jsonl", ROWS)
    said = refusal(odd, tmp_path / "odd.parquet")
    assert "the column 'prompt' cannot be written as Parquet" in said
    assert "Name an --output that ends in .jsonl" in said
    odd = write_jsonl(tmp_path / "odd.jsonl", [{"prompt": "a", "response": "b", "m": {}}])
    assert "the column 'm' cannot be written as Parquet" in refusal(odd, tmp_path / "odd.parquet")


def number_rows(*numbers: object, at: tuple[int, ...]) -> list[dict]:
    """Rows of several chunks, with numbers in some of them."""
    rows: list[dict] = [{"prompt": "a", "response": "b", "n": None} for _ in range(10)]
    for place, number in zip(at, numbers, strict=True):
        rows[place]["n"] = number
    return rows


@pytest.mark.parametrize("at", [(0, 9), (9, 0), (0, 1)])
@pytest.mark.parametrize("wrap", [lambda n: n, lambda n: {"x": n}, lambda n: [[{"x": n}]]], ids=["n", "{n}", "[[{n}]]"])
def test_a_whole_number_that_no_float_holds_is_told_before_anything_is_scored(tmp_path, monkeypatch, at, wrap):
    """It stands in another chunk than the number with a fraction, or in the same one."""
    monkeypatch.setattr(parquet_module, "ROWS_AT_A_TIME", 4)
    source = write_jsonl(tmp_path / "rows.jsonl", number_rows(wrap(2**53 + 1), wrap(0.5), at=at))
    assert "the column 'n' cannot be written as Parquet" in refusal(source, tmp_path / "scored.parquet")
    source = write_jsonl(tmp_path / "fine.jsonl", number_rows(wrap(2**53), wrap(0.5), at=at))
    assert scored(source, tmp_path / "fine.parquet")[at[0]]["n"] == wrap(2.0**53)
    source = write_jsonl(tmp_path / "whole.jsonl", number_rows(wrap(2**53 + 1), wrap(-(2**62)), at=at))
    assert scored(source, tmp_path / "whole.parquet")[at[1]]["n"] == wrap(-(2**62))


def test_what_parquet_cannot_hold_after_all_is_said_in_words_and_the_scores_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_module, "_large_in", lambda *_: iter(()))
    monkeypatch.setattr(parquet_module, "ROWS_AT_A_TIME", 4)
    source = write_jsonl(tmp_path / "rows.jsonl", number_rows(2**53 + 1, 0.5, at=(0, 9)))
    with pytest.raises(DataError, match=r"rows\.jsonl: a value cannot be written as Parquet .*9007199254740993"):
        score_with(Stub(), source, tmp_path / "scored.parquet")
    assert sorted(path.name for path in partial_of(tmp_path / "scored.parquet").iterdir()) == [
        ".lock",
        "scores.jsonl",
        "state.json",
    ]


def test_a_parquet_file_with_two_columns_of_one_name_is_refused(tmp_path):
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array([1]), pa.array([2])]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "response", "n", "n"]), tmp_path / "rows.parquet")
    for output in ("scored.jsonl", "scored.parquet"):
        said = refusal(tmp_path / "rows.parquet", tmp_path / output)
        assert said.endswith("names the column 'n' more than once. Rename or remove one.")


def test_long_rows_are_kept_sooner(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "CHARACTERS_AT_A_TIME", 10)
    sizes: list[int] = []
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abcd", "response": "e"}] * 5)
    score_with(Stub(lambda rows: sizes.append(len(rows))), source, tmp_path / "scored.jsonl")
    assert sizes == [2, 2, 1]
