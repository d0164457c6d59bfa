"""Keep a folder to one process at a time, by a lock that the system releases however the process ends (flock).

The package filelock is not used here. It is installed as a dependency of huggingface_hub in an unknown version; before
3.30 it ignores errors, or falls back to a marker file that outlives a killed process. It also does not say who holds a
lock.
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

from rewardlab.core.errors import ConfigError, naming

logger = logging.getLogger("rewardlab")

LOCK: Final = ".lock"
"""Name of the locked file. It is never removed, and says which process held it last."""
HOW_TO_OPEN: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Links are not followed, since the file that they lead to would be overwritten, and opening a pipe does not block."""
HELD_BY: Final = rb"\Z|process \d+ on "
"""Pattern of the content of a lock: empty, or the process that held it. A file with other content is not a lock."""
SHOWN: Final = 200
"""Bytes of a lock that are read."""
POLL_S: Final = 0.5
"""Seconds between two attempts to take a lock."""
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors by which a file system says that it has no locks."""


@contextmanager
def only_process(folder: Path, flag: str, *, wait_s: float = 0.0) -> Iterator[None]:
    """Keep other processes out of an existing folder. If another one holds it, wait at most `wait_s` seconds.

    On a file system without locks a warning is logged and other processes are not kept out. Some network file systems
    lock within each machine only.

    Raises ConfigError, naming `flag`, if the other process stays, if the lock belongs to another user, or if something
    that is not a lock has its name: a link, a folder, a pipe or a file with other content, which is left unchanged.
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
        with naming(path):
            _acquire(descriptor, folder, flag, wait_s)
        yield
    finally:
        os.close(descriptor)


def _no_lock(path: Path, flag: str) -> ConfigError:
    """Return the error for something that has the name of the lock and is not one."""
    return ConfigError(
        f"{path} is the name of a run's lock, but this is not a lock. Move it away, or choose another "
        f"place with {flag}."
    )


def _acquire(descriptor: int, folder: Path, flag: str, wait_s: float) -> None:
    """Take the lock and write this process into it. Raises ConfigError if it is not free after `wait_s` seconds."""
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
    """Lock an open file. Raises BlockingIOError if another process holds it, OSError where there are no locks."""
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "not on this system")
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
