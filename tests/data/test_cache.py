"""What was prepared is found again if and only if nothing that it depends on has changed, and it is whole."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import signal
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from common import make_tokenizer, write_pairs
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import RewardlabError
from rewardlab.core.signals import ending_with_status
from rewardlab.data import cache as module
from rewardlab.data.cache import Cache, hash_of_tokenizer, key_of
from rewardlab.data.config import DataConfig, ReadingConfig
from rewardlab.data.finding import find_sources
from rewardlab.data.judgements import Rules
from rewardlab.data.readers import fingerprint
from rewardlab.data.store import StoreWriter
from rewardlab.data.templates import build_renderer

PACKAGE = Path(module.__file__).parents[1]
DATA = sorted(
    path.relative_to(PACKAGE) for pattern in ("data/*.py", "data/formats/*.py") for path in PACKAGE.glob(pattern)
)
BASE: dict[str, Any] = {
    **{"seed": 0, "limit": None, "template": "chat", "label": None, "kwise_loss": "pairs"},
    "num_embeddings": None,
}


def key(folder: Path, *, count: int = 5, **changed: Any) -> str:
    """The key of a small file, with settings changed."""
    values = BASE | changed
    path = write_pairs(folder / "pairs.jsonl", count)
    (source,) = find_sources([str(path)], "train")
    source = replace(source, label=values["label"] or source.label)
    settings = {name: value for name, value in changed.items() if name not in BASE}
    config = from_mapping(DataConfig, settings, where="the test")
    bare = config.rendering.joins_texts
    tokenizer = make_tokenizer()
    if values["template"] == "other":
        tokenizer.eos_token = "<|endoftext|>"
    renderer = build_renderer(tokenizer, config.rendering)
    renderer.num_embeddings = values["num_embeddings"]
    return key_of(
        source,
        fingerprint(source) or "",
        rules=Rules(
            source=source.name, reading=config.reading, bare=bare, seed=values["seed"], kwise_loss=values["kwise_loss"]
        ),
        limit=values["limit"],
        renderer=renderer,
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"count": 6},
        {"limit": 3},
        {"label": "folder/pairs.jsonl"},
        {"kwise_loss": "plackett-luce"},
        {"max_seq_len": 64},
        {"overlong": "drop"},
        {"truncation": "error"},
        {"truncation": "reply-middle"},
        {"chat_template": "plain"},
        {"chat_template": "concat"},
        {"system_prompt": "Be brief."},
        {"ties": "half"},
        {"max_replies": 3},
        {"strength_as": "weight"},
        {"margin_column": "m"},
        {"shp": "kwise"},
        {"max_per_post": 5},
        {"min_score_ratio": 2.0},
        {"attributes": ("helpfulness=2",)},
        {"map_label": ("A=1",)},
        {"prompt_column": "question"},
        {"scores_column": "ratings"},
        {"strength_column": "sure"},
        {"incomplete_pairs": "error"},
        {"template": "other"},
        {"num_embeddings": 100},
    ],
    ids=str,
)
def test_the_key_changes_with_everything_that_decides_the_tokens(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert key(tmp_path, **changed) != key(tmp_path)


def test_every_setting_of_reading_is_part_of_the_key_or_only_concerns_a_run() -> None:
    of_a_run = {"max_drop_fraction", "num_workers", "cache_dir", "streaming", "shuffle_buffer"}
    assert {field.name for field in fields(ReadingConfig)} == {*module.READING} | of_a_run
    assert not of_a_run & {*module.READING}


def test_the_key_stays_with_what_only_the_run_decides(tmp_path: Path) -> None:
    own = {"max_drop_fraction": 0.5, "num_workers": 3, "cache_dir": "x", "eval_limit": 7, "seed": 4}
    assert key(tmp_path, **own) == key(tmp_path)
    assert key(tmp_path, num_embeddings=512) == key(tmp_path)
    assert key(tmp_path, limit=3, seed=1) != key(tmp_path, limit=3)
    assert key(tmp_path, max_replies=3, seed=1) != key(tmp_path, max_replies=3)


def test_the_key_changes_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(tmp_path)
    monkeypatch.setattr(module, "_hash_of_code", lambda: "another")
    assert key(tmp_path) != before


ONLY_WORDS = {
    *("core/bars.py", "core/config.py", "core/config_file.py", "core/config_yaml.py", "core/controls.py"),
    *("core/earlier_names.py", "core/errors.py", "core/libc.py", "core/optional.py", "core/other_names.py"),
    *("core/folders.py", "core/schema.py", "core/signals.py", "core/terminal.py", "core/together.py"),
    *("core/undecodable.py", "core/values.py"),
}
"""Modules that data import and whose changes change no stored byte: how progress is told, how settings are read, how
folders and files are replaced, what they and errors are called, what signals do."""


def imported_by(files: list[Path]) -> set[str]:
    """Modules of rewardlab outside the data room that these files import, or what these import, from its folder on."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        tree = ast.parse(waiting.pop().read_text(encoding="utf-8"))
        named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        named += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        modules = [PACKAGE.parent / name.replace(".", "/") for name in named if name.startswith("rewardlab.")]
        paths = {path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py") for path in modules}
        waiting += paths - found
        found |= paths
    return {path.relative_to(PACKAGE).as_posix() for path in found} - {path.as_posix() for path in DATA}


def test_every_module_that_decides_what_is_stored_is_part_of_the_key() -> None:
    imported = imported_by([PACKAGE / path for path in DATA])
    assert "core/types.py" in imported
    assert imported - ONLY_WORDS == set(module.BENEATH)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("core/types.py", True), ("core/files.py", True), ("core/spec.py", True), ("data/rows.py", True)]
    + [(name, False) for name in sorted(ONLY_WORDS)],
)
def test_a_change_of_code_that_decides_what_is_stored_changes_the_key(tmp_path: Path, name: str, counts: bool) -> None:
    copy = tmp_path / "rewardlab"
    for room in ("core", "data"):
        shutil.copytree(PACKAGE / room, copy / room)
    before = module._hash_of_code(copy)
    assert before == module._hash_of_code()
    with (copy / name).open("a") as file:
        file.write("# another line\n")
    assert (module._hash_of_code(copy) != before) == counts


