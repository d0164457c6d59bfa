"""A test that does not end is named, and the others are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

TESTS = """
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def endless():
    yield
    threading.Event().wait()


def test_waits():
    with ThreadPoolExecutor(1) as threads:
        threads.submit(threading.Event().wait).result()


def test_fails_and_never_cleans_up(endless):
    assert False


@pytest.mark.parametrize("number", range(6))
def test_passes(number):
    pass
"""

HANDED_OUT = """
import sys

import conftest

conftest.LATER_THAN_ITS_LIMIT_S = 2
conftest.pytest_configure = lambda config: None  # what tests of the project share is loaded there

"""


def test_no_failure_is_explained_by_tracing_which_may_never_end() -> None:
    assert Phase.explain not in settings().phases
    assert {Phase.generate, Phase.shrink} < set(settings().phases)


@pytest.mark.slow
def test_tests_that_never_end_are_named_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 1\n", encoding="utf-8")
    (tmp_path / "watched.py").write_text(f"{HANDED_OUT}sys.modules[__name__] = conftest\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "watched", "-q", "-n", "2", "--dist", "worksteal"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    printed = done.stdout + done.stderr
    assert "crashed while running 'test_some.py::test_waits'" in printed, printed
    assert "crashed while running 'test_some.py::test_fails_and_never_cleans_up'" in printed, printed
    assert 'test_some.py", line 11 in endless' in printed
    assert "3 failed, 6 passed" in printed
