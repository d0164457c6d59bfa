"""The record of a run as columns: numbers alone, so that a long run fits in memory; texts are read and let go.

Legend: N rollouts, P prompts.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.errors import DataError
from rewardlab.core.types import Conversation
from rewardlab.rl.rollout_log import RolloutRow, find_logs, read_rows

IntArray = npt.NDArray[np.int64]
LARGEST: Final = 1e100
"""Largest size of a number: what is computed from it, squares and sums, has to be finite too."""
GRAM: Final = 4
REPETITION: Final = "repetition"
MOST_WORDS: Final = 500
"""Words at the end of a reply in which repetition is counted: loops are at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Rollouts as columns, by step; within a step in the order of the files."""

    step_N: IntArray
    prompt_N: IntArray
    """Number of the prompt, from 0."""
    prompts: tuple[str, ...]
    """[P] keys of the prompts."""
    reward_N: FloatArray
    digest_N: IntArray
    """Number of the reward model that gave the reward, in `digests`."""
    digests: tuple[str | None, ...]
    """None where the record does not say which model it was."""
    reply_N: npt.NDArray[np.uint64]
    """A hash of prompt and reply."""
    evidence: Mapping[str, FloatArray]
    """Name -> [N], NaN where a row has none."""
    shown: Mapping[str, FloatArray]
    """Name -> [N], NaN where a row has none: length, repetition, spread, and what the record shows."""
    place_N: IntArray
    """[N, 2] file and line of each row, which find it again."""
    files: tuple[Path, ...]

    def of(self, kept_N: npt.NDArray[Any]) -> Columns:
        """Return the columns of some rows, by a mask or in an order."""
        return replace(
            self,
            step_N=self.step_N[kept_N],
            prompt_N=self.prompt_N[kept_N],
            reward_N=self.reward_N[kept_N],
            digest_N=self.digest_N[kept_N],
            reply_N=self.reply_N[kept_N],
            evidence={name: column[kept_N] for name, column in self.evidence.items()},
            shown={name: column[kept_N] for name, column in self.shown.items()},
            place_N=self.place_N[kept_N],
        )


class _Sparse:
    """A column that some rows have: NaN elsewhere."""

    def __init__(self) -> None:
        self.values = array("d")

    def put(self, row: int, value: float) -> None:
        if row > len(self.values):
            self.values.extend([math.nan] * (row - len(self.values)))
        self.values.append(value)

    def whole(self, count: int) -> FloatArray:
        missing = np.full(count - len(self.values), np.nan)
        return np.concatenate([np.array(self.values, dtype=np.float64), missing])


class _Builder:
    """Collects rows. (`array` holds a number in eight bytes; a list of objects would take far more.)"""

    def __init__(self) -> None:
        self.numbers = {name: array("q") for name in ("step", "prompt", "digest", "file", "line")}
        self.rewards, self.replies = array("d"), array("Q")
        self.prompts: dict[str, int] = {}
        self.digests: dict[str | None, int] = {}
        self.evidence: dict[str, _Sparse] = {}
        self.shown: dict[str, _Sparse] = {}

    def add(self, row: RolloutRow, file: int, line: int) -> None:
        number = len(self.rewards)
        known = {
            "step": row.step,
            "prompt": self.prompts.setdefault(row.prompt_key, len(self.prompts)),
            "digest": self.digests.setdefault(row.digest, len(self.digests)),
            "file": file,
            "line": line,
        }
        for name, value in known.items():
            self.numbers[name].append(value)
        self.rewards.append(row.reward)
        text = row.conversation[-1].content
        self.replies.append(_hash(row.prompt_key, text))
        for name, one in row.evidence.items():
            self.evidence.setdefault(name, _Sparse()).put(number, one)
        for name, one in _looked_at(row, text):
            self.shown.setdefault(name, _Sparse()).put(number, one)

    def whole(self, files: Sequence[Path]) -> Columns:
        own = {name: np.array(values, dtype=np.int64) for name, values in self.numbers.items()}
        count = len(self.rewards)
        columns = Columns(
            step_N=own["step"],
            prompt_N=own["prompt"],
            prompts=tuple(self.prompts),
            reward_N=np.array(self.rewards, dtype=np.float64),
            digest_N=own["digest"],
            digests=tuple(self.digests),
            reply_N=np.array(self.replies, dtype=np.uint64),
            evidence={name: self.evidence[name].whole(count) for name in sorted(self.evidence)},
            shown={name: column.whole(count) for name, column in self.shown.items()},
            place_N=np.stack([own["file"], own["line"]], axis=1),
            files=tuple(files),
        )
        order = np.argsort(columns.step_N, kind="stable")
        return columns.of(order)


def read_columns(run: str | Path) -> Columns:
    """Return the record of a run as columns.

    Raises DataError naming file and line for a row that cannot be read or has a number beyond `LARGEST`, and for a
    record without rows.
    """
    files = find_logs(run)
    builder = _Builder()
    for number, path in enumerate(files):
        for line, row in read_rows(path):
            _require_small(row, path, line)
            builder.add(row, number, line)
    if not builder.rewards:
        raise DataError(f"{files[0]}: holds no rollout. The audit reads what RolloutLog wrote during a run.")
    return builder.whole(files)


def _require_small(row: RolloutRow, path: Path, line: int) -> None:
    """Raise DataError, naming file and line, for a number that cannot be squared and added up."""
    numbers = {"reward": row.reward, "spread": row.spread or 0.0}
    numbers |= {f"evidence.{name}": value for name, value in row.evidence.items()}
    numbers |= {f"shown.{name}": value for name, value in row.shown.items()}
    for name, value in numbers.items():
        if abs(value) > LARGEST:
            raise DataError(
                f"{path}:{line}: {name} is {value:g}; wanted a size of at most {LARGEST:g}, of which squares can be "
                f"added up. Fix or remove this line."
            )


def read_conversations(columns: Columns, wanted_N: IntArray) -> Iterator[tuple[int, Conversation]]:
    """Yield (number of the row, its conversation) of the rows `wanted_N`, file by file."""
    place = {
        (int(file), int(line)): int(row) for row, (file, line) in zip(wanted_N, columns.place_N[wanted_N], strict=True)
    }
    for number, path in enumerate(columns.files):
        for line, row in read_rows(path):
            if (number, line) in place:
                yield place[number, line], row.conversation


def _looked_at(row: RolloutRow, reply: str) -> Iterable[tuple[str, float]]:
    """Yield (name, value) of what is shown about a row and not judged."""
    words = reply.split()
    yield (
        ("conversation (tokens)", float(row.num_tokens))
        if row.num_tokens is not None
        else ("reply (words)", float(len(words)))
    )
    yield REPETITION, repetition(words)
    if row.spread is not None:
        yield "spread of the ensemble", row.spread
    yield from row.shown.items()


def repetition(words: Sequence[str]) -> float:
    """Return the share of runs of four words that were there before, in the last 500 words of a reply.

    It is 0 for a reply of fewer than four words, and for one in which no word occurs twice.
    """
    last = words[-MOST_WORDS:]
    count = len(last) - GRAM + 1
    if count < 1:
        return 0.0
    return 1.0 - len({tuple(last[start : start + GRAM]) for start in range(count)}) / count


def _hash(prompt: str, reply: str) -> int:
    text = f"{prompt}\x1f{reply}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
