"""Tools for data that write several files, ended while they write: none of them is there, or what was there before."""

from __future__ import annotations

import random
import signal
from functools import partial
from pathlib import Path

import pytest

from common import write_pairs
from killing import KILLED_AT_WRITE, EndedError, ended_at_write, run_program
from rewardlab.cli import main
from rewardlab.core.files import write_text
from rewardlab.core.together import one_by_one, together

SEARCH = ("mislabels", "pairs.jsonl", "--witness", "one.csv", "two.csv", "--output-dir", "out")
COMMANDS = {
    "convert": ("convert", "pairs.jsonl", "--output", "out.jsonl"),
    "mix": ("mix", "pairs.jsonl", "more.jsonl", "--output", "out.jsonl.gz"),
    "mislabels": (*SEARCH, "--remove", "clean.jsonl", "--flip", "turned.jsonl"),
    "audit": ("audit", "pairs.jsonl", "--fix", "--remove", "duplicate-rows", "--output", "clean.jsonl",
              "--json", "audit.json", "--scores", "scores.jsonl"),
}  # fmt: skip
"""A command of each tool, all of whose files it writes only with --overwrite where they are."""
SINGLE = ("--num-workers", "1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl", 60)
    write_pairs(tmp_path / "more.jsonl", 20, offset=500)
    for name in ("one", "two"):
        draw = random.Random(name)
        margins = [(-4 if number in (3, 9, 20) else 4) + draw.gauss(0, 1) for number in range(60)]
        (tmp_path / f"{name}.csv").write_text(
            "".join(["scores_chosen,scores_rejected\n", *(f"{m},0\n" for m in margins)])
        )
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    """Every file that a command wrote."""
    inputs = ("pairs.jsonl", "more.jsonl", "one.csv", "two.csv", ".lock")
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if path.name not in inputs}


def run(words: tuple[str, ...]) -> None:
    status = 0
    try:
        main(["data", *words, *(SINGLE if words[0] == "audit" else ())])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status in (0, 1)


@pytest.mark.parametrize("tool", COMMANDS)
def test_a_tool_that_was_ended_at_any_write_begins_anew(here, tool):
    words, place = COMMANDS[tool], 1
    while ended_at_write(place, partial(run, words)):
        assert content(here) == {}, place
        place += 1
    assert place > 2, "it writes several times"
    whole = content(here)
    assert len(whole) > 1
    for at in range(1, place):
        assert ended_at_write(at, partial(run, (*words, "--overwrite")))
        assert content(here) == whole, at
    for name in whole:
        (here / name).unlink()
    run(words)
    assert content(here).keys() == whole.keys()


@pytest.mark.slow
@pytest.mark.parametrize("tool", COMMANDS)
def test_a_tool_that_was_killed_at_a_write_begins_anew(here, tool):
    told = run_program(KILLED_AT_WRITE, [str(here), "2", "data", *COMMANDS[tool], *(SINGLE if tool == "audit" else ())])
    assert told.returncode == -signal.SIGKILL, told.stderr
    run(COMMANDS[tool])
    assert not [path for path in (here / "out").rglob(".*") if path.name != ".lock"]


def test_a_file_of_a_conversion_is_never_without_its_manifest(here, monkeypatch):
    """A kill between the two leaves a manifest alone, which hinders nobody."""
    replace = Path.replace

    def ending(path: Path, target: Path) -> Path:
        if target.name == "out.jsonl":
            raise EndedError
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", ending)
        with pytest.raises(EndedError):
            main(["data", *COMMANDS["convert"]])
    assert list(content(here)) == ["out.jsonl.manifest.json"]
    run(COMMANDS["convert"])
    assert "out.jsonl" in content(here)


def test_files_wait_for_each_other_unless_they_are_in_a_folder_that_is_placed_itself(tmp_path):
    first, second, apart = (tmp_path / name for name in ("first", "second", "apart"))
    first.write_text("old")
    with together(last=first) as waiting:
        write_text(first, "new")
        write_text(second, "new")
        with one_by_one():
            write_text(apart, "new")
        assert (first.read_text(), second.exists(), apart.read_text()) == ("old", False, "new")
        assert waiting.where(first).read_text() == "new"
    assert (first.read_text(), second.read_text()) == ("new", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["apart", "first", "second"]
