"""What `rewardlab score` is given by mistake is refused in words, or written with its cause if asked."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from rewardlab.cli import main
from rewardlab.core.errors import DataError
from rewardlab.data.rows import MAX_CHARACTERS
from rewardlab.serve.file_scoring.file import ScoreSettings, score_with
from scored_files import WRITE, read_jsonl, refusal, write_jsonl
from scoring_stub import Stub, score_of

BAD_ROWS = [
    '{"prompt": ',
    "[1]",
    '{"prompt": "a", "response": "' + "x" * MAX_CHARACTERS + '"}',
    {"prompt": "a", "responses": [None, {"role": "user", "content": "a"}]},
    {"prompt": None, "response": "a"},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "robot", "content": "a"}]},
    {"response": "a", "note": 1},
    '{"prompt": "a", "response": "b", "x": NaN, "y": 7}',
]


def test_an_empty_prompt_is_scored_as_everywhere_else(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "", "response": "b"}, {"prompt": "", "responses": ["b"]}])
    score_with(Stub(), source, tmp_path / "scored.jsonl")
    one, several = read_jsonl(tmp_path / "scored.jsonl")
    assert [one["score"]] == several["scores"] == [score_of("b")]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": 5, "response": "b"}, "the prompt is of type int, neither text nor a list of messages"),
        ({"prompt": "a", "responses": []}, "responses is an empty list"),
        ({"prompt": "a", "responses": {"b": 1}}, "responses is of type dict, not a list"),
        ({"prompt": "a", "response": "b", "images": ["c.png"]}, "it has images, of which the texts alone would be"),
        ({"prompt": "a", "response": "b", "tools": [{"type": "function"}]}, "it defines tools, which the prompt would"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(tmp_path, row, said):
    with pytest.raises(DataError, match=said):
        score_with(Stub(), write_jsonl(tmp_path / "rows.jsonl", [row]), tmp_path / "scored.jsonl")


def test_an_empty_cell_of_replies_and_a_folder_in_place_of_a_file_are_said(tmp_path):
    source = tmp_path / "rows.csv"
    source.write_bytes(b"prompt,responses,note\r\na,,\r\n")
    with pytest.raises(DataError, match=r"its columns are prompt, responses \(empty\), note\)"):
        score_with(Stub(), source, tmp_path / "scored.jsonl")
    with pytest.raises(DataError, match="a folder, wanted one file. Name a file in it, .jsonl"):
        score_with(Stub(), tmp_path, tmp_path / "scored.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("lines.json", '{"prompt": "a", "response": "b"}\n\n{"prompt": "a"}\n', "line 3"),
        ("list.json", '[\n{"prompt": "a", "response": "b"},\n{"prompt": "a"}]', "row 2"),
        ("lines.jsonl", '{"prompt": "a", "response": "b"}\n\n{"prompt": "a"}\n', "line 3"),
        ("cells.csv", 'prompt,response,responses\n"a\n",b,\na,,[]\n', "line 4"),
    ],
)
def test_a_cause_names_the_line_or_in_a_file_without_lines_the_row(tmp_path, name, text, place):
    source, target = tmp_path / name, tmp_path / "scored.jsonl"
    source.write_text(text)
    score_with(Stub(), source, target, WRITE)
    assert read_jsonl(target)[-1]["score_error"].startswith(f"{place}: ")


def test_rows_that_cannot_be_scored_are_written_with_their_cause_if_asked(tmp_path, caplog):
    good = {"prompt": "a", "response": "b"}
    source = write_jsonl(tmp_path / "rows.jsonl", [good, *BAD_ROWS, good])
    target = tmp_path / "scored.jsonl"
    counts = score_with(Stub(), source, target, WRITE)
    first, *bad, last = read_jsonl(target)
    assert first == last == {**good, "score": score_of("b")}
    assert (counts.scored, counts.unscored, counts.refused) == (2, 9, 9)
    assert "9 of 11 rows cannot be scored; they are written with the cause" in caplog.text
    assert [row["score"] for row in bad] == [None] * 9
    said = [row["score_error"] for row in bad]
    assert all(cause.startswith(f"line {line}: ") for line, cause in enumerate(said, start=2))
    assert not any("rows.jsonl" in cause for cause in said), "the same rows may have another name when a run goes on"
    for cause, words in zip(
        said,
        [
            "not valid JSON",
            'expected a JSON object, got list. Each line must look like {"prompt": …, …}.',
            "the row has more than 8,000,000 characters",
            "a response is null, not text",
            "its columns are prompt (null), response",
            "a message needs a role and a text",
            "unknown role 'robot'",
            "cannot be scored (its columns are response, note)",
            "the column 'x' holds what cannot be written as JSON",
        ],
        strict=True,
    ):
        assert words in cause
    assert bad[3] == {**BAD_ROWS[3], "score": None, "score_error": said[3]}
    assert bad[8] == {"prompt": "a", "response": "b", "y": 7, "score": None, "score_error": said[8]}


@pytest.mark.parametrize("pick", ["all", "best"])
def test_one_of_several_replies_that_is_none_costs_the_others_no_score_if_asked(tmp_path, pick):
    odd = {"role": "assistant", "content": "b", "tool_calls": [{}]}
    row = {"prompt": "a", "responses": [None, "long one", odd, "b", [{"role": "assistant", "content": "cc"}]]}
    source, target = write_jsonl(tmp_path / "rows.jsonl", [row, {**row, "system": "Be brief."}]), tmp_path / "out.jsonl"
    said = refusal(source, target)
    assert said.startswith(f"{source}:1: response 0, counted from 0, cannot be scored (a response is null, not text).")
    assert said.endswith("`--on-error write` scores the others.")
    counts = score_with(Stub(), source, target, replace(WRITE, pick=pick))
    assert (counts.scored, counts.unscored, counts.refused) == (6, 4, 0)
    for written in read_jsonl(target):
        assert [score is None for score in written["scores"]] == [True, False, True, False, False]
        assert written["scores"][1::2] == [score_of("long one"), score_of("b")]
        assert written["score_errors"]["0"] == "a response is null, not text"
        assert written["score_errors"]["2"].startswith("a message has tool_calls")
        if pick == "best":
            best = max((1, 3, 4), key=lambda number: written["scores"][number])
            assert written["response_index"] == best
            assert written["response"] == {1: "long one", 3: "b", 4: "cc"}[best]


@pytest.mark.parametrize("row", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_such_a_row_is_otherwise_refused_before_anything_is_scored(tmp_path, row):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}, row])
    assert f"{source}:2: " in refusal(source, tmp_path / "scored.jsonl")


def test_a_file_of_nothing_but_such_rows_is_refused(tmp_path):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"q": 1}] * 3)
    assert "none of its 3 rows can be scored" in refusal(source, tmp_path / "scored.jsonl", WRITE)


def corrupt(folder: Path, name: str) -> Path:
    path = folder / name
    content = {
        "empty.jsonl": b"",
        "blank.jsonl": b"\n \n",
        "empty.csv": b"prompt,response\n",
        "empty.json": b"[]",
        "latin.jsonl": b'{"prompt": "a", "response": "b"}\n{"prompt": "\xe9", "response": "b"}\n',
        "latin.csv": b"prompt,response\na,\xe9\n",
        "cut.jsonl.gz": gzip.compress(b'{"prompt": "a", "response": "b"}\n' * 99)[:-20],
        "not.parquet": b"PAR1 or not",
        "rows.xlsx": b"PK",
        "rows.csv.gz": b"",
        "semicolons.csv": b"prompt;response\na;b\n",
        "number.json": b"3",
    }[name]
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("on_error", ["refuse", "write"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty.jsonl", "no rows to score"),
        ("blank.jsonl", "no rows to score"),
        ("empty.csv", "no rows to score"),
        ("empty.json", "no rows to score"),
        ("latin.jsonl", "not UTF-8 text: byte 0x"),
        ("latin.csv", "not UTF-8 text: byte 0x"),
        ("cut.jsonl.gz", "cannot be read after line"),
        ("not.parquet", "cannot be read as Parquet"),
        ("rows.xlsx", "unknown ending. Rows are read from .jsonl"),
        ("rows.csv.gz", "unknown ending"),
        ("semicolons.csv", "separated by semicolons"),
        ("number.json", "got a JSON int, wanted a list of rows or columns"),
    ],
)
def test_a_file_that_cannot_be_read_on_is_refused_before_anything_is_scored(tmp_path, name, words, on_error):
    said = refusal(corrupt(tmp_path, name), tmp_path / "scored.jsonl", ScoreSettings(on_error=on_error))
    assert words in said
    assert name in said


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("rows.jsonl", "it is the file to be scored"),
        ("there.jsonl", "it already exists. Name another file, or replace it with --overwrite"),
        ("scored.txt", "unknown ending '.txt'. Wanted one of .jsonl, .jsonl.gz, .json, .csv, .parquet"),
        ("folder", "is a folder"),
        ("../../../../../dev/null", "is not an ordinary file"),
    ],
)
def test_an_output_that_cannot_be_is_told_with_status_2(tmp_path, output, words, capsys):
    source = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "response": "b"}])
    (tmp_path / "there.jsonl").write_text("mine")
    (tmp_path / "folder").mkdir()
    target = Path("/dev/null") if "null" in output else tmp_path / output
    with pytest.raises(SystemExit) as ended:
        main(["score", "--model", "m", "--input", str(source), "--output", str(target)])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "there.jsonl").read_text() == "mine"
