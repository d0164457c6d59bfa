"""Prompts from whatever holds them: lists of texts or messages, instructions, and any preference data."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.core.files import at_home
from rewardlab.core.terminal import plural
from rewardlab.core.types import Conversation, prompt_key
from rewardlab.curation.rows import walk
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import find_sources, is_lone
from rewardlab.data.judgements import Rules
from rewardlab.data.readers import holds_lines, read_each_row, read_source
from rewardlab.data.rows import has_tools, media_of
from rewardlab.gold.files.rows import is_open, turns_of, with_system
from rewardlab.gold.files.values import first_line, read_values

logger = logging.getLogger("rewardlab")
COLUMNS: Final = ("prompt", "messages", "instruction", "question", "query", "prompts")
"""Columns that hold a prompt, in the order in which they are looked for."""
REPLIES: Final = ("chosen", "rejected", "replies", "responses", "response", "completions", "answers")
"""Columns of data that have replies already: these are read as preferences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that is to be replied to."""

    id: str
    prompt: Conversation
    extra: Mapping[str, Any] = field(default_factory=dict)
    """`source` and the like, which later files keep."""
    occurrence: int = 0
    """How often the same prompt came before."""


def read_prompts(
    name: str, *, split: str = "train", system: str | None = None, repeats: bool | None = None
) -> Iterator[Prompt]:
    """Yield the prompts of a file, a folder or a hub dataset, in its order.

    A file of prompts holds texts, lists of messages, or rows with one of `COLUMNS`; rows with an `instruction` may have
    an `input`. Other data are read as preferences, of which each prompt comes once. `repeats` says whether a prompt
    that comes again is yielded again; None: in files of prompts only. `system` is the system turn of prompts that have
    none.

    Raises DataError for data that hold no prompts.
    """
    found = _prompts(name, split)
    if found is None:
        found, once = _of_preferences(name, split), repeats is not True
    else:
        once = repeats is False
    seen: set[str] = set()
    before: Counter[bytes] = Counter()
    count = 0
    for prompt in found:
        count += 1
        if not prompt.prompt[-1].content.strip():
            raise DataError(f"{name}: prompt {prompt.id} is empty, so there is nothing to reply to. Take it out.")
        if once and (key := prompt_key(prompt.prompt)) in seen:
            continue
        if once:
            seen.add(key)
        turns = with_system(prompt.prompt, system)
        occurrence = 0
        if not once:
            digest = hashlib.sha256(json.dumps([[turn.role, turn.content] for turn in turns]).encode()).digest()[:12]
            occurrence = before[digest]
            before[digest] += 1
        yield Prompt(id=prompt.id, prompt=turns, extra=prompt.extra, occurrence=occurrence)
    if not count:
        raise DataError(f"{name}: it holds no prompts.")
    if once and len(seen) < count:
        logger.info("%s: %d rows, %d different prompts; each is taken once", name, count, len(seen))


def _prompts(name: str, split: str) -> Iterator[Prompt] | None:
    """Return the prompts of a file of prompts; None if the data are preferences."""
    path = at_home(name)
    if path.is_file() and _is_one_value(path):
        value = read_values(path)
        if isinstance(value, dict) and set(value) & {"prompts", "prompt"} and len(value) == 1:
            (value,) = value.values()
        if isinstance(value, list) and value and not isinstance(value[0], Mapping):
            return _of_list(path, value)
    rows = _rows(name, split)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{name}: it has no rows.")
    if _column(first[1]) is None or any(column in first[1] for column in REPLIES):
        return None
    return _of_rows(name, split)


def _is_one_value(path: Path) -> bool:
    """Return whether a file is JSON in one piece, or has texts or lists in its lines, not objects."""
    if path.suffix == ".json" and not holds_lines(path):
        return True
    return ".jsonl" in path.suffixes and first_line(path).startswith(('"', "["))


def _rows(name: str, split: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    path = at_home(name)
    if is_lone(name) and path.is_file():
        for number, row in read_each_row(path):
            if isinstance(row, DataError):
                raise row
            yield number, row
        return
    for source in find_sources([name], split):
        for number, row in read_source(source):
            if not isinstance(row, Mapping):
                raise DataError(f"{source.label}:{number}: this row is too long to be read. Take it out.")
            yield number, row


def _of_list(path: Path, values: list[Any]) -> Iterator[Prompt]:
    for number, value in enumerate(values):
        yield Prompt(id=str(number), prompt=turns_of(value, f"{path}:{number + 1}"))


def _of_rows(name: str, split: str) -> Iterator[Prompt]:
    for place, (number, row) in enumerate(_rows(name, split)):
        where = f"{name}:{number}"
        column = _column(row)
        if column is None:
            raise DataError(f"{where}: it has none of the columns {', '.join(COLUMNS)}.")
        _require_text(row, where)
        value = row[column]
        if column == "instruction" and isinstance(value, str) and isinstance(row.get("input"), str) and row["input"]:
            value = f"{value}\n\n{row['input']}"
        given = row.get("id")
        kept = {key: row[key] for key in ("source", "subset", "dataset") if isinstance(row.get(key), str)}
        yield Prompt(id=str(place) if given is None else str(given), prompt=turns_of(value, where), extra=kept)


def _require_text(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row with images, sound or video, or with tools, beside its prompt."""
    beside = media_of(row) or ("tools" if has_tools(row) else None)
    if beside is not None:
        raise DataError(f"{where}: has {beside} beside its prompt, which no model here reads. Take the row out.")


def _column(row: Mapping[str, Any]) -> str | None:
    return next((column for column in COLUMNS if row.get(column) is not None), None)


def _of_preferences(name: str, split: str) -> Iterator[Prompt]:
    for source in find_sources([name], split):
        rules = Rules(source=source.name, reading=ReadingConfig(), seed=0)
        dropped = begun = 0
        for row in walk(source, rules):
            if row.preference is None:
                dropped += 1
                continue
            one = row.preference
            if not is_open(one.prompt):
                begun += 1
                continue
            yield Prompt(id=one.id, prompt=one.prompt, extra={"source": one.source})
        if dropped:
            none = plural(
                dropped, "row cannot be read as a preference and gives", "rows cannot be read as preferences and give"
            )
            logger.warning("%s: %d %s no prompt", source.label, dropped, none)
        if begun:
            told = plural(
                begun,
                "prompt ends with a turn of the assistant and is",
                "prompts end with a turn of the assistant and are",
            )
            logger.warning("%s: %d %s left out", source.label, begun, told)
