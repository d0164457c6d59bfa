"""The table of a report, and its last lines: a command that works where it is read."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from rewardlab.analysis.metrics import evaluate
from rewardlab.report.run import command, evaluation_report
from scored import rows_of


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


def test_scores_that_differ_by_thousandths_have_margins_that_are_told_from_0():
    generator = np.random.default_rng(0)
    rows = rows_of(generator.normal(0.0, 0.003, (400, 2)) + np.array([0.003, 0.0]))
    found = evaluate(rows, beta=1.0)
    text = evaluation_report(found, {"made-up": found})
    line = next(line for line in text.splitlines() if line.startswith("made-up"))
    margin = found.estimates["eval_margin"]
    assert f"{margin.value:.4f} [{margin.low:.4f}, {margin.high:.4f}]" in line
    assert "0.00 [" not in line
