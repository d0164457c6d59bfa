"""A folder belongs to one process, until that ends."""

from __future__ import annotations

import errno
import os
import platform
import socket
import threading

import pytest

from rewardlab.core import lock
from rewardlab.core.errors import ConfigError
from rewardlab.core.lock import only_process


def test_a_second_process_is_refused_until_the_first_one_is_killed(tmp_path, holder):
    other = holder(tmp_path)
    named = rf"is being written by process {other.pid} on .*with --here"
    with pytest.raises(ConfigError, match=named), only_process(tmp_path, "--here"):
        pass
    other.kill()
    other.wait()
    with only_process(tmp_path, "--here"):
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_the_end_of_the_other_is_waited_for(tmp_path, holder, log, monkeypatch):
    monkeypatch.setattr(lock, "POLL_S", 0.01)
    other = holder(tmp_path)
    threading.Timer(0.2, other.kill).start()
    with only_process(tmp_path, "--here", wait_s=60):
        pass
    assert f"is being written by process {other.pid}" in log.text


def test_an_error_inside_gives_the_folder_back(tmp_path):
    with pytest.raises(KeyError), only_process(tmp_path, "--here"):
        raise KeyError
    with only_process(tmp_path, "--here"):
        pass


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, log):
    def no_locks(_descriptor):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_lock", no_locks)
    with only_process(tmp_path, "--here"):
        pass
    assert "cannot be locked (No locks available): make sure that no second run writes there" in log.text


def test_the_lock_of_another_user_is_no_licence(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(lock.os, "open", denied)
    with pytest.raises(ConfigError, match="another user may be at work there"), only_process(tmp_path, "--here"):
        pass


@pytest.mark.parametrize("how", ["link", "hard link", "link to nothing", "file", "folder", "pipe", "socket"])
def test_what_is_no_lock_is_refused_and_stays_as_it_is(how, tmp_path):
    """A link was followed, and what it led to was emptied."""
    precious, folder = tmp_path / "precious.txt", tmp_path / "run"
    precious.write_text("three months of work")
    folder.mkdir()
    path = folder / ".lock"
    listener = socket.socket(socket.AF_UNIX)
    make = {
        "link": lambda: path.symlink_to(precious),
        "hard link": lambda: path.hardlink_to(precious),
        "link to nothing": lambda: path.symlink_to(tmp_path / "nothing"),
        "file": lambda: path.write_text("mine"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "socket": lambda: listener.bind(str(path)),
    }
    make[how]()
    with pytest.raises(ConfigError, match="but this is not a lock"), only_process(folder, "--here"):
        pass
    listener.close()
    assert precious.read_text() == "three months of work"
    assert not (tmp_path / "nothing").exists()
    assert how != "file" or path.read_text() == "mine"


def test_who_held_the_lock_before_is_written_over(tmp_path):
    (tmp_path / ".lock").write_text("process 123456789 on a-machine-with-a-very-long-name.of-a-cluster.example\n")
    with only_process(tmp_path, "--here"):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_a_full_disk_names_the_lock(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as error, only_process(tmp_path, "--output"):
        raise AssertionError
    assert error.value.filename == str(tmp_path / lock.LOCK)
