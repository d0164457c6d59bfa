"""The benchmark of saves: it counts what it says it counts, and sees a file that differs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import saved_models


def test_every_file_of_every_model_is_compared(tmp_path: Path) -> None:
    for name in ("best", "step_9", "checkpoints/step_9", "best/adapter"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_text(name)
    found = saved_models.models(tmp_path)
    assert found.keys() == {"best/weights", "step_9/weights", "best/adapter/weights"}
    assert len(set(found.values())) == 3


def test_a_row_has_the_passes_of_each_save() -> None:
    facts = {"best after 3: passes": 65, "best after 3: seconds": 2.5, "step_9 after 9: passes": 0}
    timed = {
        side: [
            saved_models.Sample(wall=wall, cpu=wall, facts={**facts, "step_9 after 9: seconds": wall})
            for wall in (7.0, 5.0, 6.0)
        ]
        for side in saved_models.SIDES
    }
    row = saved_models.rows_of("head", timed)[1]
    assert row == ["head", "after", "6 (5 to 7)", "6", "8.5 (7.5 to 9.5)", "65", "best after 3 65, step_9 after 9 0"]


@pytest.mark.soak
def test_runs_of_the_same_code_leave_the_same_models(tmp_path: Path) -> None:
    flags = ["--model", "tiny-llama", "--pairs", "60", "--threads", "1", "--repeats", "1", "--results", str(tmp_path)]
    assert saved_models.main(flags) == 0
    (path,) = tmp_path.glob("saved_models.*.json")
    assert str(tmp_path) not in path.read_text(encoding="utf-8") + path.with_suffix(".md").read_text(encoding="utf-8")
    for kind in json.loads(path.read_text(encoding="utf-8"))["kinds"].values():
        assert kind["files"] >= 6
        assert not kind["different"]
        ((of_one,),) = [[sample["saves"] for sample in kind["samples"]["after"]]]
        assert any(name.endswith("passes") and count > 0 for name, count in of_one.items())
