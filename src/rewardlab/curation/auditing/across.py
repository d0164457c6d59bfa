"""Checks that look at rows together: duplicates, contradictions, cycles, leaks between splits.

Rows are compared within their split, by hashes. Each function returns scores of all rows. The legend is that of
`facts`; N counts distinct things of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.curation.auditing.facts import Facts, Mask, Scores
from rewardlab.curation.near import Signatures, near_groups
from rewardlab.curation.shingles import Hashes, Numbers
from rewardlab.data.splits import find_roots

Integers = npt.NDArray[np.integer]
FEWEST_JUDGEMENTS: Final = 5
SMALLEST_CYCLE: Final = 3


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of some checks, and exact counts of what was found."""

    scores: Mapping[str, Scores]
    """Check -> [U] scores."""
    counts: Mapping[str, Mapping[str, int]]
    """Check -> what was counted -> number."""
    partners: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Check -> row -> another row with which it was found."""


def numbers_of(*columns_N: Integers) -> Numbers:
    """Return [N] a number for each entry, equal exactly where all columns are equal."""
    numbers = np.zeros(len(columns_N[0]), dtype=np.int64)
    for column in columns_N:
        _, of_N = np.unique(column, return_inverse=True)
        pairs = numbers * (int(of_N.max(initial=0)) + 1) + of_N.reshape(-1)
        _, numbers = np.unique(pairs, return_inverse=True)
        numbers = numbers.reshape(-1)
    return numbers


def duplicates(facts: Facts, near: float) -> Scored:
    """Score rows that an earlier row equals, and pairs that an earlier row has judged alike."""
    del near
    rows_P = numbers_of(facts.parts_P, facts.rows_P)
    earlier_P = _earlier(rows_P)
    parts_J, prompts_J = facts.parts_P[facts.owners_J], facts.texts.prompts_P[facts.owners_J]
    is_tie_J = facts.label_J == 0.5
    # A tie has no winner, so its replies are taken in the order of their hashes.
    first_wins_J = np.where(is_tie_J, facts.first_J < facts.second_J, facts.label_J > 0.5)
    winner_J = np.where(first_wins_J, facts.first_J, facts.second_J)
    loser_J = np.where(first_wins_J, facts.second_J, facts.first_J)
    pairs_J = numbers_of(parts_J, prompts_J, winner_J, loser_J, is_tie_J.astype(np.int8))
    # Annotators of one row may judge a pair alike; only a judgement of an earlier row makes a duplicate.
    first_owner_N = np.full(int(pairs_J.max(initial=-1)) + 1, len(rows_P), dtype=np.int64)
    np.minimum.at(first_owner_N, pairs_J, facts.owners_J)
    again_P = np.bincount(facts.owners_J[first_owner_N[pairs_J] < facts.owners_J], minlength=len(rows_P))
    again_P[earlier_P > 0] = 0
    copies = np.bincount(rows_P, minlength=1)
    return Scored(
        scores={"duplicate-rows": facts.spread(earlier_P), "duplicate-pairs": facts.spread(again_P)},
        counts={
            "duplicate-rows": {"rows with copies": int((copies > 1).sum()), "copies": int((earlier_P > 0).sum())},
            "duplicate-pairs": {"judgements made before": int(again_P.sum())},
        },
    )


def near_duplicates(facts: Facts, near: float) -> Scored:
    """Score rows and prompts that are similar to others but not equal.

    Of rows, prompt and replies together must be similar, and what is judged the same: a long prompt makes rows similar
    that judge other replies to it.
    """
    whole_P = _near_groups(facts.parts_P, facts.whole_P, facts.whole_signatures_PH, near)
    judged = _judged_replies(facts, whole_P, near)
    groups_P = numbers_of(whole_P, facts.systems_P, _judged_alike(judged, len(whole_P)))
    sizes_P, is_first_P, rows = _alike(groups_P, facts.whole_P)
    both_ways_P, pairs, partners = _judged_both_ways(judged, len(whole_P))
    rows_P = np.flatnonzero(facts.kept_U)
    groups_P = _near_groups(facts.parts_P, facts.texts.prompts_P, facts.prompt_signatures_PH, near)
    prompt_sizes_P, _, prompts = _alike(groups_P, facts.texts.prompts_P)
    return Scored(
        scores={
            "near-duplicates": facts.spread(np.where(is_first_P, 0, sizes_P)),
            "near-contradictions": facts.spread(both_ways_P),
            "near-prompts": facts.spread(np.where(prompt_sizes_P > 1, prompt_sizes_P, 0)),
        },
        counts={
            "near-duplicates": {"groups": rows},
            "near-contradictions": {"pairs of similar replies": pairs},
            "near-prompts": {"groups": prompts},
        },
        partners={"near-contradictions": {int(rows_P[one]): int(rows_P[two]) for one, two in partners.items()}},
    )


def _near_groups(parts_P: Integers, texts_P: Hashes, signatures_PH: Signatures, near: float) -> Numbers:
    """Return [P] the number of each row's group of similar texts of its split."""
    groups_P = np.zeros(len(parts_P), dtype=np.int64)
    num_groups = 0
    for part in np.unique(parts_P):
        own = np.flatnonzero(parts_P == part)
        _, first_N, of_own = np.unique(texts_P[own], return_index=True, return_inverse=True)
        groups_N = near_groups(signatures_PH, texts_T=own[first_N], threshold=near)
        groups_P[own] = num_groups + groups_N[of_own.reshape(-1)]
        num_groups += int(groups_N.max(initial=-1)) + 1
    return groups_P


