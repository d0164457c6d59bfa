"""The interface between the HTTP server and an engine, and the errors with which an engine refuses requests.

The server knows requests, status codes and limits; the engine knows models, batches and caches. Neither depends on how
the other is built: `local.py` is the engine of this package, and tests hand the server a made-up one. This file imports
no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from rewardlab.client.protocol import ScoredGroup, ScoreRequest, ServedModel, Usage
from rewardlab.core.errors import RewardlabError


class Refused(RewardlabError):
    """A request that is not scored. The server answers `status` with `kind` as the error's type."""

    status: ClassVar[int] = 400
    kind: ClassVar[str] = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        """`param` is the place in the request; `retry_after_s` says after how many seconds to try again, None if that
        would not help."""
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class UnscorableError(Refused):
    """A conversation that the template refuses, that ends in padding, or whose score is not finite."""

    status: ClassVar[int] = 422
    kind: ClassVar[str] = "unscorable"


class NoCalibrationError(Refused):
    """An output that needs a calibration, of a model without one."""

    status: ClassVar[int] = 422
    kind: ClassVar[str] = "no_calibration"


class TooLongError(Refused):
    """A conversation above the model's length limit, or a request above the limits of the server."""

    status: ClassVar[int] = 413
    kind: ClassVar[str] = "too_long"


class UnknownModelError(Refused):
    """A name that no model or adapter has."""

    status: ClassVar[int] = 404
    kind: ClassVar[str] = "unknown_model"


class WrongDigestError(Refused):
    """The model that has this name now is not the one that the request wants."""

    status: ClassVar[int] = 409
    kind: ClassVar[str] = "wrong_digest"


class QueueFullError(Refused):
    """More is waiting than may wait."""

    status: ClassVar[int] = 429
    kind: ClassVar[str] = "queue_full"


class DrainingError(Refused):
    """The server is about to end, or has no model yet."""

    status: ClassVar[int] = 503
    kind: ClassVar[str] = "unavailable"


class EngineFailedError(Refused):
    """The model could not compute; the server goes on."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "engine_failed"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The answer to one request, all of it by one digest."""

    model: str
    digest: str
    groups: Sequence[ScoredGroup]
    usage: Usage


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine has done since it started, and what waits, for the server's metrics."""

    waiting_requests: int
    waiting_tokens: int
    max_waiting_tokens: int
    batches: int
    computed_tokens: int
    cached_tokens: int
    """Tokens of prompts that were taken from the cache."""
    prompt_tokens: int
    """Tokens of prompts, computed or cached, each counted once a group."""
    cache_tokens: int
    """Tokens that the cache holds now."""
    max_cache_tokens: int
    swaps: int
    busy_s: float
    """Seconds in which the model computed."""
    cache_off: Mapping[str, str] = field(default_factory=dict)
    """Model -> why the cache is not used for it."""


@runtime_checkable
class Prepared(Protocol):
    """A request as tokens, bound to the model that will score it."""

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed, each prompt once."""

    @property
    def digest(self) -> str:
        """The digest of the model that it was prepared for."""


@runtime_checkable
class Engine(Protocol):
    """One or several reward models that score requests. Every method may be called from any thread."""

    def served(self) -> Sequence[ServedModel]:
        """Return the models and adapters, the default one first."""

    def prepare(self, request: ScoreRequest) -> Prepared:
        """Render and tokenise a request; takes processor time, so the server calls it in a thread.

        Raises UnknownModelError, WrongDigestError, TooLongError or UnscorableError, each with its `param`.
        """

    def tokenise(self, texts: Sequence[str], name: str | None) -> tuple[str, Sequence[Sequence[int]]]:
        """Return (digest, tokens of each text) for texts that are rendered already, with nothing added, by the
        tokenizer of the model or adapter that is called `name` (None for the default) and has this digest now.

        Raises UnknownModelError, and TooLongError with `token_ids.N` for a text that is too long to be split.
        """

    def submit(self, prepared: Any) -> Future[Scored]:
        """Queue a prepared request and return the future of its answer, which may fail with a `Refused`.

        A cancelled future takes its request out of the queue. Raises QueueFullError or DrainingError.
        """

    def swap(self, name: str, folder: Path) -> ServedModel:
        """Replace the model called `name` by the one in `folder`, which is loaded and checked beside it, and return it.

        Requests prepared before are scored by the model they were prepared for. Raises UnknownModelError, or
        ArtifactError if the folder fails its checks, and then the old model stays.
        """

    def stats(self) -> EngineStats:
        """Return counts of what was done and what waits."""

    def healthy(self) -> bool:
        """Return whether the thread that computes is alive."""

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those that were taken; return whether none is left."""

    def close(self) -> None:
        """End the engine's threads and free its models; what still waits fails with DrainingError."""
