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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rewardlab.core.errors import RewardlabError, naming, words_of
from rewardlab.core.signals import held_back, results_are_whole
from rewardlab.core.together import one_by_one

logger = logging.getLogger("rewardlab")
AT_FDCWD, EXCHANGE = -100, 2
"""Arguments of Linux's renameat2: paths relative to the working directory, and RENAME_EXCHANGE."""


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
    back. What else killed processes left of this folder, it removes.
    """
    if target.is_symlink():
        target = target.resolve()
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
        for left_over in (temporary, previous):
            sweep_away(left_over)


def _take_place(temporary: Path, target: Path, previous: Path) -> None:
    """Give a folder the name `target`. The one that had it has a temporary name then."""
    if target.exists() and _exchange(temporary, target):
        return
    # A plain rename cannot replace a folder that is not empty, so the previous one is moved aside first.
    remove(previous)
    if target.exists():
        move(target, previous)
    try:
        temporary.rename(target)
    except OSError:
        if previous.exists():
            move(previous, target)
        raise


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
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy2(source, copy, follow_symlinks=False)
        copy.rename(target)
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


def remove_left_over(path: Path) -> None:
    """Remove what killed processes left that were writing or removing the file or folder `path`, which no process of
    another machine may be at now. What one had moved aside is put back if nothing else has taken its name."""
    name = re.compile(rf"\.+{re.escape(path.name)}((?:\.(?:tmp|old)-\d+)+)")
    for left_over in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        if not (match := name.fullmatch(left_over.name)) or is_at_work(match[1].rpartition("-")[2]):
            continue
        if left_over.name.startswith(f".{path.name}.old-") and not os.path.lexists(path):
            move(left_over, path)
        else:
            sweep_away(left_over)


def sweep_away(left_over: Path) -> None:
    """Remove what is of no more use; a warning if that fails. Where a file is open elsewhere, some disks keep it a
    while."""
    try:
        remove(left_over)
    except OSError as error:
        _tell_left(left_over, error)


def _tell_left(left_over: Path, error: OSError) -> None:
    logger.warning("%s is of no more use and could not be removed: %s", left_over, words_of(error))


def is_at_work(process: str) -> bool:
    """Return whether another process of this machine has this number: where locks do nothing, it may be writing."""
    if not process.isdecimal() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
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
        raise RewardlabError(
            f"cannot write to {folder} ({error.strerror or error}). Choose another place with {flag}, "
            f"or make this one writable."
        ) from error