@dataclass(frozen=True, kw_only=True, eq=False)
class _JudgedReplies:
    """The judgements of rows that are not alone in their group of similar rows. Legend: W such judgements."""

    owners_W: Numbers
    pairs_W: Numbers
    """[W] a number for the two replies, within the group: similar ones have the same. Replies of one judgement that are
    similar to each other must be the same texts."""
    leans_W: Numbers
    """[W] 1 if the reply of the first kind is preferred, −1 if the other one, 0 if neither."""
    texts_W: Numbers
    """[W] a number for the texts of the prompt and the two replies."""


def _judged_replies(facts: Facts, groups_P: Numbers, near: float) -> _JudgedReplies:
    wanted_P = np.bincount(groups_P)[groups_P] > 1 if len(groups_P) else np.zeros(0, dtype=bool)
    wanted_J, wanted_R = wanted_P[facts.owners_J], wanted_P[facts.texts.owners_R]
    first_J, second_J, owners_J = facts.first_J[wanted_J], facts.second_J[wanted_J], facts.owners_J[wanted_J]
    replies_N, first_N = np.unique(facts.texts.replies_R[wanted_R], return_index=True)
    groups_N = near_groups(facts.reply_signatures_RH, texts_T=np.flatnonzero(wanted_R)[first_N], threshold=near)
    one_J, other_J = (groups_N[np.searchsorted(replies_N, side)] for side in (first_J, second_J))
    is_exact_J = one_J == other_J
    one_J = np.where(is_exact_J, np.searchsorted(replies_N, first_J) + len(groups_N), one_J)
    other_J = np.where(is_exact_J, np.searchsorted(replies_N, second_J) + len(groups_N), other_J)
    lean_J = np.sign(np.round(facts.label_J[wanted_J].astype(np.float64) - 0.5, 6)) * np.where(one_J < other_J, 1, -1)
    return _JudgedReplies(
        owners_W=owners_J,
        pairs_W=numbers_of(
            groups_P[owners_J], facts.systems_P[owners_J], np.minimum(one_J, other_J), np.maximum(one_J, other_J)
        ),
        leans_W=lean_J.astype(np.int64),
        texts_W=numbers_of(
            facts.texts.prompts_P[owners_J], np.minimum(first_J, second_J), np.maximum(first_J, second_J)
        ),
    )


def _judged_alike(judged: _JudgedReplies, num_rows: int) -> Numbers:
    """Return [P] a number for each row: rows of one group have the same where they judge similar replies alike.

    Two judgements are alike if the preferred replies are similar, and so are the others. All rows that are alone in
    their group get 0.
    """
    said: dict[int, set[int]] = {}
    kinds_W = numbers_of(judged.pairs_W, judged.leans_W)
    for owner, kind in zip(judged.owners_W.tolist(), kinds_W.tolist(), strict=True):
        said.setdefault(owner, set()).add(kind)
    numbers: dict[frozenset[int], int] = {}
    alike_P = np.zeros(num_rows, dtype=np.int64)
    for owner, kinds in said.items():
        alike_P[owner] = numbers.setdefault(frozenset(kinds), len(numbers) + 1)
    return alike_P


