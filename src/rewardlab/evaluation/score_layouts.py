"""Score files of other programs: which replies a row scores, and which of them should win.

A file is recognised by its columns, as a dataset is. What each layout needs is listed in docs/compare.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

from rewardlab.analysis.aligned import ScoreSet
from rewardlab.core.bars import bar
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import absent, to_float
from rewardlab.core.terminal import brief, short
from rewardlab.core.types import Comparison, Message, ScoreRow, prompt_key
from rewardlab.data.rows import is_absent
from rewardlab.evaluation.score_lines import score_row
from rewardlab.evaluation.table_rows import Row, first_of, read_rows, texts_of

BOTH_SCORES: Final = (
    ("scores_chosen", "scores_rejected"),
    ("score_chosen", "score_rejected"),
    ("chosen_score", "rejected_score"),
    ("chosen_reward", "rejected_reward"),
    ("chosen", "rejected"),
)
"""Pairs of columns that hold the scores of the two replies of a pair; those of reward-bench come first."""
IDS: Final = ("preference_id", "id", "pair_id", "doc_id")
KEYS: Final = ("prompt_key", "prompt_id")
SOURCES: Final = ("source", "subset", "dataset")
VERDICTS: Final = ("correct", "outcome", "results", "result")
"""Names of columns that say whether a row was ranked correctly."""
WORDS: Final = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
"""Verdict in words -> number; the letters are those of inspect."""
RowKey = tuple[str, str]
"""Source and id of a preference."""


@dataclass(frozen=True, kw_only=True)
class ScoreFile:
    """The scores of one model, and what else its file says about each preference."""

    path: Path
    scores: ScoreSet
    columns: Mapping[RowKey, Mapping[str, str]] = field(default_factory=dict)
    """The columns that were asked for, where their values are short: they can be used for slices."""
    texts: Mapping[RowKey, Mapping[str, str]] = field(default_factory=dict)
    """Texts of `prompt`, `preferred` and `other`, where the file has them."""
    lines: Mapping[RowKey, int] = field(default_factory=dict)
    """Number of the row of each preference, where a row holds all of its replies."""
    prompts: Mapping[RowKey, str] = field(default_factory=dict)
    """Key of the prompt of each preference, where the row has its text."""
    chose: bool = False
    """Whether these are scores on the evaluation data that chose the checkpoint of a run."""


def score_rows(file: Path, rows: Iterable[Row]) -> list[ScoreRow]:
    """Return rows in the layout of our own evaluations. Raises DataError, naming file and line, for any other."""
    found = [score_row(row, f"{file}:{number}") for number, row in enumerate(rows, start=1)]
    known = {(row.source, row.preference_id, row.reply) for row in found}
    for scored in found:
        for comparison in scored.comparisons:
            if (scored.source, scored.preference_id, comparison.second) not in known:
                raise DataError(
                    f"{file}: {short(scored.preference_id)!r} is judged against reply {comparison.second}, which has "
                    f"no row. Rows are missing; evaluate the model again."
                )
    return found


def read_file(file: Path, *, name: str, outcome: str | None = None, columns: Collection[str] = ()) -> ScoreFile:
    """Return the scores in a file of any known layout, and those of its `columns` that have short values.

    Rows are read one at a time: of each only what is asked for is kept.

    Raises ConfigError if there is no such file, DataError if it cannot be read as scores.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: {absent(file)}.")
    rows = read_rows(file)
    if (first := next(rows, None)) is None:
        raise DataError(f"{file}: no rows.")
    there = set(first[1])
    for layout, read in LAYOUTS.items():
        if read.fits(there, first[1], outcome):
            return _collect(file, name, layout, read.read, shown(chain([first], rows), file), outcome, columns)
    raise DataError(
        f"{file}: its columns ({', '.join(map(short, sorted(there)))}) are not a known layout of scores. Wanted "
        f"`scores_chosen` and `scores_rejected`; or `id`, `reply` and `score`; or `id` and `correct`; or a log of "
        f"reward-bench, inspect or lm-eval. Name a column of verdicts with --outcome. The page docs/compare.md in "
        f"rewardlab's repository describes the layouts."
    )


def shown(rows: Iterable[tuple[int, Row]], file: Path) -> Iterator[tuple[int, Row]]:
    """Yield rows, and show how many were read."""
    yield from bar(rows, title=f"reading {file.name}", unit=" rows")


