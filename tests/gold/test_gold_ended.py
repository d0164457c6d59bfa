"""Stages of `gold` ended while they write: the same command then writes what it would have written."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import labelled
from chat_server import ChatServer, chatting
from killing import KILLED_AT_WRITE, KILLED_AT_WRITES, EndedError, ended_at_write, run_program
from reward_models import save_tiny
from rewardlab.cli import main
from tiny_chat import save_chat_model

BUILD = ("build", "--input", "labels.jsonl", "--output-dir", "pairs", "--test-fraction", "0.2", "--near", "none")
MATCH = ("match", "--input", "labels.jsonl", "--proxies", "p=model", "q=scores.json", "--good-match", "0.5")
CURVE = ("curve", "--input", "labels.jsonl", "--proxies", "p=model", "q=scores.json")
LABEL = ("label", "--input", "samples.jsonl", "--model", "model", "--output", "gold.jsonl")
JUDGE = ("label", "--input", "samples.jsonl", "--backend", "chat", "--url", "URL", "--concurrency", "1")
SAMPLE = ("sample", "--prompts", "prompts.json", "--model", "chat", "--max-tokens", "4", "--batch-size", "4")
STAGES = {
    "sample": (*SAMPLE, "--output", "drawn.jsonl"),
    "label": LABEL,
    "judge": (*JUDGE, "--output", "gold.jsonl"),
    "build": BUILD,
    "match": MATCH,
    "curve": CURVE,
    "check": ("check", "--labels", "labels.jsonl", "--samples", "samples.jsonl", "--output-dir", "checked"),
}
"""Stage -> a command of it. URL stands for the address of a judge."""
WITHOUT_MODEL = {
    "build": BUILD,
    "match": tuple(word for word in MATCH if word != "p=model"),
    "curve": tuple(word for word in CURVE if word != "p=model"),
}
Content = dict[str, Any]


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
    bare = [{name: value for name, value in row.items() if name != "gold"} for row in rows]
    labelled.write(folder / "samples.jsonl", bare)
    (folder / "prompts.json").write_text(json.dumps([row["prompt"] for row in rows]))
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
        if path.is_dir() or path.name == ".lock" or name.startswith(("model", "chat")) or "/scores/" in name:
            continue
        if path.name.endswith(("match.json", "curve.json", "manifest.json", "check.json")):
            values = json.loads(path.read_text())
            values.pop("provenance")
            values.pop("sha256", None)
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


@pytest.mark.slow
@pytest.mark.parametrize("place", range(1, 11))
@pytest.mark.parametrize("words", [BUILD, MATCH, CURVE], ids=lambda words: words[0])
def test_ended_at_a_write_the_same_command_writes_all(tmp_path, model, whole, monkeypatch, words, place) -> None:
    monkeypatch.setattr("rewardlab.gold.reward_models.REPLIES_AT_A_TIME", 6)
    wanted = whole(words)
    with inside(prepared(tmp_path / "here", model)):
        assert ended_at_write(place, partial(run, words))
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
    there = ["labels.jsonl", "prompts.json", "samples.jsonl", "scores.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == there


@pytest.mark.quick_cases(1)
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


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("ended") / "chat")


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    def prefers_longer(text: str) -> str:
        return "[[A]]" if len(text) % 3 else "[[B]]"

    with chatting(ChatServer(says=prefers_longer)) as url:
        yield url


@pytest.mark.soak
@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_ten_writes_each_stage_goes_on(tmp_path, model, chat, judge, monkeypatch, stage) -> None:
    monkeypatch.setattr("rewardlab.gold.reward_models.REPLIES_AT_A_TIME", 6)
    words = tuple(judge if word == "URL" else word for word in STAGES[stage])

    def folder(name: str) -> Path:
        made = prepared(tmp_path / name, model)
        (made / "chat").symlink_to(chat)
        return made

    writes: list[int] = []
    fsync = os.fsync
    with inside(folder("whole")), monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: (writes.append(handle), fsync(handle))[1])
        run(words)
    wanted = content(tmp_path / "whole")
    # As many as there are where a stage writes less than ten times.
    places = sorted({1 + k * (len(writes) - 1) // 9 for k in range(10)})
    for place in places:
        folder(str(place))
    ended = run_program(
        KILLED_AT_WRITES,
        [str(tmp_path), ",".join(map(str, places)), "gold", *words],
        {**os.environ, "OMP_NUM_THREADS": "1"},
    )
    statuses = dict(line.split() for line in ended.stdout.splitlines() if re.fullmatch(r"\d+ -?\d+", line))
    assert statuses == {str(place): "-9" for place in places}, ended.stdout + ended.stderr
    for place in places:
        with inside(tmp_path / str(place)):
            run(words)
        assert content(tmp_path / str(place)) == wanted, place
        assert [path for path in (tmp_path / str(place)).rglob(".*") if path.name != ".lock"] == []
    sys.stdout.write(f"{stage}: killed at {len(places)} of {len(writes)} writes\n")
