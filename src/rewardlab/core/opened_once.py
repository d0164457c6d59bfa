"""Something that the first of many tasks opens when it is first used, and that belongs to their event loop and
process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from rewardlab.core.errors import ConfigError

T = TypeVar("T")


class OpenedOnce(Generic[T]):
    """Opens something once for many tasks, and checks who may use it."""

    def __init__(self, owner: str, *, otherwise: str) -> None:
        """`owner` is its name in messages, such as `client`; `otherwise` names what to use from every thread."""
        self._owner = owner
        self._otherwise = otherwise
        self._task: asyncio.Task[T] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self.closed = False

    @property
    def is_elsewhere(self) -> bool:
        """Return whether this process is a fork of the one in which it was made."""
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
        """Return the result of `opening`: of the one that is under way, or of a new one.

        Raises ConfigError if it is closed meanwhile, and as the opening does.
        """
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(opening())
            # If all waiting tasks are cancelled, nobody retrieves an error; this keeps asyncio from logging that.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        task, waiting = self._task, asyncio.current_task()
        try:
            # Shielded, since cancelling one of the waiting tasks must not cancel the opening for the others.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # `close` cancels the opening, not the tasks that wait for it: they get an error instead.
            if self.closed and task.cancelled() and not (waiting is not None and waiting.cancelling()):
                raise ConfigError(f"the {self._owner} was closed while it was waited for. Make a new one.") from None
            raise

    async def close(self) -> None:
        """Mark it as closed, and cancel an opening that is under way."""
        self.closed = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
