"""The record of what was rewarded in a run of reinforcement learning: what `rewardlab rl audit` reads.

One JSON object a line in `rollouts.jsonl` of the run's folder; with several processes, `rollouts-RANK.jsonl` each. A
line holds the fields of `RolloutRow`, without those that are None or empty. Lines are appended and flushed to the disk
as they are written, so a process that is killed loses at most the line that it was writing. Readers leave such a torn
last line out and say so; the next writer takes it off.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import append_text, parse_line, require_no_pipe
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.schema import Refusal, typed
from rewardlab.core.terminal import brief, listed
from rewardlab.core.types import Conversation, Message, prompt_key
from rewardlab.core.values import path_of
from rewardlab.rl.rollouts import RolloutError

logger = logging.getLogger("rewardlab")

ONE: Final = "rollouts.jsonl"
PATTERN: Final = "rollouts*.jsonl"
EXAMPLE: Final = '{"step": 0, "prompt_key": …, "conversation": [{"role": …, "content": …}, …], "reward": 0.5}'
MOST: Final = 1 << 53
"""Largest step and number of tokens, well within the 64 bits in which readers hold them."""
REFUSAL: Final = Refusal(error=DataError, remedy=f"Fix or remove this line. A line looks like {EXAMPLE}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """One reply that was rewarded."""

    step: int
    """Optimiser steps done when the reply was sampled."""
    prompt_key: str
    """Equal for rollouts of one prompt, in all steps: a hash of its turns (`key_of`)."""
    conversation: Conversation
    """All turns, the reply last."""
    reward: float
    """The score of the reward model that is trained on (the proxy): raw, unless the scorer was asked for another."""
    trained_on: float | None = None
    """Reward that the trainer was given, after environment, floor and shaping; None if it is `reward`."""
    num_tokens: int | None = None
    spread: float | None = None
    digest: str | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)
    """Name -> another judgement of this reply: a gold score, a second reward model, a verifier."""
    shown: Mapping[str, float] = field(default_factory=dict)
    """Name -> a figure that is shown and not judged, such as the KL divergence from the reference model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The types of a line, for the message about one that does not match."""

    step: int
    prompt_key: str
    conversation: list[Message]
    reward: float
    trained_on: float | None = None
    num_tokens: int | None = None
    spread: float | None = None
    digest: str | None = None
    evidence: dict[str, float] | None = None
    shown: dict[str, float] | None = None


FIELDS: Final = frozenset(own.name for own in fields(RolloutRow))


def key_of(conversation: Sequence[Message]) -> str:
    """Return the `prompt_key` of a conversation whose last turn is the reply."""
    return prompt_key(conversation[:-1])


class RolloutLog:
    """Writes rollouts as they are rewarded. A row that was written is never lost, also if the process is killed.

    Each process of a run has a log of its own. Threads of one process may share one.
    """

    def __init__(self, folder: str | Path, *, rank: int = 0, world_size: int = 1) -> None:
        """Open the record in `folder`, the folder of the run, which is made if it is not there.

        A line that an earlier process did not finish is taken off.

        Raises ConfigError for a rank that is not below `world_size`, RewardlabError if nothing can be written there.
        """
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size} processes: ranks are counted from 0.")
        self._folder = path_of(folder, "folder")
        require_writable_folder(self._folder, "the folder of RolloutLog")
        self._rank, self._world_size = rank, world_size
        self.path = self._folder / _name_of(rank, world_size)
        self._lock = threading.Lock()
        self._closed = False
        for path in self._own_files():
            require_no_pipe(path)
        self.path.touch()
        if left := _without_torn_line(self.path):
            logger.warning("%s: took off %d bytes of a line that was not finished when the run ended", self.path, left)

    def write(self, rows: Sequence[RolloutRow]) -> None:
        """Append rows: either all of them are written or none.

        A run that is resumed goes on in the same file, and `resume_at` first takes off what it will write again.

        Raises RolloutError, naming the row, for a number that is not finite and for a row without a step or a reply,
        ConfigError if the log is closed, and OSError if the disk refuses.
        """
        text = "".join(f"{_line_of(row, number)}\n" for number, row in enumerate(rows))
        with self._lock:
            if self._closed:
                raise ConfigError(f"{self.path}: this log is closed. Open a new RolloutLog to write more.")
            before = self.path.stat().st_size
            try:
                append_text(self.path, text)
            except OSError:
                # A full disk may have taken a part of the rows. Later rows would leave it as a torn line in the middle.
                os.truncate(self.path, before)
                raise

    def resume_at(self, step: int) -> None:
        """Take rows of steps from `step` on out of the record, as a resumed run will write them again.

        Each rank does this for its own file; rank 0 also for files of ranks that the resumed run does not have.
        """
        with self._lock:
            for path in self._own_files():
                _without_torn_line(path)
                if removed := _keep(path, lambda row: row.step < step):
                    logger.info("%s: took off %d rows of steps from %d on", path, removed, step)

    def begun(self) -> Path | None:
        """Return a file of this record that holds rows already, None if there is none.

        Files of this rank count, and for rank 0 also files of ranks that the run does not have.
        """
        return next((path for path in self._own_files() if path.stat().st_size), None)

    def _own_files(self) -> list[Path]:
        """Return the files that nobody else in this run writes to."""
        own = {self.path}
        if self._rank == 0:
            taken = {_name_of(rank, self._world_size) for rank in range(self._world_size)}
            own |= {path for path in self._folder.glob(PATTERN) if path.name not in taken}
        return sorted(own)

    def close(self) -> None:
        """Refuse further rows. Everything that was written is on the disk already."""
        with self._lock:
            self._closed = True


def read_rollouts(run: str | Path) -> Iterator[RolloutRow]:
    """Yield the rollouts of a run, by step, those of one step by file and line.

    `run` is the run's folder or one file. Rows are read one at a time; of all rows only their places are kept.

    Raises DataError naming file and line for a row that cannot be read, and if there is no record.
    """
    places = [_places(path) for path in find_logs(run)]
    yield from heapq.merge(*(_in_order(path, found) for path, found in places), key=lambda row: row.step)


def find_logs(run: str | Path) -> list[Path]:
    """Return the files of a run's record. Raises DataError if there is none."""
    run = path_of(run, "run")
    if run.is_file():
        return [run]
    found = [path for path in sorted(run.glob(PATTERN)) if path.is_file()] if run.is_dir() else []
    if not found:
        what = f"holds no {ONE} and no rollouts-RANK.jsonl" if run.is_dir() else "there is no such file or folder"
        below = sorted({path.parent for path in run.glob(f"*/{PATTERN}")}) if run.is_dir() else []
        near = f" There is a record in {', '.join(map(str, below))}." if below else ""
        raise DataError(
            f"{run}: {what}.{near} Name the folder of a run of reinforcement learning whose rollouts were logged with "
            f"rewardlab.rl.RolloutLog, or its {ONE}."
        )
    return found


