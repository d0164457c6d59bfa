"""Results of several files: all of them in their places, or what stood there before, whatever ended the writer."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from rewardlab.core import placing as placing_module
from rewardlab.core.errors import ConfigError, DataError, RewardlabError, RunInterrupted
from rewardlab.core.placing import MOVING, placing, settle, settle_to_read
from rewardlab.core.signals import BEGINS_ANEW, ended_by_signals

OLD = {
    "manifest.json": "old",
    "a.json": "old",
    "gone.json": "old",
    "sub/manifest.json": "old",
    "sub/b.json": "old",
    "best/weights": "old",
    "best/more/tokens": "old",
    "room/c.json": "old",
}
MINE = {"notes.txt": "mine", "sub/notes.txt": "mine", "a.json.bak": "mine"}
NEW = {
    "manifest.json": "new",
    "a.json": "new",
    "sub/manifest.json": "new",
    "sub/d.json": "new",
    "best/weights": "new",
    "best/card": "new",
}
NAMES = ("manifest.json", "a.json", "gone.json", "sub/manifest.json", "sub/b.json", "sub/d.json", "best", "room/c.json")
"""What the earlier results of a command may be called."""


class KilledError(BaseException):
    """In place of a kill: nothing that cleans up after an error answers to it once results are moved."""


def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def tree(folder: Path) -> dict[str, str]:
    """Every file whose name and folders can be seen."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in files
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def place(folder: Path) -> None:
    with placing(folder, lambda: NAMES, whole=("best",)) as new:
        put(new, NEW)


@contextmanager
def killed_at_rename(at: int) -> Iterator[list[int]]:
    """End by `KilledError` in place of the `at`-th renaming."""
    rename, done = os.rename, [0]

    def ending(*given: object, **more: object) -> None:
        done[0] += 1
        if done[0] >= at:
            raise KilledError
        rename(*given, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "rename", ending)
        yield done


def ends(at: int, what: Callable[[], object]) -> bool:
    try:
        with killed_at_rename(at):
            what()
    except KilledError:
        return True
    return False


@pytest.mark.parametrize("before", [{}, OLD], ids=["first", "again"])
def test_results_appear_together_and_files_of_others_stay(tmp_path: Path, before: dict[str, str]) -> None:
    put(tmp_path, MINE | before)
    with placing(tmp_path, lambda: NAMES, whole=("best",)) as new:
        put(new, NEW)
        assert tree(tmp_path) == MINE | before
    assert tree(tmp_path) == MINE | NEW
    assert hidden(tmp_path) == []
    assert not (tmp_path / "room").exists(), "nothing else was in it"


@pytest.mark.parametrize("before", [{}, OLD], ids=["first", "again"])
def test_after_a_kill_at_any_move_what_was_there_is_there_again(tmp_path: Path, before: dict[str, str]) -> None:
    at = 1
    while True:
        folder = put(tmp_path / str(at), MINE | before)
        if not ends(at, partial(place, folder)):
            break
        shown = set(tree(folder).values()) - {"mine"}
        assert len(shown) <= 1, f"some files are old and some are new: {tree(folder)}"
        all_moved = tree(folder) == MINE | NEW
        again = 1
        while ends(again, partial(settle, folder)):
            again += 1
        assert tree(folder) == (MINE | NEW if all_moved else MINE | before)
        assert hidden(folder) == []
        place(folder)
        assert tree(folder) == MINE | NEW
        at += 1
    assert at > len(NEW), "it was killed at every move"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), KilledError()])
def test_an_error_while_results_are_written_leaves_all_as_it_was(tmp_path: Path, error: BaseException) -> None:
    put(tmp_path, MINE | OLD)

    def begun() -> None:
        with placing(tmp_path, lambda: NAMES) as new:
            put(new, {"manifest.json": "half"})
            raise error

    with pytest.raises(type(error)):
        begun()
    assert tree(tmp_path) == MINE | OLD
    assert hidden(tmp_path) == []


def test_an_error_while_they_are_moved_puts_back_what_was_there(tmp_path: Path, monkeypatch) -> None:
    put(tmp_path, MINE | OLD)
    move, done = placing_module.move, 0

    def failing(source: Path, target: Path) -> None:
        nonlocal done
        done += 1
        if done == len(OLD):
            raise OSError(errno.EIO, "Input/output error", str(target))
        move(source, target)

    monkeypatch.setattr(placing_module, "move", failing)
    with pytest.raises(OSError, match="Input/output"):
        place(tmp_path)
    assert tree(tmp_path) == MINE | OLD
    assert hidden(tmp_path) == []


