"""The metric files are always those of all rows, whichever way they were written."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewardlab.core.files import finite_or_none, to_json
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


def test_last_rows_are_written_at_the_end_and_others_make_files_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert len(rewritten) == 2
    records.add(3, {"train_loss": 9.0})
    check(tmp_path, [*both[:2], {"step": 3, "train_loss": 9.0}, both[2], both[3] | {"eval_loss": 0.5}])
    assert len(rewritten) == 4
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


def test_a_last_row_that_gets_shorter_leaves_nothing_of_itself(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.add(2, {"train_loss": 0.5})
    records.add(4, {"train_loss": 0.123456789})
    records.add(4, {"train_loss": 2.0})
    records.add(6, {"train_loss": 0.25})
    check(tmp_path, [{"step": 2, "train_loss": 0.5}, {"step": 4, "train_loss": 2.0}, {"step": 6, "train_loss": 0.25}])


def test_an_evaluation_writes_its_own_row_and_scores_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    replace_end = module.replace_end
    monkeypatch.setattr(
        module, "replace_end", lambda path, text, *, at: (sizes.append(len(text)), replace_end(path, text, at=at))
    )
    records = Records(tmp_path)
    records.add(0, {"eval_loss": 0.5})
    records.add_distribution(0, {"chosen": [0.5] * 100, "rejected": [1.5] * 100})
    monkeypatch.setattr(module, "write_text", lambda path, text: pytest.fail(f"{path} is written anew"))
    for step in range(1, 101):
        records.add(step, {"train_loss": 0.5})
        records.add(step, {"eval_loss": 0.5})
        records.add_distribution(step, {"chosen": [0.5] * 100, "rejected": [1.5] * 100})
    assert len(sizes) == 500
    assert max(sizes) < 4_000, "a row of the metrics, or the scores of one evaluation"


def test_distributions_that_grow_are_those_that_are_written_at_once(tmp_path: Path) -> None:
    scores = {step: {"chosen": [0.25 * step, math.nan], "rejected": [1e-30, -2.0, math.inf]} for step in range(4)}
    scores[4] = {"chosen": [], "rejected": []}
    wanted = to_json(
        {
            str(step): {side: list(map(finite_or_none, own)) for side, own in both.items()}
            for step, both in scores.items()
        }
    )
    records = Records(tmp_path)
    for step, both in scores.items():
        records.add_distribution(step, both)
    file = tmp_path / "reward_distributions.json"
    assert file.read_text() == f"{wanted}\n"
    # An evaluation that is made again stands in place of the earlier one, and a file that was lost is written whole.
    records.add_distribution(2, {"chosen": [9.0], "rejected": [9.0]})
    records.add_distribution(2, scores[2])
    assert file.read_text() == f"{wanted}\n"
    file.unlink()
    records.add_distribution(5, scores[0])
    assert file.read_text() == f"{to_json(json.loads(wanted) | {'5': json.loads(wanted)['0']})}\n"
    records.restore_distributions([])
    assert file.read_text() == "{}\n"
    records.restore_distributions([(0, scores[0])])
    records.add_distribution(1, scores[1])
    assert list(json.loads(file.read_text())) == ["0", "1"]
    records.restore_distributions([])
    records.add_distribution(3, scores[3])
    assert list(json.loads(file.read_text())) == ["3"]


def test_a_run_without_evaluations_gets_no_file_of_distributions_by_resuming(tmp_path: Path) -> None:
    Records(tmp_path).restore_distributions([])
    assert not (tmp_path / "reward_distributions.json").exists()


def test_a_rank_that_writes_nothing_leaves_no_file(tmp_path: Path) -> None:
    records = Records(tmp_path, writes=False)
    records.add(2, {"train_loss": 0.5})
    records.add(2, {"eval_loss": 0.5})
    records.add_distribution(2, {"chosen": [0.5], "rejected": [0.5]})
    records.restore_distributions([])
    assert records.rows[2] == {"step": 2, "train_loss": 0.5, "eval_loss": 0.5}
    assert not list(tmp_path.iterdir())