def read_rows(path: Path) -> Iterator[tuple[int, RolloutRow]]:
    """Yield (line number, row) of one file, in its order. A torn last line is left out with a warning.

    Raises DataError naming file and line for any other line that is not a rollout.
    """
    with path.open("rb") as file:
        for number, _, row in _parsed(path, file):
            yield number, row


def _parsed(path: Path, file: BinaryIO) -> Iterator[tuple[int, int, RolloutRow]]:
    """Yield (line number, offset in bytes, row) of every line."""
    offset = 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield number, offset, _row_of(path, number, line)
            except DataError:
                if line.endswith(b"\n"):
                    raise
                logger.warning(
                    "%s:%d: the last line is torn, as a process leaves it that is killed; left out", path, number
                )
        offset += len(line)


def _places(path: Path) -> tuple[Path, list[tuple[int, int, int]]]:
    """Return a file with (step, line number, offset) of its rows, by step."""
    with path.open("rb") as file:
        return path, sorted((row.step, number, offset) for number, offset, row in _parsed(path, file))


def _in_order(path: Path, places: Sequence[tuple[int, int, int]]) -> Iterator[RolloutRow]:
    with path.open("rb") as file:
        for _, number, offset in places:
            # A file is almost always in the order of steps, and is then read without a jump.
            if file.tell() != offset:
                file.seek(offset)
            yield _row_of(path, number, file.readline())


def _row_of(path: Path, number: int, line: bytes) -> RolloutRow:
    """Return a line as a rollout. Raises DataError naming file and line."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{number}: not UTF-8 text ({error}). Fix or remove this line.") from error
    values = parse_line(path, number, text, like=EXAMPLE)
    where = f"{path}:{number}"
    if not {"reward", "conversation"} & values.keys():
        has = listed([brief(name) for name in values]) or "nothing"
        raise DataError(
            f"{where}: no rollout: the line has {has}. Name the folder of a run, or a {PATTERN} in it; "
            f"rewardlab.rl.RolloutLog writes them. A line looks like {EXAMPLE}."
        )
    if not _matches(values):
        # This check is slower, and its error says what is wrong.
        typed(_Line, values, where=where, refusal=REFUSAL)
    row = RolloutRow(**{**values, **_nouns(values)})
    if wrong := _wrong_with(row):
        raise REFUSAL.of(f"{where}: {wrong}.")
    return row


def _nouns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line that are objects in a row."""
    turns = tuple(Message(turn["role"], turn["content"]) for turn in values["conversation"])
    return {"conversation": turns, "evidence": values.get("evidence") or {}, "shown": values.get("shown") or {}}


