"""Measures the columns of a dataset: counts, lengths, labels, and how far judges agree.

Legend: P preferences, R replies, C comparisons, D the comparisons whose label is not a tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.analysis import ceiling, stats
from rewardlab.analysis.annotators import Metric, in_both_orders, krippendorff_alpha
from rewardlab.analysis.inspection import Judges, LabelBalance, Lengths, spread
from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.stats import by_conversation
from rewardlab.core.types import Estimate
from rewardlab.curation.inspecting.columns import REFUSALS, SYSTEM, Column, Columns

NUM_BINS: Final = 5
"""Number of bins of length differences, with about equal counts."""


def names_of(roots: npt.NDArray[np.int64]) -> list[str]:
    """Return numbers as keys of clusters."""
    return [str(root) for root in roots.tolist()]


def num_replies_of(columns: Columns) -> dict[int, int]:
    """Return K -> rows."""
    return dict(sorted(Counter(columns["replies_P"].tolist()).items()))


def turns_of(columns: Columns) -> dict[int, int]:
    """Return turns of the prompt -> rows."""
    return dict(sorted(Counter(columns["turns_P"].tolist()).items()))


def system_of(columns: Columns) -> dict[str, int]:
    """Return what the system turns hold -> rows."""
    counts = np.bincount(columns["system_P"], minlength=len(SYSTEM)).tolist()
    return dict(zip(SYSTEM, counts, strict=True))


def lengths_of(columns: Columns, *, unit: str, counted_by: str, limit: int | None) -> Lengths:
    """Return the lengths of the conversations that training would have: without the replies that cannot be rendered,
    and without the rows of which these leave nothing to compare."""
    usable_P = np.zeros(len(columns["replies_P"]), dtype=bool)
    usable_P[columns["owner_C"][_rendered(columns)]] = True
    owner_R = np.repeat(np.arange(len(usable_P)), columns["replies_P"])
    refused_R, usable_R = columns["refused_R"], usable_P[owner_R]
    there_R = usable_R & (refused_R == 0)
    whole_R = columns["whole_R"][there_R]
    over_R = whole_R > limit if limit is not None else np.zeros(len(whole_R), dtype=bool)
    _, first = np.unique(owner_R[(refused_R > 0) & ~usable_R], return_index=True)
    return Lengths(
        unit=unit,
        counted_by=counted_by,
        prompts=spread(columns["prompt_length_P"][usable_P].astype(np.float64)),
        replies=spread(columns["length_R"][there_R].astype(np.float64)),
        conversations=spread(whole_R.astype(np.float64)),
        limit=limit,
        overlong=int(over_R.sum()),
        overlong_rows=len(np.unique(owner_R[there_R][over_R])),
        unrendered=_causes(refused_R[(refused_R > 0) & ~usable_R][first]),
        unrendered_replies=_causes(refused_R[(refused_R > 0) & usable_R]),
        computed=int(columns["computed_P"][usable_P].sum()),
        unshared=int(columns["unshared_P"][usable_P].sum()),
    )


def _rendered(columns: Columns) -> Column:
    """Return [C] whether both replies of a comparison could be rendered."""
    starts_C = columns.starts_P[columns["owner_C"]]
    rendered_R = columns["refused_R"] == 0
    both: Column = rendered_R[starts_C + columns["first_C"]] & rendered_R[starts_C + columns["second_C"]]
    return both


def _causes(refused: Column) -> dict[str, int]:
    """Return cause -> how many, the most frequent first."""
    return dict(Counter(REFUSALS[number - 1] for number in refused.tolist()).most_common())


def preferred_lengths(columns: Columns) -> tuple[FloatArray, FloatArray, Column]:
    """Return ([D] lengths of the better replies, [D] lengths of the others, [D] the comparisons).

    Comparisons of a reply without a length, because it could not be rendered, are left out.
    """
    starts_C = columns.starts_P[columns["owner_C"]]
    label_C = columns["label_C"]
    decided = np.flatnonzero((label_C != 0.5) & _rendered(columns))
    first, second = (columns["length_R"][starts_C + columns[name]][decided] for name in ("first_C", "second_C"))
    wins = label_C[decided] > 0.5
    better, other = np.where(wins, first, second), np.where(wins, second, first)
    return better.astype(np.float64), other.astype(np.float64), decided


def labels_of(columns: Columns, roots_P: npt.NDArray[np.int64], *, unit: str) -> LabelBalance:
    """Return the distribution of labels, and how they depend on lengths."""
    label_C, earlier_C = columns["label_C"], columns["earlier_C"]
    decided_C = label_C != 0.5
    roots_C = roots_P[columns["owner_C"]]
    placed_C = decided_C & (earlier_C >= 0)
    if not (earlier_C[columns["named_C"]] == 0).any():
        # The reply that is called chosen is the better one in every row, which its label says once more.
        placed_C &= ~columns["named_C"]
    first = None
    if placed_C.any():
        first = by_conversation(stats.proportion(earlier_C[placed_C].astype(np.float64), names_of(roots_C[placed_C])))
    better, other, judged = preferred_lengths(columns)
    keys = names_of(roots_C[judged])
    return LabelBalance(
        comparisons=len(label_C),
        decided=int(decided_C.sum()),
        label_ties=int((~decided_C).sum()),
        skipped_ties=columns.tally.skipped_ties,
        soft=int((decided_C & (label_C > 0) & (label_C < 1)).sum()),
        below_half=int((label_C < 0.5).sum()),
        first_is_better=first,
        longer_is_better=by_conversation(stats.proportion(np.heaviside(better - other, 0.5), keys)),
        by_difference=_by_difference(better - other, keys, unit),
        difference=spread(better - other),
    )


def _by_difference(difference_D: FloatArray, keys: Sequence[str], unit: str) -> list[tuple[str, Estimate]]:
    """Return how often the longer reply is the better one, by the size of the difference."""
    size_D = np.abs(difference_D)
    if not size_D.any():
        return []
    edges = np.unique(np.quantile(size_D[size_D > 0], np.linspace(0, 1, NUM_BINS + 1), method="inverted_cdf"))
    found = []
    for low, high in zip([0.5, *edges[1:-1]], edges[1:] if len(edges) > 1 else edges, strict=False):
        chosen = (size_D > low) & (size_D <= high)
        if chosen.any():
            ends = f"{int(size_D[chosen].min()):,}–{int(size_D[chosen].max()):,} {unit}"
            own = [key for key, keep in zip(keys, chosen, strict=True) if keep]
            share = stats.proportion((difference_D[chosen] > 0).astype(np.float64), own)
            found.append((ends, by_conversation(share)))
    return found


def strengths_of(columns: Columns) -> FloatArray:
    """Return the strengths of the comparisons that have one."""
    strength_C: FloatArray = columns["strength_C"]
    return strength_C[np.isfinite(strength_C)]


def judges_of(columns: Columns) -> Judges:
    """Return how far judgements of the same pair agree, and the noise ceilings that follow."""
    judged = Judgements.of(columns)
    _, sizes = np.unique(judged.pair_C, return_counts=True)
    inside, elsewhere = judged, judged.in_other_rows()
    alpha = _alphas(inside, "in one row", judged.pair_C) | _alphas(elsewhere, "in several rows", elsewhere.text_C)
    found = [
        _from_votes(inside, inside.pair_C, "repeats"),
        ceiling.from_labels(judged.label_C, judged.keys),
        _from_strengths(judged),
        _from_votes(elsewhere, elsewhere.text_C, "other rows"),
    ]
    known = [one for one in found if one is not None]
    return Judges(
        annotators=len(np.unique(columns["annotator_C"][columns["annotator_C"] > 0])),
        repeated=int((sizes > 1).sum()),
        repeated_elsewhere=len(np.unique(elsewhere.text_C)),
        alpha=alpha,
        ceilings=tuple(sorted(known, key=_unknown)),
    )


def _unknown(one: ceiling.Ceiling) -> bool:
    return not one.is_known


@dataclass(frozen=True, kw_only=True)
class Judgements:
    """Comparisons as judgements of pairs of texts. All judgements of a pair name its two texts in the same order."""

    owner_C: Column
    """[C] the row."""
    pair_C: Column
    """[C] number of the two replies of the row."""
    text_C: Column
    """[C] number of the pair of texts, whichever row it is in."""
    label_C: FloatArray
    """[C] probability that the text whose hash is lower is preferred."""
    strength_C: FloatArray
    """[C] strength, below 0 where the other text is preferred; NaN for none."""
    keys: list[str]
    """The prompts of the C comparisons."""

    @classmethod
    def of(cls, columns: Columns) -> Judgements:
        """Return the judgements in columns."""
        owner_C, first_C, second_C = (columns[name] for name in ("owner_C", "first_C", "second_C"))
        starts_C = columns.starts_P[owner_C]
        key_C, other_C = (columns["reply_R"][starts_C + reply_C] for reply_C in (first_C, second_C))
        prompt_C = columns["prompt_P"][owner_C]
        # Two replies with the same text have equal keys: the one that stands first counts as the lower.
        is_low = (key_C < other_C) | ((key_C == other_C) & (first_C < second_C))
        label_C = columns["label_C"]
        return cls(
            owner_C=owner_C,
            pair_C=_numbered(owner_C, np.minimum(first_C, second_C), np.maximum(first_C, second_C)),
            text_C=_numbered(prompt_C, np.minimum(key_C, other_C), np.maximum(key_C, other_C)),
            label_C=np.where(is_low, label_C, 1 - label_C),
            strength_C=np.where(is_low, 1.0, -1.0) * np.sign(label_C - 0.5) * columns["strength_C"],
            keys=[f"{key:x}" for key in prompt_C.tolist()],
        )

    def where(self, kept_C: npt.NDArray[np.bool_]) -> Judgements:
        """Return the judgements for which `kept_C` is true."""
        return Judgements(
            owner_C=self.owner_C[kept_C],
            pair_C=self.pair_C[kept_C],
            text_C=self.text_C[kept_C],
            label_C=self.label_C[kept_C],
            strength_C=self.strength_C[kept_C],
            keys=[key for key, keep in zip(self.keys, kept_C.tolist(), strict=True) if keep],
        )

    def in_other_rows(self) -> Judgements:
        """Return, for each pair of texts that several rows judge, the first judgement of each of these rows.

        A K-wise row may hold the same text twice; its scores then do not count as two judgements.
        """
        _, first = np.unique(_numbered(self.owner_C, self.text_C), return_index=True)
        is_first = np.zeros(len(self.text_C), dtype=bool)
        is_first[first] = True
        once = self.where(is_first)
        _, number_C, sizes = np.unique(once.text_C, return_inverse=True, return_counts=True)
        return once.where(sizes[number_C] > 1)


def _numbered(*keys: Column) -> npt.NDArray[np.int64]:
    """Return [N] a number for each different combination of keys, each [N]."""
    numbers = np.zeros(len(keys[0]), dtype=np.int64)
    if not len(numbers):
        return numbers
    order = np.lexsort(keys)
    is_new = np.zeros(len(order), dtype=bool)
    for key in keys:
        ordered = key[order]
        is_new[1:] |= ordered[1:] != ordered[:-1]
    numbers[order] = np.cumsum(is_new)
    return numbers


def _alphas(judged: Judgements, place: str, unit_C: Column) -> dict[str, Estimate]:
    """Return Krippendorff's α of preferred sides, of soft labels and of strengths, where pairs repeat."""
    if len(np.unique(unit_C)) == len(unit_C):
        return {}
    label_C, there = judged.label_C, np.isfinite(judged.strength_C)
    side = _alpha(unit_C, np.sign(label_C - 0.5), judged.keys, mirror=0.0, metric="nominal")
    found = {f"which reply is better, {place} (nominal)": side}
    if ((label_C > 0) & (label_C < 1) & (label_C != 0.5)).any():
        soft = _alpha(unit_C, label_C, judged.keys, mirror=1.0, metric="interval")
        found[f"labels, {place} (interval)"] = soft
    if there.any():
        own = judged.where(there)
        strength = _alpha(unit_C[there], own.strength_C, own.keys, mirror=0.0, metric="interval")
        found[f"strengths, {place} (interval)"] = strength
    return {name: estimate for name, estimate in found.items() if estimate.n}


def _alpha(unit_C: Column, value_C: FloatArray, keys: Sequence[str], *, mirror: float, metric: Metric) -> Estimate:
    return krippendorff_alpha(*in_both_orders(unit_C, value_C, keys, mirror=mirror), metric=metric)


def _from_votes(judged: Judgements, unit_C: Column, origin: ceiling.Origin) -> ceiling.Ceiling | None:
    decided = judged.label_C != 0.5
    voters = judged.where(decided)
    return ceiling.from_votes(unit_C[decided], voters.label_C > 0.5, voters.keys, origin=origin)


def _from_strengths(judged: Judgements) -> ceiling.Ceiling | None:
    decided = judged.where(judged.label_C != 0.5)
    return ceiling.from_strengths(np.abs(decided.strength_C), decided.keys)
