"""Score rows as columns: the one place where they are joined, turned and put into an order of their own.

Legend: R replies, N comparisons, C prompts, G preferences. Every comparison is turned so that its raw label is at least
½ (see metrics.py). Rows are sorted first, so every number made from the columns, drawn ones included, is the same for
any order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from rewardlab.analysis.intervals import FloatArray
from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, ScoreRow

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
PreferenceKey = tuple[str, str]
"""Source and id of a preference."""
Columns = TypeVar("Columns", "Replies", "Pairs")
LARGEST: Final = 1e150
"""Largest score and largest β d that can be judged: their squares still are numbers of float64."""


def require_computable(scores: FloatArray, *, name: str = "") -> None:
    """Raise DataError if a finite score is larger than `LARGEST`; `name` is that of the model, where there are several.

    Scores that are not finite are counted elsewhere.
    """
    largest = np.abs(scores[np.isfinite(scores)]).max(initial=0.0)
    if largest > LARGEST:
        raise DataError(
            f"{f'{name}: ' if name else ''}a score has the size {largest:g}, but beyond {LARGEST:g} nothing can be "
            "computed. Divide the scores by a constant."
        )


def logits_of(difference_N: FloatArray, *, beta: float) -> FloatArray:
    """Return [N] β d of finite differences. Raises DataError if one is larger than `LARGEST`."""
    with np.errstate(over="ignore"):
        logit_N: FloatArray = beta * difference_N
    if not (np.abs(logit_N) <= LARGEST).all():
        raise DataError(
            f"β = {beta:g} times a score difference of {np.abs(difference_N).max():g} is more than {LARGEST:g}, "
            "beyond which nothing can be computed. Use a smaller β, or divide the scores by a constant."
        )
    return logit_N


def outcome_of(difference_N: FloatArray) -> FloatArray:
    """Return [N] 1 where a difference of two scores is above 0, ½ where it is 0, else 0; all must be finite."""
    assert np.isfinite(difference_N).all(), "a score that is not finite is never compared"
    return np.heaviside(difference_N, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """One entry a score row, in the order of source, preference and reply."""

    score: FloatArray
    """[R], perhaps not finite."""
    length: FloatArray
    """[R] tokens of the reply, without its prompt."""
    truncated: BoolArray
    """[R] whether something was cut, from the prompt or from the middle of the reply."""
    number: IntArray
    """[R] number of the reply within its preference."""
    prompt: IntArray
    """[R] index of the prompt among the sorted keys."""
    source: IntArray
    """[R] index of the source among the sorted names."""
    preference: IntArray
    """[R] index of the preference."""

    def where(self, kept: BoolArray) -> Replies:
        """Return the replies for which `kept` [R] is true."""
        return _where(self, kept)

    @property
    def finite(self) -> Replies:
        """The replies with a finite score."""
        return self.where(np.isfinite(self.score))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """One entry a comparison, turned so that the label is at least ½."""

    difference: FloatArray
    """[N] score of the preferred reply minus that of the other, perhaps not finite."""
    label: FloatArray
    """[N] raw label in [½, 1]; ½ is a tie."""
    preferred: FloatArray
    """[N] score of the preferred reply."""
    other: FloatArray
    """[N] score of the other one."""
    length_preferred: FloatArray
    """[N] tokens of the preferred reply."""
    length_other: FloatArray
    """[N] tokens of the other one."""
    truncated: BoolArray
    """[N] whether either conversation was cut."""
    prompt: IntArray
    """[N] index of the prompt."""
    source: IntArray
    """[N] index of the source."""
    preference: IntArray
    """[N] index of the preference."""

    def where(self, kept: BoolArray) -> Pairs:
        """Return the comparisons for which `kept` [N] is true."""
        return _where(self, kept)

    @property
    def finite(self) -> Pairs:
        """The comparisons with two finite scores."""
        return self.where(np.isfinite(self.difference))

    @property
    def decided(self) -> Pairs:
        """The comparisons with two finite scores and a label that is not a tie."""
        return self.where(np.isfinite(self.difference) & (self.label != 0.5))

    @property
    def outcome(self) -> FloatArray:
        """[N] 1 where the preferred reply scores higher, ½ where scores tie, else 0; scores must be finite."""
        return outcome_of(self.difference)

    @property
    def length_difference(self) -> FloatArray:
        """[N] tokens of the preferred reply minus those of the other."""
        return self.length_preferred - self.length_other

    def logit(self, *, beta: float) -> FloatArray:
        """Return [N] β d of finite differences. Raises DataError if one is larger than `LARGEST`."""
        return logits_of(self.difference, beta=beta)

    def probability(self, *, beta: float) -> FloatArray:
        """Return [N] σ(β d), the model's probability that the preferred reply is preferred."""
        probability: FloatArray = expit(self.logit(beta=beta))
        return probability

    def nll(self, *, beta: float) -> FloatArray:
        """Return [N] −[y log σ(β d) + (1 − y) log σ(−β d)], stable for any finite d."""
        logits = self.logit(beta=beta)
        return self.label * np.logaddexp(0.0, -logits) + (1 - self.label) * np.logaddexp(0.0, logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTable:
    """Score rows as columns, with the names that their indices stand for."""

    replies: Replies
    pairs: Pairs
    prompts: npt.NDArray[np.object_]
    """[C] sorted prompt keys, as texts."""
    sources: tuple[str, ...]
    """Sorted names of the sources."""
    preferences: tuple[PreferenceKey, ...]
    """[G] source and id of each preference, sorted."""
    rows: tuple[ScoreRow, ...]
    """[R] the score rows themselves, sorted."""

    def keys(self, columns: Replies | Pairs) -> list[str]:
        """Return a short text for the prompt of every entry of `columns`, the clusters of its intervals.

        It is the index of the prompt, in the order of the keys. The keys themselves may be as long as a prompt, and are
        made into arrays of one width.
        """
        return self.names(columns.prompt)

    def names(self, prompts: IntArray) -> list[str]:
        """Return the texts of `keys` for indices of prompts [N]."""
        width = len(str(len(self.prompts)))
        return [f"{index:0{width}}" for index in prompts.tolist()]


def score_table(rows: Sequence[ScoreRow]) -> ScoreTable:
    """Return score rows as columns.

    Raises DataError if there are no rows, if a reply has two rows, or if a comparison is invalid: its first reply is
    not that of its row, it compares a reply with itself or with one that has no row, or its label is not a probability.
    """
    if not rows:
        raise DataError("there are no score rows to judge. Score at least one preference first.")
    ordered = sorted(rows, key=lambda row: (row.source, row.preference_id, row.reply))
    place = {(row.source, row.preference_id, row.reply): number for number, row in enumerate(ordered)}
    if len(place) < len(ordered):
        raise DataError("the score rows hold a reply twice. Rows of several files need ids that differ.")
    prompts, prompt_R = _coded(row.prompt_key for row in ordered)
    sources, source_R = _coded(row.source for row in ordered)
    preferences, preference_R = _preferences(ordered)
    replies = Replies(
        score=np.array([row.score for row in ordered], dtype=np.float64),
        length=np.array([row.num_tokens - row.prompt_tokens for row in ordered], dtype=np.float64),
        truncated=np.array([row.is_cut for row in ordered]),
        number=np.array([row.reply for row in ordered], dtype=np.int64),
        prompt=prompt_R,
        source=source_R,
        preference=preference_R,
    )
    return ScoreTable(
        replies=replies,
        pairs=_pairs(ordered, place, replies),
        prompts=prompts,
        sources=tuple(sources.tolist()),
        preferences=preferences,
        rows=tuple(ordered),
    )


def _pairs(ordered: Sequence[ScoreRow], place: dict[tuple[str, str, int], int], replies: Replies) -> Pairs:
    first, second, label = [], [], []
    for number, row in enumerate(ordered):
        for comparison in row.comparisons:
            _check(row, comparison)
            other = place.get((row.source, row.preference_id, comparison.second))
            if other is None:
                raise DataError(
                    f"preference {row.preference_id!r} of {row.source!r} compares reply {comparison.first} with reply "
                    f"{comparison.second}, which has no score row. Score all replies of a preference together."
                )
            first.append(number)
            second.append(other)
            label.append(comparison.label)
    first_N, second_N = np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)
    label_N = np.array(label, dtype=np.float64)
    swapped = label_N < 0.5
    preferred, other_N = np.where(swapped, second_N, first_N), np.where(swapped, first_N, second_N)
    # ∞ − ∞ is NaN, which rightly counts as not finite, so numpy need not warn.
    with np.errstate(invalid="ignore", over="ignore"):
        difference = replies.score[preferred] - replies.score[other_N]
    return Pairs(
        difference=difference,
        label=np.where(swapped, 1 - label_N, label_N),
        preferred=replies.score[preferred],
        other=replies.score[other_N],
        length_preferred=replies.length[preferred],
        length_other=replies.length[other_N],
        truncated=replies.truncated[preferred] | replies.truncated[other_N],
        prompt=replies.prompt[preferred],
        source=replies.source[preferred],
        preference=replies.preference[preferred],
    )


