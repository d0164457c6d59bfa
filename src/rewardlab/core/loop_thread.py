"""An event loop in its own thread, for callers without a loop and for those whose loop is busy."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from rewardlab.core.errors import ConfigError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any number of threads, which wait for their results.

    It ends when it is closed or when nothing refers to it any more.
    """

    def __init__(self, owner: str, finish: Callable[[], Awaitable[object]]) -> None:
        """`owner` is the name in messages and of the thread, such as `client`. `finish` runs in the loop at the end; it
        must not refer to the object that holds this one, which would then never be collected."""
        self._owner = owner
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        # The thread must not keep its owner alive when nothing else does, so it refers only to the loop.
        self._thread = threading.Thread(target=_run, args=(self._loop,), name=f"rewardlab-{owner}", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self._loop, self._thread, finish, os.getpid())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, done in the loop.

        Raises ConfigError if the thread has ended, ends meanwhile, or is that of another process, and as `work` does.
        """
        if not self._end.alive or self._process != os.getpid():
            work.close()
            why = "is closed" if self._process == os.getpid() else "was made in another process, and its thread with it"
            raise ConfigError(f"the {self._owner} {why}. Make a new one.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ConfigError(f"the {self._owner} was closed while it waited for an answer. Make a new one.") from None
        except BaseException:
            future.cancel()  # after Ctrl-C nobody waits for this result any more
            raise

    def close(self) -> None:
        """End the loop and its thread. Calls that still wait in other threads end with ConfigError."""
        self._end()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, finish: Callable[[], Awaitable[object]], process: int
) -> None:
    """End all work in the loop, then the loop and its thread. In a forked process neither exists."""
    if process != os.getpid() or not thread.is_alive():
        return
    finishing = asyncio.run_coroutine_threadsafe(_finished(finish), loop)
    finishing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    # Garbage collection may run in the thread that is about to end, which must not wait for itself.
    if threading.current_thread() is not thread:
        finishing.result()
        thread.join()


async def _finished(finish: Callable[[], Awaitable[object]]) -> None:
    """Cancel every other task of the loop, then run `finish`."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await finish()
    await asyncio.get_running_loop().shutdown_default_executor()
