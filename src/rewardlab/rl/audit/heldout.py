"""Results of a held-out suite at checkpoints, as evidence: read from JSONL or CSV, and compared between windows.

A row is one of two forms, by its columns:

    step, value, item           the outcome of one item: compared item by item
    step, value, low, high      the suite's value with its interval; `level` (0.95) and `n` (items) may be given

`name` says which suite it is, where a file holds several. Legend: N rows, P items.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from scipy.special import ndtri

from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.errors import DataError
from rewardlab.core.files import UTF8, read_jsonl
from rewardlab.core.terminal import brief
from rewardlab.rl.audit.changes import Sample, Shift, missing, room_of
from rewardlab.rl.audit.columns import LARGEST, IntArray
from rewardlab.rl.audit.windows import windows_of
from rewardlab.rl.rollout_log import MOST

NAME: Final = "held-out"
KNOWN: Final = ("step", "value", "name", "item", "low", "high", "level", "n")
REMEDY: Final = (
    "A row has step, value and item, or step, value, low and high; name says which suite it is, level is that of the "
    "interval (0.95), n the number of items."
)
LEVELS: Final = (0.01, 0.9999)
"""Levels of intervals that are taken."""
IMAGINED: Final = 4.0
"""Items that are imagined to move beside those that did (z² at 95 %, as Agresti & Coull 1998 have it for shares). Where
few items move, how many would have done so in other items is hardly known, and with none the error would be 0."""
ROUNDING: Final = 1e-9
MANY: Final = 1e6
"""Degrees of freedom of an interval in a file, which does not say them: as good as a normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mean:
    """The mean of the checkpoints in a window."""

    value: float
    error: float
    degrees: float
    checkpoints: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """All results of one suite."""

    name: str
    step_N: IntArray
    value_N: FloatArray
    item_N: IntArray | None
    """Number of the item of each row; None for values of the whole suite."""
    items: tuple[str, ...] = ()
    error_N: FloatArray | None = None
    """Standard errors of values of the whole suite; None for outcomes of items."""
    count_N: FloatArray | None = None
    """Number of items behind each value; NaN where the file does not say."""

    @property
    def scale(self) -> float:
        """The standard deviation of an item at the first checkpoint; 1, the suite's own unit, where it is not known."""
        if self.item_N is not None:
            first = self.value_N[self.step_N == self.step_N.min()]
            spread = float(np.std(first)) or float(np.std(self.value_N))
            return spread or 1.0
        assert self.error_N is not None
        assert self.count_N is not None
        first_error, first_count = self.error_N[0], self.count_N[0]
        spread = float(first_error * math.sqrt(first_count)) if math.isfinite(first_count) else 0.0
        return spread or 1.0

    @property
    def has_scale(self) -> bool:
        """Whether changes can be given in standard deviations of an item."""
        return self.item_N is not None or bool(np.isfinite(np.asarray(self.count_N)[0]))

    def within(self, first: float, last: float) -> Suite:
        """Return the results of checkpoints from one step to another."""
        kept = (self.step_N >= first) & (self.step_N <= last)
        return replace(
            self,
            step_N=self.step_N[kept],
            value_N=self.value_N[kept],
            item_N=None if self.item_N is None else self.item_N[kept],
            error_N=None if self.error_N is None else self.error_N[kept],
            count_N=None if self.count_N is None else self.count_N[kept],
        )

    def change(self, earlier: int, later: int, windows: Sequence[IntArray]) -> Shift:
        """Return how the suite changed between two windows, in the unit of `scale`."""
        if self.item_N is not None:
            return self._by_item(earlier, later, windows)
        window_N = windows_of(self.step_N, windows)
        assert self.error_N is not None
        sides = [self._mean(window_N == window) for window in (earlier, later)]
        num_steps = sum(side.checkpoints for side in sides)
        counts = np.asarray(self.count_N)
        items = int(np.nanmin(counts)) if np.isfinite(counts).any() else num_steps
        if not all(side.checkpoints for side in sides):
            return missing(items, num_steps, "no checkpoint in a window")
        error = math.hypot(*(side.error for side in sides))
        return Shift(
            value=sides[1].value - sides[0].value,
            error=error,
            degrees=error**4 / sum(side.error**4 / side.degrees for side in sides),
            num_prompts=items,
            num_steps=num_steps,
            method="from the intervals in the file, as if of different items",
        ).scaled(1 / self.scale)

    def room(self, earlier: int, windows: Sequence[IntArray]) -> float | None:
        """Return how far the suite can rise from a window on, in the unit of `scale`; None if its end is not known."""
        before_N = windows_of(self.step_N, windows) == earlier
        if self.item_N is None or not before_N.any():
            return None
        return room_of(self.value_N, before_N) / self.scale

    def _mean(self, kept: np.ndarray) -> _Mean:
        """Return the mean of some checkpoints.

        The error is the larger of two: the mean of the intervals' errors, and the error from how far checkpoints lie
        apart, which is known no better than their number lets it be.
        """
        values, errors = self.value_N[kept], np.asarray(self.error_N)[kept]
        count = len(values)
        if not count:
            return _Mean(value=math.nan, error=math.nan, degrees=math.nan, checkpoints=0)
        # The same items are in all checkpoints, so their errors do not average out.
        own = float(np.mean(errors))
        between = float(np.std(values, ddof=1) / math.sqrt(count)) if count > 1 else 0.0
        degrees = MANY if own >= between else float(count - 1)
        return _Mean(value=float(values.mean()), error=max(own, between), degrees=degrees, checkpoints=count)

    def _by_item(self, earlier: int, later: int, windows: Sequence[IntArray]) -> Shift:
        assert self.item_N is not None
        values = np.stack([np.zeros_like(self.value_N), self.value_N / self.scale], axis=1)
        sample = Sample.of(self.step_N, self.item_N, values, windows, self.items, min_steps=1)
        found = sample.compare(earlier, later).gold
        return replace(found, error=math.hypot(found.error, self._of_unseen(earlier, later, windows)))

    def _of_unseen(self, earlier: int, later: int, windows: Sequence[IntArray]) -> float:
        """Return what `IMAGINED` items add to the error, in the unit of `scale`.

        They move as far as those that moved; where none did, from the lowest value to the highest.
        """
        assert self.item_N is not None
        window_N = windows_of(self.step_N, windows)
        means = []
        for window in (earlier, later):
            item_N = self.item_N[window_N == window]
            counts = np.bincount(item_N, minlength=len(self.items))
            sums = np.bincount(item_N, self.value_N[window_N == window], minlength=len(self.items))
            means.append(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))
        moved = means[1] - means[0]
        moved = moved[np.isfinite(moved)]
        if not moved.size:
            return 0.0
        moving = moved[np.abs(moved) > ROUNDING * np.abs(self.value_N).max()]
        size = math.sqrt(float(np.square(moving).mean())) if moving.size else float(np.ptp(self.value_N))
        return float(math.sqrt(IMAGINED) * size / self.scale / moved.size)


