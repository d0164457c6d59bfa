"""What the runs of a study came to: every quantity that is asked of an arm, a value for each seed.

Selection reads validation data only. Code that may read test data says so (`may_read="test"`); nothing else in this
room can read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.analysis.crossed import Observed
from rewardlab.analysis.linearised import observed_in
from rewardlab.analysis.score_table import ScoreTable, score_table
from rewardlab.core.bars import bar
from rewardlab.core.errors import ConfigError, DataError, RewardlabError
from rewardlab.core.files import sha256_file
from rewardlab.core.types import ScoreRow
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.log import LOG, hashes_of
from rewardlab.experiments.plan import Kind, Run
from rewardlab.experiments.quantities import QUANTITIES, Quantity, quantity_named
from rewardlab.experiments.records import TEST_SCORES, record_of
from rewardlab.experiments.study import Study
from rewardlab.report.evaluations import read_scores
from rewardlab.report.folder import Record, read_folder

EVALUATION: Final[Mapping[str, str]] = {"test": "test", "validation": "selection"}
"""Data -> the evaluation of a run that has its scores."""
NORMAL_95: Final = 1.96
"""Standard errors in half a 95 % interval."""
SIDES: Final = ("_low", "_high")
"""What the columns of an interval's ends are called after the value's."""
OF_ROWS: Final = ("seconds", "peak_memory", "speed_spread", "tokens_per_second", "pairs_per_second", "mfu")
"""Numbers of a run that are computed from all rows of its metrics."""
COLUMNS: Final = (
    *dict.fromkeys(f"{one.column}{end}" for one in QUANTITIES.values() if one.column for end in ("", "_low", "_high")),
    "eval_pairs",
)
"""Columns of metrics.csv that can be asked for at a step, with their intervals."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """A column of metrics.csv over the rows that have it."""

    steps_N: npt.NDArray[np.int64]
    """In ascending order, each once."""
    values_N: npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What one run left. Those of all runs are kept, so each holds of its metrics only what is asked of it."""

    run: Run
    record: Record
    """Without the rows of metrics.csv, but for the last one."""
    curves: Mapping[str, Curve]
    """Columns of metrics.csv that can be asked for at a step, where some row has them."""
    numbers: Mapping[str, float]
    """What is computed from all rows; NaN where it was not measured."""

    @classmethod
    def of(cls, run: Run, record: Record) -> Outcome:
        """Return the outcome of a run by its whole record."""
        return cls(
            run=run,
            record=replace(record, rows=record.rows[-1:]),
            curves={column: curve for column in COLUMNS if (curve := _curve(record.rows, column)) is not None},
            numbers={name: _number(record, name) for name in OF_ROWS},
        )

    @cached_property
    def chosen_step(self) -> int | None:
        """The step of the chosen checkpoint; None if that is not known."""
        model = self.record.model
        return None if model is None else _step_of(self.record)

    @property
    def stopped_early(self) -> bool:
        """Whether the run ended before the last step of its settings."""
        planned = self.record.num_steps
        return planned is not None and self.record.step < planned

    def rows(self, on: str) -> list[ScoreRow]:
        """Return score rows. Raises DataError if there are none, or they do not match their checksum."""
        judged = self.record.evaluations.get(EVALUATION[on])
        if judged is None or judged.scores is None:
            raise DataError(f"{self.run.name}: has no scores on {on} data")
        return read_scores(judged)

    def table(self, on: str) -> ScoreTable:
        """Return the score rows as columns, read once. Raises as `rows`.

        Those of all runs are kept, so they come without the rows themselves, which take most of the memory.
        """
        if on not in self._tables:
            self._tables[on] = replace(score_table(self.rows(on)), rows=())
        return self._tables[on]

    @cached_property
    def _tables(self) -> dict[str, ScoreTable]:
        return {}

    def at_step(self, column: str, step: int | None) -> float:
        """Return a column of metrics.csv at a step, or at the chosen checkpoint; NaN where it is empty."""
        wanted = self.chosen_step if step is None else step
        curve = self.curves.get(column)
        if curve is None or wanted is None:
            return math.nan
        place = int(np.searchsorted(curve.steps_N, wanted))
        is_there = place < len(curve.steps_N) and curve.steps_N[place] == wanted
        return float(curve.values_N[place]) if is_there else math.nan

    def of_record(self, name: str) -> float:
        """Return one number of the run; NaN where it was not measured."""
        if name in self.numbers:
            return self.numbers[name]
        if name == "stopped_at":
            return float(self.record.step) if self.record.rows or self.record.step else math.nan
        if name == "best_step":
            return math.nan if self.chosen_step is None else float(self.chosen_step)
        counts = self.record.manifest.get("parameters")
        told = [counts.get(one) for one in ("trainable", "total")] if isinstance(counts, Mapping) else []
        found = [float(one) for one in told if isinstance(one, int) and 0 < one < 1 << 63]
        if len(found) < 2:
            return math.nan
        trainable, total = found
        return trainable if name == "trainable_parameters" else trainable / total


