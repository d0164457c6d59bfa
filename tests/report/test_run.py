"""The table of a report, and its last lines: a command that works where it is read."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from rewardlab.analysis.judgement import judge_rows
from rewardlab.analysis.metrics import evaluate
from rewardlab.core.types import Comparison
from rewardlab.report.judged import slice_table
from rewardlab.report.run import command, comparison_table, evaluation_report
from score_rows import pair_rows, score_row
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


def test_comparisons_of_rankings_are_not_called_pairs():
    pairs = pair_rows([(1.0, 0.0, 1.0)] * 12)
    judged = tuple(Comparison(first=0, second=other) for other in (1, 2))
    ranked = [score_row(n, k, 2.0 - k, judged if k == 0 else ()) for n in range(12) for k in range(3)]
    for rows, unit in ((pairs, "pairs"), (ranked, "comparisons")):
        head = comparison_table({"before": evaluate(rows, beta=1.0)}, first="model").splitlines()[0]
        assert head.split()[-1] == unit
        sliced = slice_table({"before": judge_rows(rows, beta=1.0)}, "source").splitlines()[0]
        assert sliced.split()[-1] == unit
