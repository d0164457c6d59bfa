"""Replace, remove and try folders: a whole folder stands under its name at every moment, whatever ends the process."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from rewardlab.core.errors import NO_ROOM, RewardlabError, naming, words_of
from rewardlab.core.signals import held_back, results_are_whole
from rewardlab.core.together import one_by_one

logger = logging.getLogger("rewardlab")
AT_FDCWD, EXCHANGE = -100, 2
"""Arguments of Linux's renameat2: paths relative to the working directory, and RENAME_EXCHANGE."""
LARGEST_PROCESS: Final = 2**22
"""No process of Linux has a larger number: a name that ends with one is not ours, such as that of a dated copy."""
ABANDONED_S: Final = 24 * 3600.0
"""A process that writes a file or folder changes it more often than this, even one that was stopped for a night."""


def fsync_folder(folder: Path) -> None:
    """Flush every file below `folder`, and the folder itself, to the disk."""
    # A link is part of its folder, and what it leads to was not written here, and may not be there.
    inside = (path for path in sorted(folder.rglob("*")) if not path.is_symlink())
    for path in (*inside, folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def replacing_folder(target: Path, *, is_result: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends without an error.

    A link stays, and the folder that it leads to is replaced. `is_result` says that the command writes nothing else.

    On any error the previous `target` stays as it was and the temporary folder is removed. Where Linux can swap two
    names, a whole `target` exists at every moment, whenever the process is killed. Elsewhere the previous one is
    moved aside before the rename, and a kill between the two steps leaves it as `.NAME.old-…`, which the next call puts
    back. What else killed processes left of this folder goes, as `remove_left_over` says.
    """
    if target.is_symlink():
        target = target.resolve()
    _put_back(target)
    remove_left_over(target)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    previous = target.with_name(f".{target.name}.old-{os.getpid()}")
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        with one_by_one(), naming(target, temporary=temporary):
            yield temporary
            # The files must be on the disk before the folder takes its final name: a reader takes the name as complete.
            fsync_folder(temporary)
        with held_back():
            _take_place(temporary, target, previous)
            if is_result:
                results_are_whole(target)
    finally:
        # The new folder stands there even if the previous one cannot be removed, whose files somebody may have open.
        sweep_away(temporary)


def _take_place(temporary: Path, target: Path, previous: Path) -> None:
    """Give a folder the name `target`. The one that had it has the name `temporary` then, and is of no more use."""
    if target.exists() and _exchange(temporary, target):
        return
    # A plain rename cannot replace a folder that is not empty, so the previous one is moved aside first.
    remove(previous)
    try:
        if target.exists():
            move(target, previous)
        temporary.rename(target)
    except OSError:
        if previous.exists():
            _give_back(previous, target)
        raise
    if previous.exists():
        try:
            previous.rename(temporary)
        except OSError as error:
            _tell_left(previous, error)


def _give_back(previous: Path, target: Path) -> None:
    """Give a folder that was moved aside its name again; a warning that says where it is if that fails, or if there is
    something of this name: what another process put there, or a part that could not be removed."""
    try:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        move(previous, target)
    except OSError as error:
        logger.warning("what was in %s before is in %s now: %s", target, previous, words_of(error))


def _put_back(target: Path) -> None:
    """Give a folder its name again that a killed process had moved aside, unless something else has the name. Of
    several it is the newest."""
    if os.path.lexists(target):
        return
    aside = [path for path, kind, _ in _left_over(target) if kind == "old" and path.is_dir()]
    if aside:
        _give_back(max(aside, key=lambda path: path.stat().st_mtime), target)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step. Return False where the system or the file system cannot."""
    # Python has no call for RENAME_EXCHANGE, so renameat2 is called in the C library.
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    answer: int = rename(AT_FDCWD, os.fsencode(first.absolute()), AT_FDCWD, os.fsencode(second.absolute()), EXCHANGE)
    return answer == 0


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists.

    A folder is renamed to a temporary name first, where it can be: a process that is killed while it deletes then
    leaves no folder of the original name with half of its files.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    if not re.search(r"\.(tmp|old)-\d+$", path.name):
        try:
            path = _aside(path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
    shutil.rmtree(path)


def move(source: Path, target: Path) -> None:
    """Give a file or a folder another name, also on another disk, where a link may lead, and where a folder cannot be
    renamed although it is on this one: in a container, one that came with its image."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        remove(copy)
        try:
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, copy, symlinks=True)
            else:
                shutil.copy2(source, copy, follow_symlinks=False)
            copy.rename(target)
        except BaseException:
            sweep_away(copy)
            raise
        remove(source)


def _aside(folder: Path) -> Path:
    return folder.rename(folder.with_name(f".{folder.name}.tmp-{os.getpid()}"))


def removed_at_end(folder: Path, end: ExitStack) -> None:
    """Let a folder go that this process has locked by a file in it, once `end` is closed, after the lock: a network
    disk keeps a file that is open, and the folder around it. What cannot be removed is a warning."""
    try:
        end.callback(sweep_away, _aside(folder))
    except OSError as error:
        _tell_left(folder, error)


def remove_left_over(path: Path, *, alone: bool = False) -> None:
    """Remove what killed processes left that were writing or removing the file or folder `path`.

    `alone` says that this process holds a lock, so that no other one is writing there. Otherwise one of another machine
    may be, and only what nobody has changed for `ABANDONED_S` goes. What was moved aside (`.NAME.old-…`) may be the
    only copy, and stays.
    """
    for left_over, kind, process in _left_over(path):
        if kind == "old" or is_at_work(process):
            continue
        with suppress(OSError):  # another process may be removing it
            if alone or time.time() - _last_change(left_over) > ABANDONED_S:
                sweep_away(left_over)


def _left_over(path: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield what has a temporary name of a file or folder: its path, `tmp` or `old`, and the process that made it. A
    temporary folder may have a temporary one itself, where a model is written into it."""
    own = re.escape(path.name)
    name = re.compile(rf"\.{own}\.(tmp|old)-(\d{{1,7}})|\.\.{own}\.tmp-(\d{{1,7}})\.(?:tmp|old)-\3")
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:  # no such folder, or one that may not be listed
        return
    for other in beside:
        match = name.fullmatch(other.name)
        if match and (process := int(match[2] or match[3])) <= LARGEST_PROCESS:
            yield other, match[1] or "tmp", process


def _last_change(path: Path) -> float:
    """Return when a file, or anything in a folder, was changed last."""
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    times: list[float] = [one.lstat().st_mtime for one in (path, *inside)]
    return max(times)


def sweep_away(left_over: Path) -> None:
    """Remove what is of no more use; a warning if that fails. Where a file is open elsewhere, some disks keep it a
    while."""
    try:
        remove(left_over)
    except OSError as error:
        _tell_left(left_over, error)


def _tell_left(left_over: Path, error: OSError) -> None:
    logger.warning("%s is of no more use and could not be removed: %s", left_over, words_of(error))


def is_at_work(process: int) -> bool:
    """Return whether another process of this machine has this number: where locks do nothing, it may be writing."""
    if process == os.getpid() or not 0 < process <= LARGEST_PROCESS:
        return False
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


def require_writable_folder(folder: Path, flag: str) -> None:
    """Create `folder` and check that a file can be written in it, before any long work begins.

    Raises RewardlabError, naming `flag`, if that fails, and for a name that is not UTF-8, which neither TensorBoard nor
    JSON files can hold.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise RewardlabError(
            f"cannot write to {folder}: this name is not UTF-8. Choose another place with {flag}."
        ) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Without a name where the system can: a process that is killed here leaves nothing.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b" ")
    except OSError as error:
        if folder.is_file():
            raise RewardlabError(
                f"cannot write to {folder}: it is a file. Choose another place with {flag}."
            ) from error
        remedy = "make room there" if error.errno in NO_ROOM else "make this one writable"
        raise RewardlabError(
            f"cannot write to {folder} ({error.strerror or error}). Choose another place with {flag}, or {remedy}."
        ) from error