def test_where_what_was_there_cannot_be_put_back_both_errors_and_its_place_are_named(tmp_path, monkeypatch) -> None:
    put(tmp_path, OLD)
    move, done = placing_module.move, 0

    def failing(source: Path, target: Path) -> None:
        nonlocal done
        done += 1
        if done > 3:
            raise OSError(errno.EIO, f"Input/output error {done}", str(target))
        move(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(placing_module, "move", failing)
        with pytest.raises(RewardlabError, match=r"error 4.*error 5.*They are in .*\.results\.moving/old"):
            place(tmp_path)
    settle(tmp_path)
    assert tree(tmp_path) == OLD


def test_what_another_command_has_put_there_since_is_not_touched(tmp_path: Path) -> None:
    """The folder of results that were moved cannot outlive what it is about and remove the results of somebody else."""
    put(tmp_path, MINE)
    assert ends(len(NEW), lambda: place(tmp_path))
    for name in list(tree(tmp_path)):
        (tmp_path / name).unlink()
    other = dict.fromkeys(NEW, "another run")
    put(tmp_path, other)
    settle(tmp_path)
    assert tree(tmp_path) == other
    assert hidden(tmp_path) == []


def test_earlier_results_are_not_lost_where_something_has_taken_their_names(tmp_path: Path) -> None:
    put(tmp_path, OLD)
    assert ends(5, lambda: place(tmp_path))
    gone = next(name for name in OLD if not (tmp_path / name).exists())
    put(tmp_path, {gone: "another"})
    with pytest.raises(ConfigError, match="Move one of the two away") as refused:
        settle(tmp_path)
    aside = Path(str(refused.value).split("earlier file of that name is ")[1].split(". Move")[0])
    assert aside.read_text() == "old"
    (tmp_path / gone).unlink()
    settle(tmp_path)
    assert tree(tmp_path) == OLD


def test_a_folder_of_results_is_moved_to_another_disk_where_a_link_leads(tmp_path: Path, monkeypatch) -> None:
    folder, elsewhere = put(tmp_path / "out", MINE | OLD), tmp_path / "disk"
    shutil.move(folder / "sub", elsewhere)
    (folder / "sub").symlink_to(elsewhere)
    rename = os.rename

    def on_disks(source: Path, target: Path) -> None:
        if len({"disk" in Path(os.path.realpath(path.parent)).parts for path in map(Path, (source, target))}) > 1:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    monkeypatch.setattr(os, "rename", on_disks)
    place(folder)
    assert tree(elsewhere) == {"manifest.json": "new", "d.json": "new", "notes.txt": "mine"}
    assert (folder / "sub").is_symlink()
    assert hidden(folder) == hidden(elsewhere) == []


@pytest.mark.parametrize("name", ["../outside/file", "{}/outside/file"])
def test_a_plan_that_names_what_is_outside_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    folder = put(tmp_path / "out", {f"{MOVING}/old/0": "planted"})
    plan = {"new": {}, "old": [name.format(tmp_path)], "alone": False}
    (folder / MOVING / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(DataError, match="damaged. Of results that were being replaced, .*old has the earlier ones"):
        settle(folder)
    assert not (tmp_path / "outside/file").exists()


@contextmanager
def disks() -> Iterator[None]:
    """Folders called `disk` are on another disk than the rest."""
    rename = os.rename

    def on_disks(source: Path, target: Path) -> None:
        if len({"disk" in Path(os.path.realpath(path.parent)).parts for path in map(Path, (source, target))}) > 1:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "rename", on_disks)
        yield


def ends_at_change(at: int, what: Callable[[], object]) -> bool:
    """End by `KilledError` in place of the `at`-th renaming, copy or deletion; return whether there was one."""
    done = [0]

    def ending(call: Callable[..., object]) -> Callable[..., object]:
        def counted(*given: object, **more: object) -> object:
            done[0] += 1
            if done[0] >= at:
                raise KilledError
            return call(*given, **more)

        return counted

    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((os, "rename"), (os, "unlink"), (os, "rmdir"), (shutil, "copyfile")):
            patched.setattr(owner, name, ending(getattr(owner, name)))
        try:
            what()
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("before", [{}, OLD], ids=["first", "again"])
def test_a_kill_between_disks_loses_nothing_and_mixes_nothing(tmp_path: Path, before: dict[str, str]) -> None:
    """A link leads to another disk, where moving is copying and deleting, and so is the moving of a whole folder."""
    at = 1
    while True:
        folder, elsewhere = put(tmp_path / str(at) / "out", MINE | before), tmp_path / str(at) / "disk"
        shutil.move(folder / "sub", elsewhere / "sub")
        (folder / "sub").symlink_to(elsewhere / "sub")
        if before:
            shutil.move(folder / "best", elsewhere / "best")
            shutil.copytree(elsewhere / "best", folder / "best")

        def shown(folder: Path = folder, elsewhere: Path = elsewhere) -> dict[str, str]:
            behind = {f"sub/{name}": text for name, text in tree(elsewhere / "sub").items()}
            return {name: text for name, text in tree(folder).items() if not name.startswith("sub/")} | behind

        with disks():
            ended = ends_at_change(at, partial(place, folder))
            all_moved = shown() == MINE | NEW
            settle(folder)
        if not ended:
            break
        assert shown() == (MINE | NEW if all_moved else MINE | before), at
        assert hidden(folder) == hidden(elsewhere) == []
        at += 1
    assert at > 2 * len(NEW)


def test_of_no_new_results_none_are_taken_for_moved(tmp_path: Path) -> None:
    folder = put(tmp_path, {f"{MOVING}/old/0": "old"})
    (folder / MOVING / "plan.json").write_text(json.dumps({"new": {}, "old": ["a.json"], "alone": True}))
    settle(folder)
    assert tree(folder) == {"a.json": "old"}


def test_a_folder_with_the_name_of_a_result_is_refused_and_kept(tmp_path: Path) -> None:
    put(tmp_path, {"a.json/notes.txt": "mine"})
    with pytest.raises(ConfigError, match="a.json is a folder, and has the name of a file"):
        place(tmp_path)
    assert tree(tmp_path) == {"a.json/notes.txt": "mine"}
    assert hidden(tmp_path) == []


def test_a_link_among_earlier_results_goes_with_what_is_behind_it(tmp_path: Path) -> None:
    folder = put(tmp_path / "out", {"manifest.json": "old"})
    put(tmp_path / "evals", {"a.json": "old"})
    (folder / "evals").symlink_to(tmp_path / "evals")
    with placing(folder, lambda: ("evals", "evals/a.json", "manifest.json")) as new:
        put(new, {"evals/a.json": "new"})
    assert tree(folder) == {"evals/a.json": "new"}
    assert tree(tmp_path / "evals") == {"a.json": "old"}


def test_results_that_cannot_be_removed_make_no_failure_of_what_is_whole(tmp_path, monkeypatch, caplog) -> None:
    put(tmp_path, OLD)

    def busy(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    place(tmp_path)
    assert tree(tmp_path) == NEW
    settle(tmp_path)
    assert "could not be removed: " in caplog.text


def test_what_another_process_is_writing_is_not_swept(tmp_path: Path) -> None:
    written = put(tmp_path, {f".results.tmp-{os.getppid()}/new/a.json": "half", ".results.tmp-999999999/new/b": "left"})
    settle(written)
    assert hidden(tmp_path) == [f".results.tmp-{os.getppid()}"]


def test_a_signal_that_comes_while_they_are_moved_waits_and_is_told_that_all_is_written(tmp_path, monkeypatch) -> None:
    move, sent = placing_module.move, []

    def moving(source: Path, target: Path) -> None:
        if not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGTERM)
        move(source, target)

    monkeypatch.setattr(placing_module, "move", moving)
    with pytest.raises(RunInterrupted, match="What it had to write is whole") as ended, ended_by_signals(BEGINS_ANEW):
        place(tmp_path)
    assert ended.value.exit_status == 0
    assert tree(tmp_path) == NEW
    assert hidden(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "said", "status"), [(signal.SIGTERM, "stopped by SIGTERM", 75), (signal.SIGINT, "interrupted", 130)]
)
def test_a_signal_before_that_says_that_the_command_begins_anew(tmp_path: Path, number, said, status) -> None:
    with (
        pytest.raises(RunInterrupted, match=rf"{said}\. {BEGINS_ANEW}") as ended,
        ended_by_signals(BEGINS_ANEW),
        placing(tmp_path, lambda: NAMES),
    ):
        signal.raise_signal(number)
    assert ended.value.exit_status == status
    assert tree(tmp_path) == {}


