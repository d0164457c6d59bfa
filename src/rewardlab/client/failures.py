"""Errors between a client and a server of scores.

    EndpointError
    ├── UnavailableError    the server does not answer, or answers 5xx or 429, after all attempts
    ├── RefusedError        the server answers 4xx: the same request would be refused again
    ├── BadAnswerError      an answer that is not one finite score for each row
    ├── ModelChangedError   the scores are of another model than the one that was connected to
    └── CanaryError         the server does not give the scores of the model's canaries

No message holds a text that was to be scored. A server's own message is quoted in part, and only for a refusal.
"""

from __future__ import annotations

from rewardlab.core.errors import EndpointError


class UnavailableError(EndpointError):
    """A server that could not be reached or was too busy, after all attempts. Later the same call may succeed."""


class RefusedError(EndpointError):
    """A request that the server refuses, and would refuse again."""

    def __init__(
        self, message: str, *, status: int, kind: str = "", param: str = "", retry_after_s: float | None = None
    ) -> None:
        """`status` is the HTTP status; `kind` is the server's word for programs (`too_long`), `param` the place in the
        request (`groups.3.replies.0`); both are empty if it gave none. `retry_after_s` is the server's `Retry-After`
        in seconds, None if it sent none.
        """
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = status
        self.kind = kind
        self.param = param


class BadAnswerError(EndpointError):
    """An answer that is not one finite number for each row. It is not asked for again."""


class ModelChangedError(EndpointError):
    """The scores would be of another model than the one that the client is connected to."""


class CanaryError(EndpointError):
    """A server whose scores of the canaries are not those of the model."""

    def __init__(self, message: str, *, fault: str) -> None:
        """`fault` is the description of the fault that fits, with its name, as in `analysis/endpoint_faults.py`."""
        super().__init__(message)
        self.fault = fault
