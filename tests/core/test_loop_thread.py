"""Work in an event loop in a thread: nobody waits for ever when it ends, whoever ends it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import pytest

from rewardlab.core import loop_thread
from rewardlab.core.errors import ConfigError
from rewardlab.core.loop_thread import LoopThread


async def never() -> None:
    await asyncio.Event().wait()


def test_a_call_that_begins_while_the_loop_ends_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ending, begin, told = threading.Event(), asyncio.run_coroutine_threadsafe, list[str]()

    async def finish() -> None:
        ending.set()
        await asyncio.sleep(0.2)

    one = LoopThread("client", finish)

    def late(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        if work.__name__ == "never":  # found open: it is closed before the loop has the work, if that can be
            threading.Thread(target=one.close, daemon=True).start()
            ending.wait(1)
        return begin(work, loop)

    def ask() -> None:
        try:
            one.wait(never())
        except ConfigError as error:
            told.append(str(error))

    monkeypatch.setattr(loop_thread.asyncio, "run_coroutine_threadsafe", late)
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert told == ["the client was closed while it waited for an answer. Make a new one."]
    with pytest.raises(ConfigError, match="the client is closed"):
        one.wait(never())


def test_one_that_is_collected_in_a_thread_of_its_own_loop_ends() -> None:
    """The end waits for such threads, so that none of them may wait for the end."""
    dropped, found = threading.Event(), list[threading.Thread]()

    def blocks() -> None:
        assert dropped.wait(60)
        gc.collect()

    async def finish() -> None:
        """Nothing."""

    def make() -> None:
        one = LoopThread("client", finish)
        vars(one)["itself"] = one  # so that only garbage collection finds it

        async def begin() -> None:
            asyncio.get_running_loop().run_in_executor(None, blocks)

        one.wait(begin())
        found.append(one._thread)

    gc.disable()
    try:
        make()
        dropped.set()
        found[0].join(60)
    finally:
        gc.enable()
    assert not found[0].is_alive()


AT_EXIT = """
import asyncio, os
from rewardlab.core.loop_thread import LoopThread

async def fails():
    raise ValueError("not now")

async def slow():
    await asyncio.sleep(0.5)
    os.write(1, b"finished ")  # in one piece, since three threads write

kept = [LoopThread("client", finish) for finish in (fails, slow, fails, slow)]
LoopThread("client", slow)  # which nothing refers to any more
"""


def test_the_exit_of_the_process_waits_for_every_end_though_others_fail() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["finished"] * 3, done.stderr
    assert done.stderr.count("ValueError: not now") == 2


FORKED_MEANWHILE = """
import asyncio, os, sys
from rewardlab.core.loop_thread import LoopThread

async def slow():
    await asyncio.sleep(1)

LoopThread("client", slow)  # which nothing refers to: its end is under way
child = os.fork()
if child:
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_is_forked_off_meanwhile_waits_for_no_end() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", FORKED_MEANWHILE], env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.communicate(timeout=30)[0].strip() == b"0"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
