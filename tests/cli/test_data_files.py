"""`rewardlab data convert`, `split` and `mix`, and weighted training data, from their command lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import refusal, short_run, write_rows
from rewardlab.cli import main
from rewardlab.curation.files import reading, writing


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`a.jsonl` of 40 rows and `b.jsonl` of 20, in the working directory."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"question {k}?", "chosen": f"good {k}", "rejected": f"bad {k}"} for k in range(60)]
    write_rows(tmp_path / "a.jsonl", *rows[:40])
    write_rows(tmp_path / "b.jsonl", *rows[40:])


@pytest.mark.usefixtures("two")
def test_the_three_tools_write_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    main(["data", "convert", "a.jsonl", "--to", "trl", "--output", "a.parquet"])
    assert "wrote a.parquet: 40 rows from 40 preferences" in capsys.readouterr().out
    main(
        [
            "data",
            "split",
            "a.jsonl",
            "b.jsonl",
            "--output-dir",
            "sides",
            "--fractions",
            "train=0.7",
            "test=0.3",
            "--near",
            "none",
        ]
    )
    told = capsys.readouterr().out
    assert "test with train: shared rows 0, prompts 0" in told
    assert "--dataset sides" in told
    main(["data", "mix", "a.parquet:3", "b.jsonl:1", "--output", "mixed.jsonl.gz", "--rows", "20"])
    told = capsys.readouterr().out
    assert "weights: 20 rows: a 0.7500 (15 of 40 rows; wanted 0.7500), b 0.2500 (5 of 20 rows" in told
    assert "wrote mixed.jsonl.gz: 20 rows" in told
    manifest = json.loads(Path("mixed.jsonl.gz.manifest.json").read_text())
    assert manifest["settings"]["dataset"] == ["a.parquet:3", "b.jsonl:1"]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("convert --output x.jsonl", "DATASET is missing"),
        ("convert a.jsonl", "--output is missing"),
        ("convert a.jsonl --output x.csv", "unknown ending"),
        ("convert none.jsonl --output x.jsonl", "no such file"),
        ("convert a.jsonl --output b.jsonl", "exists"),
        ("split a.jsonl --output-dir sides --near 2", "--near 2.0: must be above 0 and at most 1, or none"),
        ("split a.jsonl --output-dir .", "holds a dataset that is read"),
        ("mix a.jsonl:1 b.jsonl --output x.jsonl", "has the weight 1, and b.jsonl has none"),
        ("mix a.jsonl:1 b.jsonl:0 --output x.jsonl", "must be above 0"),
        ("convert a.jsonl:1 b.jsonl --output x.jsonl", "1 is a weight"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    assert said in refusal(capsys, "data", *arguments.split())
    assert sorted(Path().iterdir()) == before


@pytest.mark.slow
@pytest.mark.usefixtures("two")
def test_rows_are_rewritten_without_torch() -> None:
    code = (
        "import sys; from rewardlab.cli import main; main('data convert a.jsonl --output x.jsonl.zst'.split()); "
        "main('data split a.jsonl --output-dir s --fractions a=0.5 b=0.5'.split()); "
        "sys.exit(','.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("two")
@pytest.mark.usefixtures("verified_here")
def test_a_run_writes_down_the_shares_it_trained_on(base_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*map(str, short_run(base_model, Path("run"))), "--dataset", "a.jsonl:0.5", "b.jsonl:0.5"])
    assert "weights: 40 rows: a 0.5000 (20 of 40 rows; wanted 0.5000)" in capsys.readouterr().out
    data = json.loads(Path("run/manifest.json").read_text())["data"]
    assert [one["rows"] for one in data["weights"]["train"]["datasets"]] == [20, 20]
    assert json.loads(Path("run/config.json").read_text())["dataset"] == ["a.jsonl:0.5", "b.jsonl:0.5"]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("words", ["convert a.jsonl --output", "mix a.jsonl --output", "split a.jsonl --output-dir"])
def test_a_place_where_nothing_can_be_written_is_told_before_data_are_read(words, monkeypatch, capsys) -> None:
    Path("closed").mkdir()
    monkeypatch.setattr(writing.os, "access", lambda folder, _: folder != Path("closed").absolute())
    monkeypatch.setattr(reading, "open_units", lambda *_: pytest.fail("read"))
    tool, name, flag = words.split()
    output = "closed/new/sides" if tool == "split" else "closed/new/out.jsonl"
    more = ("--fractions", "train=0.5", "test=0.5") if tool == "split" else ()
    said = refusal(capsys, "data", tool, name, flag, output, *more)
    assert said.startswith(
        f"cannot write to {Path('closed').absolute()} (Permission denied). Choose another place with"
    )
    assert f"with {flag}, or make" in said
    assert not list(Path("closed").iterdir())