def half_moved(folder: Path, *names: str) -> Path:
    """Make a folder of results of which a killed process had moved the earlier ones aside."""
    put(folder / MOVING, {f"old/{number}": "old" for number, _ in enumerate(names)} | {"new/compare.json": "new"})
    plan = {"new": {"compare.json": [["", 0, 0]]}, "old": [*names], "alone": True}
    (folder / MOVING / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.mark.parametrize("name", ["out", "out/m1", "out/m1/eval.scores.jsonl"])
def test_what_is_read_is_put_back_first_by_whatever_name(tmp_path: Path, monkeypatch, name: str) -> None:
    half_moved(tmp_path / "out", "m1/eval.scores.jsonl")
    (tmp_path / "out/m1").mkdir()
    here = (tmp_path / name) if (tmp_path / name).is_dir() else (tmp_path / name).parent
    monkeypatch.chdir(here)
    settle_to_read(Path(os.path.relpath(tmp_path / name)))
    assert (tmp_path / "out/m1/eval.scores.jsonl").read_text() == "old"
    assert not (tmp_path / "out" / MOVING).exists()


def test_results_that_do_not_concern_what_is_read_are_left_alone(tmp_path: Path) -> None:
    half_moved(tmp_path, "compare.json")
    (tmp_path / "other/m1").mkdir(parents=True)
    for path in (tmp_path / "other", tmp_path / "other/m1", tmp_path / "other/scores.jsonl"):
        settle_to_read(path)
    assert (tmp_path / MOVING).is_dir()
    (tmp_path / MOVING / "plan.json").write_text("{")
    settle_to_read(tmp_path / "other")
    with pytest.raises(ConfigError, match="has moved only some of them so far, or was killed"):
        settle_to_read(tmp_path)