def test_a_tokenizer_in_python_is_hashed_by_what_it_would_save():
    class Slow:
        def __init__(self, words: str) -> None:
            self.words = words

        def save_pretrained(self, folder: str) -> None:
            Path(folder, "vocab.txt").write_text(self.words)

    assert hash_of_tokenizer(Slow("a b")) == hash_of_tokenizer(Slow("a b")) != hash_of_tokenizer(Slow("a c"))


def write(folder: Path) -> None:
    """A store without rows."""
    with StoreWriter(folder) as writer:
        writer.finish(source="s", facts={})


def fail(folder: Path) -> None:
    """What may not be called."""
    raise AssertionError(f"{folder} is written again")


def test_a_damaged_entry_is_said_and_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Cache(tmp_path)
    assert cache.find("k") is None
    assert cache.make("k", write)[1] is True
    assert cache.make("k", fail)[1] is False
    assert cache.find("k") is not None
    assert caplog.text == ""
    (tmp_path / "k" / "tokens.bin").write_bytes(b"1234")
    assert cache.make("k", write)[1] is True
    assert caplog.text.count("damaged (tokens.bin has changed); the data are prepared again") == 1
    assert cache.make("k", fail)[1] is False


def test_an_interrupted_write_leaves_nothing_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    cache = Cache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.make("k", interrupted)
    left_over = tmp_path / ".k.tmp-1"
    left_over.mkdir()
    (left_over / "tokens.bin").write_bytes(b"half")
    assert cache.make("k", write)[1] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == [".k.lock", "k"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_signal_that_ends_the_process_at_once_leaves_nothing_half_written(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[list[str]] = []

    def ended(status: int) -> NoReturn:
        there.append(sorted(path.name for path in tmp_path.iterdir()))
        raise SystemExit(status)

    def interrupted(folder: Path) -> None:
        (folder / "tokens.bin").write_bytes(b"half")
        assert folder.parent == tmp_path
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("os._exit", ended)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ending_with_status(), pytest.raises((SystemExit, RewardlabError)):
        Cache(tmp_path if kept else None).make("k", interrupted)
    assert there == [[".k.lock"] if kept else []]


def test_what_a_killed_process_left_of_other_data_is_removed_once_it_is_old(tmp_path: Path) -> None:
    old, new = "0" * 32, "f" * 32
    thesis = tmp_path / ".thesis.tmp-old"  # of the user, whose folder it may be
    (thesis / "chapters").mkdir(parents=True)
    os.utime(thesis, (0, 0))
    for key, hours in ((old, 25), (new, 1)):
        left_over = tmp_path / f".{key}.tmp-1"
        left_over.mkdir()
        (left_over / "tokens.bin").write_bytes(b"half")
        for path in (left_over / "tokens.bin", left_over):
            os.utime(path, (time.time() - 3600 * hours,) * 2)
    begun_long_ago = tmp_path / f".{new}.tmp-1"
    os.utime(begun_long_ago, (0, 0))
    assert Cache(tmp_path).make("k", write)[1] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".{new}.tmp-1", ".k.lock", thesis.name, "k"]


def test_of_several_that_want_the_same_one_writes_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release, waiting = (threading.Event() for _ in range(3))
    monkeypatch.setattr(module.logger, "info", lambda line, *_: "another process" in line and waiting.set())
    made: list[bool] = []

    def slow(folder: Path) -> None:
        started.set()
        assert release.wait(60)
        write(folder)

    first = threading.Thread(target=lambda: made.append(Cache(tmp_path).make("k", slow)[1]))
    second = threading.Thread(target=lambda: made.append(Cache(tmp_path).make("k", fail)[1]))
    first.start()
    assert started.wait(60)
    second.start()
    assert waiting.wait(60)
    release.set()
    first.join()
    second.join()
    assert sorted(made) == [False, True]


def test_without_a_folder_nothing_is_left_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store, made = Cache(None).make("k", write)
    assert (made, store.num_groups, list(tmp_path.iterdir())) == (True, 0, [])


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RewardlabError, match="--cache-dir"):
        Cache(tmp_path / "file").make("k", write)


def test_what_is_there_is_read_from_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    assert Cache(tmp_path).make("k", write)[1] is True
    monkeypatch.setattr(module, "_locked", refuse)
    assert Cache(tmp_path).make("k", fail)[1] is False
    with pytest.raises(RewardlabError, match=r"Read-only file system.*--cache-dir"):
        Cache(tmp_path).make("other", write)


def test_a_folder_that_another_user_keeps_closed_is_told_with_the_flag(tmp_path, monkeypatch) -> None:
    def refuse(path: Path, **_: Any) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)  # as in the home of another user, which is kept after `su`
    with pytest.raises(
        RewardlabError, match=r"cannot keep prepared data in .*Permission denied\). Choose another .*--cache-dir none"
    ):
        Cache(tmp_path / "tokens").make("a", lambda _: None)
