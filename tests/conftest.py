"""Where tests keep what they prepare; what all of them share is in helpers/common.py."""

from __future__ import annotations

import atexit
import faulthandler
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _use_own_cache() -> None:
    """Keep what tests prepare out of the user's cache, subprocesses included; a model converted there is used."""
    chosen = os.environ.get("REWARDLAB_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "rewardlab")
    models = Path(chosen).expanduser().absolute() / "models"
    folder = Path(tempfile.mkdtemp(prefix="rewardlab-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if models.is_dir():
        (folder / "models").symlink_to(models)
    os.environ["REWARDLAB_CACHE"] = str(folder)


_use_own_cache()


def pytest_configure(config: pytest.Config) -> None:
    """Load what all tests share, except where this process only hands tests out to others: it takes ten seconds, for
    which those would wait."""
    told = config.option
    hands_out = getattr(told, "dist", "no") != "no" and getattr(told, "tx", None) and not told.collectonly
    if hasattr(config, "workerinput") or not hands_out:
        config.pluginmanager.import_plugin("common")


LATER_THAN_ITS_LIMIT_S = 120
"""Seconds after a test's time limit after which its process ends, with where each of its threads was."""


def _end_if_stuck(item: pytest.Item) -> None:
    """End this process if the test goes on long after its time limit, so that the others are run, and it is named.

    At its limit a test gets an exception, which Python raises as soon as it can. A test that waits in native code never
    gets it, and one whose clean-up waits for what it waited for itself has no other limit.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    where = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit + LATER_THAN_ITS_LIMIT_S, exit=True, file=where)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watch each test, with its fixtures."""
    _end_if_stuck(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Watch the clean-up too: pytest ends every such watch as soon as a test has failed."""
    _end_if_stuck(item)
