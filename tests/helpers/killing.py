"""Programs that end themselves in the middle of what they write, as a kill from outside would end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def end_while_appending(module: ModuleType, *, at: int, number: int = signal.SIGKILL) -> None:
    """Let the process end with the `at`-th text that `module` appends half written."""
    append, count = module.append_text, 0

    def ending(path: Any, text: str) -> None:
        nonlocal count
        count += 1
        if count == at:
            append(path, text[: len(text) // 2])
            os.kill(os.getpid(), number)
        append(path, text)

    module.append_text = ending


def killed_while_keeping(preparation: str, at: int) -> str:
    """Program that runs a command of `rewardlab gold` so many times, each time in a process of its own, which is killed
    as it keeps results for the `at`-th time: TIMES command…

    It prints how each ended, and whether the last word of the command, its output, is there then. `preparation` comes
    before all of them: imports, which take most of the time, and what is to be smaller than usual.
    """
    return f"""
import os, sys
from killing import end_while_appending
from rewardlab.cli import main
from rewardlab.gold import kept_results
{preparation}
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it prints is not asked for
        end_while_appending(kept_results, at={at})
        try:
            main(sys.argv[2:])
        finally:
            os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.path.exists(sys.argv[-1]), flush=True)
"""


def at_write(at: int, end: Callable[[], object]) -> Callable[[int], None]:
    """What stands for `os.fsync`, by which every file of ours is written: it calls `end` in place of the `at`-th."""
    fsync, count = os.fsync, 0

    def ending(handle: int) -> None:
        nonlocal count
        count += 1
        if count == at:
            end()
        fsync(handle)

    return ending


class EndedError(Exception):
    """In place of a kill."""


def ended_at_write(place: int, run: Callable[[], object]) -> bool:
    """Run something, ended by an EndedError in place of its write of this number; return whether there was one."""

    def end() -> None:
        raise EndedError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", at_write(place, end))
        try:
            run()
        except EndedError:
            return True
    return False


KILLED_AT_WRITE = """
import os, signal, sys
from killing import at_write
from rewardlab.cli import main

os.chdir(sys.argv[1])
os.fsync = at_write(int(sys.argv[2]), lambda: os.kill(os.getpid(), signal.SIGKILL))
main(sys.argv[3:])
"""
"""Program that runs a command in a folder and is killed at a write: FOLDER NUMBER command…"""


KILLED_AT_WRITES = """
import os, signal, sys
from pathlib import Path

import torch, transformers
from killing import at_write
from rewardlab.cli import main
from rewardlab.gold import reward_models

reward_models.REPLIES_AT_A_TIME = 6
for place in sys.argv[2].split(","):
    os.chdir(Path(sys.argv[1], place))
    child = os.fork()
    if not child:
        os.fsync = at_write(int(place), lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            main(sys.argv[3:])
        finally:
            os._exit(0)
    print(place, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Program that runs a command in FOLDER/PLACE for each of some places, each time in a process of its own, which is
killed at that write, and prints how each ended: FOLDER PLACE,PLACE,… command…"""


def run_program(
    program: str, words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a program, which imports what this test imports, in a process of its own."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def ended_process() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid


def abandon(*paths: Path) -> None:
    """Make files as old as those are that a process left which was killed more than a day ago."""
    for path in paths:
        for one in (path, *path.rglob("*")):
            os.utime(one, (0, 0))
