"""Reads one evaluation as it was written: its estimates, its score rows, and the columns that divide it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_json, read_jsonl, sha256_file, to_float
from rewardlab.core.run_folder import GOLD, SCORES_SUM, SLICES
from rewardlab.core.terminal import short
from rewardlab.core.types import Estimate, ScoreRow

JUDGED: Final = ("test", "eval", "selection", "cross_validated")
"""Names of evaluations by which a run is judged, the most telling first: `test` data chose nothing."""
BASELINES: Final = ("_length_only", "_bag_of_words")
"""Ends of the names of evaluations with which it is compared pair by pair."""
METRICS: Final = ".metrics.json"
MOST_ROWS: Final = 2_000_000
"""Most rows of a file that a report reads: it holds all of them in memory."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One evaluation as it was written."""

    name: str
    """Its name, such as `test`, `step_100`, `test_length_only`."""
    estimates: Mapping[str, Mapping[str, Estimate]]
    """`all` or a source -> metric -> estimate."""
    counts: Mapping[str, Mapping[str, float]]
    """`all` or a source -> count -> number."""
    scores: Path | None
    """The file with its score rows; None if it is missing or does not match its checksum."""
    beta: float | None = None
    """The β by which it was judged; None if that was not written."""
    calibrated: bool = False
    """Whether this β is the model's β divided by the temperature that is stored in the model."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises DataError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError("it is not a JSON object")
    return value


def scores_of(path: Path) -> Path:
    """Return the file with the score rows of an evaluation, by that with its metrics."""
    return path.with_name(f"{path.name.removesuffix(METRICS)}.scores.jsonl")


def read_judged(path: Path, problems: list[str]) -> Judged:
    """Return an evaluation from its metrics.json. Scores that cannot be trusted are left out and become `problems`.

    Raises DataError, KeyError, TypeError or ValueError if the file does not hold an evaluation.
    """
    values = read_object(path)
    parts = {name: part for name, part in values.items() if isinstance(part, dict) and "estimates" in part}
    if "all" not in parts:
        raise DataError("it has no estimates over all rows")
    name = path.name.removesuffix(METRICS)
    scores: Path | None = scores_of(path)
    assert scores is not None
    is_used = name in JUDGED or name.endswith(BASELINES)
    if not scores.is_file():
        problems.append(f"{scores.name} is missing, so nothing can be computed from its rows.")
        scores = None
    elif is_used and values.get(SCORES_SUM) is None:
        problems.append(f"{path.name} has no checksum, so it is unknown whether {scores.name} is what was judged.")
    elif is_used and values[SCORES_SUM] != sha256_file(scores):
        problems.append(f"{scores.name} does not match its checksum in {path.name}, so it is not used.")
        scores = None
    return Judged(
        name=name,
        estimates={
            name: {
                metric: estimate
                for metric, entry in part["estimates"].items()
                if (estimate := estimate_of(entry)) is not None
            }
            for name, part in parts.items()
        },
        counts={
            name: {count: to_float(value) for count, value in dict(part.get("sums") or {}).items()}
            for name, part in parts.items()
        },
        scores=scores,
        beta=beta if math.isfinite(beta := to_float(values.get("beta"))) and beta > 0 else None,
        calibrated=values.get("calibrated") is True,
    )


def read_scores(judged: Judged, problems: list[str] | None = None) -> list[ScoreRow]:
    """Return the score rows of an evaluation; none if they are missing. Raises DataError if rows are damaged.

    With `problems`, a longer file is read up to `MOST_ROWS`, without a preference that this would divide, and they are
    told so.
    """
    if judged.scores is None:
        return []
    try:
        rows = (_checked(ScoreRow.from_dict(row)) for _, row in read_jsonl(judged.scores))
        if problems is None:
            return list(rows)
        found = list(islice(rows, MOST_ROWS))
        following = next(rows, None)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
        raise DataError(f"{judged.scores}: not the rows of an evaluation ({short(str(error))}).") from error
    if following is not None:
        while found and _preference_of(found[-1]) == _preference_of(following):
            found.pop()
        problems.append(
            f"{judged.scores.name} has more than {MOST_ROWS:,} rows. What is computed from rows is of the first "
            f"{len(found):,}; what was written down at judging is of all."
        )
    return found


def _preference_of(row: ScoreRow) -> tuple[str, str]:
    return row.source, row.preference_id


def _checked(row: ScoreRow) -> ScoreRow:
    """Return a row. Raises TypeError unless every value has its type and a possible value."""
    words = (row.preference_id, row.source, row.prompt_key)
    numbers = [row.reply, row.num_tokens, row.prompt_tokens, row.truncated_tokens, row.truncated_reply_tokens]
    numbers += [index for one in row.comparisons for index in (one.first, one.second)]
    usable = all(isinstance(word, str) for word in words) and all(
        isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**53 for number in numbers
    )
    labels = [one.label for one in row.comparisons]
    if not usable or not all(isinstance(label, (int, float)) and 0 <= label <= 1 for label in labels):
        raise TypeError(f"preference {row.preference_id!r}, reply {row.reply!r}: a value that cannot be meant")
    return row


def read_columns(judged: Judged) -> dict[str, dict[tuple[str, str], object]]:
    """Return the columns by which an evaluation was divided: name -> source and id -> value; none that are damaged."""
    columns: dict[str, dict[tuple[str, str], object]] = {}
    path = None if judged.scores is None else judged.scores.with_name(f"{judged.name}.{SLICES}")
    if path is None or not path.is_file():
        return columns
    for _, row in islice(read_jsonl(path), MOST_ROWS):
        values = row.get("slices")
        for name, value in values.items() if isinstance(values, dict) else ():
            columns.setdefault(str(name), {})[str(row.get("source")), str(row.get("preference_id"))] = value
    return columns


def read_gold(judged: Judged) -> dict[tuple[str, str, int], float] | None:
    """Return the gold scores that lie beside an evaluation: source, id and number of the reply -> score. None if there
    are none."""
    path = None if judged.scores is None else judged.scores.with_name(f"{judged.name}.{GOLD}")
    if path is None or not path.is_file():
        return None
    gold: dict[tuple[str, str, int], float] = {}
    for _, row in islice(read_jsonl(path), MOST_ROWS):
        reply, score = row.get("reply"), to_float(row.get("gold"))
        if isinstance(reply, int) and math.isfinite(score):
            gold[str(row.get("source")), str(row.get("preference_id")), reply] = score
    return gold or None


def estimate_of(entry: object) -> Estimate | None:
    """Return an estimate from its JSON, with null as NaN; None if it is not an estimate."""
    if not isinstance(entry, dict):
        return None
    try:
        numbers = {name: to_float(entry.get(name)) for name in ("value", "low", "high")}
        return Estimate(
            **numbers, n=int(entry["n"]), method=str(entry["method"]), level=float(entry.get("level", 0.95))
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
