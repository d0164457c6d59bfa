"""The errors meant for users, and where they come from.

    RewardlabError (a ValueError)
    ├── ConfigError          a flag, a configuration file or a combination of settings
    ├── DataError            a dataset: what, in which file and line, and what to do
    ├── RenderError          a conversation that the chat template cannot turn into tokens
    ├── ModelError           a model that is missing, unsuitable or incomplete
    ├── ArtifactError        a reward-model folder that is damaged or does not give its own score
    ├── EndpointError        a server of scores that is away, refuses, or answers something that is not a score
    ├── DeviceMemoryError    not even the smallest micro-batch fits into memory
    ├── DiskFullError        the disk takes no more of what a run writes (an OSError, too)
    ├── NonFiniteError       training produced NaN or infinity and was stopped before the optimizer step
    ├── RankError            a process of a distributed run that ended because another one failed
    ├── LostRankError        a process of a distributed run whose connection to another one broke
    └── RunInterrupted       a signal or a limit ended a run early; it can be resumed

A message says what happened, what was found, what was wanted, and what to do next.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rewardlab.core.terminal import visible

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
NOT_ALLOWED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


class RewardlabError(ValueError):
    """Base of every error meant for the user; ``rewardlab`` prints it without a traceback."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel whole between processes, whatever the constructor takes: a pool breaks on an error that does not."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[RewardlabError], said: tuple[object, ...], state: dict[str, object]) -> RewardlabError:
    error = kind.__new__(kind, *said)
    error.__dict__.update(state)
    return error


class ConfigError(RewardlabError):
    """A setting, or a combination of settings, that cannot be used."""


class DataError(RewardlabError):
    """A dataset that cannot be used as it is."""


class RenderError(RewardlabError):
    """A conversation that cannot be rendered within its limits."""


class ModelError(RewardlabError):
    """A model that is missing, unsuitable or incomplete."""


class ArtifactError(RewardlabError):
    """A reward-model folder that is damaged, incomplete or changed since it was saved."""


class EndpointError(RewardlabError):
    """A server of scores that cannot be reached, refuses, or answers something that is not a score of its model."""


class DeviceMemoryError(RewardlabError):
    """Memory ran out even with the smallest micro-batches that were tried."""


class DiskFullError(RewardlabError, OSError):
    """A disk that takes no more of what a run writes. It is an OSError too, as the error of the system is."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as errors of the system do, with number and file."""
        return tuple(OSError.__reduce__(self))


class NonFiniteError(RewardlabError):
    """A non-finite loss or gradient; the weights are those of the last good step."""


class RankError(RewardlabError):
    """A process of a distributed run that ended because another one failed. The message of that one says why."""


class LostRankError(RewardlabError):
    """A process of a distributed run whose connection to another one broke: that one ended and did not say why."""


class RunInterrupted(RewardlabError):
    """A run that was asked to end early, and ended between two steps or after the last."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        """`exit_status` is the exit status for the process, by which a batch system can tell that work is left."""
        super().__init__(message)
        self.exit_status = exit_status


@contextmanager
def naming(path: Path, *, temporary: Path | None = None) -> Iterator[None]:
    """Give the error of a full disk the name of the file or folder that was being written.

    The system names no file when a write to an open one fails. `temporary` is the name under which `path` is written
    first; nobody knows that one.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        if name is None and error.errno in NO_ROOM:
            error.filename = str(path)
        elif temporary is not None and isinstance(name, str) and Path(name).is_relative_to(temporary):
            error.filename = str(path / Path(name).relative_to(temporary))
        raise


@contextmanager
def naming_for_rust(path: Path) -> Iterator[None]:
    """Raise an OSError that names `path` where a library in Rust raises a bare Exception for what the system refuses.

    Tokenizers are written by one: its error says only `No space left on device (os error 28)`.
    """
    try:
        yield
    except Exception as error:
        found = re.search(r"^(.*) \(os error (\d+)\)$", str(error))
        if found is None or isinstance(error, OSError):
            raise
        raise OSError(int(found[2]), found[1], str(path)) from error


def words_of(error: OSError) -> str:
    """Return a message for an error of the operating system: what it refused, and what to do about it."""
    name = None if error.filename is None else str(error.filename)
    said = f"{'' if name is None else f'{visible(name)}: '}{error.strerror or error}"
    if error.errno == errno.ENOENT and name is not None:
        return f"{said}. If {visible(str(Path(name).parent))} was there before, it has been moved or deleted."
    if error.errno in NOT_ALLOWED and name is not None:
        return f"{said}. Let this user read and write there, or name another place."
    remedy = " Make room there, or write to another disk." if error.errno in NO_ROOM else ""
    return f"{said}.{remedy} What was saved before is still there."
