"""The metric files are always those of all rows, whichever way they were written."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewardlab.core.types import Estimate
from rewardlab.training.monitoring import records as module
from rewardlab.training.monitoring.records import Records, evaluation_columns


def check(folder: Path, wanted: list[dict[str, float]]) -> None:
    """Both files hold these rows."""
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == wanted
    with (folder / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows == wanted


def test_limits_of_what_is_evaluated_are_columns_where_there_are_any() -> None:
    found = evaluation_columns({"eval_ece": Estimate(value=0.1, low=0.05, high=0.2, n=40, method="-")})
    assert found == {"eval_ece": 0.1, "eval_ece_low": 0.05, "eval_ece_high": 0.2}


def test_new_rows_are_appended_and_changed_ones_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.csv").write_text("an earlier run\n")
    (tmp_path / "metrics.jsonl").write_text("an earlier run\n")
    rewritten: list[str] = []
    write_text = module.write_text
    monkeypatch.setattr(module, "write_text", lambda path, text: (rewritten.append(path.name), write_text(path, text)))
    records = Records(tmp_path)
    records.add(0, {"eval_loss": 0.7})
    check(tmp_path, [{"step": 0, "eval_loss": 0.7}])
    assert rewritten == ["metrics.csv", "metrics.jsonl"]
    for step in (2, 4, 6):
        records.add(step, {"train_loss": 1 / step})
    both = [{"step": 0, "eval_loss": 0.7}, *({"step": step, "train_loss": 1 / step} for step in (2, 4, 6))]
    check(tmp_path, both)
    assert len(rewritten) == 2
    records.add(6, {"eval_loss": 0.5})
    check(tmp_path, [*both[:-1], both[-1] | {"eval_loss": 0.5}])
    records.add(3, {"train_loss": 9.0})
    check(tmp_path, [*both[:2], {"step": 3, "train_loss": 9.0}, both[2], both[3] | {"eval_loss": 0.5}])
    assert len(rewritten) == 6
    (tmp_path / "metrics.csv").unlink()
    records.add(8, {"train_loss": 0.1})
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 7
    with pytest.raises(KeyError, match="loss_of_hair"):
        records.add(9, {"loss_of_hair": 1.0})


def test_a_new_row_does_not_go_through_those_of_before(tmp_path: Path) -> None:
    class Rows(dict[int, dict[str, float | None]]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("all rows are looked at")

    records = Records(tmp_path)
    records.rewind([{"step": 2, "train_loss": 0.5}, {"step": 4, "train_loss": 0.25}], 4)
    records.rows = Rows(records.rows)
    records.add(6, {"train_loss": 0.125})
    check(tmp_path, [{"step": step, "train_loss": 1 / step} for step in (2, 4)] + [{"step": 6, "train_loss": 0.125}])