@dataclass(frozen=True, kw_only=True)
class _Parsed:
    """One row of a file: scores of its replies, and which of them should win."""

    scores: Sequence[float]
    first_reply: int = 0
    correct: int | None = None
    """How many replies, counted from the first, are right; the others are wrong. None for scores without labels."""
    label: float = 1.0
    """Probability that a right reply is preferred to a wrong one; 0.5 is a tie."""
    verdict: bool = False
    preference_id: object = None
    prompt_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Layout:
    fits: Callable[[set[str], Row, str | None], bool]
    read: Callable[[Row, str, str | None], _Parsed]


def _pair_columns(columns: set[str], row: Row) -> tuple[str, str] | None:
    for chosen, rejected in BOTH_SCORES:
        # In other files these columns may hold texts.
        if {chosen, rejected} <= columns and _maybe_number(row[chosen]) and _maybe_number(row[rejected]):
            return chosen, rejected
    return None


def _named_pair(columns: set[str], row: Row) -> tuple[str, str] | None:
    """Return the columns that hold both scores by their names, or by a number in one of them."""
    for names in BOTH_SCORES:
        if set(names) <= columns and (names != BOTH_SCORES[-1] or any(_is_number(row[name]) for name in names)):
            return names
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _maybe_number(value: object) -> bool:
    try:
        _number(value, "")
    except DataError:
        return False
    return True


def _number(value: object, where: str) -> float:
    """Return a score; NaN for a missing one. Raises DataError if it is not a number."""
    if isinstance(value, list) and len(value) == 1:
        return _number(value[0], where)
    if value is None or value == "":
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise DataError(f"{where}: got {brief(value)}, wanted a score.")
    try:
        return float(value)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where}: got {brief(value)}, wanted a score.") from error


