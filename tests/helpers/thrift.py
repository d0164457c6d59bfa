"""What spares the tests time and takes nothing from what they hold; common.py loads it after the type checks."""

from __future__ import annotations

import gc
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

try:  # comes with the client, which a machine that only trains need not have
    import httpcore2
except ImportError:
    httpcore2 = None

from rewardlab.artifact import canaries
from rewardlab.model import selftest

# Only a power cut loses what is written but not yet on the disk, and no test makes one. Waiting for the disk took 8 %
# of the time of tests that write many checkpoints.
os.fsync = lambda handle: None

# Imports alone leave a million objects, and looking at them for cycles every 700 new ones took 5 to 10 % of the time.
gc.set_threshold(50_000, 20, 20)


if not torch.accelerator.is_available():
    # For each kind of device that may come later torch keeps the whole stack in words, which takes milliseconds.
    torch.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves the slow ones out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test behind the first few as slow where it says how many of them are quick."""
    found: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("quick_cases")
        if mark is None or item.get_closest_marker("slow") or item.get_closest_marker("soak"):
            continue
        (count,) = mark.args
        test = item.nodeid.partition("[")[0]
        found[test] += 1
        if found[test] > count:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: it stays, and each of its runs would look at all of it again.

    torch's loggers hand on what they are told, as loggers do: six times a test, pytest adds itself to each of the sixty
    that would not.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()


_MODULES = itertools.count(1)


@pytest.fixture(autouse=True, scope="module")
def _spared() -> Iterator[None]:
    """The same now and then for what tests have imported and pytest has noted since."""
    yield
    if next(_MODULES) % 20 == 0:
        gc.collect()
        gc.freeze()


if httpcore2 is not None:
    # A client reads every certificate of the machine when it is made, which takes 30 ms, and no test speaks TLS.
    httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)


@pytest.fixture(autouse=True, scope="session")
def _one_self_test() -> Iterator[None]:
    """Loading tests the layout on a tiny model of the class: here once for each class and configuration that passes.

    tests/laws has tests of that test.
    """
    found: dict[tuple[str, type, int | None], float] = {}
    measure = selftest.layout_error

    def known(config: Any, disk_class: Any, *, window: int | None = None) -> float:
        key = (config.to_json_string(), disk_class, window)
        error = found[key] if key in found else measure(config, disk_class, window=window)
        if error <= selftest.EXACT:
            found[key] = error
        return error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "layout_error", known)
        yield


ALL_CANARIES = ("test_commands.py", "test_page_examples.py", "test_short_limit.py", "test_verify_live.py")
"""Files outside of tests/artifact whose tests are about all canaries."""


@pytest.fixture(autouse=True, scope="module")
def _canaries(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models are saved with two canaries and that of typed control tokens, in a third of the time, except where tests
    look at all of them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "artifact" and request.path.name not in ALL_CANARIES:
            patch.setattr(canaries, "CONVERSATIONS", canaries.CONVERSATIONS[:2])
        yield


@pytest.fixture
def few_canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in tests/artifact."""
    monkeypatch.setattr(canaries, "CONVERSATIONS", canaries.CONVERSATIONS[:2])


@pytest.fixture
def verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last check of a run, made in this process, where it is quick, and not in a clean one."""
    import rewardlab

    for command in ("training.run", "probing.run"):
        monkeypatch.setattr(f"rewardlab.{command}.verify_in_clean_process", rewardlab.verify)
