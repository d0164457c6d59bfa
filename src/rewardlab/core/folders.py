"""Replace, remove and try folders: a whole folder stands under its name at every moment, whatever ends the process."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rewardlab.core.errors import RewardlabError, naming
from rewardlab.core.together import one_by_one

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
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` when the block ends without an error.

    A link stays, and the folder that it leads to is replaced.

    On any error the previous `target` stays as it was and the temporary folder is removed. Where Linux can swap two
    names, a whole `target` exists at every moment, whenever the process is killed. Elsewhere the previous one is
    moved aside before the rename, and a kill between the two steps leaves it as `.NAME.old-…`.
    """
    if target.is_symlink():
        target = target.resolve()
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    previous = target.with_name(f".{target.name}.old-{os.getpid()}")
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        with one_by_one(), naming(target, temporary=temporary):
            yield temporary
            # The files must be on the disk before the folder takes its final name: a reader takes the name as complete.
            fsync_folder(temporary)
        # After a swap the temporary name holds the previous folder, which the `finally` below removes.
        if target.exists() and _exchange(temporary, target):
            return
        # A plain rename cannot replace a folder that is not empty, so the previous one is moved aside first.
        remove(previous)
        if target.exists():
            target.rename(previous)
        try:
            temporary.rename(target)
        except OSError:
            if previous.exists():
                previous.rename(target)
            raise
        remove(previous)
    finally:
        remove(temporary)


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

    A folder is renamed to a temporary name first: a process that is killed while it deletes then leaves no folder of
    the original name with half of its files.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    if not re.search(r"\.(tmp|old)-\d+$", path.name):
        path = path.rename(path.with_name(f".{path.name}.tmp-{os.getpid()}"))
    shutil.rmtree(path)


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