def _curve(rows: Sequence[Mapping[str, float]], column: str) -> Curve | None:
    """Return a column over the rows that have it; None if none has."""
    found = [row for row in rows if column in row]
    if not found:
        return None
    return Curve(
        steps_N=np.array([int(row["step"]) for row in found]), values_N=np.array([row[column] for row in found])
    )


def _number(record: Record, name: str) -> float:
    """Return a number that is computed from all rows; NaN where it was not measured."""
    rows = record.rows
    if name == "seconds":
        timed_rows = [row["seconds"] for row in rows if "seconds" in row]
        return math.fsum(timed_rows) if timed_rows else math.nan
    if name == "peak_memory":
        return max((row["peak_memory_gib"] for row in rows if "peak_memory_gib" in row), default=math.nan)
    if name == "speed_spread":
        return _speed_spread(rows, _resumed_after(record))
    timed = [(row["seconds"], row[name]) for row in rows if name in row and row.get("seconds")]
    whole = math.fsum(seconds for seconds, _ in timed)
    return math.fsum(seconds * value for seconds, value in timed) / whole if whole else math.nan


def _speed_spread(rows: Sequence[Mapping[str, float]], resumed_after: Iterable[int]) -> float:
    """Return the standard deviation of pairs/s over its mean, with rows weighted by their seconds; NaN for one row.

    The first row, and the first one after each step from which the run was resumed, are left out: they warm up.
    """
    timed = [row for row in rows if row.get("pairs_per_second") and row.get("seconds")]
    slow = {min((row["step"] for row in timed if row["step"] > start), default=None) for start in (-1, *resumed_after)}
    warm = [row for row in timed if row["step"] not in slow]
    seconds = np.array([row["seconds"] for row in warm])
    speeds = np.array([row["pairs_per_second"] for row in warm])
    if len(speeds) < 2:
        return math.nan
    mean = float(np.average(speeds, weights=seconds))
    # This makes the variance unbiased; where all rows take equally long, it subtracts one from their count.
    degrees = seconds.sum() - np.square(seconds).sum() / seconds.sum()
    return math.sqrt(float(seconds @ np.square(speeds - mean) / degrees)) / mean


