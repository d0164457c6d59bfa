"""Publishing of a training run's newest model to a running server. A failure to publish never ends the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from rewardlab.client.config import ClientConfig
from rewardlab.client.failures import RefusedError, UnavailableError
from rewardlab.client.http import Http
from rewardlab.client.rendering import digest_in
from rewardlab.core.errors import EndpointError
from rewardlab.core.terminal import number_of

logger = logging.getLogger("rewardlab")
T = TypeVar("T")
SWAP_PATH: Final = "/admin/swap"
BEST: Final = "best"
"""Name of the folder of a run's best model."""
ATTEMPTS: Final = 3
GOES_ON: Final = "swap_goes_on"
"""The server's error type for a swap that has to wait for another one."""
WAIT_S: Final = 5.0
"""Seconds to wait then, unless the server names another time."""


class Publisher:
    """Asks a rewardlab server to swap to the folders that a run saves.

    A swap that fails is logged as a warning and counted, and the run goes on. The next folder is tried all the same,
    and `finish` tries once more with the model that was chosen.
    """

    def __init__(self, url: str, *, model: str, token: str | None, every: str, timeout_s: float) -> None:
        """`every` is `best`, `eval` or `end`. Raises ConfigError for an invalid address."""
        self.url, self.model, self.every, self.timeout_s = url, model, every, timeout_s
        self._token = token
        self.published: Path | None = None
        """The folder that the server has now; None before the first swap and after one that failed."""
        self.digest = ""
        """Digest of that model."""
        self.swaps = 0
        self.failures = 0
        # Create a connection once, so that an invalid address is refused before the first step, not after the first
        # evaluation.
        _finished(self._closed())

    def saved(self, folder: Path, step: int) -> None:
        """Publish a folder that was just saved, if it is of the kind that `every` names."""
        kind = "best" if folder.name == BEST else "eval"
        if kind == self.every:
            self.publish(folder, step=step)

    def finish(self, folder: Path, step: int) -> None:
        """Publish the model that a run has chosen at its end, unless the server has it already."""
        if self.published != folder or self.every != "best":
            self.publish(folder, step=step)
        failed = f", {self.failures} failed" if self.failures else ""
        logger.info("published %s to %s%s", number_of(self.swaps, "time"), self.url, failed)

    def publish(self, folder: Path, *, step: int) -> bool:
        """Ask the server to swap to a folder; return whether it did. Any failure is a warning; nothing is raised."""
        body = {"model": self.model, "folder": str(folder.resolve())}
        try:
            wanted = digest_in(folder)
            answer = _finished(self._swap(body))
            digest = answer.get("digest") if isinstance(answer, Mapping) else None
            if not isinstance(digest, str):
                raise EndpointError(f"{self.url}{SWAP_PATH}: the answer has no digest. Is it a rewardlab server?")
            if digest != wanted:
                raise EndpointError(
                    f"{self.url}{SWAP_PATH}: the server answers with the digest {digest:.12}…, and the folder has "
                    f"{wanted or 'none':.12}…. Does it see the same disk at the same path?"
                )
        # A server, a proxy or a network may fail in any way, and publishing must never end a run.
        except Exception as error:
            self.failures += 1
            self.published = None
            first = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning(
                "step %d  %s is not published (failure %d): %s The run goes on; the next one is tried again.",
                step,
                folder,
                self.failures,
                first if first.endswith(".") else f"{first}.",
            )
            return False
        self.published, self.digest = folder, digest
        self.swaps += 1
        logger.info("step %d  published %s to %s as %s (digest %s)", step, folder, self.url, self.model, digest[:12])
        return True

    async def _swap(self, body: Mapping[str, Any]) -> Any:
        """Return the server's answer to a swap. While another swap goes on, ask again, for at most `timeout_s`."""
        http = self._http()
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    try:
                        return (await http.post(SWAP_PATH, body)).values
                    except RefusedError as error:
                        if error.kind != GOES_ON:
                            raise
                        await asyncio.sleep(WAIT_S if error.retry_after_s is None else error.retry_after_s)
        except TimeoutError:
            raise UnavailableError(
                f"{self.url}{SWAP_PATH}: no swap within {self.timeout_s:g} s (--publish-timeout-s)."
            ) from None
        finally:
            await http.close()

    async def _closed(self) -> None:
        await self._http().close()

    def _http(self) -> Http:
        return Http(self.url, ClientConfig(token=self._token, timeout_s=self.timeout_s, attempts=ATTEMPTS))


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, even if the caller's thread runs an event loop, as in a notebook."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