def _matches(values: Mapping[str, Any]) -> bool:
    """Return whether the fields have the types of `_Line`, by a quick look; refused lines are looked at again."""
    turns = values.get("conversation")
    return (
        values.keys() <= FIELDS
        and type(values.get("step")) is int
        and isinstance(values.get("prompt_key"), str)
        and isinstance(turns, list)
        and all(_is_turn(turn) for turn in turns)
        and _is_number(values.get("reward"))
        and all(values.get(name) is None or _is_number(values[name]) for name in ("trained_on", "spread"))
        and (values.get("num_tokens") is None or type(values["num_tokens"]) is int)
        and isinstance(values.get("digest"), str | None)
        and all(_are_numbers(values.get(name)) for name in ("evidence", "shown"))
    )


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and turn.keys() == {"role", "content"} and all(type(t) is str for t in turn.values())


def _are_numbers(values: object) -> bool:
    return values is None or (isinstance(values, dict) and all(map(_is_number, values.values())))


def _is_number(value: object) -> bool:
    return type(value) is float or type(value) is int


def _wrong_with(row: RolloutRow) -> str:
    """Return what is wrong with a row, as the end of a sentence; empty for a good one."""
    if not 0 <= row.step <= MOST:
        return f"step is {brief(row.step)}; steps are counted from 0 to {MOST}"
    if row.num_tokens is not None and not 0 <= row.num_tokens <= MOST:
        return f"num_tokens is {brief(row.num_tokens)}; expected a number from 0 to {MOST}"
    if not row.prompt_key:
        return "prompt_key is empty; take rewardlab.rl.rollout_log.key_of(conversation)"
    if not row.conversation:
        return "conversation has no turn; the reply is the last"
    numbers = {"reward": row.reward, "trained_on": row.trained_on, "spread": row.spread}
    numbers |= {f"evidence.{name}": value for name, value in row.evidence.items()}
    numbers |= {f"shown.{name}": value for name, value in row.shown.items()}
    for name, value in numbers.items():
        if value is not None and not _is_finite(value):
            return f"{name} is {brief(value)}, which is not a finite number"
    return ""


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that is too large for a float
        return False


def _line_of(row: RolloutRow, number: int) -> str:
    """Return a row as a line. Raises RolloutError naming the row for what a reader would refuse."""
    if wrong := _wrong_with(row):
        raise RolloutError(f"rollout {number} of step {row.step} cannot be logged: {wrong}.", rollouts=(number,))
    values: dict[str, object] = {}
    for name in _ORDER:
        value = getattr(row, name)
        if name == "conversation":
            values[name] = [turn.as_dict() for turn in row.conversation]
        elif isinstance(value, Mapping):
            values |= {name: {key: _plain(one) for key, one in value.items()}} if value else {}
        elif value is not None:
            values[name] = _plain(value)
    # Characters beyond ASCII are escaped: a lone surrogate, which a tokenizer may produce, has no UTF-8 of its own.
    return json.dumps(values, ensure_ascii=True, allow_nan=False)


_ORDER: Final = tuple(own.name for own in fields(RolloutRow))


def _plain(value: Any) -> Any:
    """Return a number of numpy or torch as Python's, which JSON can hold."""
    return value.item() if hasattr(value, "item") else value


def _name_of(rank: int, world_size: int) -> str:
    return ONE if world_size == 1 else f"rollouts-{rank}.jsonl"


def _without_torn_line(path: Path) -> int:
    """Take off what stands after the last line feed, unless it is a whole row. Return the number of bytes taken off."""
    size = path.stat().st_size
    if not size:
        return 0
    end = _end_of_lines(path, size)
    if end == size:
        return 0
    with path.open("rb") as file:
        file.seek(end)
        last = file.read()
    try:
        _row_of(path, 0, last)
    except DataError:
        os.truncate(path, end)
        return size - end
    append_text(path, "\n")
    return 0


def _end_of_lines(path: Path, size: int) -> int:
    """Return the offset after the last line feed, looking from the end."""
    with path.open("rb") as file:
        end = size
        while end:
            begin = max(0, end - (1 << 16))
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
    return 0


def _keep(path: Path, wanted: Callable[[RolloutRow], bool]) -> int:
    """Replace a file, in one step, by its rows that are wanted. Return how many were taken off."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    removed = 0
    try:
        with path.open("rb") as file, temporary.open("wb") as kept:
            for number, line in enumerate(file, start=1):
                if line.strip() and not wanted(_row_of(path, number, line)):
                    removed += 1
                else:
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        if removed:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return removed