def _verdict(value: object, where: str) -> float:
    """Return a verdict as 1, ½ or 0; NaN for a missing one. Raises DataError for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (found := WORDS.get(value, WORDS.get(value.lower()))) is not None:
        return found
    number = _number(value, where)
    if not math.isnan(number) and number not in (0.0, 0.5, 1.0):
        raise DataError(f"{where}: got {brief(value)}, wanted a verdict: 1 (right), 0 (wrong) or 0.5 (a tie).")
    return number


def _read_pair(row: Row, where: str, outcome: str | None) -> _Parsed:
    columns = _pair_columns(set(row), row) or _named_pair(set(row), row)
    if columns is None:
        raise DataError(f"{where}: wanted the scores of both replies as numbers, as in the first row.")
    scores = [_number(row[column], f"{where}, {column}") for column in columns]
    return _Parsed(scores=scores, correct=1, label=_label(row, where))


def _label(row: Row, where: str) -> float:
    """Return the label of a row; 1 without one. Raises DataError for anything but a number from 0 to 1."""
    if not is_absent(row.get("labels")):
        raise DataError(
            f"{where}: 'labels' holds {brief(row['labels'])}, the labels of several annotators, which no layout of "
            f"scores reads. Write one probability into 'label', or rename the column."
        )
    if is_absent(row.get("label")):
        return 1.0
    label = to_float(row["label"])
    if not 0 <= label <= 1:
        raise DataError(
            f"{where}, label: got {brief(row['label'])}, wanted the probability, from 0 to 1, that the first (chosen) "
            f"reply is preferred; 0.5 is a tie. Rename the column if it means something else."
        )
    return label


def _read_list(row: Row, where: str, outcome: str | None) -> _Parsed:
    scores = row.get("scores")
    if not isinstance(scores, list) or not scores:
        raise DataError(f"{where}: got {brief(scores)}, wanted a list of scores.")
    numbers = [_number(score, f"{where}, scores") for score in scores]
    if row.get("num_correct") is None:
        return _Parsed(scores=numbers)
    correct = _number(row["num_correct"], f"{where}, num_correct")
    if not (correct.is_integer() and 1 <= correct <= len(numbers)):
        raise DataError(f"{where}: num_correct {brief(row['num_correct'])} of {len(numbers)} replies.")
    return _Parsed(scores=numbers, correct=int(correct), label=_label(row, where))


def _read_reply(row: Row, where: str, outcome: str | None) -> _Parsed:
    reply = _number(row["reply"], f"{where}, reply")
    if not (reply.is_integer() and reply >= 0):
        raise DataError(f"{where}: reply {brief(row['reply'])}, wanted its number from 0.")
    return _Parsed(scores=[_number(row["score"], f"{where}, score")], first_reply=int(reply))


def _of_verdict(verdict: float, **more: Any) -> _Parsed:
    """Return a verdict as two scores with this order: 1 and 0 for right, 0 and 0 for a tie, 0 and 1 for wrong."""
    scores = [math.nan] * 2 if math.isnan(verdict) else [max(2 * verdict - 1, 0.0), max(1 - 2 * verdict, 0.0)]
    return _Parsed(scores=scores, correct=1, verdict=True, **more)


def _read_verdict(row: Row, where: str, outcome: str | None) -> _Parsed:
    column = outcome or next((name for name in VERDICTS if name in row), VERDICTS[0])
    if column not in row:
        wanted = f"{column!r}, which --outcome names" if outcome else f"verdict ({', '.join(VERDICTS)})"
        raise DataError(f"{where}: this row has no {wanted}.")
    return _of_verdict(_verdict(row[column], f"{where}, {column}"))


def _read_lm_eval(row: Row, where: str, outcome: str | None) -> _Parsed:
    """Read a sample of lm-eval. Its `doc_hash` shows whether two files are about the same data."""
    metrics = row.get("metrics") or ()
    if not isinstance(metrics, (list, tuple)):
        raise DataError(f"{where}, metrics: got {brief(metrics)}, wanted a list of names of metrics.")
    named = [name for name in metrics if isinstance(name, str) and name in row]
    column = outcome or (named[0] if named else next((name for name in ("acc", "exact_match") if name in row), None))
    if column is None or column not in row:
        raise DataError(f"{where}: no metric {column or 'acc'!r}. Name one with --outcome; there are: {named}.")
    key = str(row["doc_hash"]) if row.get("doc_hash") is not None else None
    return _of_verdict(
        _verdict(row[column], f"{where}, {column}"),
        preference_id="/".join(str(row[part]) for part in ("doc_id", "filter") if row.get(part) is not None),
        prompt_key=key,
    )


def _read_inspect(row: Row, where: str, outcome: str | None) -> _Parsed:
    """Read a sample of inspect. The epochs of one sample form one cluster."""
    scores = row["scores"]
    if not isinstance(scores, dict) or not scores:
        raise DataError(f"{where}: this sample has no scores (was the log of a run that failed?).")
    scorer = outcome or next(iter(scores))
    if scorer not in scores:
        raise DataError(f"{where}: no scorer {scorer!r}. Name one with --outcome: {', '.join(map(str, scores))}.")
    value = scores[scorer].get("value") if isinstance(scores[scorer], dict) else scores[scorer]
    return _of_verdict(
        _verdict(value, f"{where}, scorer {scorer}"),
        preference_id=f"{row.get('id')}/{row.get('epoch', 1)}",
        prompt_key=str(row.get("id")),
    )


LAYOUTS: Final[Mapping[str, _Layout]] = {
    "rewardlab": _Layout(
        fits=lambda columns, row, outcome: {"preference_id", "reply", "score", "comparisons"} <= columns,
        read=_read_reply,
    ),
    "inspect": _Layout(
        fits=lambda columns, row, outcome: {"id", "scores"} <= columns and isinstance(row["scores"], dict),
        read=_read_inspect,
    ),
    "lm-eval": _Layout(fits=lambda columns, row, outcome: {"doc_id", "resps"} <= columns, read=_read_lm_eval),
    "verdicts": _Layout(fits=lambda columns, row, outcome: outcome in columns, read=_read_verdict),
    "pairs": _Layout(
        fits=lambda columns, row, outcome: _pair_columns(columns, row) is not None,
        read=_read_pair,
    ),
    "list of scores": _Layout(
        fits=lambda columns, row, outcome: "scores" in columns and isinstance(row["scores"], list), read=_read_list
    ),
    "one reply a row": _Layout(fits=lambda columns, row, outcome: {"reply", "score"} <= columns, read=_read_reply),
    "verdicts in a known column": _Layout(
        fits=lambda columns, row, outcome: bool(columns & set(VERDICTS)), read=_read_verdict
    ),
    # Their readers name the cell that is not a score.
    "pairs with a broken cell": _Layout(
        fits=lambda columns, row, outcome: _named_pair(columns, row) is not None, read=_read_pair
    ),
    "broken list of scores": _Layout(fits=lambda columns, row, outcome: "scores" in columns, read=_read_list),
}
"""Layouts, in the order in which they are tried."""


def _collect(
    file: Path,
    name: str,
    layout: str,
    read: Callable[[Row, str, str | None], _Parsed],
    rows: Iterable[tuple[int, Row]],
    outcome: str | None,
    wanted: Collection[str],
) -> ScoreFile:
    """Return the rows of a layout as score rows, with the `wanted` columns."""
    if layout == "rewardlab":
        return ScoreFile(
            path=file, scores=ScoreSet(name=name, rows=score_rows(file, (row for _, row in rows)), layout=layout)
        )
    found: list[ScoreRow] = []
    columns: dict[RowKey, dict[str, str]] = {}
    texts: dict[RowKey, dict[str, str]] = {}
    lines: dict[RowKey, int] = {}
    prompts: dict[RowKey, str] = {}
    verdicts = by_place = False
    prompts_by: str | None = None
    for number, row in rows:
        try:
            parsed = read(row, f"{file}:{number}", outcome)
        except KeyError as error:
            raise DataError(f"{file}:{number}: no {error} in this row, which the first one has.") from error
        verdicts |= parsed.verdict
        given = parsed.preference_id if parsed.preference_id is not None else first_of(row, IDS)
        # Without ids, rows of several files are matched by their place.
        by_place |= given is None
        # Rows and the files of other models have the same names: each is held once.
        preference_id = sys.intern(str(given) if given is not None else f"row {number}")
        source = sys.intern(str(first_of(row, SOURCES) or ""))
        key = sys.intern(parsed.prompt_key or key_of_prompt(row) or preference_id)
        if prompts_by is None:
            prompts_by = layout if parsed.prompt_key else _prompts_by(row)
        correct = parsed.correct or 0
        for reply, score in enumerate(parsed.scores, start=parsed.first_reply):
            lost = range(correct, len(parsed.scores)) if reply < correct else range(0)
            found.append(
                ScoreRow(
                    preference_id=preference_id,
                    source=source,
                    prompt_key=key,
                    reply=reply,
                    score=score,
                    num_tokens=0,
                    prompt_tokens=0,
                    truncated_tokens=0,
                    comparisons=_against(reply, lost, parsed.label),
                )
            )
        place = source, preference_id
        if wanted:
            columns[place] = _short_values(row, wanted)
        if own_texts := texts_of(row, label=parsed.label):
            texts[place] = own_texts
        if len(parsed.scores) > 1:
            lines[place] = number
        if (prompt := key_of_text(row)) is not None:
            prompts[place] = prompt
    return ScoreFile(
        path=file,
        scores=ScoreSet(
            name=name,
            rows=found,
            verdicts_only=verdicts,
            by_place=by_place,
            layout=layout,
            prompts_by=prompts_by or "",
        ),
        columns=columns,
        texts=texts,
        lines=lines,
        prompts=prompts,
    )


@lru_cache(maxsize=256)
def _against(reply: int, others: range, label: float) -> tuple[Comparison, ...]:
    """Return the comparisons of a reply with `others`. Most rows of a file have the same ones, which are held once."""
    return tuple(Comparison(first=reply, second=other, label=label) for other in others)


def _prompts_by(row: Row) -> str:
    """Return the column by which `key_of_prompt` knows a row's prompt; nothing if there is none."""
    given = next((name for name in KEYS if row.get(name) not in (None, "")), None)
    return given or ("prompt" if key_of_text(row) is not None else "")


def key_of_prompt(row: Row) -> str | None:
    """Return the key of a row's prompt: a given one, or that of its text or messages; None if there is none."""
    given = first_of(row, KEYS)
    return key_of_text(row) if given is None else str(given)


def key_of_text(row: Row) -> str | None:
    """Return the key of the text or messages in `prompt`; None if there are none."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt_key([Message("user", prompt)])
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        return prompt_key([Message(str(turn.get("role")), str(turn.get("content"))) for turn in prompt])
    return None


def _short_values(row: Row, wanted: Collection[str]) -> dict[str, str]:
    """Return the `wanted` cells that can be used for slices: short texts, numbers and truth values."""
    return {
        name: sys.intern(str(value))
        for name, value in row.items()
        if name in wanted and isinstance(value, (str, int, float, bool)) and len(str(value)) <= 80
    }