def _resumed_after(record: Record) -> list[int]:
    """Return the steps of the checkpoints from which a run went on, as its manifest has them."""
    entries = record.manifest.get("resumed")
    steps = [entry.get("step") for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    return [step for step in steps if isinstance(step, int)]


class Outcomes:
    """The outcomes of a study's runs that are done, each read once, when it is first asked for."""

    def __init__(self, study: Study, *, may_read: Kind) -> None:
        self.study = study
        self._may_read = may_read
        self._read: dict[str, Outcome] = {}
        self._done: dict[str, list[Outcome]] = {}
        self._recorded: set[str] = set()
        """Runs whose test scores are those of the record."""
        self._hashes = set(hashes_of(study.entries))

    def done(self, arm: str) -> list[Outcome]:
        """Return what the finished runs of an arm left, by seed."""
        if arm not in self._done:
            runs = [run for run in self.study.runs if run.arm == arm and record_of(self.study, run).is_over]
            by_seed = sorted(runs, key=lambda run: run.seed)
            # The metrics of long runs take seconds each.
            self._done[arm] = [self._outcome(run) for run in bar(by_seed, title=f"reading runs of {arm}", unit=" runs")]
        return self._done[arm]

    def observe(self, terms: Iterable[Term]) -> tuple[dict[Term, Observed], dict[Term, str]]:
        """Return (the values of terms, why others have no value).

        Raises ConfigError for a term on test data where those may not be read, DataError for test scores that are not
        those of the record.
        """
        found: dict[Term, Observed] = {}
        missing: dict[Term, str] = {}
        for term in dict.fromkeys(terms):
            if term.on == "test" and self._may_read != "test" and quantity_named(term.quantity).source == "scores":
                raise ConfigError(f"{term}: a choice or a gate reads validation data only; leave the test data alone.")
            try:
                found[term] = self._observed(term)
            except RewardlabError as error:
                missing[term] = str(error).rstrip(".")
        return found, missing

    def _observed(self, term: Term) -> Observed:
        if term.arm in self.study.plan.left_out:
            raise DataError(f"{term.arm} is not run at this scale: {self.study.plan.left_out[term.arm]}")
        outcomes = self.done(term.arm)
        if not outcomes:
            raise DataError(f"no run of {term.arm} is done")
        quantity = quantity_named(term.quantity)
        if quantity.source == "scores" and term.step is None:
            for outcome in outcomes:
                if term.on == "test":
                    self._require_recorded(outcome)
            tables = {outcome.run.seed: outcome.table(term.on) for outcome in outcomes}
            return observed_in(quantity.name, tables, beta=outcomes[0].record.beta)
        values = {outcome.run.seed: _value(outcome, quantity, term) for outcome in outcomes}
        if without := [one for one in outcomes if not math.isfinite(values[one.run.seed])]:
            raise DataError(_without(term, without, of=len(outcomes)))
        error, rows = _of_rows(outcomes, quantity, term)
        return Observed(
            by_seed_S=np.array(list(values.values())),
            seeds=tuple(values),
            varies=quantity.varies,
            row_error=error,
            num_rows=rows,
        )

    def _outcome(self, run: Run) -> Outcome:
        if run.name not in self._read:
            self._require_same_log(run)
            self._read[run.name] = Outcome.of(run, read_folder(self.study.run_folder(run), distributions=False))
        return self._read[run.name]

    def _require_same_log(self, run: Run) -> None:
        """Raise ConfigError unless the log still has the entry that was its last one when a run began."""
        entry = record_of(self.study, run).values.get("log")
        if entry is not None and entry not in self._hashes:
            raise ConfigError(
                f"{self.study.folder / LOG}: it was changed after {run.name} began: the entry that was the last one "
                f"then is not in it. Restore it."
            )

    def _require_recorded(self, outcome: Outcome) -> None:
        """Raise DataError unless the test scores are those that the record of the run names."""
        if outcome.run.name in self._recorded:
            return
        path = self.study.run_folder(outcome.run) / TEST_SCORES
        reads = record_of(self.study, outcome.run).test_reads
        if not path.is_file() or not reads or reads[-1]["scores"] != sha256_file(path):
            raise DataError(f"{path}: is not what the run left when it ended. Restore it, or do the run again")
        self._recorded.add(outcome.run.name)


def _value(outcome: Outcome, quantity: Quantity, term: Term) -> float:
    if _is_of_curve(quantity, term):
        return outcome.at_step(quantity.column, term.step)
    return outcome.of_record(quantity.name)


def _is_of_curve(quantity: Quantity, term: Term) -> bool:
    return bool(quantity.column) and (term.step is not None or quantity.source == "curve")


def _of_rows(outcomes: Sequence[Outcome], quantity: Quantity, term: Term) -> tuple[float | None, int]:
    """Return (the standard error of a curve's value from its validation rows, the number of these rows).

    Runs write the 95 % interval of such values beside them. Of its two sides the longer one is taken: that of a loss is
    above it and that of a high accuracy below, where the truth of a claim that looks too good would be. The error is
    NaN where the interval is missing, and None for a value that is not from rows.
    """
    if quantity.source == "record" or not _is_of_curve(quantity, term):
        return None, 0
    sides = [
        [
            abs(outcome.at_step(f"{quantity.column}{side}", term.step) - _value(outcome, quantity, term))
            for side in SIDES
        ]
        for outcome in outcomes
    ]
    counts = [outcome.at_step("eval_pairs", term.step) for outcome in outcomes]
    error = math.sqrt(float(np.mean(np.square(np.max(sides, axis=1))))) / NORMAL_95
    return error, int(min(counts)) if all(map(math.isfinite, counts)) else 0


def _without(term: Term, outcomes: Sequence[Outcome], *, of: int) -> str:
    """Return why a term has no value. One run without a value suffices: the others say nothing about it."""
    at = "" if term.step is None else f" at step {term.step}"
    if len(outcomes) == of:
        return f"no run of {term.arm} has {term.quantity}{at}"
    seeds = ", ".join(
        f"seed {one.run.seed}{'' if term.step is None else f' (it ended at step {one.record.step})'}"
        for one in outcomes
    )
    return f"{len(outcomes)} of {of} runs of {term.arm} have no {term.quantity}{at}: {seeds}"


def _step_of(record: Record) -> int | None:
    """Return the step at which the chosen checkpoint was saved."""
    assert record.model is not None
    step = record.model.provenance.get("step") if isinstance(record.model.provenance, Mapping) else None
    return int(step) if isinstance(step, int) else None
