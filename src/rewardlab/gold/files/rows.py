"""A prompt with its sampled replies and their gold scores, as a line of the files that the stages hand on.

    {"id": "17", "prompt": [messages], "responses": ["…", "…"], "samples": [{"seed": 1, "stop": "stop"}, …],
     "gold": [14.9, 8.5], "source": "alpacafarm"}

`gold` is there once the replies are labelled. A reply that could not be sampled, and a score that could not be given,
is null, with the cause in `samples` (`error`) or in `gold_errors`, by the index of the reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError, RenderError
from rewardlab.core.files import is_number
from rewardlab.core.terminal import number_of, plural
from rewardlab.core.types import Conversation, Message, prompt_key
from rewardlab.data.formats.mapping import unpacked
from rewardlab.data.prompts import prompt_turns, reply_text
from rewardlab.data.readers import read_each_row
from rewardlab.data.rows import UnusableRowError
from rewardlab.gold.files.parts import parts_of

CELLS: Final = ("gold", "samples", "gold_errors")
"""Columns that CSV files hold as JSON."""
OWN: Final = ("id", "prompt", "responses", "samples", "gold", "gold_errors")
"""Columns that the stages write; every other column of a row is kept as it is."""
HALF: Final = "has half of a surrogate pair in it, which no tokenizer can read"
"""What is wrong with a text that is not `is_encodable`."""
WANTED: Final = (
    'A row looks like {"prompt": [messages], "responses": ["…", "…"], "gold": [0.1, 0.7]}; `rewardlab gold sample` '
    "writes the replies, `rewardlab gold label` the scores."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldRow:
    """One prompt, its K replies, and what is known about them."""

    id: str
    prompt: Conversation
    """Ends with a turn that is not the assistant's."""
    responses: tuple[str | None, ...]
    """[K] texts; None for one that could not be sampled."""
    samples: tuple[Mapping[str, Any], ...] = ()
    """[K] how each was sampled: `seed`, `stop`, `tokens`, `logprob`, `error`; empty where nothing is known."""
    gold: tuple[float | None, ...] | None = None
    """[K] gold scores, None for one that is missing; None before the row is labelled."""
    gold_errors: Mapping[str, str] = field(default_factory=dict)
    """Index of a reply -> why it has no gold score."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other columns."""
    where: str = ""
    """File and line, for messages."""

    @property
    def key(self) -> str:
        """`prompt_key` of the prompt, by which intervals are clustered and splits are made."""
        return prompt_key(self.prompt)

    @property
    def is_cut(self) -> tuple[bool, ...]:
        """[K] whether each reply ended at the token limit."""
        return tuple(facts.get("stop") == "length" for facts in self.samples) or (False,) * len(self.responses)

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is written."""
        row: dict[str, Any] = {
            "id": self.id,
            "prompt": [turn.as_dict() for turn in self.prompt],
            "responses": list(self.responses),
        }
        if self.samples:
            row["samples"] = [dict(facts) for facts in self.samples]
        if self.gold is not None:
            row["gold"] = list(self.gold)
        if self.gold_errors:
            row["gold_errors"] = dict(self.gold_errors)
        return row | dict(self.extra)


def read_gold_rows(paths: Path | Sequence[Path], *, labelled: bool = False) -> Iterator[GoldRow]:
    """Yield the rows of a file, or of several in order: JSON Lines (also compressed), JSON, CSV or Parquet.

    A row without `id` has its number, from 0, over all files; `replies` is another name of `responses`. Rows of a file
    that is not there but whose numbered parts are (see `parts_of`) are those of the parts.

    Raises DataError naming file and line for a row without prompt or replies, with scores that are not as many as the
    replies or not finite, or with `labelled` without scores; and for a file without rows.
    """
    number = 0
    for path in [paths] if isinstance(paths, Path) else paths:
        for file in parts_of(path):
            found = False
            for line, row in read_each_row(file):
                if isinstance(row, DataError):
                    raise row
                found = True
                yield read_gold_row(row, f"{file}:{line}", number, labelled=labelled)
                number += 1
            if not found:
                raise DataError(f"{file}: it has no rows. {WANTED}")


def read_gold_row(row: Mapping[str, Any], where: str, number: int, *, labelled: bool = False) -> GoldRow:
    """Return a row of a file. Raises DataError, beginning with `where`, as `read_gold_rows` does."""
    name = "responses" if row.get("responses") is not None else "replies"
    # Cells of CSV files are texts, but for the replies and messages.
    row = {**row, **{column: unpacked(row.get(column) or None) for column in CELLS if isinstance(row.get(column), str)}}
    responses, samples, errors = row.get(name), row.get("samples"), row.get("gold_errors")
    if not isinstance(responses, list):
        raise DataError(f"{where}: `responses` is not a list of texts. {WANTED}")
    if not responses:
        raise DataError(f"{where}: `responses` is empty. {WANTED}")
    if samples is not None and (not isinstance(samples, list) or len(samples) != len(responses)):
        raise DataError(f"{where}: `samples` does not say of each of the {len(responses)} replies how it was sampled.")
    scores = scores_of(row.get("gold"), len(responses), where)
    if labelled and scores is None:
        raise DataError(f"{where}: it has no gold scores (`gold`). Label it with `rewardlab gold label` first.")
    given = row.get("id")
    return GoldRow(
        id=str(number) if given is None else str(given),
        prompt=turns_of(row.get("prompt"), where),
        responses=texts_of(responses, where),
        samples=tuple(one if isinstance(one, Mapping) else {} for one in samples or ()),
        gold=scores,
        gold_errors=_errors_of(errors, len(responses), where),
        extra={column: value for column, value in row.items() if column not in (*OWN, name)},
        where=where,
    )


def _errors_of(errors: Any, num_responses: int, where: str) -> dict[str, str]:
    """Return why replies have no score, by their numbers. Raises DataError for a name that is not one of a reply."""
    # In Parquet every row has the names of all others, with nothing behind them.
    found = {name: why for name, why in errors.items() if why is not None} if isinstance(errors, Mapping) else {}
    numbers = set(map(str, range(num_responses)))
    for name in found:
        if name not in numbers:
            raise DataError(
                f"{where}: `gold_errors` names {name!r:.60}; wanted the number of one of the {num_responses} replies, "
                f"counted from 0."
            )
    return found


def texts_of(responses: Sequence[Any], where: str) -> tuple[str | None, ...]:
    """Return the texts of replies, which may be assistant turns (`reply_text`), and None for one that is missing.

    Raises DataError for anything else.
    """
    try:
        return tuple(None if one is None else reply_text(one) for one in responses)
    except (RenderError, TypeError) as error:
        raise DataError(f"{where}: `responses` cannot be read ({error}). {WANTED}") from error


def turns_of(prompt: Any, where: str) -> Conversation:
    """Return a prompt as turns; a text that is an open transcript is split. Raises DataError if it is not a prompt."""
    try:
        turns, _ = prompt_turns(prompt, bare=False) if isinstance(prompt, str | list) else ((), False)
    except (RenderError, UnusableRowError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: the prompt cannot be read ({error}). {WANTED}") from error
    if not turns or turns[-1].role == "assistant":
        last = "is missing or empty" if not turns else "ends with a turn of the assistant"
        raise DataError(f"{where}: the prompt {last}, so there is nothing to reply to. {WANTED}")
    return turns


def is_open(turns: Conversation) -> bool:
    """Return whether there is something to reply to: the last turn has text, and is not the assistant's."""
    return bool(turns) and bool(turns[-1].content.strip()) and turns[-1].role != "assistant"


