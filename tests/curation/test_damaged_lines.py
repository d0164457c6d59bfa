"""Lines that are no JSON objects: counted and removed by the tools that look at data, an error where data are used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewardlab.cli import main

BROKEN = ('{"prompt": "broken', "[1, 2]", '{"prompt": "a", "prompt": "b"}', '{"prompt": "cut off')


def line(number: int) -> str:
    return json.dumps({"prompt": f"Why {number}?", "chosen": f"Because of {number}.", "rejected": f"No idea {number}."})


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Lines 1, 2, 8 and 15 are damaged, the last of them without an end."""
    lines = [*BROKEN[:2], *map(line, range(5)), BROKEN[2], *map(line, range(5, 11)), BROKEN[3]]
    path = tmp_path / "damaged.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def ended(*words: str) -> int:
    try:
        main([*words])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_an_audit_counts_them_and_fix_leaves_the_other_lines_as_they_stand(damaged: Path, tmp_path: Path) -> None:
    cleaned, found = tmp_path / "cleaned.jsonl", tmp_path / "audit.json"
    assert ended("data", "audit", str(damaged), "--fix", "--output", str(cleaned), "--json", str(found)) == 1
    assert cleaned.read_text(encoding="utf-8").splitlines() == [line(number) for number in range(11)]
    trace = [json.loads(one)["row"] for one in (tmp_path / "cleaned.removed.jsonl").read_text().splitlines()]
    assert trace == [f"damaged.jsonl:{number}" for number in (1, 2, 8, 15)]
    assert json.loads(found.read_text())["sources"][0]["dropped"] == {"not_json": 4}
    assert ended("data", "audit", str(cleaned)) == 0


def test_inspect_and_show_say_what_is_wrong_with_them(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("data", "inspect", str(damaged)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "15 read, 11 kept, 4 dropped" in said
    assert "since the first row has prompt, chosen, rejected" in said
    assert "damaged.jsonl:8: cannot be read (the key 'prompt' appears twice in one object)" in said
    assert ended("data", "show", str(damaged), "--row", "2") == 0
    assert "left out: not_json" in capsys.readouterr().out


def test_inspect_and_audit_tell_of_texts_that_nothing_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    table = tmp_path / "f.csv"
    table.write_text(",prompt,chosen,rejected,context\n0,Why?,So it is.,No,Basil dies in the dark.\n")
    assert ended("data", "inspect", str(table)) == 0
    assert "among a column without a name, prompt, chosen" in " ".join(capsys.readouterr().out.split())
    ended("data", "audit", str(table))
    told = [said for said in caplog.messages if "the column context is not read, and in 1 of the first 1 row" in said]
    assert len(told) == 2
    assert not any("Basil" in said for said in told)


@pytest.mark.parametrize("tool", [("data", "convert"), ("data", "split")])
def test_tools_that_use_the_rows_end_with_the_first_of_them(
    tool: tuple[str, str], damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "--output" if tool[1] == "convert" else "--output-dir"
    assert ended(*tool, str(damaged), where, str(tmp_path / "new.jsonl")) == 2
    assert "damaged.jsonl:1: not valid JSON" in capsys.readouterr().err


def test_a_file_that_is_something_else_is_no_dataset_of_damaged_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("words\n" * 200, encoding="utf-8")
    assert ended("data", "audit", str(path)) == 2
    assert "notes.jsonl:1: not valid JSON" in (said := capsys.readouterr().err)
    assert "So are the 99 lines after it. Is it the right file?" in said
    path.write_text("words\n" * 3, encoding="utf-8")
    assert ended("data", "audit", str(path)) == 2
    assert "notes.jsonl:1: not valid JSON" in capsys.readouterr().err


def test_where_several_rows_are_one_preference_they_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    rows = [{"pair_id": "a", "role": role, "prompt": "Why?", "text": role} for role in ("chosen", "rejected")]
    path.write_text("\n".join([BROKEN[0], *map(json.dumps, rows)]), encoding="utf-8")
    assert ended("data", "audit", str(path)) == 2
    assert "long.jsonl:1: not valid JSON" in capsys.readouterr().err
