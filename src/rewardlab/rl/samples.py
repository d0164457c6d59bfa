"""Files of prompts with sampled replies: what best-of-n and rejection sampling read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.files import is_number
from rewardlab.core.types import Conversation
from rewardlab.data.chat import to_messages
from rewardlab.data.prompts import prompt_turns
from rewardlab.data.readers import read_each_row
from rewardlab.data.rows import UnusableRowError

PROMPT: Final = ("prompt", "messages")
REPLIES: Final = ("replies", "responses")
REMEDY: Final = (
    'Fix or remove this row. It looks like {"prompt": "…" or a list of messages, "replies": ["…", "…"]}, with '
    '"gold": [0.1, 0.7] if there are gold scores; `messages` and `responses` are other names of the first two.'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The replies that were sampled for one prompt."""

    where: str
    """File and line, for messages."""
    prompt: str | Conversation
    """As the row has it: a text may be an open transcript."""
    replies: tuple[str, ...]
    gold: tuple[float, ...] | None
    """A gold score for each reply, or None."""


def read_samples(path: str | Path) -> Iterator[Samples]:
    """Yield the rows of a file: JSON Lines (also `.gz`), JSON, CSV or Parquet.

    Raises DataError naming file and line for a row without a prompt or replies, or with gold scores that are not as
    many as the replies or not finite, and for a file that cannot be read or has no rows.
    """
    path, found = Path(path), False
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Name a file of prompts with their replies.")
    for number, row in read_each_row(path):
        if isinstance(row, DataError):
            raise row
        found = True
        yield _samples(f"{path}:{number}", row)
    if not found:
        raise DataError(f"{path}: it has no rows. {REMEDY}")


def _samples(where: str, row: Mapping[str, Any]) -> Samples:
    prompt, replies, gold = _one_of(PROMPT, where, row), _one_of(REPLIES, where, row), row.get("gold")
    if not isinstance(prompt, str | list):
        raise DataError(f"{where}: the prompt cannot be read (it is a {type(prompt).__name__}). {REMEDY}")
    try:
        turns, _ = prompt_turns(prompt, bare=False)
    except (RenderError, UnusableRowError) as error:
        raise DataError(f"{where}: the prompt cannot be read ({error}). {REMEDY}") from error
    if not turns or turns[-1].role == "assistant":
        last = "is empty" if not turns else "ends with a turn of the assistant"
        raise DataError(f"{where}: the prompt {last}, so there is nothing that the replies answer. {REMEDY}")
    if not isinstance(replies, list) or not replies or not all(isinstance(reply, str) for reply in replies):
        raise DataError(f"{where}: the replies are not a list of texts with at least one. {REMEDY}")
    if gold is not None and (not isinstance(gold, list) or len(gold) != len(replies) or not all(map(is_number, gold))):
        raise DataError(f"{where}: gold is not a list of {len(replies)} finite numbers, one for each reply. {REMEDY}")
    return Samples(
        where=where,
        prompt=prompt if isinstance(prompt, str) else to_messages(prompt),
        replies=tuple(replies),
        gold=None if gold is None else tuple(map(float, gold)),
    )


def _one_of(names: tuple[str, str], where: str, row: Mapping[str, Any]) -> Any:
    """Return the value of that one of two columns that a row has. Raises DataError if it has neither or both."""
    given = [name for name in names if row.get(name) is not None]
    if len(given) != 1:
        what = "has both" if given else "has neither"
        raise DataError(f"{where}: the row {what} `{names[0]}` {'and' if given else 'nor'} `{names[1]}`. {REMEDY}")
    return row[given[0]]
