"""Reading of an input: which replies each row asks to be scored, and which columns the file has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from rewardlab.core.bars import bar
from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.files import to_json
from rewardlab.core.types import Conversation
from rewardlab.data.chat import to_messages
from rewardlab.data.formats.context import COLUMNS as CONTEXT
from rewardlab.data.formats.context import with_context
from rewardlab.data.prompts import prompt_turns, reply_text
from rewardlab.data.readers import holds_lines, read_each_row
from rewardlab.data.rows import UnusableRowError, has_tools, is_absent, media_of, show

ROWS_AT_A_TIME: Final = 256
"""Most rows that are scored and kept together: few, so that little is lost in an interruption, but enough to fill
micro-batches."""
CHARACTERS_AT_A_TIME: Final = 1_000_000
"""A part ends after this many characters of prompts and replies, so that long rows are kept sooner."""
ROW_NUMBERS: Final = (".json", ".parquet")
"""Endings of files whose messages number rows, unless they have lines."""
WANTED: Final = "Wanted `messages`, or `prompt` and `response`, or `prompt` and `responses`."


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt with the replies that a row asks to be scored, which belong together."""

    prompt: str | Conversation
    """As the row has it: a text may be an open transcript."""
    replies: tuple[str, ...]
    refused: tuple[tuple[int, str], ...] = ()
    """(number, cause) of each other reply of the row, which cannot be asked."""

    def of_all(self, entries: Sequence[Entry]) -> list[Entry | str]:
        """Return the entries of all replies of the row, by their numbers: those of the replies that are asked, and the
        causes of the others."""
        causes, found = dict(self.refused), iter(entries)
        numbers = range(len(entries) + len(causes))
        return [causes[number] if number in causes else next(found) for number in numbers]

    def num_characters(self) -> int:
        """Return the number of characters of prompt and replies."""
        turns = [self.prompt] if isinstance(self.prompt, str) else [turn.content for turn in self.prompt]
        return sum(map(len, turns)) + sum(map(len, self.replies))


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring rows that are scored and kept together. Where a part begins and ends depends on the input alone, so
    that a resumed run computes the same rows together as an uninterrupted one, and gets the same scores bit for bit."""

    number: int
    first: int
    """Number of its first row, from 0."""
    rows: tuple[Asked | str, ...]
    """For each row, what it asks, or the reason why it cannot be scored."""
    places: tuple[str, str]
    """Where the first and the last row are: file and line."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What an input file holds."""

    num_rows: int
    columns: tuple[str, ...]
    """In the order in which they first appear."""
    has_single: bool
    """Whether some row asks for one reply, or cannot be asked."""
    has_several: bool
    """Whether some row has `responses`."""
    num_refused: int
    """Rows that cannot be scored."""
    keeps_responses: bool = False
    """Whether some row has `responses` that are not scored, since it also has `messages`."""


Entry = TypeVar("Entry")
Look = Callable[[Mapping[str, Any]], None]
"""Looks at a row before anything is scored. Raises DataError if the output cannot hold it."""


def present(row: Mapping[str, Any], column: str) -> bool:
    """Return whether a row has a value in a column: neither null nor, where a list is wanted, an empty cell."""
    value = row.get(column)
    return value is not None if column in ("prompt", "response") else not is_absent(value)


def asks_for_several(row: Mapping[str, Any]) -> bool:
    """Return whether a row's replies are its `responses`."""
    return present(row, "responses") and not present(row, "messages")


def _other_use(row: Mapping[str, Any]) -> str:
    """Return what to do about a row of preferences, which is judged, in words; nothing for any other row."""
    if {"chosen", "rejected"} <= row.keys():
        return " Rows of preferences are for `rewardlab eval`, which writes a score for each reply."
    if "replies" in row:
        return " Name `replies` `responses` to score them; rows with `comparisons` are for `rewardlab eval`."
    return ""


