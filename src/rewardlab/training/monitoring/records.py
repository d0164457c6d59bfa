"""Writes the files of a run folder: metrics as CSV and JSONL, reward distributions.

Every file is replaced atomically. Only the last row of the metrics, the last evaluation of the reward distributions,
and warnings are written at the end of what is there, each by one write that is flushed to the disk, so that a long run
writes no more for a row than a short one; a full disk or a loss of power may leave a torn end. Rows of memory.csv and
gpu.csv are not flushed.

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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rewardlab.analysis.metrics import current_columns
from rewardlab.core.files import finite_or_none, replace_end, to_json, write_text
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


@dataclass(kw_only=True)
class _Growing:
    """A file whose last entry may change, and which may get another one, without the rest being written anew."""

    path: Path
    begin: int = 0
    """The byte with which the last entry begins."""
    end: int = -1
    """How long the file is; -1 if this process has not written it."""

    def is_as_left(self) -> bool:
        """Return whether the file is there, and as long as it was left."""
        try:
            return self.path.stat().st_size == self.end
        except OSError:
            return False

    def write(self, entries: Iterable[str]) -> None:
        """Replace the whole file by its entries, in one step."""
        *earlier, last = entries
        before = "".join(earlier)
        write_text(self.path, before + last)
        self.begin = len(before.encode())
        self.end = self.begin + len(last.encode())

    def put(self, entry: str, *, anew: bool) -> None:
        """Write an entry behind the last one, or in place of it if `anew` is false."""
        if anew:
            self.begin = self.end
        replace_end(self.path, entry, at=self.begin)
        self.end = self.begin + len(entry.encode())


class Records:
    """Collects rows by step and keeps the files of a run folder up to date."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        """`writes` is False on all ranks but the first; they keep rows in memory and write no files."""
        self.folder = folder
        self.writes = writes
        self.rows: dict[int, dict[str, float | None]] = {}
        self.rewritten = 0
        """How often other rows than the last one changed."""
        self._distributions: dict[int, dict[str, npt.NDArray[np.float64]]] = {}
        self._last_step = -1
        self._csv = _Growing(path=folder / "metrics.csv")
        self._jsonl = _Growing(path=folder / "metrics.jsonl")
        self._scores = _Growing(path=folder / "reward_distributions.json")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Merge values into the row of a step. The last row is written at the end of both metric files.

        Raises KeyError for a value that is not a column.
        """
        unknown = set(values) - set(COLUMNS)
        if unknown:
            raise KeyError(f"not a column of metrics.csv: {sorted(unknown)}")
        # A row that is inserted, or of another than the last step, makes both files be written anew, and so does the
        # first row, which replaces files of an earlier run.
        is_last, is_new = step >= self._last_step, step not in self.rows
        self.rewritten += not is_last
        row = self.rows.setdefault(step, {"step": step})
        self._last_step = max(self._last_step, step)
        row.update({name: finite_or_none(value) for name, value in values.items()})
        if not self.writes:
            return
        if is_last and self._csv.is_as_left() and self._jsonl.is_as_left():
            self._csv.put(_to_csv([row], header=False), anew=is_new)
            self._jsonl.put(_to_line(row), anew=is_new)
        else:
            self._write_rows()

    def rewind(self, rows: Iterable[Mapping[str, float | None]], step: int) -> None:
        """Restore the record as it was after `step`: `rows` is all of it, and files of later evaluations are removed.

        Reward distributions are restored by the caller, who has the scores (`restore_distributions`).
        """
        self.rows = {int(row["step"] or 0): current_columns(row) for row in rows}
        self._last_step = max(self.rows, default=-1)
        self.rewritten += 1
        if not self.writes:
            return
        if self.rows:
            self._write_rows()
        for file in (self.folder / "evals").glob("step_*"):
            if (match := re.match(r"step_(\d+)\.", file.name)) and int(match[1]) > step:
                remove(file)

    def _write_rows(self) -> None:
        rows = [self.rows[number] for number in sorted(self.rows)]
        self._csv.write([_to_csv(rows[:-1], header=True), _to_csv(rows[-1:], header=False)])
        self._jsonl.write(map(_to_line, rows))

    def add_distribution(self, step: int, scores: Mapping[str, list[float]]) -> None:
        """Record the scores of preferred (`chosen`) and other (`rejected`) replies at an evaluation."""
        is_new = step not in self._distributions
        self._distributions[step] = _as_arrays(scores)
        if not self.writes:
            return
        if is_new and self._scores.is_as_left():
            # In place of the bracket that closes the object.
            self._scores.put(f",{_to_entry(step, self._distributions[step])}", anew=False)
            self._scores.begin = self._scores.end - len(_CLOSED)
        else:
            self._write_distributions()

    def restore_distributions(self, found: Iterable[tuple[int, Mapping[str, list[float]]]]) -> None:
        """Replace the reward distributions by those `found` in earlier evaluations: (step, scores), in order."""
        self._distributions = {step: _as_arrays(scores) for step, scores in found}
        if self.writes:
            self._write_distributions()

    def _write_distributions(self) -> None:
        entries = [_to_entry(step, scores).removesuffix(_CLOSED) for step, scores in self._distributions.items()]
        if entries:
            self._scores.write([f"{{{','.join(entries)}", _CLOSED])
        elif self._scores.path.exists():
            self._scores.write(["{}\n"])
            self._scores.end = -1  # nothing can be put into it


_CLOSED = "\n}\n"
"""With this the object of `reward_distributions.json` ends."""


def _as_arrays(scores: Mapping[str, list[float]]) -> dict[str, npt.NDArray[np.float64]]:
    # A list of floats takes four times the memory, and a long run has very many.
    return {name: np.array(values, dtype=np.float64) for name, values in scores.items()}


def _to_entry(step: int, scores: Mapping[str, npt.NDArray[np.float64]]) -> str:
    """Return the distributions of a step as the only ones of an object, without the bracket that opens it."""
    finite = {name: [finite_or_none(score) for score in values.tolist()] for name, values in scores.items()}
    return to_json({str(step): finite}).removeprefix("{") + "\n"


def _to_line(row: Mapping[str, float | None]) -> str:
    return to_json(row, indent=None) + "\n"


def _to_csv(rows: list[dict[str, float | None]], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=COLUMNS, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in row.items()})
    return text.getvalue()
