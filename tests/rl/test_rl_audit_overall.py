"""The verdict on a run by several kinds of evidence, and of several reward models."""

from __future__ import annotations

import dataclasses

import numpy as np

from harness import toy_logs
from rewardlab.report.document import Charts
from rewardlab.rl.audit.columns import Columns
from rewardlab.rl.audit.report import json_report, page, text_report
from rewardlab.rl.audit.run import audit_columns
from test_rl_audit import CONFIG, falling, record, with_gold


def told(columns: Columns) -> tuple[str, str]:
    """Verdict and first line of the report."""
    found = audit_columns("run", columns, [], CONFIG)
    report = json_report(found, CONFIG)
    assert report["headline"] in " ".join(text_report(found).split())
    return report["verdict"], report["headline"]


def test_the_first_line_says_which_evidence_speaks_for_the_run() -> None:
    columns = record()
    noise = np.random.default_rng(2).normal(size=len(columns.step_N))
    both = dataclasses.replace(columns, evidence={**columns.evidence, "judge": noise})
    verdict, line = told(both)
    assert verdict == "sound"
    assert line.startswith("SOUND by gold: the evidence rose")
    assert line.endswith("Undecided by judge.")
    verdict, line = told(with_gold(columns, falling))
    assert (verdict, line) == ("exploited", "EXPLOITED: the reward rose while the evidence fell.")


def test_a_reward_model_without_a_verdict_is_not_spoken_for_by_another() -> None:
    columns = record(size=toy_logs.Size(steps=80, prompts=16))
    late = columns.step_N >= 40
    noise = np.random.default_rng(2).normal(size=len(late))
    changed = dataclasses.replace(
        with_gold(columns, lambda own: np.where(late, noise, own.evidence["gold"])),
        digest_N=late.astype(np.int64),
        digests=("first", "second"),
    )
    verdict, line = told(changed)
    assert verdict == "undecided"
    assert line.startswith("UNDECIDED by gold (reward model 2 of 2): the record does not tell.")
    assert line.endswith("Sound by gold (reward model 1 of 2).")


def test_the_axis_of_a_figure_that_never_moves_is_as_high_as_its_limits() -> None:
    found = audit_columns("run", record(), [], CONFIG)
    blocks = [block for part in page(found).parts for section in part.sections for block in section.blocks]
    charts = [chart for block in blocks if isinstance(block, Charts) for chart in block.charts]
    (chart,) = [one for one in charts if one.title == "Distinct replies"]
    (curve,) = [one for part in found.parts for one in part.shown if one.name == "distinct replies"]
    assert {own.value for _, own in curve.points} == {1.0}
    assert chart.y.high == 1.0, "no share is above 1"
    assert 0.5 < chart.y.low <= min(own.low for _, own in curve.points)