def ask(row: Mapping[str, Any], where: str, *, bare: bool | None, strict: bool = False) -> Asked:
    """Return what a row asks to be scored: the first of `messages`, `responses` and `response` that it has.

    `bare` says whether the model takes texts without a template, so that a prompt is not split into turns; None where
    that is not known.

    Raises DataError, saying what is wrong, if there is nothing to score; with `strict`, also if one of several replies
    cannot be asked.
    """
    given = [name for name in ("messages", "responses", "response") if present(row, name)]
    if not given or (given[0] != "messages" and not present(row, "prompt")):
        raise DataError(f"{where}: cannot be scored (its columns are {_columns(row)}). {WANTED}{_other_use(row)}")
    _require_text_alone(row, where)
    try:
        if given[0] == "messages":
            turns = to_messages(row["messages"])
            if not turns or turns[-1].role != "assistant":
                raise DataError(f"{where}: a conversation must end with an assistant turn, the reply to be scored.")
            return Asked(with_context(turns[:-1], row), (turns[-1].content,))
        replies = row["responses"] if given[0] == "responses" else [row["response"]]
        if not isinstance(replies, list):
            raise TypeError(f"responses is of type {type(replies).__name__}, not a list")
        if not replies:
            raise TypeError("responses is an empty list")
        texts, refused = _texts(replies)
        if refused and not texts:
            raise TypeError(refused[0][1])
        if refused and strict:
            number, cause = refused[0]
            raise DataError(
                f"{where}: response {number}, counted from 0, cannot be scored ({cause}). `--on-error write` scores "
                f"the others."
            )
        return _after_context(Asked(_prompt(row["prompt"], bare=bare), texts, refused), row, bare=bare)
    except UnusableRowError as error:
        raise DataError(f"{where}: cannot be scored ({error.detail}). {WANTED}") from error
    except (RenderError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: cannot be scored ({error}). {WANTED}") from error


def _after_context(asked: Asked, row: Mapping[str, Any], *, bare: bool | None) -> Asked:
    """Return what is asked with the turns of the row's `system` and `history` before its prompt, as in training.

    Raises UnusableRowError if these do not fit the prompt.
    """
    if all(is_absent(row.get(name)) for name in CONTEXT):
        return asked
    turns, parsed = prompt_turns(asked.prompt, bare=bool(bare))
    replies = tuple(reply.strip() for reply in asked.replies) if parsed else asked.replies
    return replace(asked, prompt=with_context(turns, row), replies=replies)


def _texts(replies: Sequence[Any]) -> tuple[tuple[str, ...], tuple[tuple[int, str], ...]]:
    """Return (the texts of replies, the number and the cause of each that has none)."""
    texts, refused = [], []
    for number, reply in enumerate(replies):
        try:
            texts.append(reply_text(reply))
        except (RenderError, TypeError, UnusableRowError) as error:  # what `reply_text` raises for what is not a reply
            refused.append((number, error.detail if isinstance(error, UnusableRowError) else str(error)))
    return tuple(texts), tuple(refused)


def _require_text_alone(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row with images, sound or video, or with tools, neither of which a prompt here holds."""
    if media := media_of(row):
        raise DataError(
            f"{where}: cannot be scored (it has {media}, of which the texts alone would be judged). If they stand "
            f"alone, take the column out or rename it."
        )
    if has_tools(row):
        raise DataError(
            f"{where}: cannot be scored (it defines tools, which the prompt would lack). If the prompt has them, take "
            f"the column out or rename it."
        )


def _prompt(value: Any, *, bare: bool | None) -> str | Conversation:
    """Return a prompt, a text as it stands. Raises RenderError or UnusableRowError if it is not a prompt."""
    if not isinstance(value, str | list | tuple):
        raise TypeError(f"the prompt is of type {type(value).__name__}, neither text nor a list of messages")
    if not isinstance(value, str):
        return to_messages(value)
    # Only a check: a backend splits the text itself, since a server may have its own rule.
    if bare is not None:
        prompt_turns(value, bare=bare)
    return value


def _columns(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns for a message, and which are null, or empty where a list is wanted."""
    empty = [name for name in ("messages", "responses") if row.get(name) is not None and not present(row, name)]
    says = dict.fromkeys(empty, " (empty)") | {name: " (null)" for name, value in row.items() if value is None}
    names = [f"{name}{says.get(name, '')}" for name in list(row)[:20]]
    return ", ".join(names) + (", …" if len(row) > 20 else "") or "none"


def require_writable(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError if a row could not be written back as JSON."""
    # Nearly every row is writable, so try all columns at once before looking for the one at fault.
    if len(row) > 1 and _is_writable(row):
        return
    for name, value in row.items():
        try:
            to_json({name: value}, indent=None).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"{where}: the column {show(name)[1:-1]!r} holds what cannot be written as JSON ({error}). JSON has no "
                f"NaN, no Infinity, no bytes, no decimals, no dates and no unpaired surrogates: write null, a float or "
                f"a text instead, or leave the column out."
            ) from error


def _is_writable(row: Mapping[str, Any]) -> bool:
    """Return whether a row could be written back as JSON, without saying what is wrong."""
    try:
        to_json(row, indent=None).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def survey(source: Path, *, bare: bool | None, refuse: bool, looks: Sequence[Look] = (), as_json: bool) -> Survey:
    """Read a whole file and return what it holds. Each of `looks` is called with every row that can be read.

    Raises DataError, naming file and line, if the file becomes unreadable or has no rows; with `refuse`, also for the
    first row that cannot be scored or, with `as_json`, not be written as JSON.
    """
    num_rows = num_refused = 0
    columns: dict[str, None] = {}
    has_single = has_several = keeps_responses = False
    for line, row in bar(read_each_row(source), title=f"looking at {source.name}", unit=" rows"):
        num_rows += 1
        try:
            row = readable(row, f"{source}:{line}", as_json=as_json)
            ask(row, f"{source}:{line}", bare=bare, strict=refuse)
            several = asks_for_several(row)
        except DataError:
            if refuse:
                raise
            num_refused, several = num_refused + 1, False
        has_several, has_single = has_several or several, has_single or not several
        if not isinstance(row, DataError):
            columns |= dict.fromkeys(row)
            keeps_responses |= not several and present(row, "responses")
            kept = row if refuse or not as_json else writable(row, f"{source}:{line}")[0]
            for look in looks:
                look(kept)
    if not num_rows:
        raise DataError(f"{source}: no rows to score.")
    return Survey(
        num_rows=num_rows,
        columns=tuple(columns),
        has_single=has_single,
        has_several=has_several,
        num_refused=num_refused,
        keeps_responses=keeps_responses,
    )


def readable(row: Mapping[str, Any] | DataError, where: str, *, as_json: bool) -> Mapping[str, Any]:
    """Return a row. Raises DataError if it could not be read or, with `as_json`, cannot be written as JSON."""
    if isinstance(row, DataError):
        raise row
    if as_json:
        require_writable(row, where)
    return row


def writable(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str | None]:
    """Return a row without the columns that cannot be written as JSON, and what is wrong with the first of them."""
    wrong: str | None = None
    kept: dict[str, Any] = {}
    for name, value in row.items():
        try:
            require_writable({name: value}, where)
        except DataError as error:
            wrong = wrong or str(error)
        else:
            kept[name] = value
    return kept, wrong


def _unit(source: Path) -> str:
    """Return what the numbers of a file's rows count: its lines or, where it has none, its rows."""
    return "row" if source.suffix in ROW_NUMBERS and not holds_lines(source) else "line"


def parts(source: Path, *, bare: bool | None, as_json: bool) -> Iterator[Part]:
    """Yield the rows of a file in parts, in order, with the cause in place of a row that cannot be scored.

    Raises DataError if the file becomes unreadable.
    """
    number = first = characters = 0
    unit = _unit(source)
    rows: list[Asked | str] = []
    places: list[str] = []
    for line, row in read_each_row(source):
        where = f"{source}:{line}"
        try:
            asked: Asked | str = ask(readable(row, where, as_json=as_json), where, bare=bare)
        except DataError as error:
            # Without the name of the file, which may have another name on resuming.
            asked = f"{unit} {line}: {str(error).removeprefix(f'{where}: ')}"
        rows.append(asked)
        places.append(where)
        characters += 0 if isinstance(asked, str) else asked.num_characters()
        if len(rows) >= ROWS_AT_A_TIME or characters >= CHARACTERS_AT_A_TIME:
            yield Part(number, first, tuple(rows), (places[0], places[-1]))
            number, first, characters = number + 1, first + len(rows), 0
            rows, places = [], []
    if rows:
        yield Part(number, first, tuple(rows), (places[0], places[-1]))
