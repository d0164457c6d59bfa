"""The script that times sliding windows, on a tiny model."""

from __future__ import annotations

import pytest

import windows
from benchmark_results import result


def run(folder, *more):
    flags = ["--size", "tiny", "--layers", "6", "--windows", "0", "8", "--shapes", "20+6+4", "5+5+5+5", "--rounds", "1"]
    code = windows.main([*flags, "--threads", "1", "--results", str(folder), *more])
    return code, result(folder)["rows"]


@pytest.mark.slow
def test_windows_are_timed_in_both_layouts_and_give_the_same_scores(tmp_path):
    code, rows = run(tmp_path)
    assert code == 0
    assert [(row["shape"], row["window"]) for row in rows] == [
        ("20+6+4", 0),
        ("20+6+4", 8),
        ("5+5+5+5", 0),
        ("5+5+5+5", 8),
    ]
    tokens = {layout: times["facts"]["tokens"] for layout, times in rows[0]["times"].items()}
    assert tokens == {"padded": 52, "shared": 30}
    assert all(row["apart"] <= 1e-5 for row in rows)


@pytest.mark.slow
def test_a_window_that_only_one_layout_has_is_an_error(tmp_path, monkeypatch):
    build = windows.build

    def other(options, window, work):
        models = build(options, window, work)
        return {"padded": models["padded"], "shared": build(options, 0, work / "other")["shared"]}

    monkeypatch.setattr(windows, "build", other)
    code, rows = run(tmp_path)
    assert code == 1
    assert [row["apart"] > 1e-4 for row in rows] == [False, True, False, True]