def _check(row: ScoreRow, comparison: Comparison) -> None:
    """Raise DataError if a comparison of `row` is invalid: wrong first reply, second equal to first, or wrong label."""
    where = f"a comparison of reply {row.reply} of preference {row.preference_id!r} of {row.source!r}"
    if comparison.first != row.reply:
        raise DataError(
            f"{where} has the first reply {comparison.first}. Each comparison belongs to the row of its first reply."
        )
    if comparison.second == comparison.first:
        raise DataError(f"{where} is with itself. Leave it out.")
    if not 0 <= comparison.label <= 1:
        raise DataError(
            f"{where} has the label {comparison.label}, but a label is the probability, from 0 to 1, that the first "
            "reply is preferred. Mend it or leave the comparison out."
        )


def _coded(values: Iterable[str]) -> tuple[npt.NDArray[np.object_], IntArray]:
    """Return the sorted distinct texts and, for each value, its index among them."""
    column = list(values)
    names = sorted(set(column))
    code = {name: number for number, name in enumerate(names)}
    return np.array(names, dtype=object), np.array([code[value] for value in column], dtype=np.int64)


def _preferences(ordered: Sequence[ScoreRow]) -> tuple[tuple[PreferenceKey, ...], IntArray]:
    keys = [(row.source, row.preference_id) for row in ordered]
    names = list(dict.fromkeys(keys))
    code = {name: number for number, name in enumerate(names)}
    return tuple(names), np.array([code[key] for key in keys], dtype=np.int64)


def _where(columns: Columns, kept: BoolArray) -> Columns:
    return type(columns)(**{field.name: getattr(columns, field.name)[kept] for field in fields(columns)})
