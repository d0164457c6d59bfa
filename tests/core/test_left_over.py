"""What killed processes left beside a file or folder goes when it is written again, and nothing else does."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from killing import abandon, ended_process
from rewardlab.core import folders
from rewardlab.core.errors import RunInterrupted
from rewardlab.core.folders import move, remove, remove_left_over, removed_at_end, replacing_folder
from rewardlab.core.lock import only_process
from rewardlab.core.placing import placing
from rewardlab.core.signals import BEGINS_ANEW, GOES_ON, ended_by_signals

KILLED_IN_TWO = """
import os, sys
from pathlib import Path
from rewardlab.core.folders import replacing_folder
with replacing_folder(Path(sys.argv[1])) as outer, replacing_folder(outer) as inner:
    (inner / "weights").write_text("new")
    os._exit(9)
"""
"""As `rewardlab average` writes a model."""


def write(folder: Path, text: str) -> None:
    with replacing_folder(folder) as temporary:
        (temporary / "weights").write_text(text)


def write_as_result(folder: Path) -> None:
    with replacing_folder(folder, is_result=True) as temporary:
        (temporary / "weights").write_text("new")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_a_killed_process_was_writing_goes_when_it_is_written_again_days_later(tmp_path):
    died = subprocess.run([sys.executable, "-c", KILLED_IN_TWO, str(tmp_path / "out")], check=False)
    assert died.returncode == 9
    left = list(tmp_path.iterdir())
    assert len(left) == 2
    write(tmp_path / "out", "newer")
    assert len(names(tmp_path)) == 3, "a process of another machine may be writing it"
    abandon(*left)
    os.utime(next(left[0].rglob("*"), left[0]))
    write(tmp_path / "out", "newer")
    assert len(names(tmp_path)) == 2, "one of the two has a file that is new"
    abandon(*tmp_path.glob(".*"))
    write(tmp_path / "out", "newest")
    assert names(tmp_path) == ["out"]


def test_a_folder_that_was_moved_aside_is_put_back_before_it_is_written_again(tmp_path, monkeypatch):
    """Where names cannot be swapped, a kill comes between two renames."""
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    target = tmp_path / "best"
    write(target, "old")
    target.rename(tmp_path / f".best.old-{ended_process()}")
    with pytest.raises(TypeError, match="must be str"):
        write(target, b"no text")
    assert names(tmp_path) == ["best"]
    assert (target / "weights").read_text() == "old"


def test_the_newest_of_several_that_were_moved_aside_is_put_back(tmp_path):
    target = tmp_path / "best"
    older, newer = (tmp_path / f".best.old-{process}" for process in (ended_process(), os.getpid()))
    for aside in (older, newer):
        write(aside, aside.name)
    abandon(older)
    folders._put_back(target)
    assert (target / "weights").read_text() == newer.name
    assert names(tmp_path) == sorted(["best", older.name])


def test_a_folder_moved_aside_stays_where_another_one_has_its_name(tmp_path):
    """Of a folder of a container's image that was being removed, it is the only whole copy."""
    write(tmp_path / "best", "a part")
    aside = tmp_path / f".best.old-{ended_process()}"
    write(aside, "whole")
    abandon(aside)
    remove_left_over(tmp_path / "best", alone=True)
    write(tmp_path / "best", "new")
    assert (aside / "weights").read_text() == "whole"


def test_the_earlier_folder_is_kept_and_named_where_it_cannot_be_put_back(tmp_path, monkeypatch, log):
    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    target, rename = tmp_path / "best", Path.rename
    write(target, "old")

    def refuse_the_name(path: Path, to: Path) -> Path:
        if to == target:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse_the_name)
    with pytest.raises(OSError, match="Input/output error"):
        write(target, "new")
    (left,) = tmp_path.iterdir()
    assert (left / "weights").read_text() == "old"
    assert f"what was in {target} before is in {left} now" in log.text


def test_what_is_of_a_process_at_work_or_has_another_name_stays(tmp_path):
    gone, at_work = ended_process(), os.getppid()
    mine = [
        f".a.json.tmp-{gone}",
        f"..a.json.tmp-{gone}.tmp-{gone}",
        f"..a.json.tmp-{gone}.old-{gone}",
        f".a.json.tmp-{os.getpid()}",
    ]
    others = [
        f".a.json.old-{gone}",
        f".a.json.tmp-{at_work}",
        f"..a.json.tmp-{gone}.tmp-{at_work}",
        f"..a.json.tmp-{at_work}.tmp-{at_work}",
        f"..a.json.tmp-{gone}",
        f".a.json.old-1.tmp-{gone}",
        f".b.a.json.tmp-{gone}",
        f".axjson.tmp-{gone}",
        f".a.json.tmp-{gone}x",
        f"a.json.tmp-{gone}",
        ".a.json.tmp-20241130",
        ".a.json.tmp-4194305",
        ".a.json.tmp-20241130120000",
        ".a.json",
        "a.json",
    ]
    for name in (*mine, *others):
        (tmp_path / name).touch()
    remove_left_over(tmp_path / "a.json")
    assert names(tmp_path) == sorted((*mine, *others))
    abandon(tmp_path / mine[0])
    remove_left_over(tmp_path / "a.json")
    assert names(tmp_path) == sorted((*mine[1:], *others))
    remove_left_over(tmp_path / "a.json", alone=True)
    assert names(tmp_path) == sorted(others)
    remove_left_over(tmp_path / "nowhere/a.json")


