"""The same comparisons as several models score them, or a refusal that says why they are not the same.

Legend: M models, N comparisons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.score_table import require_computable
from rewardlab.core.errors import DataError
from rewardlab.core.terminal import number_of, plural, short
from rewardlab.core.types import ScoreRow

FEWEST: Final = 10
"""Comparisons below which nothing is compared: no test of fewer can be trusted, and few can show anything."""
ReplyKey = tuple[str, str, int]
"""Source, id of the preference, number of the reply."""


class Pair(NamedTuple):
    """One comparison, turned so that the first reply is the preferred one."""

    source: str
    preference_id: str
    preferred: int
    other: int
    label: float
    """In [½, 1]; ½ is a tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSet:
    """What one model scored."""

    name: str
    rows: Sequence[ScoreRow]
    """Rows without any comparison are scores alone: another set then says what was judged."""
    beta: float | None = None
    """σ(β d) is the probability of a difference d; None where it is unknown."""
    verdicts_only: bool = False
    """Whether the scores are only right (1) and wrong (0) verdicts, so that margins and NLL mean nothing."""
    by_place: bool = False
    """Whether rows have no ids, so that they belong to those of the same number in the other files."""
    layout: str = "rewardlab"
    """Layout by which the file was read. Prompts are only compared between files of one layout."""
    prompts_by: str = "prompt_key"
    """What the rows' prompts are known by, such as a column; empty if the ids of preferences stand for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """The comparisons that all models judge, turned so that each label is at least ½."""

    names: tuple[str, ...]
    """M names, the reference first."""
    pairs: tuple[Pair, ...]
    difference_MN: FloatArray
    """[M, N] score of the preferred reply minus that of the other; finite."""
    rows: tuple[tuple[ScoreRow, ScoreRow], ...]
    """N rows of the first model: that of the preferred reply, with the prompt by all sets, and that of the other."""
    betas: tuple[float | None, ...]
    verdicts_only: tuple[bool, ...]
    not_finite: Mapping[str, int]
    """Model -> comparisons left out of everything because its score of a reply is not finite."""
    missing: Mapping[str, int]
    """Model -> comparisons of others that it lacks, left out with `common`."""

    @property
    def label_N(self) -> FloatArray:
        """[N] label in [½, 1]."""
        return np.array([pair.label for pair in self.pairs])

    @property
    def prompt_keys(self) -> tuple[str, ...]:
        """N prompt keys, the clusters of every interval."""
        return tuple(row.prompt_key for row, _ in self.rows)

    @property
    def decided(self) -> Aligned:
        """The comparisons whose label is not a tie."""
        return self.where(np.array([pair.label != 0.5 for pair in self.pairs]))

    def where(self, kept_N: npt.NDArray[Any]) -> Aligned:
        """Return the comparisons for which `kept_N` is true."""
        if kept_N.all():
            return self
        numbers = np.flatnonzero(kept_N)
        return replace(
            self,
            pairs=tuple(self.pairs[number] for number in numbers),
            rows=tuple(self.rows[number] for number in numbers),
            difference_MN=self.difference_MN[:, kept_N],
        )


def align(sets: Sequence[ScoreSet], *, common: bool = False) -> Aligned:
    """Return the comparisons of score sets that judge the same ones, with the scores of every model.

    Rows belong together by source, id and reply; where a set has no sources, by id and reply. With `common`,
    comparisons that a model lacks are left out and counted.

    Raises DataError if a reply has two rows, with `common` if a set has no ids, if sets have no row or not the same
    rows in common (without `common`), if they judge with other labels or other prompts, if no comparison has finite
    scores in all of them, if a score is too large to compute with, if every label is a tie, or if fewer than ten
    comparisons are left.
    """
    assert len(sets) >= 2, "nothing to compare"
    if common and (without := [own.name for own in sets if own.by_place]):
        raise DataError(
            f"--common: {', '.join(without)} {'has' if len(without) == 1 else 'have'} no ids, so rows of other numbers "
            f"cannot be told apart from rows that are missing. Write a column `id` into every file."
        )
    by_key = _by_key(sets)
    for own in sets:
        require_computable(np.array([row.score for row in own.rows], dtype=np.float64), name=own.name)
    pairs = _judged(sets, by_key)
    missing = _require_same_rows(sets, by_key, pairs, common=common)
    if missing:
        pairs = [pair for pair in pairs if all(_holds(rows, pair) for rows in by_key)]
    # Each key is made once, for all sets.
    preferred_N = [(pair.source, pair.preference_id, pair.preferred) for pair in pairs]
    other_N = [(pair.source, pair.preference_id, pair.other) for pair in pairs]
    difference_MN = np.stack([_differences(rows, preferred_N, other_N) for rows in by_key])
    finite_MN = np.isfinite(difference_MN)
    first = by_key[0]
    prompts = _prompts(sets, by_key, pairs, preferred_N)
    aligned = Aligned(
        names=tuple(own.name for own in sets),
        pairs=tuple(pairs),
        difference_MN=difference_MN,
        rows=tuple(
            (_of_prompt(first[preferred], prompt), first[other])
            for preferred, other, prompt in zip(preferred_N, other_N, prompts, strict=True)
        ),
        betas=tuple(own.beta for own in sets),
        verdicts_only=tuple(own.verdicts_only for own in sets),
        not_finite={own.name: int(count) for own, count in zip(sets, (~finite_MN).sum(1), strict=True) if count},
        missing=missing,
    ).where(np.asarray(finite_MN.all(0)))
    _require_enough(aligned, finite_MN, [own.name for own in sets])
    return aligned


def _prompts(
    sets: Sequence[ScoreSet],
    by_key: Sequence[Mapping[ReplyKey, ScoreRow]],
    pairs: Sequence[Pair],
    preferred_N: Sequence[ReplyKey],
) -> Sequence[str]:
    """Return the prompt of each comparison: two have the same one if any set that knows prompts says so.

    So a file with ids alone does not make every row a prompt of its own. Where sets name prompts differently, a prompt
    is named after the least of its comparisons: the order of the names, in which random signs are drawn, must not
    depend on which set comes first.
    """
    knowing = [rows for own, rows in zip(sets, by_key, strict=True) if own.prompts_by] or by_key[:1]
    keys_SN = [[rows[preferred].prompt_key for preferred in preferred_N] for rows in knowing]
    if all(keys_N == keys_SN[0] for keys_N in keys_SN):
        return keys_SN[0]
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # A graph of comparisons, and of the prompts of each set behind them.
    entries = [(number, (s, key)) for s, keys_N in enumerate(keys_SN) for number, key in enumerate(keys_N)]
    place = {prompt: len(pairs) + n for n, prompt in enumerate(dict.fromkeys(prompt for _, prompt in entries))}
    size = len(pairs) + len(place)
    ends = np.array([(number, place[prompt]) for number, prompt in entries]).T
    _, component = connected_components(coo_array((np.ones(ends.shape[1]), tuple(ends)), shape=(size, size)))
    least: dict[int, Pair] = {}
    for own, pair in zip(component.tolist(), pairs, strict=False):  # the prompts come after the comparisons
        least[own] = min(least.get(own, pair), pair)
    return [str(tuple(least[own])) for own in component[: len(pairs)].tolist()]


def _of_prompt(row: ScoreRow, prompt: str) -> ScoreRow:
    return row if row.prompt_key == prompt else replace(row, prompt_key=prompt)


def _by_key(sets: Sequence[ScoreSet]) -> list[dict[ReplyKey, ScoreRow]]:
    """Return the rows of each set by source, id and reply; by id and reply alone if a set has no sources."""
    bare = any(all(row.source == "" for row in own.rows) for own in sets)
    keyed = []
    for own in sets:
        rows: dict[ReplyKey, ScoreRow] = {}
        for row in own.rows:
            key = ("" if bare else row.source, row.preference_id, row.reply)
            if key in rows:
                raise DataError(
                    f"{own.name}: reply {row.reply} of {short(row.preference_id)!r} has two scores. Every id must "
                    f"occur once; rows of several files need ids that differ, or a column `source`."
                )
            rows[key] = row
        if not rows:
            raise DataError(f"{own.name}: no scores. Evaluate the model first, with `rewardlab eval`.")
        keyed.append(rows)
    return keyed


def _comparisons(rows: Mapping[ReplyKey, ScoreRow]) -> list[Pair]:
    """Return the comparisons in the order of the rows, turned so that each label is at least ½."""
    pairs = []
    for (source, name, reply), row in rows.items():
        for judged in row.comparisons:
            first, second, label = reply, judged.second, judged.label
            # A tie has no preferred reply; the one of the lower number comes first in every file.
            if label < 0.5 or (label == 0.5 and second < first):
                first, second, label = second, first, 1 - label
            pairs.append(Pair(source, name, first, second, label))
    return pairs


def _judged(sets: Sequence[ScoreSet], by_key: Sequence[Mapping[ReplyKey, ScoreRow]]) -> list[Pair]:
    """Return the comparisons of the first set that has any, and those that only later sets have.

    Raises DataError if no set has comparisons, or if two sets that have the same replies judge them differently.
    """
    judging = [(own, rows, pairs) for own, rows in zip(sets, by_key, strict=True) if (pairs := _comparisons(rows))]
    if not judging:
        raise DataError(
            "no file says which reply is preferred. Give one with `scores_chosen` and `scores_rejected`, or name the "
            "scores of a gold model with --gold, whose order then counts as the truth."
        )
    for (first, rows, pairs), (own, own_rows, own_pairs) in combinations(judging, 2):
        if own_pairs == pairs:
            continue  # the usual case, of which there are many for several models
        ours = Counter(pair for pair in own_pairs if _holds(rows, pair))
        theirs = Counter(pair for pair in pairs if _holds(own_rows, pair))
        if ours != theirs:
            other = next(iter((ours - theirs) or (theirs - ours)))
            raise DataError(
                f"{own.name} and {first.name} judge the replies to {short(other.preference_id)!r} differently "
                f"({(ours - theirs).total() + (theirs - ours).total():,} comparisons differ in replies or label). "
                f"Evaluate both on one file, with the same settings of reading."
            )
    # What only later sets judge, as of replies that the first has not scored, is judged too, and counted as missing.
    known: dict[Pair, None] = {}
    found: list[Pair] = []
    for _, _, pairs in judging:
        found += [pair for pair in pairs if pair not in known]
        known |= dict.fromkeys(pairs)
    return found


def _holds(rows: Mapping[ReplyKey, ScoreRow], pair: Pair) -> bool:
    source, name, preferred, other, _ = pair
    return (source, name, preferred) in rows and (source, name, other) in rows


def _differences(
    rows: Mapping[ReplyKey, ScoreRow], preferred_N: Sequence[ReplyKey], other_N: Sequence[ReplyKey]
) -> FloatArray:
    """Return [N] the score of each preferred reply minus that of the other; NaN unless both are finite."""
    preferred, other = (
        np.array([rows[key].score for key in keys], dtype=np.float64) for keys in (preferred_N, other_N)
    )
    # A difference of infinite scores would be NaN or infinite, and is never compared.
    finite = np.isfinite(preferred) & np.isfinite(other)
    difference_N: FloatArray = np.full(len(preferred_N), np.nan)
    difference_N[finite] = preferred[finite] - other[finite]
    return difference_N


def _require_same_rows(
    sets: Sequence[ScoreSet],
    by_key: Sequence[Mapping[ReplyKey, ScoreRow]],
    pairs: Iterable[Pair],
    *,
    common: bool,
) -> dict[str, int]:
    """Return how many comparisons each set lacks.

    Raises DataError if a set lacks one (without `common`), if no comparison is in all sets, or if prompts differ.
    """
    pairs = list(pairs)
    lacking_S = [[pair for pair in pairs if not _holds(rows, pair)] for rows in by_key]
    in_all = sum(all(_holds(rows, pair) for rows in by_key) for pair in pairs) if any(lacking_S) else len(pairs)
    missing: dict[str, int] = {}
    for own, rows, lacking in zip(sets, by_key, lacking_S, strict=True):
        if not lacking:
            continue
        missing[own.name] = len(lacking)
        if not in_all:
            (origin, name, _), there = next(iter(rows)), lacking[0]
            own_id, other_id = repr(short(name)), repr(short(there.preference_id))
            if own_id == other_id and origin != there.source:
                own_id, other_id = f"{own_id} of {short(origin)!r}", f"{other_id} of {short(there.source)!r}"
            ids = f"{own.name} has {own_id}, others {other_id}"
            raise DataError(
                f"the score files have no comparison in common ({ids}): they are of other data. Evaluate all models "
                f"on one file, with the same settings of reading."
            )
        if not common:
            here = {(source, name) for source, name, _ in rows}
            part = any((pair.source, pair.preference_id) in here for pair in lacking)
            why = " Of some rows it lacks single replies, as of those too long for a model." if part else ""
            raise DataError(
                f"{own.name} lacks {len(lacking):,} of {len(pairs):,} comparisons (such as "
                f"{short(lacking[0].preference_id)!r}).{why} Evaluate all models on the same rows, or compare the "
                f"{in_all:,} that all have with --common."
            )
    first = next(iter(zip(sets, by_key, strict=True)))
    for own, rows in list(zip(sets, by_key, strict=True))[1:]:
        # Another layout or column may write the same prompt differently, and ids are none, so such keys prove nothing.
        if (own.layout, own.prompts_by) != (first[0].layout, first[0].prompts_by) or not own.prompts_by:
            continue
        for key, row in rows.items():
            known = first[1].get(key)
            if known is not None and known.prompt_key != row.prompt_key:
                raise DataError(
                    f"{own.name} and {first[0].name} have other prompts under the id {short(row.preference_id)!r}: "
                    f"they are of other data (or of another version of it). Evaluate all models on one file."
                )
    return missing


def _require_enough(aligned: Aligned, finite_MN: np.ndarray, names: Sequence[str]) -> None:
    """Raise DataError unless at least `FEWEST` comparisons are left that are finite and not ties."""
    for name, finite_N in zip(names, finite_MN, strict=True):
        if not finite_N.any():
            raise DataError(f"{name}: no score is finite. Look at how it was computed; `rewardlab verify` may help.")
    if not aligned.pairs:
        raise DataError("no comparison has finite scores by all models, so nothing can be compared.")
    if (decided := int((aligned.label_N != 0.5).sum())) < FEWEST:
        ties = len(aligned.pairs) - decided
        labelled = plural(ties, "is labelled as a tie", "are labelled as ties")
        of = f" ({ties:,} more {labelled}, which no model can get right)" if ties else ""
        said = f"{number_of(decided, 'comparison')}{of}"
        raise DataError(f"{said}: at least {FEWEST} are needed to compare models. Judge more data.")
