"""The facts that an audit keeps about each row: its scores by checks that need no other row, and hashes of its texts.

They are computed chunk by chunk, in worker processes. A pair takes about 1.6 kB, most of it MinHash signatures (of its
prompt, of its whole text, and short ones of its replies), however long its texts are. Legend: U rows (in long-form
data, pairs of rows), P the rows that are preferences, R the replies of all preferences, J their judgements, H
permutations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

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


ARRAYS = {field.name: field.name.rpartition("_")[2][0] for field in fields(Facts) if "_" in field.name}
"""Array -> the letter of its first axis."""


def joined(parts: Sequence[Facts]) -> Facts:
    """Return the facts about all rows, in order."""
    rows = np.cumsum([0, *(len(part.kept_U) for part in parts)])
    preferences = np.cumsum([0, *(len(part.rows_P) for part in parts)])
    causes: Counter[str] = Counter()
    unused: Counter[str] = Counter()
    details: dict[str, dict[int, str]] = {}
    for part, first in zip(parts, rows.tolist(), strict=False):
        causes.update(part.causes)
        unused.update(part.unused)
        for check, found in part.details.items():
            own = details.setdefault(check, {})
            room = MAX_DETAILS - len(own)
            own.update({first + row: text for row, text in list(found.items())[:room]})
    arrays = {name: _concatenated([getattr(part, name) for part in parts]) for name in ARRAYS}
    shifts = preferences.tolist()
    arrays["owners_J"] = _concatenated([part.owners_J + shift for part, shift in zip(parts, shifts, strict=False)])
    texts = Texts(
        prompts_P=_concatenated([part.texts.prompts_P for part in parts]),
        first_turns_P=_concatenated([part.texts.first_turns_P for part in parts]),
        replies_R=_concatenated([part.texts.replies_R for part in parts]),
        long_R=_concatenated([part.texts.long_R for part in parts]),
        owners_R=_concatenated([part.texts.owners_R + shift for part, shift in zip(parts, shifts, strict=False)]),
    )
    rows_by_cause, replies_by_cause = (dict(counts.most_common()) for counts in (causes, unused))
    return replace(
        parts[0],
        texts=texts,
        causes=rows_by_cause,
        unused=replies_by_cause,
        example=next((part.example for part in parts if part.example), ""),
        details=details,
        **arrays,
    )


def _concatenated(arrays: Sequence[npt.NDArray]) -> npt.NDArray:
    """Return the arrays as one. A single one is not copied: signatures of a million rows take more than a GB."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