def test_what_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, log):
    left_over = tmp_path / f".a.json.tmp-{ended_process()}"
    left_over.touch()

    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    remove_left_over(tmp_path / "a.json", alone=True)
    assert "could not be removed" in log.text


@pytest.fixture
def keeps_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network disk does, which keeps a file that is open, and so the folder in which it is."""
    remove_tree = shutil.rmtree

    def removing(folder: Path, **how: object) -> None:
        for handle in Path("/proc/self/fd").iterdir():
            if os.path.lexists(handle) and Path(folder).resolve() in handle.readlink().parents:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))
        remove_tree(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", removing)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux says which files are open")
@pytest.mark.usefixtures("keeps_open_files")
def test_a_locked_folder_goes_on_a_disk_that_keeps_open_files(tmp_path, caplog):
    place = tmp_path / ".out.partial"
    place.mkdir()
    with ExitStack() as ended, only_process(place, "--output"):
        removed_at_end(place, ended)
        assert not place.exists(), "nobody else takes it for the folder of their own work"
    assert names(tmp_path) == []
    assert caplog.text == ""


def test_work_whose_folder_cannot_be_removed_is_done_all_the_same(tmp_path, monkeypatch, caplog):
    def refuse(path: Path, _: Path) -> Path:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with ExitStack() as ended:
        monkeypatch.setattr(Path, "rename", refuse)
        removed_at_end(tmp_path, ended)
    assert "is of no more use and could not be removed" in caplog.text


def test_a_folder_is_replaced_where_the_earlier_one_cannot_be_removed(tmp_path, monkeypatch, caplog):
    write(tmp_path / "best", "old")

    def refuse(folder: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    write(tmp_path / "best", "new")
    assert (tmp_path / "best/weights").read_text() == "new"
    assert "could not be removed" in caplog.text


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGTERM, 0, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_after_a_folder_has_its_name_says_that_all_is_written(tmp_path, monkeypatch, number, status, said):
    take_place = folders._take_place

    def then_a_signal(*given: Path) -> None:
        take_place(*given)
        signal.raise_signal(number)

    write(tmp_path / "best", "old")
    monkeypatch.setattr(folders, "_take_place", then_a_signal)
    whole = f"^{said}. What it had to write is whole: .*best$"
    with pytest.raises(RunInterrupted, match=whole) as ended, ended_by_signals(BEGINS_ANEW):
        write_as_result(tmp_path / "best")
    assert ended.value.exit_status == status
    assert names(tmp_path) == ["best"]
    assert (tmp_path / "best/weights").read_text() == "new"


def test_a_signal_in_a_command_of_another_one_is_told_by_the_other_one(tmp_path):
    @ended_by_signals(BEGINS_ANEW)
    def command() -> None:
        write_as_result(tmp_path / "best")
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(RunInterrupted, match=GOES_ON) as ended, ended_by_signals(GOES_ON):
        command()
    assert ended.value.exit_status == 75


def test_ctrl_c_before_anything_is_whole_says_what_the_same_command_does():
    with pytest.raises(RunInterrupted, match=f"^interrupted. {BEGINS_ANEW}$") as ended, ended_by_signals(BEGINS_ANEW):
        signal.raise_signal(signal.SIGINT)
    assert ended.value.exit_status == 130


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as it came with the image of a container: it cannot be renamed, and a new one can."""
    rename, folder = Path.rename, tmp_path / "best"
    write(folder, "old")
    (folder / "of the image").touch()

    def renaming(path: Path, target: Path) -> Path:
        if (path / "of the image").exists() and not re.search(r"\.(tmp|old)-\d+$", path.name):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))
        return rename(path, target)

    monkeypatch.setattr(folders, "_exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", renaming)
    return folder


def test_a_folder_of_the_image_of_a_container_is_replaced(image, tmp_path):
    write(image, "new")
    assert names(image) == ["weights"]
    assert (image / "weights").read_text() == "new"
    assert names(tmp_path) == ["best"]


def test_a_folder_of_the_image_of_a_container_is_removed_and_moved(image, tmp_path):
    move(image, tmp_path / "runs/other")
    assert names(tmp_path) == ["runs"]
    assert (tmp_path / "runs/other/weights").read_text() == "old"
    remove(tmp_path / "runs/other")
    assert names(tmp_path / "runs") == []


def test_a_copy_to_another_disk_that_fails_leaves_nothing(image, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        (tmp_path / f".other.tmp-{os.getpid()}").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", refuse)
    with pytest.raises(OSError, match="No space left"):
        move(image, tmp_path / "other")
    assert names(tmp_path) == ["best"]


def test_results_take_the_place_of_a_folder_of_the_image_of_a_container(image, tmp_path):
    with placing(tmp_path, lambda: ("best",), whole=("best",)) as new:
        (new / "best").mkdir()
        (new / "best/weights").write_text("new")
    assert names(tmp_path) == ["best"]
    assert names(image) == ["weights"]
