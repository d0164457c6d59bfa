"""How long work tells where it is, with a terminal and without."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest

from rewardlab import console
from rewardlab.core import bars
from rewardlab.core.bars import bar, over_bars


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


def test_what_is_told_besides_stands_behind_the_time_left(soon, log):
    with bar(title="labelling", unit=" replies", total=10) as shown:
        time.sleep(0.03)
        shown.set_postfix_str("1,200 tokens", refresh=False)
        shown.update(5)
    line = log.records[0].getMessage()
    assert line.startswith("labelling: 50 %, ")
    assert line.endswith(" left, 1,200 tokens")


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


def screen(text: str) -> list[str]:
    """What a terminal shows after this: carriage returns go back, newlines on, letters overwrite."""
    lines, column = [""], 0
    for letter in text:
        if letter == "\n":
            lines.append("")
            column = 0
        elif letter == "\r":
            column = 0
        else:
            line = lines[-1]
            lines[-1] = f"{line[:column]}{letter}{line[column + 1 :]}"
            column += 1
    return [line.rstrip() for line in lines]


def test_lines_of_the_log_stand_alone_and_the_bar_below_them(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    handler = console.Lines(terminal)
    logger = logging.getLogger("rewardlab")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with bar(range(3), title="training") as shown:
            for number, _ in enumerate(shown):
                logger.info("step %d  loss 0.5", number)
                assert screen(terminal.getvalue())[-1].startswith("training:")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert screen(terminal.getvalue())[:3] == [f"step {number}  loss 0.5" for number in range(3)]


def test_where_there_is_no_terminal_a_line_takes_no_lock_of_the_bars(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(bars.tqdm, "external_write_mode", None)
    with over_bars(stream):
        stream.write("a line")


def test_a_bar_leaves_room_for_what_the_terminal_echoes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    list(bar(range(3), title="scoring"))
    assert max(len(line) for line in terminal.getvalue().split("\r")) + len("^C") < 40
