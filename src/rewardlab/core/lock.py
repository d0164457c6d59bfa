"""One process at a time in a folder, by a lock that goes with the process however it ends (flock).

Not filelock, which comes with the hub's client in whatever version there is: before 3.30 it passes over errors, or
falls back to a marker that outlives a killed process; and it does not say who holds a lock.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import re
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError

logger = logging.getLogger("rewardlab")

LOCK: Final = ".lock"
"""File that is locked; it stays, and says who was the last to hold it."""
HOW_TO_OPEN: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""No link is followed, since what it leads to would be written over, and no pipe is waited for."""
HELD_BY: Final = rb"\Z|process \d+ on "
"""What the file holds: nothing, or who held it."""
SHOWN: Final = 200
"""Bytes of it that are read."""
POLL_S: Final = 0.5
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that has none."""


@contextmanager
def only_process(folder: Path, flag: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keep other processes out of `folder`, which exists. Another one there is waited for at most `wait_s` seconds.

    Raises ConfigError naming `flag` if it stays, if the lock is another user's, or if what has its name is no lock: a
    link, a folder or a pipe, or a file with other words in it, which stays as it is. A file system without locks keeps
    nobody out, and a warning says so; some network file systems lock within each machine only.
    """
    path = folder / LOCK
    try:
        descriptor = os.open(path, HOW_TO_OPEN, 0o666)
    except PermissionError:
        raise ConfigError(
            f"{path} cannot be written, so another user may be at work there. Choose another place with {flag}, or "
            f"remove it if nobody is."
        ) from None
    except OSError as error:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise _no_lock(path, flag) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not re.match(HELD_BY, os.pread(descriptor, SHOWN, 0)):
            raise _no_lock(path, flag)
        _acquire(descriptor, folder, flag, wait_s)
        yield
    finally:
        os.close(descriptor)


def _no_lock(path: Path, flag: str) -> ConfigError:
    return ConfigError(
        f"{path} is where a run keeps its lock, and something else has that name. Move it away, or choose another "
        f"place with {flag}."
    )


def _acquire(descriptor: int, folder: Path, flag: str, wait_s: float) -> None:
    end, told = time.monotonic() + wait_s, False
    while True:
        try:
            _lock(descriptor)
        except BlockingIOError:
            holder = os.pread(descriptor, SHOWN, 0).decode(errors="replace").strip() or "another process"
            if time.monotonic() >= end:
                raise ConfigError(
                    f"{folder} is being written by {holder}. Wait until it ends or end it, or choose another place "
                    f"with {flag}."
                ) from None
            if not told:
                logger.warning("%s is being written by %s; waiting %.0f s for its end", folder, holder, wait_s)
            told = True
            time.sleep(POLL_S)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.warning(
                "%s cannot be locked (%s): make sure that no second run writes there", folder, error.strerror
            )
            return
        else:
            own = f"process {os.getpid()} on {platform.node()}\n".encode()
            os.pwrite(descriptor, own, 0)
            os.truncate(descriptor, len(own))
            return


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "not on this system")
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