def _judged_both_ways(judged: _JudgedReplies, num_rows: int) -> tuple[Numbers, int, Mapping[int, int]]:
    """Return ([P] judgements of each row that a row of similar, not equal, texts contradicts; pairs of replies; such a
    row of each)."""
    told: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
    columns = (judged.pairs_W, judged.leans_W, judged.owners_W, judged.texts_W)
    judgements = list(zip(*(column.tolist() for column in columns), strict=True))
    for pair, lean, owner, text in judgements:
        if lean:
            told.setdefault(pair, ({}, {}))[lean > 0].setdefault(text, owner)
    clashes_P = np.zeros(num_rows, dtype=np.int64)
    pairs: set[int] = set()
    partners: dict[int, int] = {}
    for pair, lean, owner, text in judgements:
        against = told[pair][lean < 0].items() if lean else ()
        # Thousands of similar rows may be judged against each other, so the search ends at the first of other texts.
        other = next((other for about, other in against if about != text), None)
        if other is not None:
            clashes_P[owner] += 1
            pairs.add(pair)
            partners.setdefault(owner, other)
    return clashes_P, len(pairs), partners


def _alike(groups_P: Numbers, texts_P: Hashes) -> tuple[Numbers, Mask, int]:
    """Return ([P] different texts of each row's group, [P] whether a row may stay, groups of more than one text).

    The first text of a group may stay, and so may rows with the same text as an earlier row, which other checks find.
    """
    # A text may be in several groups: in those of two splits, or judged both ways.
    _, first_N = np.unique(numbers_of(groups_P, texts_P), return_index=True)
    sizes_G = np.bincount(groups_P[first_N], minlength=1)
    first_G = np.full(len(sizes_G), len(groups_P), dtype=np.int64)
    np.minimum.at(first_G, groups_P[first_N], first_N)
    stays_P = np.ones(len(groups_P), dtype=bool)
    stays_P[first_N[first_N != first_G[groups_P[first_N]]]] = False
    return sizes_G[groups_P], stays_P, int((sizes_G > 1).sum())