def read_heldout(path: Path) -> list[Suite]:
    """Return the suites of a file, in the order of their names.

    Raises DataError naming file and line for a row that cannot be read, and for a file without rows.
    """
    rows: dict[str, list[tuple[int, Mapping[str, object]]]] = {}
    for number, row in _rows(path):
        rows.setdefault(str(row.get("name") or NAME), []).append((number, row))
    if not rows:
        raise DataError(f"{path}: holds no row. {REMEDY}")
    return [_suite(path, name, own) for name, own in sorted(rows.items())]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    if not path.is_file():
        raise DataError(f"--heldout {path}: there is no such file. Name a JSONL or CSV file. {REMEDY}")
    if path.suffix.lower() == ".csv":
        with path.open(encoding=UTF8, newline="") as file:
            reader = csv.DictReader(file, strict=True)
            try:
                for row in reader:
                    if None in row:
                        raise DataError(f"{path}:{reader.line_num}: has more cells than the first line. {REMEDY}")
                    yield reader.line_num, {name: cell for name, cell in row.items() if cell not in ("", None)}
            except (csv.Error, UnicodeDecodeError) as error:
                raise DataError(f"{path}:{reader.line_num + 1}: cannot be read as CSV ({error}). {REMEDY}") from error
    else:
        yield from read_jsonl(path)


