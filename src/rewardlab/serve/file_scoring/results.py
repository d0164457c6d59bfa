"""The results that are written for a row: its scores, the causes of missing ones, and the best reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.terminal import plural
from rewardlab.data.prompts import reply_text
from rewardlab.serve.file_scoring.journal import Outcome
from rewardlab.serve.file_scoring.rows import Survey, asks_for_several

PAIRS: Final = {"score": "scores", "score_error": "score_errors", "score_std": "score_stds"}
"""Columns that scoring writes for one reply -> for several."""
CUT: Final = "truncated_tokens"
"""Column of rows in which a prompt was cut; it has one number for each reply."""
SHORTENED: Final = "truncated_reply_tokens"
"""Column of rows in which a reply lost its middle; it has one number for each reply. Formats with the same columns in
every row have it only if the model's rule is to cut replies."""
WRITTEN: Final = (*(name for pair in PAIRS.items() for name in pair), CUT, SHORTENED)
"""Columns that scoring writes; those of an earlier scoring are replaced."""
PICKED: Final = ("responses", "response_index")
"""Columns that a row loses when its best reply is picked."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The scores of a row, or why it has none."""

    scores: list[float | None]
    """The scores that are written, one for each reply; a single None for a row that cannot be scored."""
    raw: list[float | None]
    """The raw scores that these were made from. The best reply is chosen by the raw scores: converted ones may be equal
    where raw ones differ, such as probabilities near 1."""
    truncated_tokens: list[int]
    """Tokens that were cut from the prompt, for each reply."""
    truncated_reply_tokens: list[int]
    """Tokens that were cut from the middle of each reply."""
    causes: Mapping[int, str]
    """Number of a reply -> why it has no score."""
    spread: list[float | None] | None = None
    """The standard deviation over the members of an ensemble, for each reply."""
    is_refused: bool = False
    """Whether the row cannot be scored at all."""

    @property
    def is_cut(self) -> bool:
        """Return whether something was cut from the prompt of some reply."""
        return any(self.truncated_tokens)

    @property
    def is_shortened(self) -> bool:
        """Return whether some reply lost its middle."""
        return any(self.truncated_reply_tokens)

    def best(self) -> int | None:
        """Return the number of the reply with the highest score, the first of several; None if none has a score."""
        known = [number for number, score in enumerate(self.raw) if score is not None]
        return max(known, key=lambda number: (self.raw[number], -number), default=None)

    def is_tied(self) -> bool:
        """Return whether several replies have the highest score."""
        best = self.best()
        return best is not None and self.raw.count(self.raw[best]) > 1


def result_of(outcome: Outcome, convert: Callable[[list[float]], list[float]]) -> Result:
    """Return the result of a row; `convert` turns its raw scores into those that are written."""
    if isinstance(outcome, str):
        return Result(
            scores=[None],
            raw=[None],
            truncated_tokens=[0],
            truncated_reply_tokens=[0],
            causes={0: outcome},
            is_refused=True,
        )
    raw = [None if isinstance(value, str) else value[0] if isinstance(value, list) else value for value in outcome]
    return Result(
        scores=[None if value is None else convert([value])[0] for value in raw],
        raw=raw,
        truncated_tokens=[_number(value, 1) for value in outcome],
        truncated_reply_tokens=[_number(value, 2) for value in outcome],
        causes={number: value for number, value in enumerate(outcome) if isinstance(value, str)},
    )


def with_spread(outcome: Outcome) -> Result:
    """Return the result of a row that a probe's bootstrap heads have scored."""
    result = result_of(outcome, list)
    if isinstance(outcome, str):
        return replace(result, spread=[None])
    return replace(result, spread=[value[3] if isinstance(value, list) else None for value in outcome])