def contradictions(facts: Facts, near: float) -> Scored:
    """Score pairs that are judged both ways, and judgements that form a cycle (A beats B beats C beats A)."""
    del near
    votes = _votes(facts)
    up_N = np.bincount(votes.pairs_V, votes.signs_V > 0, minlength=votes.num_pairs) > 0
    down_N = np.bincount(votes.pairs_V, votes.signs_V < 0, minlength=votes.num_pairs) > 0
    both_N = up_N & down_N
    clashing_V = both_N[votes.pairs_V] & (votes.signs_V != 0)
    clashing_P = np.bincount(votes.owners_V[clashing_V], minlength=len(facts.rows_P))
    cycle_N, num_cycles = _cycles(votes)
    cycle_P = np.zeros(len(facts.rows_P), dtype=np.int64)
    np.maximum.at(cycle_P, votes.owners_V, np.where(votes.signs_V != 0, cycle_N[votes.pairs_V], 0))
    return Scored(
        scores={"contradictions": facts.spread(clashing_P), "cycles": facts.spread(cycle_P)},
        counts={
            "contradictions": {"pairs of replies": int(both_N.sum())},
            "cycles": {"cycles": num_cycles, "replies in them": int(_replies_in(votes, cycle_N))},
        },
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Votes:
    """Legend: V votes, one of each row for each of its pairs (its annotators together have one)."""

    pairs_V: Numbers
    signs_V: Numbers
    """[V] 1 if the reply with the lower number is preferred, −1 if the other one, 0 if neither."""
    owners_V: Numbers
    annotated_V: Mask
    """[V] whether it is the vote of annotators."""
    low_N: Numbers
    high_N: Numbers
    """[pairs] numbers of the two replies, which are numbered by split, prompt and text."""

    @property
    def num_pairs(self) -> int:
        return len(self.low_N)


def _votes(facts: Facts) -> _Votes:
    num = len(facts.owners_J)
    both = np.concatenate([facts.owners_J, facts.owners_J])
    replies = numbers_of(
        facts.parts_P[both], facts.texts.prompts_P[both], np.concatenate([facts.first_J, facts.second_J])
    )
    first_J, second_J = replies[:num], replies[num:]
    different_J = first_J != second_J
    first_J, second_J, owners_J = first_J[different_J], second_J[different_J], facts.owners_J[different_J]
    low_J, high_J = np.minimum(first_J, second_J), np.maximum(first_J, second_J)
    lean_J = np.where(first_J < second_J, 1.0, -1.0) * (facts.label_J[different_J].astype(np.float64) - 0.5)
    pairs_J = numbers_of(low_J, high_J)
    _, first_N = np.unique(pairs_J, return_index=True)
    # Each judgement without an annotator is a separate vote.
    single_J = np.where(facts.has_annotator_J[different_J], -1, np.arange(len(pairs_J)))
    of_J = numbers_of(pairs_J, owners_J, single_J)
    _, first_V = np.unique(of_J, return_index=True)
    signs_V = np.sign(np.round(np.bincount(of_J, lean_J, minlength=len(first_V)), 9)).astype(np.int64)
    return _Votes(
        pairs_V=pairs_J[first_V],
        signs_V=signs_V,
        owners_V=owners_J[first_V],
        annotated_V=facts.has_annotator_J[different_J][first_V],
        low_N=low_J[first_N],
        high_N=high_J[first_N],
    )


def _cycles(votes: _Votes) -> tuple[Numbers, int]:
    """Return ([pairs] number of replies in the cycle that a pair belongs to, 0 without one; number of cycles).

    Each pair counts once, by the majority of its votes, so that two replies alone cannot form a cycle.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    lean_N = np.sign(np.bincount(votes.pairs_V, votes.signs_V, minlength=votes.num_pairs)).astype(np.int64)
    edges = np.flatnonzero(lean_N != 0)
    if not len(edges):
        return np.zeros(votes.num_pairs, dtype=np.int64), 0
    better = np.where(lean_N > 0, votes.low_N, votes.high_N)[edges]
    worse = np.where(lean_N > 0, votes.high_N, votes.low_N)[edges]
    size = int(max(votes.low_N.max(), votes.high_N.max())) + 1
    graph = coo_array((np.ones(len(edges), dtype=np.float32), (better, worse)), shape=(size, size))
    _, component = connected_components(graph, directed=True, connection="strong")
    sizes = np.bincount(component)
    # The majorities of one row's annotators may form a cycle though each annotator is consistent (Condorcet 1785).
    sizes[_of_one_row(votes, component)] = 0
    cycle_N = np.zeros(votes.num_pairs, dtype=np.int64)
    inside = component[better] == component[worse]
    cycle_N[edges[inside]] = sizes[component[better[inside]]]
    return cycle_N, int((sizes >= SMALLEST_CYCLE).sum())


def _of_one_row(votes: _Votes, component: Integers) -> Mask:
    """Return [components] whether all votes within a component come from annotators of one row."""
    low_V, high_V = component[votes.low_N[votes.pairs_V]], component[votes.high_N[votes.pairs_V]]
    inside_V = (low_V == high_V) & (votes.signs_V != 0)
    of_V, owners_V = low_V[inside_V], votes.owners_V[inside_V]
    count = int(component.max()) + 1
    first_C, last_C = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    np.minimum.at(first_C, of_V, owners_V)
    np.maximum.at(last_C, of_V, owners_V)
    single_C = np.bincount(of_V, ~votes.annotated_V[inside_V], minlength=count) > 0
    one: Mask = (first_C == last_C) & ~single_C
    return one


def _replies_in(votes: _Votes, cycle_N: Numbers) -> int:
    inside = cycle_N > 0
    return len(np.union1d(votes.low_N[inside], votes.high_N[inside]))


def longer_wins(facts: Facts, near: float) -> Scored:
    """Score prompts in whose judgements the longer reply always wins."""
    del near
    prompts_P = numbers_of(facts.parts_P, facts.texts.prompts_P)
    decided_J = (facts.label_J != 0.5) & (facts.longer_J != 0)
    won_J = decided_J & ((facts.label_J > 0.5) == (facts.longer_J > 0))
    of_J = prompts_P[facts.owners_J]
    size = int(prompts_P.max(initial=-1)) + 1
    decided_N = np.bincount(of_J[decided_J], minlength=size)
    won_N = np.bincount(of_J[won_J], minlength=size)
    always_N = np.where((decided_N == won_N) & (decided_N >= FEWEST_JUDGEMENTS), decided_N, 0)
    by_chance = float((0.5 ** decided_N[decided_N >= FEWEST_JUDGEMENTS]).sum())
    return Scored(
        scores={"longer-always-wins": facts.spread(always_N[prompts_P])},
        counts={
            "longer-always-wins": {
                "prompts": int((always_N > 0).sum()),
                "prompts looked at": int((decided_N >= FEWEST_JUDGEMENTS).sum()),
                "prompts expected if length decided nothing": round(by_chance),
            }
        },
    )


def leaks(facts: Facts, near: float) -> Scored:
    """Score rows whose prompt or conversation, or a similar prompt, is also in a later split."""
    if len(np.unique(facts.parts_U)) < 2:
        return Scored(scores={}, counts={})
    prompts_P = numbers_of(facts.texts.prompts_P)
    roots_P = find_roots(facts.texts)[0] if len(prompts_P) else prompts_P
    near_P = _near_prompts(facts, near)
    later = {
        "leaked-prompts": _later(prompts_P, facts.parts_P),
        "leaked-conversations": _later(roots_P, facts.parts_P),
        "leaked-near-prompts": _later(near_P, facts.parts_P),
    }
    ways_P = np.sum([scores > 0 for scores in later.values()], axis=0)
    shared = {
        name: {"shared": len(np.unique(groups[scores > 0]))}
        for (name, scores), groups in zip(later.items(), (prompts_P, roots_P, near_P), strict=True)
    }
    return Scored(
        scores={name: facts.spread(scores) for name, scores in (later | {"leaks": ways_P}).items()},
        counts=shared | {"leaks": {"prompts": len(np.unique(prompts_P[ways_P > 0]))}},
    )


def _near_prompts(facts: Facts, near: float) -> Numbers:
    """Return [P] the number of the group of near duplicates of each prompt, over all splits."""
    _, first_N, of_P = np.unique(facts.texts.prompts_P, return_index=True, return_inverse=True)
    return near_groups(facts.prompt_signatures_PH, texts_T=first_N, threshold=near)[of_P.reshape(-1)]


def _later(groups_P: Numbers, parts_P: Integers) -> Numbers:
    """Return [P] how many rows of later splits are in the group of each row."""
    num_groups, num_parts = int(groups_P.max(initial=-1)) + 1, int(parts_P.max(initial=-1)) + 1
    counts = np.bincount(groups_P * num_parts + parts_P, minlength=num_groups * num_parts)
    # [groups, splits] rows of all later splits: those from the end, without the split itself.
    counts_GS = counts.reshape(num_groups, num_parts)
    later_GS = counts_GS[:, ::-1].cumsum(axis=1)[:, ::-1] - counts_GS
    later: Numbers = later_GS[groups_P, parts_P]
    return later


def _earlier(groups_P: Numbers) -> Numbers:
    """Return [P] how many earlier rows are in the group of each row."""
    order = np.argsort(groups_P, kind="stable")
    sizes = np.bincount(groups_P, minlength=1)
    starts = np.cumsum(sizes) - sizes
    earlier = np.empty(len(groups_P), dtype=np.int64)
    earlier[order] = np.arange(len(groups_P)) - np.repeat(starts, sizes)
    return earlier


FAMILIES: Final[Mapping[str, Callable[[Facts, float], Scored]]] = MappingProxyType(
    {
        "duplicate-rows": duplicates,
        "duplicate-pairs": duplicates,
        "near-duplicates": near_duplicates,
        "near-contradictions": near_duplicates,
        "near-prompts": near_duplicates,
        "contradictions": contradictions,
        "cycles": contradictions,
        "longer-always-wins": longer_wins,
        "leaked-prompts": leaks,
        "leaked-conversations": leaks,
        "leaked-near-prompts": leaks,
        "leaks": leaks,
    }
)
"""Check -> the function that computes it, with others."""
