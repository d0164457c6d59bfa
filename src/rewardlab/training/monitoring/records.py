"""Writes the files of a run folder: metrics as CSV and JSONL, reward distributions.

Every file is replaced atomically. Only new rows of the metrics, and warnings, are appended, each by one write that is
flushed to the disk, so a process that is killed leaves whole lines; a full disk or a loss of power may leave a torn
last line. Rows of memory.csv and gpu.csv are not flushed.

config.json                 the resolved configuration
manifest.json               its hash, rows kept and dropped by cause, token counts, versions
metrics.jsonl               the record: one object for each logged or evaluated step
metrics.csv                 the same for spreadsheets
warnings.jsonl              warning signs as they were told, one object each
memory.csv, gpu.csv         with --profile-memory and --track-gpu: a row a step, a row a sample
tensorboard/, profile/      event files of TensorBoard; with --profile a trace and a table
reward_distributions.json   scores of preferred and other replies at each evaluation
samples.txt                 rendered pairs, token by token
evals/                      score rows of each evaluation
report.txt                  the closing tables
best/, step_N/              reward-model folders
checkpoints/                what resuming needs (training/checkpoints/checkpoint.py)
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rewardlab.analysis.metrics import current_columns
from rewardlab.core.files import append_text, finite_or_none, to_json, write_json, write_text
from rewardlab.core.folders import remove
from rewardlab.core.types import Estimate

COLUMNS = (
    "step",
    "train_loss",
    "train_accuracy",
    "train_margin",
    "eval_loss",
    "eval_accuracy",
    "eval_margin",
    "eval_pairs",
    "eval_accuracy_low",
    "eval_accuracy_high",
    "eval_loss_low",
    "eval_loss_high",
    "eval_margin_low",
    "eval_margin_high",
    "eval_ece",
    "eval_ece_low",
    "eval_ece_high",
    "eval_margin_std",
    "eval_margin_std_low",
    "eval_margin_std_high",
    "eval_negative_margin_rate",
    "eval_negative_margin_rate_low",
    "eval_negative_margin_rate_high",
    "eval_roc_auc",
    "eval_roc_auc_low",
    "eval_roc_auc_high",
    "eval_score_mean",
    "eval_score_std",
    "train_nll",
    "train_pairs",
    "train_eval_loss",
    "train_eval_accuracy",
    "train_eval_accuracy_low",
    "train_eval_accuracy_high",
    "gap_accuracy",
    "gap_accuracy_low",
    "gap_accuracy_high",
    "gap_loss",
    "gap_loss_low",
    "gap_loss_high",
    "lr",
    "grad_norm",
    "head_grad_norm",
    "tokens",
    "tokens_per_second",
    "pairs_per_second",
    "padding_share",
    "sharing_ratio",
    "model_tflops_per_second",
    "mfu",
    "peak_memory_gib",
    "seconds",
    "eval_seconds",
    "epoch",
)
"""Columns of metrics.csv. Training values are sums over all steps since the row before, divided once."""


def evaluation_columns(estimates: Mapping[str, Estimate]) -> dict[str, float]:
    """Return the columns of an evaluation: the value of every metric, and limits where there are columns for them."""
    values: dict[str, float] = {}
    for name, estimate in estimates.items():
        values[name] = estimate.value
        if f"{name}_low" in COLUMNS:
            values |= {f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return values


class Records:
    """Collects rows by step and keeps the files of a run folder up to date."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        """`writes` is False on all ranks but the first; they keep rows in memory and write no files."""
        self.folder = folder
        self.writes = writes
        self.rows: dict[int, dict[str, float | None]] = {}
        self.distributions: dict[str, object] = {}
        self._last_step = -1

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Merge values into the row of a step. A row after all others is appended to both metric files.

        Raises KeyError for a value that is not a column.
        """
        unknown = set(values) - set(COLUMNS)
        if unknown:
            raise KeyError(f"not a column of metrics.csv: {sorted(unknown)}")
        # Only a new last row can be appended. The first row replaces files of an earlier run, and a row that changes or
        # is inserted makes both files be written anew.
        files = self.folder / "metrics.csv", self.folder / "metrics.jsonl"
        is_last = bool(self.rows) and step > self._last_step and all(file.is_file() for file in files)
        row = self.rows.setdefault(step, {"step": step})
        self._last_step = max(self._last_step, step)
        row.update({name: finite_or_none(value) for name, value in values.items()})
        rows = [row] if is_last else [self.rows[number] for number in sorted(self.rows)]
        self._write(rows, whole=not is_last)

    def rewind(self, rows: Iterable[Mapping[str, float | None]], step: int) -> None:
        """Restore the record as it was after `step`: `rows` is all of it, and files of later evaluations are removed.

        Reward distributions are restored by the caller, who has the scores (`restore_distributions`).
        """
        self.rows = {int(row["step"] or 0): current_columns(row) for row in rows}
        self._last_step = max(self.rows, default=-1)
        if not self.writes:
            return
        if self.rows:
            self._write([self.rows[number] for number in sorted(self.rows)], whole=True)
        for file in (self.folder / "evals").glob("step_*"):
            if (match := re.match(r"step_(\d+)\.", file.name)) and int(match[1]) > step:
                remove(file)

    def _write(self, rows: list[dict[str, float | None]], *, whole: bool) -> None:
        if not self.writes:
            return
        write = write_text if whole else append_text
        write(self.folder / "metrics.csv", _to_csv(rows, header=whole))
        write(self.folder / "metrics.jsonl", "".join(to_json(row, indent=None) + "\n" for row in rows))

    def add_distribution(self, step: int, scores: Mapping[str, list[float]]) -> None:
        """Record the scores of preferred (`chosen`) and other (`rejected`) replies at an evaluation."""
        self.distributions[str(step)] = _finite(scores)
        self._write_distributions()

    def restore_distributions(self, found: Mapping[int, Mapping[str, list[float]]]) -> None:
        """Replace the reward distributions by those `found` in earlier evaluations, by step."""
        self.distributions = {str(step): _finite(found[step]) for step in sorted(found)}
        self._write_distributions()

    def _write_distributions(self) -> None:
        if self.writes:
            write_json(self.folder / "reward_distributions.json", self.distributions)


def _finite(scores: Mapping[str, list[float]]) -> dict[str, list[float | None]]:
    return {name: [finite_or_none(score) for score in values] for name, values in scores.items()}


def _to_csv(rows: list[dict[str, float | None]], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in row.items()})
    return text.getvalue()
