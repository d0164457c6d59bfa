"""How long work tells where it is, with a terminal and without."""

from __future__ import annotations

import io
import sys
import time

import pytest

from rewardlab.core import bars
from rewardlab.core.bars import bar


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(bars, "LINE_EVERY_S", 0.02)
    monkeypatch.setattr(sys, "stderr", io.StringIO())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_now_and_then(soon, log):
    assert [item for item in bar(range(4), title="scoring") if time.sleep(0.03) is None] == [0, 1, 2, 3]
    lines = [record.getMessage() for record in log.records]
    assert [line.split(",")[0] for line in lines[:2]] == ["scoring: 25 %", "scoring: 50 %"]
    assert all(line.endswith("left") for line in lines)


def test_work_of_unknown_length_counts(soon, log):
    with bar(title="preparing", unit=" rows") as shown:
        time.sleep(0.03)
        shown.update(1500)
    assert log.records[0].getMessage() == "preparing: 1.50k rows"


def test_short_work_says_nothing(log, capsys):
    assert list(bar(range(1000), title="scoring")) == list(range(1000))
    assert not log.records
    assert not "".join(capsys.readouterr())


def test_a_terminal_has_a_bar(soon, monkeypatch, log):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(bar(range(3), title="scoring"))
    assert "scoring:" in terminal.getvalue()
    assert not log.records
