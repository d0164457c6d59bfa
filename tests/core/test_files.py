"""Folders and files are replaced whole, whatever ends the process."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rewardlab.core import files, folders
from rewardlab.core.errors import DataError, naming_for_rust
from rewardlab.core.files import append_text, is_number, read_json, write_text
from rewardlab.core.folders import replacing_folder

KILLED = """
import os, sys
from pathlib import Path
from rewardlab.core import folders

def then_die(real):
    def act(*arguments):
        real(*arguments)
        os._exit(9)
    return act

Path.rename = then_die(Path.rename)
if hasattr(folders, "_exchange"):
    folders._exchange = then_die(folders._exchange)
with folders.replacing_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("new")
"""


def write(folder: Path, text: str) -> None:
    with replacing_folder(folder) as temporary:
        (temporary / "weights").write_text(text)


def can_exchange(folder: Path) -> bool:
    for name in "ab":
        (folder / name).mkdir()
    return folders._exchange(folder / "a", folder / "b")


def test_a_process_killed_right_after_the_first_change_of_names_leaves_a_whole_folder(tmp_path):
    if not can_exchange(tmp_path):
        pytest.skip("this system cannot swap two names in one step")
    target = tmp_path / "best"
    write(target, "old")
    died = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert died.returncode == 9
    assert (target / "weights").read_text() == "new"
    write(target, "newer")
    assert (target / "weights").read_text() == "newer"


def test_behind_a_link_the_folder_that_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "disk" / "model").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "model")
    with replacing_folder(link) as temporary:
        assert temporary.parent == tmp_path / "disk", "nothing is written on the disk of the link"
        (temporary / "weights").write_text("new")
    assert link.is_symlink()
    assert (tmp_path / "disk" / "model" / "weights").read_text() == "new"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


@pytest.mark.parametrize("swaps", [True, False])
def test_a_folder_is_replaced_and_nothing_else_is_left(tmp_path, monkeypatch, swaps):
    if not swaps:
        monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    target = tmp_path / "best"
    for text in ("old", "new", "newer"):
        write(target, text)
        assert [path.name for path in tmp_path.iterdir()] == ["best"]
        assert (target / "weights").read_text() == text
    with pytest.raises(TypeError, match="must be str"):
        write(target, b"no text")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (target / "weights").read_text() == "newer"


def test_without_swapping_a_rename_that_fails_brings_the_old_folder_back(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    target = tmp_path / "best"
    write(target, "old")
    real = Path.rename

    def refuse(path, other):
        if ".tmp-" in path.name:
            raise OSError("no")
        return real(path, other)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        write(target, "new")
    assert (target / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize(
    ("project", "own"), [('name = "rewardlab"', True), ('name = "users-own-project"', False), (None, False)]
)
def test_the_commit_of_a_manifest_is_that_of_rewardlab_and_of_no_other_project(tmp_path, monkeypatch, project, own):
    (tmp_path / "src/rewardlab/core").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    if project:
        (tmp_path / "pyproject.toml").write_text(f"[project]\n{project}\n")
    for line in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -q -m first"):
        subprocess.run(["git", "-C", str(tmp_path), *line.split()], check=True)
    head = subprocess.run(
        ["git", "-C", str(tmp_path), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    monkeypatch.setattr(files, "__file__", str(tmp_path / "src/rewardlab/core/files.py"))
    found = files.provenance()
    assert found["git_commit"] == (head if own else None)
    assert found["git_dirty"] == (False if own else None)
    installed = tmp_path / ".venv/lib/python3.11/site-packages/rewardlab/core/files.py"
    monkeypatch.setattr(files, "__file__", str(installed))
    assert files.provenance()["git_commit"] is None


def test_json_is_read_from_a_pipe_of_the_shell_and_not_from_one_in_a_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b'{"a": 1}')
        os.close(writing)
        assert read_json(Path(f"/dev/fd/{reading}")) == {"a": 1}
    finally:
        os.close(reading)
    os.mkfifo(tmp_path / "named.json")
    with pytest.raises(DataError, match="it is a pipe"):
        read_json(tmp_path / "named.json")


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(1, True), (-0.5, True), (10**400, False), (float("nan"), False), ("1", False), (True, False), (None, False)],
)
def test_a_number_of_json_is_one_that_a_float_holds(value: object, is_one: bool) -> None:
    assert is_number(value) is is_one


@pytest.mark.parametrize("write", [write_text, append_text])
def test_a_full_disk_names_the_file_that_was_being_written(write, tmp_path, monkeypatch):
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "metrics.csv"
    file.touch()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as refused:
        write(file, "1,2")
    assert refused.value.filename == str(file)


def test_a_full_disk_does_not_name_what_is_only_there_while_a_folder_is_written(tmp_path):
    with pytest.raises(OSError, match="No space left") as refused, replacing_folder(tmp_path / "best") as temporary:
        raise OSError(errno.ENOSPC, "No space left on device", str(temporary / "adapter/config.json"))
    assert refused.value.filename == str(tmp_path / "best/adapter/config.json")


def test_what_rust_says_of_the_system_is_the_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="No space left") as refused, naming_for_rust(tmp_path):
        raise Exception("No space left on device (os error 28)")
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, str(tmp_path))
    with pytest.raises(Exception, match="data did not match") as other, naming_for_rust(tmp_path):
        raise Exception("data did not match any variant")
    assert type(other.value) is Exception


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_holds_no_number_that_other_readers_refuse(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.to_json({"loss": [1.0, value]})
    assert files.to_json({"loss": [files.finite_or_none(value)]}, indent=None) == '{"loss": [null]}'
