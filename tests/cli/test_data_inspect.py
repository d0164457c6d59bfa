"""`rewardlab data inspect` from the command line: what it prints, writes, replaces and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import refusal, write_rows
from rewardlab.cli import main


def pairs(count: int) -> list[dict[str, object]]:
    return [{"prompt": f"q{n}", "chosen": f"yes {n}" * (n % 3 + 1), "rejected": f"no {n}"} for n in range(count)]


@pytest.mark.slow
def test_the_command_prints_and_writes_and_replaces_only_its_own(tmp_path: Path, capsys) -> None:
    path = write_rows(tmp_path / "a.jsonl", *pairs(30))
    out = tmp_path / "out"
    arguments = ["data", "inspect", str(path), "--output-dir", str(out), "--samples", "1", "--num-workers", "1"]
    main(arguments)
    said = capsys.readouterr().out
    assert "30 read, 30 kept, 0 dropped" in said
    assert max(map(len, said.split("Samples:")[0].splitlines())) <= 100 + len(str(tmp_path))
    values = json.loads((out / "inspection.json").read_text(encoding="utf-8"))
    assert values["datasets"][0]["kept"] == 30
    page = (out / "inspection.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert page.count("<figure") >= 4
    # A second time: its own files are replaced.
    main(arguments)
    (out / "inspection.html").write_text("mine", encoding="utf-8")
    assert "did not write it" in refusal(capsys, *arguments)
    assert (out / "inspection.html").read_text(encoding="utf-8") == "mine"
    main([*arguments, "--overwrite"])
    assert (out / "inspection.html").read_text(encoding="utf-8") != "mine"


def test_without_texts_no_text_of_the_data_is_written(tmp_path: Path, capsys) -> None:
    rows = [{"prompt": f"zebra {n}", "chosen": f"quokka {n}", "rejected": f"ocelot {n}"} for n in range(12)]
    path = write_rows(tmp_path / "a.jsonl", *rows, {"prompt": "zebra", "chosen": "quokka", "rejected": "quokka"})
    main(["data", "inspect", str(path), "--no-texts", "--output-dir", str(tmp_path), "--num-workers", "1"])
    texts = [capsys.readouterr().out, *((tmp_path / f"inspection.{kind}").read_text() for kind in ("json", "html"))]
    assert not any(word in text for text in texts for word in ("zebra", "quokka", "ocelot"))
    # The place of a dropped row is still told.
    assert all("a.jsonl:13" in text for text in texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "a.jsonl"], "a.jsonl is a dataset that is read, and would be replaced"),
        (["--html", "../data/a.jsonl"], "is a dataset that is read, and would be replaced"),
        (["--html", "folder"], "folder is a folder. Name a file in it"),
        (["--json", "b", "--html", "./b"], "b would be written twice"),
    ],
)
def test_no_overwrite_replaces_the_data_a_folder_or_another_output(
    tmp_path: Path, capsys, monkeypatch, arguments: list[str], message: str
) -> None:
    (tmp_path / "data/folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "data")
    path = write_rows(Path("a.jsonl"), *pairs(3))
    before = path.read_bytes()
    assert message in refusal(capsys, "data", "inspect", "a.jsonl", "--overwrite", *arguments)
    assert path.read_bytes() == before
    assert sorted(each.name for each in Path().iterdir()) == ["a.jsonl", "folder"]


def test_bad_calls_are_refused_in_words(tmp_path: Path, capsys) -> None:
    assert "DATASET is missing" in refusal(capsys, "data", "inspect")
    path = write_rows(tmp_path / "a.jsonl", *pairs(2))
    assert "give one of the two" in refusal(capsys, "data", "inspect", path, "--model", "x", "--tokenizer", "y")
    assert "no such file" in refusal(capsys, "data", "inspect", tmp_path / "b.jsonl")
    empty = write_rows(tmp_path / "c.jsonl")
    assert "no rows" in refusal(capsys, "data", "inspect", empty)


@pytest.mark.slow
def test_words_are_counted_without_torch(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", *pairs(4))
    code = (
        "import sys; from rewardlab.cli import main; main(sys.argv[1:]);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "data", "inspect", str(path), "--num-workers", "1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
