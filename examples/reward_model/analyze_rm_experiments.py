"""Compare runs: best evaluation accuracy with its interval, gap to the training data, final step.

    python examples/reward_model/analyze_rm_experiments.py runs/A1_none runs/A2_scheduler --csv runs.csv
    python examples/reward_model/analyze_rm_experiments.py STUDY

Each folder is a run of `rewardlab train`, or a study of `rewardlab plan`, all of whose runs are listed. Runs that have
no evaluation, or were done with other settings than the plan of their study has now, are named with the reason. Exit
status: 0, or 2 if a folder is not there, or nothing can be listed.

The best of several evaluations is flattered by being chosen, and intervals of two runs on the same rows say little of
their difference. `rewardlab compare` tests the difference, and `rewardlab plan report` does so over seeds.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.types import Estimate
from rewardlab.experiments.records import record_of
from rewardlab.experiments.study import open_study
from rewardlab.report.folder import read_folder
from rewardlab.report.tables import format_estimate, text_table

NOT_OF_THE_PLAN = frozenset(("outdated", "failed", "damaged"))
"""States of runs whose numbers are not those of the plan of their study."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run. Numbers that the run did not measure are NaN."""

    run: str
    best_eval_accuracy: float
    low: float
    high: float
    best_step: int
    train_eval_gap: float
    gap_low: float
    gap_high: float
    gap_from: str
    """`train_eval`: training rows judged like the evaluation data. `batches`: the last training batches before their
    updates, minus the best evaluation; without an interval."""
    final_step: int


def runs_in(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield (name, folder, why it is left out; empty if it is not): of a run, or of all runs of a study."""
    if not (folder / "log.jsonl").is_file():
        yield name_of(folder), folder, ""
        return
    study = open_study(folder)
    for run in study.runs:
        record = record_of(study, run)
        begun = study.run_folder(run).is_dir()
        spoilt = f"{record.state}: {record.message}" if record.state in NOT_OF_THE_PLAN else ""
        yield run.name, study.run_folder(run), spoilt or ("" if begun else "not begun")


def name_of(folder: Path) -> str:
    """Return a name of a run folder: with that of its arm, if its own is that of a seed."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name.startswith("seed_") else path.name


def row_of(name: str, folder: Path) -> Row:
    """Return what a run came to. Raises DataError if it has not been evaluated."""
    record = read_folder(folder)
    judged = [row for row in record.rows if "eval_accuracy" in row]
    if not judged:
        raise DataError(
            f"it has no evaluation after {record.step} steps: it is too young, or evaluates nothing (--eval-every, "
            f"--eval-fraction)"
        )
    # Of equal accuracies the one with the lower loss, as a run itself chooses.
    best = max(judged, key=lambda row: (row["eval_accuracy"], -row.get("eval_loss", math.inf)))
    gap, low, high, source = _gap(best, record.rows)
    return Row(
        run=name,
        best_eval_accuracy=best["eval_accuracy"],
        low=best.get("eval_accuracy_low", math.nan),
        high=best.get("eval_accuracy_high", math.nan),
        best_step=int(best["step"]),
        train_eval_gap=gap,
        gap_low=low,
        gap_high=high,
        gap_from=source,
        final_step=record.step,
    )


def _gap(best: Mapping[str, float], rows: Sequence[Mapping[str, float]]) -> tuple[float, float, float, str]:
    if "gap_accuracy" in best:
        edges = (best.get("gap_accuracy_low", math.nan), best.get("gap_accuracy_high", math.nan))
        return best["gap_accuracy"], *edges, "train_eval"
    trained = [row["train_accuracy"] for row in rows if "train_accuracy" in row]
    return (trained[-1] - best["eval_accuracy"] if trained else math.nan), math.nan, math.nan, "batches"


def table(rows: Sequence[Row]) -> str:
    """Return the runs as a table, in the order in which they were named."""
    return text_table(
        ("run", "best eval accuracy", "at step", "train-eval gap", "gap from", "final step"),
        [
            (
                row.run,
                _with_interval(row.best_eval_accuracy, row.low, row.high),
                str(row.best_step),
                _with_interval(row.train_eval_gap, row.gap_low, row.gap_high),
                row.gap_from,
                str(row.final_step),
            )
            for row in rows
        ],
    )


def _with_interval(value: float, low: float, high: float) -> str:
    return format_estimate(Estimate(value=value, low=low, high=high, n=0, method="as the run wrote it"))


def gathered(folders: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Return the rows of all runs in some folders, and what is left out, with the reasons."""
    rows: list[Row] = []
    left_out: list[str] = []
    for folder in folders:
        try:
            for name, run, why in runs_in(folder):
                try:
                    if why:
                        raise DataError(why)
                    rows.append(row_of(name, run))
                except RewardlabError as error:
                    left_out.append(f"{name}: {error}")
        except RewardlabError as error:
            left_out.append(str(error))
    return rows, left_out


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the table as CSV. Numbers that a run did not measure are empty cells, as in metrics.csv."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: "" if value != value else value for name, value in asdict(row).items()})


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table, write it as CSV where that is asked for, and return its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, or studies")
    parser.add_argument("--csv", type=Path, help="where the table is written too")
    asked = parser.parse_args(arguments)
    if absent := [str(folder) for folder in asked.folders if not folder.is_dir()]:
        parser.error(f"no such folder: {', '.join(absent)}. Name folders of runs, or of studies.")
    rows, left_out = gathered(asked.folders)
    for why in left_out:
        print(f"left out: {why}", file=sys.stderr)
    if not rows:
        parser.exit(2, "error: no run has been evaluated, so there is nothing to compare.\n")
    print(table(rows))
    written = ""
    if asked.csv is not None:
        write_csv(asked.csv, rows)
        written = f"; written to {asked.csv}"
    runs = f"{len(rows)} run{'' if len(rows) == 1 else 's'}"
    left = f", {len(left_out)} left out" if left_out else ""
    print(f"\n95% intervals by prompt, as each run wrote them. {runs}{left}{written}")
    return rows


if __name__ == "__main__":
    main()
