"""One row of our own score files: what it has to hold, and in words what is wrong with one that does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.core.schema import Refusal, shown, typed
from rewardlab.core.terminal import short
from rewardlab.core.types import Comparison, ScoreRow

REFUSAL: Final = Refusal(error=DataError, remedy="Evaluate the model again.")


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The types of a row, for the message about one that does not match: its score may be the text of NaN."""

    preference_id: str
    source: str
    prompt_key: str
    reply: int
    score: object
    num_tokens: int
    prompt_tokens: int
    truncated_tokens: int
    comparisons: list[Comparison]
    truncated_reply_tokens: int = 0


def score_row(row: Mapping[str, Any], where: str) -> ScoreRow:
    """Return a row of our own evaluations. Raises DataError, naming `where` and the field, for any other."""
    try:
        own = ScoreRow.from_dict(row)
        _require_sound(own)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        place = f"{where}: not a score row of rewardlab"
        # Only now, since it takes longer: the schema tells what Python says in words of its own.
        line = typed(_Line, row, where=place, refusal=REFUSAL)
        _require_number(line.score, place)
        raise REFUSAL.of(f"{place} ({short(str(error))}).") from error
    return own


def _require_number(score: Any, place: str) -> None:
    """Raise DataError unless a score is a number, or the text of one that JSON does not have."""
    try:
        float(score)
    except (TypeError, ValueError, OverflowError) as error:
        raise REFUSAL.of(f"{place}: score: expected a number, found {shown(score)}.") from error


def _require_sound(row: ScoreRow) -> None:
    """Raise TypeError or ValueError for a score row with values of a wrong type or range."""
    if not all(isinstance(value, str) for value in (row.preference_id, row.source, row.prompt_key)):
        raise TypeError("preference_id, source and prompt_key are texts")
    numbers = (row.reply, row.num_tokens, row.prompt_tokens, row.truncated_tokens, row.truncated_reply_tokens)
    if not all(isinstance(value, int) for value in numbers):
        raise TypeError("reply and counts of tokens are whole numbers")
    for judged in row.comparisons:
        if not (isinstance(judged.second, int) and judged.first == row.reply != judged.second):
            raise ValueError("a comparison is between this reply and another one")
        if not 0 <= judged.label <= 1:
            raise ValueError("a label lies between 0 and 1")
