"""The facts that an audit keeps about each row: its scores by checks that need no other row, and hashes of its texts.

They are computed chunk by chunk, in worker processes. A pair takes about 1.6 kB, most of it MinHash signatures (of its
prompt, of its whole text, and short ones of its replies), however long its texts are. Legend: U rows (in long-form
data, pairs of rows), P the rows that are preferences, R the replies of all preferences, J their judgements, H
permutations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from rewardlab.curation.auditing.registry import AGAINST, OF_ROWS
from rewardlab.curation.near import Signatures
from rewardlab.curation.shingles import Hashes, Numbers
from rewardlab.data.splits import Texts

Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float32]
ROW_CHECKS = tuple(check.name for check in (*OF_ROWS, *AGAINST))
"""The checks whose scores need no other row: the columns of `scores_UC`."""
CUTS = ("prompt tokens cut", "replies shortened", "reply tokens cut", "replies left out", "rows left out")
"""The effects of truncation: the columns of `cuts_UX`. Each conversation of a row is cut, and counted, by itself."""
REPLY_HASHES = 64
"""Hashes kept of the signature of each reply, which is looked at only where whole rows are similar."""
MAX_DETAILS = 1_000
"""For each check, details of what was found are kept for at most this many rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """Rows as an audit sees them. Arrays of rows have an entry for each row, dropped ones included."""

    numbers_U: Numbers
    """[U] line or row numbers, from 1."""
    sources_U: npt.NDArray[np.int32]
    """[U] index of the dataset."""
    parts_U: npt.NDArray[np.int32]
    """[U] index of the split, in the order in which splits are used."""
    kept_U: Mask
    """[U] whether the row is a preference."""
    scores_UC: Scores
    """[U, ROW_CHECKS] scores."""
    cuts_UX: npt.NDArray[np.int64]
    """[U, CUTS] what the rule of truncation does to the row; 0 where lengths are not counted in tokens."""
    texts: Texts
    """[P], [R] prompts, first turns and replies."""
    rows_P: Hashes
    """[P] hash of prompt, replies and judgements."""
    whole_P: Hashes
    """[P] hash of prompt and replies."""
    prompt_signatures_PH: Signatures
    whole_signatures_PH: Signatures
    reply_signatures_RH: Signatures
    """[R, REPLY_HASHES] the beginnings of the signatures of single replies."""
    systems_P: Hashes
    """[P] hash of the system turns, which signatures leave out."""
    owners_J: Numbers
    """[J] index of the preference."""
    first_J: Hashes
    second_J: Hashes
    """[J] hashes of the two replies."""
    label_J: Scores
    """[J] probability that the first is preferred."""
    longer_J: npt.NDArray[np.int8]
    """[J] 1 if the first reply has more words than the second, −1 if it has fewer, else 0."""
    has_annotator_J: Mask
    """[J] whether the judgement is that of one of several annotators."""
    causes: Mapping[str, int]
    """Why rows were dropped -> rows."""
    unused: Mapping[str, int]
    """Why replies of kept rows were left out -> replies."""
    example: str
    """The place of the first of these replies, and what was found there; empty if there is none."""
    details: Mapping[str, Mapping[int, str]]
    """Check -> row -> what was found in it, for the first rows."""

    @property
    def of_P(self) -> Numbers:
        """[P] index of the row of each preference."""
        return np.flatnonzero(self.kept_U)

    @property
    def parts_P(self) -> npt.NDArray[np.int32]:
        """[P] index of the split of each preference."""
        return self.parts_U[self.kept_U]

    def spread(self, scores_P: npt.NDArray) -> Scores:
        """Return [U] the scores of preferences as scores of rows, 0 for rows that are not preferences."""
        scores_U = np.zeros(len(self.kept_U), dtype=np.float32)
        scores_U[self.kept_U] = scores_P
        return scores_U

    def only(self, wanted_U: Mask) -> Facts:
        """Return the facts about some of the rows."""
        wanted_P = wanted_U[self.kept_U]
        # [P] the new index of each preference that stays.
        renumbered_P = np.cumsum(wanted_P) - 1
        wanted_J = wanted_P[self.owners_J]
        wanted_R = wanted_P[self.texts.owners_R]
        texts = replace(
            self.texts,
            prompts_P=self.texts.prompts_P[wanted_P],
            first_turns_P=self.texts.first_turns_P[wanted_P],
            replies_R=self.texts.replies_R[wanted_R],
            long_R=self.texts.long_R[wanted_R],
            owners_R=renumbered_P[self.texts.owners_R[wanted_R]],
        )
        wanted = {"U": wanted_U, "P": wanted_P, "R": wanted_R, "J": wanted_J}
        chosen = {name: getattr(self, name)[wanted[axis]] for name, axis in ARRAYS.items()}
        chosen["owners_J"] = renumbered_P[self.owners_J[wanted_J]]
        renumbered_U = np.cumsum(wanted_U) - 1
        details = {
            check: {int(renumbered_U[row]): text for row, text in found.items() if wanted_U[row]}
            for check, found in self.details.items()
        }
        return replace(self, texts=texts, details=details, **chosen)


