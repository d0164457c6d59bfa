"""The last lines of a report: a command that works where it is read."""

from __future__ import annotations

import sys

import pytest

from rewardlab.report.run import command


@pytest.mark.parametrize(
    ("called", "found", "printed"),
    [
        ("/usr/bin/rewardlab", "/usr/bin/rewardlab", "rewardlab verify x"),
        ("{here}/.venv/bin/rewardlab", None, ".venv/bin/rewardlab verify x"),
        (".venv/bin/rewardlab", None, ".venv/bin/rewardlab verify x"),
        ("/elsewhere/bin/rewardlab", None, "/elsewhere/bin/rewardlab verify x"),
        ("/usr/lib/pytest/__main__.py", None, "rewardlab verify x"),
    ],
)
def test_a_command_is_printed_as_it_can_be_typed(called, found, printed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [called.format(here=tmp_path)])
    monkeypatch.setattr("rewardlab.report.run.shutil.which", lambda name: found)
    assert command("verify", "x") == printed
