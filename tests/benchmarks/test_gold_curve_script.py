"""The simulation of turn-overs plants what it says, and writes its rates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import gold_turnover
from rewardlab.analysis.best_of_n import curves_of


@pytest.mark.parametrize(
    ("kind", "highest"),
    [("flat", set(range(1, 17))), ("rising", {16}), ("edge", {15, 16}), ("turning", {4}), ("falling", {1})],
)
def test_a_world_is_highest_where_its_kind_says(kind: str, highest: set[int]) -> None:
    world = gold_turnover.world(kind, 16)
    assert world.highest == highest
    assert (world.fall > 0.01) == (kind in ("turning", "falling"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("noise", gold_turnover.NOISES)
def test_drawn_prompts_have_the_expected_curve(noise: str) -> None:
    world = gold_turnover.world("turning", 8)
    drawn = gold_turnover.drawn(world, 3000, 16, noise, np.random.default_rng(0))
    gold_PN = curves_of(drawn, most=8).gold_PN
    assert gold_PN is not None
    gain_PN = gold_PN - gold_PN[:, :1]
    error_N = gain_PN.std(axis=0) / np.sqrt(len(gain_PN))
    assert (np.abs(gain_PN.mean(0) - (world.gold_N - world.gold_N[0])) <= 4 * error_N + 1e-12).all()


@pytest.mark.slow
def test_rates_are_written(tmp_path: Path) -> None:
    flags = ["--draws", "3", "--flips", "99", "--kinds", "turning", "--prompts", "50", "--results", str(tmp_path)]
    assert gold_turnover.main(flags) in (0, 1)
    (path,) = tmp_path.glob("gold_turnover.all.*.json")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert len(cells) == len(gold_turnover.REACHES) * len(gold_turnover.NOISES)
    assert all(one["called"] >= one["called_and_held"] for one in cells)
    assert np.mean([one["called"] for one in cells]) > 0.5
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "| called a turn-over, of curves that have none | 0 | – | – |" in page
    assert "| turning | 16 | 32 | 50 | normal |" in page