TEXTS = tuple(field.name for field in fields(Texts))
ARRAYS = {field.name: field.name.rpartition("_")[2][0] for field in fields(Facts) if "_" in field.name}
"""Array -> the letter of its first axis."""
OWNERS = ("owners_J", "owners_R")
"""Arrays of indices of preferences."""


def joined(parts: Iterable[Facts]) -> Facts:
    """Return the facts about all rows, in order. Parts are taken one by one, and none is kept: all of a million rows
    take more than a GB. A single one is not copied."""
    source = iter(parts)
    first = next(source)
    second = next(source, None)
    copies = second is not None
    arrays, texts = ({name: _Column() for name in names if copies} for names in (ARRAYS, TEXTS))
    causes: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    details: dict[str, dict[int, str]] = {}
    rows, preferences, example = 0, 0, ""
    for part in chain((first,) if second is None else (first, second), source):
        causes.update(part.causes)
        unused.update(part.unused)
        for check, found in part.details.items():
            own = details.setdefault(check, {})
            room = MAX_DETAILS - len(own)
            own.update({rows + row: text for row, text in list(found.items())[:room]})
        for of, columns in ((part, arrays), (part.texts, texts)):
            for name, column in columns.items():
                own_N = getattr(of, name)
                column.add(own_N + preferences if name in OWNERS else own_N)
        rows, preferences = rows + len(part.kept_U), preferences + len(part.rows_P)
        example = example or part.example
    return replace(
        first,
        texts=replace(first.texts, **{name: column.whole() for name, column in texts.items()}),
        causes=_by_count(causes),
        unused=_by_count(unused),
        example=example,
        details=details,
        **{name: column.whole() for name, column in arrays.items()},
    )


def _by_count(counts: Counter[str]) -> dict[str, int]:
    return dict(counts.most_common())


class _Column:
    """An array that grows at its end, by an eighth of itself at a time."""

    def __init__(self) -> None:
        self._array: npt.NDArray | None = None
        self._used = 0

    def add(self, more: npt.NDArray) -> None:
        if self._array is None:
            self._array = np.empty((0, *more.shape[1:]), dtype=more.dtype)
        array, end = self._array, self._used + len(more)
        assert (array.dtype, array.shape[1:]) == (more.dtype, more.shape[1:]), (array.dtype, more.dtype)
        if end > len(array):
            # In place where the system can: nobody else knows the array yet.
            array.resize((end + end // 8, *more.shape[1:]), refcheck=False)
        array[self._used : end] = more
        self._used = end

    def whole(self) -> npt.NDArray:
        """Return the array, which ends here."""
        array = self._array
        assert array is not None
        array.resize((self._used, *array.shape[1:]), refcheck=False)
        return array