def _number(entry: float | str | list[float], place: int) -> int:
    """Return the number of cut tokens at this place of an entry; 0 if the entry has none there."""
    return int(entry[place]) if isinstance(entry, list) and len(entry) > place else 0


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of an output."""

    pick: bool
    """Whether only the best of several replies is written."""
    dropped: frozenset[str]
    """Columns of the input that no row keeps."""
    added: tuple[str, ...]
    """Columns that some row may get, for formats in which every row has all columns."""

    @classmethod
    def of(cls, survey: Survey, *, pick: bool, spread: bool, may_cut: bool, may_shorten: bool) -> Columns:
        """Return the columns for an input.

        `spread` says whether there is a standard deviation over members, `may_cut` whether long conversations are cut,
        and `may_shorten` whether replies may be.
        """
        single = [name for name in PAIRS if spread or name != "score_std"]
        added = single if survey.has_single else []
        several = [PAIRS[name] for name in single]
        if pick and survey.has_several:
            several = ["response", "response_index", "score", *(["score_std"] if spread else []), *several]
        if survey.has_several:
            added = [*added, *(name for name in several if name not in added)]
        added = [*added, *([CUT] if may_cut else []), *([SHORTENED] if may_cut and may_shorten else [])]
        picked = ("responses",) if pick and not survey.keeps_responses else ()
        return cls(pick=pick, dropped=frozenset((*WRITTEN, *picked)), added=tuple(added))

    def rest(self, row: Mapping[str, Any], result: Result) -> dict[str, Any]:
        """Return the columns of a row that are kept."""
        dropped = (*WRITTEN, *PICKED) if self.picks(row, result) else WRITTEN
        return {name: value for name, value in row.items() if name not in dropped}

    def picks(self, row: Mapping[str, Any], result: Result) -> bool:
        """Return whether only the best reply of this row is written."""
        return self.pick and not result.is_refused and asks_for_several(row)

    def values(self, row: Mapping[str, Any], result: Result) -> dict[str, Any]:
        """Return the columns that a row gets; those about errors and cuts only where there are some."""
        errors = {str(number): cause for number, cause in result.causes.items()}
        cut = {CUT: result.truncated_tokens} if result.is_cut else {}
        cut |= {SHORTENED: result.truncated_reply_tokens} if result.is_shortened else {}
        if result.is_refused or not asks_for_several(row):
            own: dict[str, Any] = {"score": result.scores[0]}
            own |= {"score_std": result.spread[0]} if result.spread is not None else {}
            return own | ({"score_error": errors["0"]} if errors else {}) | cut
        several: dict[str, Any] = {"scores": result.scores}
        several |= {"score_stds": result.spread} if result.spread is not None else {}
        several |= ({"score_errors": errors} if errors else {}) | cut
        if not self.pick:
            return several
        best = result.best()
        chosen: dict[str, Any] = {
            "response": None if best is None else reply_text(row["responses"][best]),
            "response_index": best,
            "score": None if best is None else result.scores[best],
        }
        if result.spread is not None:
            chosen["score_std"] = None if best is None else result.spread[best]
        return chosen | several


@dataclass(kw_only=True)
class FileScores:
    """How many replies of a file were scored."""

    scored: int = 0
    """Replies that have a score."""
    unscored: int = 0
    """Replies without a score. The file gives the cause for each, such as the length limit of the model."""
    refused: int = 0
    """Rows that cannot be scored; each counts as one reply without a score."""
    cut: int = 0
    """Rows with a reply whose prompt was cut to the model's length limit."""
    shortened: int = 0
    """Rows with a reply that lost its middle."""
    tied: int = 0
    """Rows in which several replies have the highest score."""
    first_cause: str | None = field(default=None)
    """The cause for which the first reply without a score has none."""

    @property
    def error_fraction(self) -> float:
        """The share of replies without a score."""
        return self.unscored / max(self.scored + self.unscored, 1)

    def count(self, result: Result) -> None:
        """Count the replies of a row."""
        self.scored += len(result.scores) - len(result.causes)
        self.unscored += len(result.causes)
        self.refused += result.is_refused
        self.cut += result.is_cut
        self.shortened += result.is_shortened
        self.tied += result.is_tied()
        if result.causes and self.first_cause is None:
            self.first_cause = next(iter(result.causes.values()))

    def require_few_errors(self, max_fraction: float, target: Path) -> None:
        """Raise DataError if a larger share of the replies has no score."""
        if self.error_fraction > max_fraction:
            num_replies = self.scored + self.unscored
            raise DataError(
                f"{target} is written, but {self.unscored} of {num_replies} replies "
                f"{plural(self.unscored, 'has', 'have')} no score, more than "
                f"--max-error-fraction {max_fraction:g}. The first: {self.first_cause}"
            )


def together(rows: Iterator[Any], results: Iterable[Result], source: Path) -> Iterator[tuple[Any, Result]]:
    """Yield rows with their results. Raises DataError if there are more of one than of the other."""
    try:
        yield from zip(rows, results, strict=True)
    except ValueError as error:
        if isinstance(error, RewardlabError):
            raise
        raise DataError(f"{source}: it was changed while it was scored. Score it again with --restart.") from error
