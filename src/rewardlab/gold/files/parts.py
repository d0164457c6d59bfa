"""One file in several parts, each written by a process of its own: `samples-00002-of-00016.jsonl`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.terminal import short


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` (from 0) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the part that `K/N` names, K from 1. Raises ConfigError for anything else."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(
                f"--shard {short(text)}: wanted K/N with K from 1 to N, such as 3/16: the third of sixteen parts."
            )
        return cls(int(found[1]) - 1, int(found[2]))

    def rows(self, num_rows: int) -> range:
        """Return the rows of this part: neighbours, so that the parts in order are the whole."""
        return range(num_rows * self.number // self.count, num_rows * (self.number + 1) // self.count)

    def some_rows(self, num_rows: int) -> range:
        """Return the rows of this part. Raises ConfigError if it has none, since a file without rows says nothing."""
        rows = self.rows(num_rows)
        if not rows:
            raise ConfigError(
                f"--shard {self.number + 1}/{self.count}: this part has no rows, since there are {num_rows}. Divide "
                f"them into at most {num_rows} parts."
            )
        return rows

    def path(self, whole: Path) -> Path:
        """Return the name of this part of a file."""
        stem, _, ending = whole.name.partition(".")
        return whole.with_name(f"{stem}-{self.number + 1:05d}-of-{self.count:05d}.{ending}")


def shard_of(text: str | None) -> Shard | None:
    """Return the part that `--shard` names, `K/N` or `slurm` for the place of this task in its array; None without it.

    Raises ConfigError as `Shard.parse` does, outside an array, and for one whose numbers have gaps.
    """
    if text != "slurm":
        return None if text is None else Shard.parse(text)
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        raise ConfigError(
            "--shard slurm: this is not a task of a Slurm array. Give --shard K/N, or sbatch --array=1-N."
        )
    first, last, count = (int(os.environ.get(f"SLURM_ARRAY_TASK_{name}", task)) for name in ("MIN", "MAX", "COUNT"))
    # With gaps (--array=1,3) the number of a task would not say how many tasks come before it.
    if last - first + 1 != count:
        raise ConfigError("--shard: the numbers of this Slurm array have gaps. Give --shard K/N, K from 1.")
    return Shard(int(task) - first, count)


def parts_of(whole: Path) -> list[Path]:
    """Return a file, or if it is not there its parts in order.

    Raises DataError if there is neither, if a part is missing, or if there are parts of several divisions; ConfigError
    if there are both, since nobody can tell which of them is meant.
    """
    stem, _, ending = whole.name.partition(".")
    pattern = re.compile(rf"{re.escape(stem)}-(\d{{5}})-of-(\d{{5}})\.{re.escape(ending)}")
    there: dict[int, list[Path]] = {}
    for path in sorted(whole.parent.iterdir()) if whole.parent.is_dir() else []:
        if found := pattern.fullmatch(path.name):
            there.setdefault(int(found[2]), []).append(path)
    if whole.is_file():
        if there:
            part = min(there.values())[0]
            raise ConfigError(f"{whole}: {part.name} is there too, a part of a file of that name. Remove one of them.")
        return [whole]
    if not there:
        raise DataError(f"{whole}: there is no such file.")
    if len(there) > 1:
        told = " and ".join(str(count) for count in sorted(there))
        raise DataError(f"{whole}: there are parts of {told}. Remove those of one division.")
    ((count, paths),) = there.items()
    found_names = {path.name for path in paths}
    if missing := [number for number in range(count) if Shard(number, count).path(whole).name not in found_names]:
        raise DataError(f"{whole}: part {missing[0] + 1} of {count} is missing. Let it finish first.")
    return paths