def is_encodable(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def system_of(prompt: Conversation) -> str | None:
    """Return the system turn of a prompt; None without one."""
    return prompt[0].content if prompt and prompt[0].role == "system" else None


def with_system(prompt: Conversation, system: str | None) -> Conversation:
    """Return a prompt with a system turn, perhaps empty, before it, unless it has one or `system` is None."""
    if system is None or (prompt and prompt[0].role == "system"):
        return prompt
    return (Message("system", system), *prompt)


def scores_of(
    scores: Any, num_responses: int, where: str, *, what: str = "the gold score"
) -> tuple[float | None, ...] | None:
    """Return one score for each reply; None if there is no list of scores. `what` names one in messages.

    Raises DataError for anything else.
    """
    if scores is None:
        return None
    if not isinstance(scores, list | tuple) or len(scores) != num_responses:
        got = f"{number_of(len(scores), 'score')}" if isinstance(scores, list | tuple) else f"a {type(scores).__name__}"
        raise DataError(
            f"{where}: got {got} for {num_responses} {plural(num_responses, 'reply', 'replies')}; wanted a "
            f"list of one score for each."
        )
    for place, score in enumerate(scores):
        if score is not None and not is_number(score):
            raise DataError(
                f"{where}: {what} of reply {place} (counted from 0) is {score!r:.60}; wanted a finite number, or null "
                f"for none."
            )
    return tuple(None if score is None else float(score) for score in scores)
