"""`gold build`, `match` and `curve` ended while they write: the same command then writes what it would have written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import labelled
from killing import KILLED_AT_WRITE, at_write, run_program
from reward_models import save_tiny
from rewardlab.cli import main

PLACES = range(1, 11)
BUILD = ("build", "--input", "labels.jsonl", "--output-dir", "pairs", "--test-fraction", "0.2", "--near", "none")
MATCH = ("match", "--input", "labels.jsonl", "--proxies", "p=model", "q=scores.json", "--good-match", "0.5")
CURVE = ("curve", "--input", "labels.jsonl", "--proxies", "p=model", "q=scores.json")
WITHOUT_MODEL = {
    "build": BUILD,
    "match": tuple(word for word in MATCH if word != "p=model"),
    "curve": tuple(word for word in CURVE if word != "p=model"),
}
Content = dict[str, Any]


class EndedError(Exception):
    """In place of a kill."""


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def prepared(folder: Path, model: Path | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    rows = labelled.rows(24)
    labelled.write(folder / "labels.jsonl", rows)
    (folder / "scores.json").write_text(json.dumps([[score + k for k, score in enumerate(r["gold"])] for r in rows]))
    if model is not None:
        (folder / "model").symlink_to(model)
    return folder


def run(words: tuple[str, ...]) -> None:
    status = 0
    try:
        main(["gold", *words])
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status in (0, 1)


def content(folder: Path) -> Content:
    """Every file that was written, without what says when; places of locks and of kept scores are left out."""
    found: Content = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or path.name == ".lock" or name.startswith("model") or "/scores/" in name:
            continue
        if path.suffix == ".json" and path.stem in ("match", "curve", "manifest"):
            values = json.loads(path.read_text())
            values.pop("provenance")
            found[name] = values
        else:
            found[name] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("ended") / "model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[tuple[str, ...]], Content]:
    """What an undisturbed command writes."""
    known: dict[tuple[str, ...], Content] = {}

    def of(words: tuple[str, ...]) -> Content:
        if words not in known:
            folder = prepared(tmp_path_factory.mktemp("whole"), model)
            with inside(folder):
                run(words)
            known[words] = content(folder)
        return known[words]

    return of


def ended_at(place: int, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        raise EndedError

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", at_write(place, end))
        with pytest.raises(EndedError):
            run(words)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("words", [BUILD, MATCH, CURVE], ids=lambda words: words[0])
def test_ended_at_a_write_the_same_command_writes_all(tmp_path, model, whole, monkeypatch, words, place) -> None:
    monkeypatch.setattr("rewardlab.gold.reward_models.REPLIES_AT_A_TIME", 6)
    wanted = whole(words)
    with inside(prepared(tmp_path / "here", model)):
        ended_at(place, words, monkeypatch)
        run(words)
    assert content(tmp_path / "here") == wanted


@pytest.mark.parametrize("row", [1, 9, 24])
def test_a_build_ended_at_a_row_leaves_nothing(tmp_path, monkeypatch, row) -> None:
    from rewardlab.gold.building.files import SideFiles

    count, write = 0, SideFiles.write

    def ending(*given: Any) -> None:
        nonlocal count
        count += 1
        if count == row:
            raise EndedError
        write(*given)

    with inside(prepared(tmp_path)):
        monkeypatch.setattr(SideFiles, "write", ending)
        with pytest.raises(EndedError):
            run(BUILD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.jsonl", "scores.json"]


@pytest.mark.parametrize("words", WITHOUT_MODEL.values(), ids=WITHOUT_MODEL)
def test_killed_at_a_write_the_same_command_writes_all_and_removes_the_rest(tmp_path, whole, words) -> None:
    folder = prepared(tmp_path)
    ended = run_program(KILLED_AT_WRITE, [str(folder), "2", "gold", *words])
    assert ended.returncode == -9, ended.stderr
    assert list(folder.rglob(".*.tmp-*")), "it was killed in the middle"
    with inside(folder):
        run(words)
    assert content(folder) == whole(words)
    assert [path for path in folder.rglob(".*") if path.name != ".lock"] == []
