"""The errors with which the server itself refuses requests; engine/api.py has those of an engine."""

from __future__ import annotations

from typing import ClassVar, Final

from rewardlab.core.errors import RewardlabError
from rewardlab.core.terminal import short
from rewardlab.serve.engine.api import Refused


class MalformedError(Refused):
    """A body that is not JSON, or whose JSON has more than one meaning."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "malformed"


class UnauthorizedError(Refused):
    """No token, or another one."""

    status: ClassVar[int] = 401
    kind: ClassVar[str] = "unauthorized"


class ForbiddenError(Refused):
    """A folder from which nothing may be swapped in."""

    status: ClassVar[int] = 403
    kind: ClassVar[str] = "forbidden"


class SlowBodyError(Refused):
    """A body that did not arrive in time."""

    status: ClassVar[int] = 408
    kind: ClassVar[str] = "timeout"


class SwapGoesOnError(Refused):
    """A swap while another one is not finished."""

    status: ClassVar[int] = 409
    kind: ClassVar[str] = "swap_goes_on"


class TooLargeError(Refused):
    """A body or a number of conversations above the limit."""

    status: ClassVar[int] = 413
    kind: ClassVar[str] = "too_large"


class NotJsonError(Refused):
    """A body of another media type or encoding."""

    status: ClassVar[int] = 415
    kind: ClassVar[str] = "unsupported_media_type"


class MisdirectedError(Refused):
    """A request whose Host header is not a name of this server."""

    status: ClassVar[int] = 421
    kind: ClassVar[str] = "misdirected"


class InvalidError(Refused):
    """JSON that is not a request."""

    status: ClassVar[int] = 422
    kind: ClassVar[str] = "invalid_request"


class RawOnlyError(Refused):
    """A request in the shape of another engine for something that this server does not give there: not a raw score."""

    status: ClassVar[int] = 422
    kind: ClassVar[str] = "raw_scores_only"


class NotMappableError(Refused):
    """A request of another project that cannot be mapped to a conversation without guessing."""

    status: ClassVar[int] = 422
    kind: ClassVar[str] = "not_mappable"


class NotSwappedError(Refused):
    """A folder that failed its checks; the old model stays."""

    status: ClassVar[int] = 422
    kind: ClassVar[str] = "not_swapped"


SWAP_FAILURES: Final = (RewardlabError, OSError, RuntimeError, MemoryError)
"""Errors that loading a model may raise. PyTorch raises RuntimeError for a lack of memory and for files that do not
fit."""


def not_swapped(error: BaseException) -> NotSwappedError:
    """Return the refusal for a swap that failed with one of SWAP_FAILURES."""
    words = str(error) if isinstance(error, RewardlabError) else f"{type(error).__name__}: {short(str(error))}."
    return NotSwappedError(f"{words} The model that was served before stays.", param="folder")


class TooBusyError(Refused):
    """More requests or bytes at a time than may be held."""

    status: ClassVar[int] = 429
    kind: ClassVar[str] = "too_busy"


class ClientGone(Exception):
    """The client has closed its connection; nobody is there to answer."""
