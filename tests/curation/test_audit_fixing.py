"""`rewardlab data audit --fix`: the rows that stay are untouched, and a second audit finds none of what was removed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest

from helpers.planted import Planted
from rewardlab.cli import main
from rewardlab.core.files import read_jsonl, write_jsonl
from rewardlab.curation.auditing.registry import CHECKS

REMOVED = [check.name for check in CHECKS.values() if check.is_removed]


def run(*arguments: object) -> int:
    """Return the exit status of `rewardlab data audit` with these arguments."""
    try:
        main(["data", "audit", *map(str, arguments), "--num-workers", "1"])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def audited(path: Path, *arguments: object) -> dict[str, dict]:
    """Return the checks of a second audit."""
    out = path.with_suffix(".audit.json")
    assert run(path, "--json", out, "--overwrite", *arguments) in (0, 1)
    checks: dict[str, dict] = json.loads(out.read_text())["checks"]
    return checks


def planted_file(tmp_path: Path) -> Path:
    planted = Planted(seed=1)
    planted.plant_all()
    planted.write(tmp_path / "planted.jsonl", num_rows=650)
    return tmp_path / "planted.jsonl"


@pytest.mark.slow
def test_rows_that_stay_are_the_lines_of_the_file_and_every_other_is_traced(tmp_path: Path) -> None:
    path, cleaned = planted_file(tmp_path), tmp_path / "out" / "cleaned.jsonl"
    before = path.read_bytes()
    assert run(path, "--fix", "--output", cleaned) == 1
    assert path.read_bytes() == before
    lines = before.splitlines(keepends=True)
    trace = [row for _, row in read_jsonl(tmp_path / "out" / "cleaned.removed.jsonl")]
    gone = {int(str(row["row"]).rpartition(":")[2]) for row in trace}
    assert cleaned.read_bytes() == b"".join(line for number, line in enumerate(lines, 1) if number not in gone)
    assert {row["check"] for row in trace} == set(REMOVED) - {"leaks", "overlap-prompts", "overlap-13"}
    assert all(row["done"] == "removed" and row["value"] >= 1 for row in trace)
    again = audited(cleaned)
    assert {name: again[name]["flagged"] for name in REMOVED if name in again} == dict.fromkeys(
        (name for name in REMOVED if name in again), 0
    )
    # 37 + 5 copies, 23 near copies, 19 pairs both ways, 33 rows that reading drops.
    assert len(gone) == 42 + 23 + 38 + 45


@pytest.mark.slow
def test_any_check_can_be_removed_and_is_then_not_found_again(tmp_path: Path) -> None:
    path, cleaned = planted_file(tmp_path), tmp_path / "cleaned.jsonl"
    names = [name for name in CHECKS if not name.startswith(("overlap-", "leak"))]
    run(path, "--fix", "--output", cleaned, "--remove", *names)
    assert all(check["flagged"] == 0 for check in audited(cleaned).values())


@pytest.mark.slow
def test_a_check_that_fails_and_is_not_removed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(planted_file(tmp_path), "--fix", "--output", tmp_path / "cleaned.jsonl") == 1
    said = capsys.readouterr().out
    left = said.partition("still in: ")[2].partition(";")[0].split(", ")
    assert "encoding-damage" in left
    assert not set(left) & set(REMOVED)
    # What stays in is what another audit of the cleaned file finds above its limit. The rows of equal and of empty
    # replies are flagged too, and went because reading drops them.
    again = audited(tmp_path / "cleaned.jsonl")
    assert left == [name for name, check in again.items() if check["above_limit"]]
    assert {"identical-replies", "empty-replies"} & {name for name, check in again.items() if not check["flagged"]}


@pytest.mark.slow
def test_nothing_is_removed_that_remove_does_not_name(tmp_path: Path) -> None:
    path, cleaned = planted_file(tmp_path), tmp_path / "cleaned.jsonl"
    run(path, "--fix", "--output", cleaned, "--remove", "refusals")
    assert len(path.read_bytes().splitlines()) - len(cleaned.read_bytes().splitlines()) == 5
    before, after = audited(path), audited(cleaned)
    assert {name: check["flagged"] for name, check in after.items() if check["flagged"] != before[name]["flagged"]} == {
        "refusals": 0
    }


def test_a_duplicate_of_a_row_that_goes_stays(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a\0b", "rejected": "c"}
    rows = [row, {**row, "label": 0.9}, {"prompt": "q", "chosen": "d", "rejected": "e"}]
    write_jsonl(tmp_path / "a.jsonl", [*rows, rows[2]])
    run(tmp_path / "a.jsonl", "--fix", "--output", tmp_path / "b.jsonl", "--remove", "duplicate-rows", "contradictions")
    assert [row for _, row in read_jsonl(tmp_path / "b.jsonl")] == rows


def test_rows_with_other_strengths_are_no_duplicates(tmp_path: Path) -> None:
    row = {"prompt": "Q one", "chosen": "good.", "rejected": "bad."}
    rows = [{**row, "strength": 1}, {**row, "strength": 3}, row]
    write_jsonl(tmp_path / "a.jsonl", [*rows, rows[1]])
    run(tmp_path / "a.jsonl", "--fix", "--output", tmp_path / "b.jsonl")
    assert [row for _, row in read_jsonl(tmp_path / "b.jsonl")] == rows


def test_line_ends_blank_lines_and_the_byte_order_mark_stay_as_they_are(tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"prompt": "p", "chosen": "a", "rejected": "b"}\r\n',
        b"\n",
        b'{"rejected": "d",  "prompt":"p\\u00e9",  "chosen": "c", "extra": 1.50}\n',
        b'{"prompt": "p", "chosen": "a", "rejected": "b"}\r\n',
        b'{"prompt": "r", "chosen": "e", "rejected": "f"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    run(tmp_path / "a.jsonl", "--fix", "--output", tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_bytes() == b"".join(lines[:3] + lines[4:])


def test_gzipped_lines_are_cleaned_too(tmp_path: Path) -> None:
    line = b'{"prompt": "p", "chosen": "a", "rejected": "b"}\n'
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as file:
        file.write(line * 3)
    run(tmp_path / "a.jsonl.gz", "--fix", "--output", tmp_path / "b.jsonl.gz")
    assert gzip.decompress((tmp_path / "b.jsonl.gz").read_bytes()) == line


def test_both_rows_of_a_long_form_pair_go(tmp_path: Path) -> None:
    rows = [
        {"pair_id": 1, "prompt": "p", "role": "chosen", "text": "a"},
        {"pair_id": 2, "prompt": "q", "role": "chosen", "text": "c"},
        {"pair_id": 2, "prompt": "q", "role": "rejected", "text": " c"},
        {"pair_id": 1, "prompt": "p", "role": "rejected", "text": "b"},
        {"prompt": "q", "role": "rejected", "text": "d"},
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    run(tmp_path / "a.jsonl", "--fix", "--output", tmp_path / "b.jsonl")
    assert [row for _, row in read_jsonl(tmp_path / "b.jsonl")] == [rows[0], rows[3]]


def test_all_rows_of_a_group_go_whatever_the_format(tmp_path: Path) -> None:
    def rated(prompt: str, response: str, helpfulness: int) -> dict:
        return {"question": prompt, "response": response, "helpfulness": helpfulness}

    rows = [
        rated("p", "one", 1),
        rated("q", "the same", 4),
        rated("p", "two", 2),
        rated("q", "The  same", 1),
        rated("p", "three", 3),
        rated("q", "another", 0),
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    arguments = ["--prompt-column", "question", "--fix", "--output", tmp_path / "b.jsonl"]
    run(tmp_path / "a.jsonl", *arguments, "--remove", "identical-replies")
    assert [row for _, row in read_jsonl(tmp_path / "b.jsonl")] == rows[::2]
    (trace,) = [row for _, row in read_jsonl(tmp_path / "b.removed.jsonl")]
    assert (trace["row"], trace["rows"]) == ("a.jsonl:2", [2, 4, 6])


def test_numbered_files_are_audited_and_cleaned_into_one(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    (tmp_path / "d").mkdir()
    write_jsonl(tmp_path / "d" / "train-0-of-2.jsonl", [row])
    write_jsonl(tmp_path / "d" / "train-1-of-2.jsonl", [{**row, "prompt": "q"}, row])
    assert run(tmp_path / "d") == 1
    assert run(tmp_path / "d", "--fix", "--output", tmp_path / "b.jsonl.zst") == 1
    assert [row["prompt"] for _, row in read_jsonl(tmp_path / "b.jsonl.zst")] == ["p", "q"]
    assert [row["row"] for _, row in read_jsonl(tmp_path / "b.removed.jsonl")] == ["train-*-of-2.jsonl:3"]
    assert run(tmp_path / "d", "--fix", "--output", tmp_path / "d" / "train-1-of-2.jsonl", "--overwrite") == 2


def test_names_of_cleaned_files_in_a_folder_are_told_apart(tmp_path: Path) -> None:
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    write_jsonl(tmp_path / "a.jsonl", [row])
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\nq,a,b\n")
    (tmp_path / "hh").mkdir()
    write_jsonl(tmp_path / "hh" / "train-0-of-1.jsonl", [{**row, "prompt": "r"}])
    assert run(tmp_path / "a.jsonl", tmp_path / "a.csv", tmp_path / "hh", "--fix", "--output", tmp_path / "out") == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"a.jsonl.jsonl", "a.csv.jsonl", "train.jsonl", "removed.jsonl"}


def test_judgements_that_a_flag_leaves_out_are_no_defect(tmp_path: Path) -> None:
    rows = [
        {
            "post_id": "x",
            "history": "h",
            "human_ref_A": f"a{n}",
            "human_ref_B": f"b{n}",
            "labels": 1,
            "score_ratio": 9.0,
        }
        for n in range(10)
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    arguments = (tmp_path / "a.jsonl", "--max-per-post", 3)
    assert run(*arguments, "--fix", "--output", tmp_path / "b.jsonl", "--json", tmp_path / "j.json") == 0
    assert json.loads((tmp_path / "j.json").read_text())["checks"]["unusable-rows"]["flagged"] == 0
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "a.jsonl").read_bytes()


def test_rows_of_other_formats_become_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,chosen,rejected\np,"a, é",b\np,"a, é",b\nq,c,d\n', encoding="utf-8")
    run(tmp_path / "a.csv", "--fix", "--output", tmp_path / "b.jsonl")
    assert [row for _, row in read_jsonl(tmp_path / "b.jsonl")] == [
        {"prompt": "p", "chosen": "a, é", "rejected": "b"},
        {"prompt": "q", "chosen": "c", "rejected": "d"},
    ]


def test_several_files_are_cleaned_into_a_folder_and_leaks_go_from_the_earlier_split(tmp_path: Path) -> None:
    rows = [{"prompt": name, "chosen": f"{name} a", "rejected": f"{name} b"} for name in ("one", "two", "three")]
    write_jsonl(tmp_path / "d.train.jsonl", rows)
    write_jsonl(tmp_path / "d.test.jsonl", rows[1:2])
    out = tmp_path / "out"
    run(tmp_path / "d", "--splits", "train", "test", "--fix", "--output", out)
    assert [row for _, row in read_jsonl(out / "d.train.jsonl")] == [rows[0], rows[2]]
    assert [row for _, row in read_jsonl(out / "d.test.jsonl")] == rows[1:2]
    assert [row for _, row in read_jsonl(out / "removed.jsonl")] == [
        {"row": "d.train.jsonl:2", "check": "leaks", "value": 3.0, "done": "removed"}
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fix"], "--fix and --output FILE are given together"),
        (["--fix", "--output", "a.jsonl"], "would be replaced"),
        (["--against", "there.jsonl", "--json", "there.jsonl", "--overwrite"], "would be replaced"),
        (["--json", ".", "--overwrite"], "is a folder"),
        (["--fix", "--output", "there.jsonl"], "--overwrite"),
        (["--fix", "--output", "b.csv"], "name it"),
        (["--fix", "--output", "b.jsonl", "--limit", "5"], "leave --limit out"),
        (["--fix", "--output", "b.jsonl", "--remove", "duplicate-row"], "Did you mean 'duplicate-rows'?"),
        (["--remove", "ties"], "give --fix and --output FILE"),
        (["--json", "there.jsonl"], "--overwrite"),
        (["--json", "b.json", "--scores", "b.json"], "written twice"),
        (["--fail-on", "ties"], "write it as check=number"),
        (["--fail-on", "tie=1"], "Did you mean 'ties'?"),
        (["--fail-on", "ties=-1"], "a number of rows"),
        (["--fail-on", "ties=0.5"], "a number of rows"),
        (["--fail-on", "ties=101%"], "a number of rows"),
        (["--threshold", "ties=0"], "above 0"),
        (["--threshold", "ties=nan"], "above 0"),
        (["--splits", "train"], "at least two"),
        (["--splits", "train", "test"], "is one file and has no splits"),
        (["--suite-data", "."], "--against"),
        (["--near", "0"], "--near"),
        (["--max-seq-len", "0"], "max-seq-len"),
        (["--against", "no-such-data.jsonl"], "no such file"),
        (["--model", "no-such-model/here"], "no tokenizer"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_jsonl(Path("a.jsonl"), [{"prompt": "p", "chosen": "a", "rejected": "b"}])
    Path("there.jsonl").touch()
    assert run("a.jsonl", *arguments) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "there.jsonl"}


def test_nan_of_a_table_becomes_null_and_the_trace_says_in_which_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, cleaned = tmp_path / "table.parquet", tmp_path / "cleaned.jsonl"
    nan = float("nan")
    columns = {
        "prompt": ["p", "q", "q", "r"],
        "chosen": ["a.", "b.", "b.", "c."],
        "rejected": ["x.", "y.", "y.", ""],
        "quality": [nan, 2.0, nan, nan],
        "more": [{"of": [1.0, nan]}, None, None, None],
    }
    parquet.write_table(pyarrow.table(columns), path)
    assert run(path, "--fix", "--output", cleaned) == 1
    rows = [row for _, row in read_jsonl(cleaned)]
    assert [(row["quality"], row["more"]) for row in rows] == [(None, {"of": [1.0, None]}), (2.0, None)]
    trace = [row for _, row in read_jsonl(tmp_path / "cleaned.removed.jsonl")]
    assert trace[-2:] == [
        {"column": name, "rows": 1, "first": "table.parquet:1", "done": "NaN written as null"}
        for name in ("quality", "more")
    ]
    assert "NaN, which JSON has not, is null in quality (1 row), more (1 row)" in capsys.readouterr().out
    # A row that reading drops might be used without its NaN, so there it stays an error.
    assert run(path, "--fix", "--output", tmp_path / "b.jsonl", "--remove", "duplicate-rows") == 2
    assert "table.parquet:4: cannot be written as JSON" in capsys.readouterr().err


@pytest.mark.parametrize("value", [float("inf"), b"bytes"])
def test_what_json_cannot_hold_besides_nan_ends_the_cleaning(value: object, tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["p"], "chosen": ["a."], "rejected": ["x."], "more": [value]})
    parquet.write_table(table, tmp_path / "table.parquet")
    assert run(tmp_path / "table.parquet", "--fix", "--output", tmp_path / "cleaned.jsonl") == 2


@pytest.mark.parametrize(("num_pairs", "is_told"), [(3, False), (8, True)])
def test_that_much_was_removed_is_told_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_pairs: int, is_told: bool
) -> None:
    """Three people who judge each pair in a row of their own: two of them agree."""
    rows = [{"prompt": f"prompt {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(40)]
    pairs = [{"prompt": f"both {n}", "chosen": f"a {n}", "rejected": f"b {n}"} for n in range(num_pairs)]
    voted = [one | two for one in pairs for two in ({}, {}, {"chosen": one["rejected"], "rejected": one["chosen"]})]
    write_jsonl(tmp_path / "voted.jsonl", [*rows, *voted])
    assert run(tmp_path / "voted.jsonl", "--fix", "--output", tmp_path / "cleaned.jsonl") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert f"40 of {40 + 3 * num_pairs} rows; {3 * num_pairs} removed" in told
    assert ("38% of all rows went (contradictions 16, duplicate-rows 8)" in told) == is_told
    assert ("makes one row of them, where it is no defect" in told) == is_told
    assert "several people who judged the same replies in a row each contradict each other here" in told


@pytest.mark.parametrize(("near", "gone"), [(0.8, 30), (0.97, 0)])
def test_prompts_of_one_template_are_told_apart_by_a_higher_threshold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], near: float, gone: int
) -> None:
    template = " ".join(f"word{place}" for place in range(80))
    for part, count in (("train", 30), ("test", 5)):
        rows = [
            {"prompt": f"{template} {part} {n}", "chosen": f"good {part} {n}", "rejected": f"bad {part} {n}"}
            for n in range(count)
        ]
        write_jsonl(tmp_path / f"a.{part}.jsonl", rows)
    files = tmp_path / "a.train.jsonl", tmp_path / "a.test.jsonl"
    run(*files, "--fix", "--near", near, "--output", tmp_path / "cleaned")
    told = " ".join(capsys.readouterr().out.split())
    assert f"{30 - gone} of 30 rows; {gone} removed" in told
    assert ("a higher --near tells them apart" in told) == (gone > 0)
