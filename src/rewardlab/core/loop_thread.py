"""An event loop in its own thread, for callers without a loop and for those whose loop is busy."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

from rewardlab.core.errors import ConfigError

logger = logging.getLogger("rewardlab")
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
        # Held while work is handed to the loop. It may be taken again, by a signal handler that closes this object.
        self._turn = threading.RLock()
        # The thread must not keep its owner alive when nothing else does, so it refers only to the loop.
        self._thread = threading.Thread(target=_run, args=(self._loop,), name=f"rewardlab-{owner}", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self._loop, self._thread, finish, os.getpid(), self._turn)
        self._end.atexit = False  # `_close_all` waits then
        _open.add(self)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, done in the loop.

        Raises ConfigError if the thread has ended, ends meanwhile, or is that of another process, and as `work` does.
        """
        future = self._begun(work)
        try:
            return future.result()
        except CancelledError:
            raise ConfigError(f"the {self._owner} was closed while it waited for an answer. Make a new one.") from None
        except BaseException:
            future.cancel()  # after Ctrl-C nobody waits for this result any more
            raise

    def _begun(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._process != os.getpid():
            work.close()
            raise ConfigError(f"the {self._owner} was made in another process, and its thread with it. Make a new one.")
        with self._turn:
            # `_stop` takes its turn too, so that all that is handed to the loop before is cancelled by it. What came
            # later would never be done, and be waited for without end.
            if self._end.alive:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise ConfigError(f"the {self._owner} is closed. Make a new one.")

    def close(self) -> None:
        """End the loop and its thread. Calls that still wait in other threads end with ConfigError."""
        if (kept := self._end.detach()) is None:
            return
        _, stop, given, _ = kept
        finishing = stop(*given)
        if finishing is not None and threading.current_thread() is not self._thread:
            finishing.result()
            self._thread.join()


_open: Final[weakref.WeakSet[LoopThread]] = weakref.WeakSet()
_ending: Final[set[Future[None]]] = set()
"""Loops that are to be ended, and ends that are under way. Of the process, since its exit has to wait for them, whoever
made them."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ending.clear)  # the threads that would end them are in the parent


@atexit.register
def _close_all() -> None:
    ends = list(_ending)
    for end in [*(one.close for one in list(_open)), *(one.result for one in ends)]:
        try:
            end()
        except Exception:  # of any class: `finish` is the caller's, and the others have to end all the same
            logger.exception("the end of an event loop failed")


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    finish: Callable[[], Awaitable[object]],
    process: int,
    turn: AbstractContextManager[Any],
) -> Future[None] | None:
    """Begin to end all work in the loop, then the loop and its thread. In a forked process neither exists.

    It waits for nothing: garbage collection may run in a thread that the end has to wait for, such as one in which the
    loop does blocking work.
    """
    if process != os.getpid() or not thread.is_alive():
        return None
    with turn:
        finishing = asyncio.run_coroutine_threadsafe(_finished(finish), loop)
    _ending.add(finishing)
    finishing.add_done_callback(_ending.discard)
    finishing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    return finishing


async def _finished(finish: Callable[[], Awaitable[object]]) -> None:
    """Cancel every other task of the loop, then run `finish`."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await finish()
    await asyncio.get_running_loop().shutdown_default_executor()
