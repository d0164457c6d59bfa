"""What is opened when it is first used, by the first of many tasks, and belongs to their event loop and process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rewardlab.core.errors import ConfigError

T = TypeVar("T")


class OpenedOnce(Generic[T]):
    """Opens something once for a crowd of tasks, and says who may use it."""

    def __init__(self, owner: str, *, otherwise: str) -> None:
        """`owner` is what messages call it, such as `client`; `otherwise` is what works from every thread."""
        self._owner = owner
        self._otherwise = otherwise
        self._task: asyncio.Task[T] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self.closed = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one in which it was made."""
        return self._process != os.getpid()

    def require_usable(self) -> None:
        """Raise ConfigError if it is closed, or used in another event loop or process than before."""
        if self.closed:
            raise ConfigError(f"the {self._owner} is closed. Make a new one.")
        if self.is_elsewhere:
            raise ConfigError(f"the {self._owner} was made in another process. Make one in each.")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConfigError(
                f"the {self._owner} was first used in another event loop, and belongs to that one. Make one for each "
                f"loop (each asyncio.run), or use {self._otherwise}, which works from every thread."
            )

    async def opened(self, opening: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what `opening` gives: that of the opening that is under way, or of one that is begun.

        Raises ConfigError if it is closed meanwhile, and as the opening does.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(opening())
            # If everyone who waits is cancelled, nobody is told of an error, and asyncio need not complain of that.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        task, waiting = self._task, asyncio.current_task()
        try:
            # One of a crowd may be cancelled without harm to the others.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # `close` ends the opening, and not those who wait for it.
            if self.closed and task.cancelled() and not (waiting is not None and waiting.cancelling()):
                raise ConfigError(f"the {self._owner} was closed while it was waited for. Make a new one.") from None
            raise

    async def close(self) -> None:
        """Say that it is closed, and end the opening that is under way."""
        self.closed = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