def _suite(path: Path, name: str, rows: Sequence[tuple[int, Mapping[str, object]]]) -> Suite:
    by_item = "item" in rows[0][1]
    steps, values, items, errors, counts = [], [], [], [], []
    numbers: dict[str, int] = {}
    for number, row in rows:
        where = f"{path}:{number}"
        if unknown := [key for key in row if key not in KNOWN]:
            raise DataError(f"{where}: unknown column {brief(unknown[0])}. {REMEDY}")
        if ("item" in row) != by_item:
            raise DataError(f"{where}: some rows of {brief(name)} have an item and others do not. {REMEDY}")
        steps.append(_whole(row, "step", where))
        values.append(_number(row, "value", where))
        if by_item:
            items.append(numbers.setdefault(str(row["item"]), len(numbers)))
        else:
            errors.append(_error(row, where))
            counts.append(float(_whole(row, "n", where, least=1)) if row.get("n") is not None else math.nan)
    if by_item and len(set(zip(steps, items, strict=True))) < len(steps):
        raise DataError(f"{path}: an item of {brief(name)} has two values at one step. Keep one, or name the suites.")
    if not by_item and len(set(steps)) < len(steps):
        raise DataError(f"{path}: {brief(name)} has two values at one step. Keep one, or give `item` or `name`.")
    order = np.argsort(np.array(steps), kind="stable")
    return Suite(
        name=name,
        step_N=np.array(steps, dtype=np.int64)[order],
        value_N=np.array(values)[order],
        item_N=np.array(items, dtype=np.int64)[order] if by_item else None,
        items=tuple(numbers),
        error_N=None if by_item else np.array(errors)[order],
        count_N=None if by_item else np.array(counts)[order],
    )


def _error(row: Mapping[str, object], where: str) -> float:
    """Return the standard error that an interval implies. Raises DataError for an interval that cannot be right."""
    value, low, high = (_number(row, key, where) for key in ("value", "low", "high"))
    level = _number(row, "level", where) if row.get("level") is not None else 0.95
    if not low <= value <= high or not LEVELS[0] <= level <= LEVELS[1]:
        raise DataError(
            f"{where}: the interval [{low:g}, {high:g}] at level {level:g} does not hold the value {value:g}, or its "
            f"level is not from {LEVELS[0]:g} to {LEVELS[1]:g}. {REMEDY}"
        )
    if low == high:
        raise DataError(f"{where}: the interval of {value:g} has no width, so it says nothing about errors. {REMEDY}")
    # The longer side, since an interval near the end of a scale is not symmetric.
    return max(value - low, high - value) / float(ndtri((1 + level) / 2))


def _number(row: Mapping[str, object], key: str, where: str) -> float:
    value = row.get(key)
    number = math.nan
    # Only the outcome of an item may be a yes or a no.
    if isinstance(value, (int, float, str)) and (key == "value" or not isinstance(value, bool)):
        with suppress(OverflowError, ValueError):
            number = float(value)
    if not abs(number) <= LARGEST:
        raise DataError(f"{where}: {key} is {brief(value)}; expected a finite number, at most {LARGEST:g}. {REMEDY}")
    return number


def _whole(row: Mapping[str, object], key: str, where: str, *, least: int = 0) -> int:
    number = _number(row, key, where)
    if number != int(number) or not least <= number <= MOST:
        raise DataError(f"{where}: {key} is {brief(row[key])}; expected a whole number from {least} on. {REMEDY}")
    return int(number)
