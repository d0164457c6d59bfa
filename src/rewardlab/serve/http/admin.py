"""Hot swap over HTTP: who may swap, and from which folders a model may be loaded."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rewardlab.client.protocol import ServedModel
from rewardlab.core.terminal import short
from rewardlab.serve.engine.api import DrainingError, Refused
from rewardlab.serve.http.body import Held, Receive, body_of, parse
from rewardlab.serve.http.config import LimitsConfig
from rewardlab.serve.http.refusals import (
    SWAP_FAILURES,
    ForbiddenError,
    InvalidError,
    NotSwappedError,
    SwapGoesOnError,
    not_swapped,
)
from rewardlab.serve.http.scoring import validated

Swap = Callable[[str, Path], ServedModel]


class SwapRequest(BaseModel):
    """Which model to replace, by what."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1)]
    """Name of the model that is served."""
    folder: Annotated[str, Field(min_length=1)]
    """Reward-model folder on the server's disk, as an absolute path."""


class SwapResponse(BaseModel):
    """What is served under the name now."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    digest: str


class Swaps:
    """Swaps one model at a time, from allowed folders."""

    def __init__(self, swap: Swap, allowed: Sequence[Path], limits: LimitsConfig) -> None:
        """`swap` replaces a model by name, as `Engine.swap` does."""
        self._swap = swap
        self._allowed = [folder.resolve() for folder in allowed]
        self._limits = limits
        self._held = Held(limits.max_body_kib * 1024)
        self._waiting: asyncio.Future[ServedModel] | None = None
        self.busy = False
        """Whether a swap is under way, be it that its client has gone or been told that the server ends."""
        self.draining = False
        """Whether the server is about to end, so that no swap begins any more."""

    async def answer(self, receive: Receive, headers: Any) -> SwapResponse:
        """Read a request, swap, and return which model is served now. Raises Refused; the old model stays then."""
        async with body_of(receive, headers, self._limits, self._held) as body:
            asked = validated(SwapRequest, parse(body, max_depth=self._limits.max_depth))
        if self.draining:
            raise DrainingError("This server is about to end.")
        if self.busy:
            raise SwapGoesOnError("Another swap is not finished. Try again when it is.", retry_after_s=5.0)
        self._waiting = asyncio.wrap_future(self._begun(asked))
        try:
            served = await self._waiting
        except asyncio.CancelledError:
            if not self.draining:
                raise
            raise DrainingError("The server ended before the model was loaded.") from None
        return SwapResponse(model=served.name, digest=served.digest)

    def give_up(self) -> None:
        """Tell clients that wait for a swap, or send the request for one, that the server ends.

        Called in the event loop.
        """
        self.draining = True
        self._held.give_up()
        if self._waiting is not None:
            self._waiting.cancel()

    def _begun(self, asked: SwapRequest) -> Future[ServedModel]:
        """Begin a swap and return the future of what is served then.

        It has a thread of its own, which nobody waits for at the end: loading may take minutes and cannot be stopped.
        """
        future: Future[ServedModel] = Future()
        # From here on it cannot be cancelled: a client that goes away must not leave half a swap.
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                served = self._do(asked)
            except BaseException as error:
                self.busy = False
                future.set_exception(error)
            else:
                self.busy = False
                future.set_result(served)

        self.busy = True
        try:
            threading.Thread(target=work, name="rewardlab-swap", daemon=True).start()
        except RuntimeError:  # the system gives no more threads
            self.busy = False
            raise
        return future

    def _do(self, asked: SwapRequest) -> ServedModel:
        try:
            return self._swap(asked.model, allowed_folder(asked.folder, self._allowed))
        except Refused:
            raise
        except SWAP_FAILURES as error:
            raise not_swapped(error) from error


def allowed_folder(given: str, allowed: Sequence[Path]) -> Path:
    """Return the real path of a folder, if it and every file in it really lie below an allowed folder.

    Raises InvalidError unless it is an absolute path; ForbiddenError if it is not allowed, whether or not it exists,
    so that a client cannot find out which files the server has; NotSwappedError if it is allowed but does not exist;
    and OSError if it cannot be read.
    """
    if "\0" in given or not Path(given).is_absolute():
        raise InvalidError("folder: name the folder by its absolute path on the server's disk.", param="folder")
    real = _real(Path(given), allowed)
    if real is None:
        raise _forbidden(given)
    if not real.is_dir():
        raise NotSwappedError(f"{short(given)}: there is no such folder.", param="folder")
    for path in real.rglob("*"):
        if path.is_symlink() and _real(path, allowed) is None:
            raise _forbidden(given)
    return real


def _real(path: Path, allowed: Sequence[Path]) -> Path | None:
    """Return where a path really leads; None unless that is known, and below an allowed folder.

    Behind a link that leads back to itself, `realpath` leaves the rest of the path as it stands, with its links. A
    real path has none, so one with links is not allowed. `Path.resolve` refuses such a link only before Python 3.13.
    """
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(folder) for folder in allowed):
        return None
    return None if any(part.is_symlink() for part in (real, *real.parents)) else real


def _forbidden(given: str) -> ForbiddenError:
    return ForbiddenError(
        f"{short(given)}: does not lie, with all its files, below a folder of --allow-swap-from.", param="folder"
    )
