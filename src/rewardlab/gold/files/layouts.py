"""The layout with one JSON file a fact: prompts, `[{"response_1": "…", "response_2": "…"}]`, and `[[14.9, 8.5]]`.

Rows belong together by their place. This layout can be read in place of our own files, also with a row a line, and is
written beside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import absent, encodable, to_json
from rewardlab.core.terminal import number_of
from rewardlab.curation.rewriting import as_line, replacing_lines
from rewardlab.gold.files.prompts import read_prompts
from rewardlab.gold.files.rows import GoldRow, scores_of
from rewardlab.gold.files.values import read_values

NUMBERED: Final = re.compile(r"response_\d+")
"""Names of replies in a row."""


def read_layout(
    prompts: Path, responses: Path, rewards: Path | None = None, *, num_responses: int | None = None
) -> Iterator[GoldRow]:
    """Yield the rows of files that belong together by place.

    Raises DataError if they differ in length, naming the files, and for a row that is not of this layout.
    """
    questions = list(read_prompts(str(prompts), repeats=True))
    replies = [list(row) for row in read_responses(responses)]
    scores = None if rewards is None else list(read_rewards(rewards))
    for path, rows in ((responses, replies), (rewards, scores)):
        if rows is not None and len(rows) != len(questions):
            raise DataError(
                f"{path} has {number_of(len(rows), 'row')} and {prompts} has {len(questions)}. They belong "
                f"together by place, so "
                f"one of them is of other data, or lacks rows."
            )
    for number, (question, texts) in enumerate(zip(questions, replies, strict=True)):
        where = f"{responses}:{number + 1}"
        if num_responses is not None and len(texts) < num_responses:
            raise DataError(
                f"{where}: has {number_of(len(texts), 'response')}, wanted {num_responses} (--num-responses)."
            )
        gold = None
        if scores is not None:
            # There may be scores of all replies, or only of those that are used.
            few = num_responses is not None and len(scores[number]) == num_responses
            num_scores = num_responses if few and num_responses is not None else len(texts)
            gold = scores_of(scores[number], num_scores, f"{rewards}:{number + 1}")
        yield GoldRow(
            id=question.id,
            prompt=question.prompt,
            responses=tuple(texts[:num_responses]),
            gold=None if gold is None else gold[:num_responses],
            extra=question.extra,
            where=where,
        )


def read_responses(path: Path, num_responses: int | None = None) -> Iterator[Sequence[str | None]]:
    """Yield the replies of each row of `[{"response_1": "…", …}]`, in the order of their numbers.

    With `num_responses`, only that many from the first. Raises DataError for rows that have fewer, or none.
    """
    for number, row in enumerate(_list(path), start=1):
        names = _numbered(row) if isinstance(row, Mapping) else []
        if not names or (num_responses is not None and len(names) < num_responses):
            wanted = f"response_1 to response_{num_responses or 2}"
            raise DataError(f"{path}:{number}: wanted an object with {wanted}, got {str(row)!r:.80}.")
        beyond = [name for name in row if NUMBERED.fullmatch(str(name)) and name not in names]
        if beyond:
            raise DataError(f"{path}:{number}: has {beyond[0]}, but no response_{len(names) + 1}. Number them from 1.")
        texts = [row[name] for name in names[:num_responses]]
        if not all(text is None or isinstance(text, str) for text in texts):
            raise DataError(f"{path}:{number}: a response is not a text.")
        yield texts


def _numbered(row: Mapping[str, Any]) -> list[str]:
    """Return `response_1`, `response_2`, … as far as a row has them without a gap."""
    names: list[str] = []
    while f"response_{len(names) + 1}" in row:
        names.append(f"response_{len(names) + 1}")
    return names


def read_rewards(path: Path, *, what: str = "the gold score") -> Iterator[Sequence[float | None]]:
    """Yield the rows of `[[14.9, 8.5], …]`. `what` names a score in messages. Raises DataError for anything else."""
    for number, row in enumerate(_list(path), start=1):
        if not isinstance(row, list):
            raise DataError(f"{path}:{number}: wanted a list of scores, one for each response, got {str(row)!r:.80}.")
        scores = scores_of(row, len(row), f"{path}:{number}", what=what)
        assert scores is not None
        yield scores


def _list(path: Path) -> list[Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: {absent(path)}.")
    value = read_values(path)
    if not isinstance(value, list) or not value:
        raise DataError(f"{path}: wanted a list with a row for each prompt, got {str(value)!r:.80}.")
    return value


def write_responses(path: Path, rows: Iterable[GoldRow]) -> None:
    """Write `[{"response_1": "…", …}]`, a row a line; null for a reply that is missing."""
    write_list(path, ({f"response_{k + 1}": text for k, text in enumerate(row.responses)} for row in rows))


def write_rewards(path: Path, rows: Iterable[GoldRow]) -> None:
    """Write `[[14.9, 8.5], …]`, a row a line, with all digits of each score; null for one that is missing."""
    write_list(path, (list(row.gold or ()) for row in rows))


def write_list(path: Path, values: Iterable[object]) -> None:
    """Write a JSON list, a value a line, in one step, without holding it in memory."""
    with replacing_lines(path) as sink:
        sink.write(b"[")
        for number, value in enumerate(values):
            sink.write((",\n" if number else "\n").encode() + _line(value))
        sink.write(b"\n]\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON Lines in one step; return their number. Raises DataError for a value that JSON cannot hold."""
    count = 0
    with replacing_lines(path) as sink:
        for row in rows:
            sink.write(as_line(row, f"{path}:{count + 1}").encode())
            count += 1
    return count


def _line(value: object) -> bytes:
    """Return a value as JSON; lone surrogates are escaped, since UTF-8 has none."""
    return encodable(to_json(value, indent=None)).encode()
