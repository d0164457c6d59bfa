"""Judged pairs as a problem of two classes, and which of them must be held out together.

In preference data every label says "the first one": there is only one class, and methods that compare classes do not
work. So each pair is turned at random, with a seed, and is used once, as `first` against `second`. A head without a
bias learns the same from a pair in either order. Using both orders would teach it nothing new, and count each pair
twice.

Legend: N pairs, P preferences (rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.core.types import Comparison, Preference
from rewardlab.curation.near import near_groups, signatures
from rewardlab.data.splits import JOINING_BYTES, MOST_FIRST_TURNS, MOST_TOGETHER, Numbers, Texts, find_roots

FloatArray = npt.NDArray[np.float64]
MOST_OPPOSITE: Final = 20
"""Most rows with the opposite label that are named for a pair."""
FEWEST: Final = 50
"""The smallest number of judged pairs that is searched: probabilities cannot be calibrated on fewer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Near:
    """The groups of near-duplicate texts of preferences."""

    prompts_P: Numbers
    """[P] group of near-duplicate prompts."""
    replies: tuple[tuple[int, ...], ...]
    """For each preference, the group of near duplicates of each of its replies."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pairs:
    """Judged pairs, each turned one way or the other at random. Ties of labels are left out."""

    preferences: Sequence[Preference]
    """The P rows."""
    owners_N: Numbers
    """[N] index of the preference."""
    numbers_N: Numbers
    """[N] index of the comparison in its preference."""
    first_N: Numbers
    second_N: Numbers
    """[N] the two replies, as turned."""
    label_N: FloatArray
    """[N] probability that `first` is preferred, by the label."""
    margin_N: FloatArray
    """[N] additive margin in logits in favour of the preferred reply."""
    weight_N: FloatArray
    """[N] weight of the judgement, divided by the number of judgements of its row."""
    prompts_N: Numbers
    """[N] number of the prompt."""
    roots_N: Numbers
    """[N] number of the root, which is held out as a whole: conversations, joined by near duplicates."""
    num_ties: int
    """Judgements left out because their label is a tie."""

    def __len__(self) -> int:
        return len(self.owners_N)

    @property
    def sign_N(self) -> FloatArray:
        """[N] 1 where the label prefers `first`, −1 where it prefers `second`."""
        return np.where(self.label_N > 0.5, 1.0, -1.0)

    @property
    def clusters(self) -> list[str]:
        """The root of each of the N pairs as a text; roots are the clusters of every interval."""
        return [str(root) for root in self.roots_N.tolist()]

    def comparison(self, number: int) -> Comparison:
        """Return the judgement of a pair, as its row has it."""
        found: Comparison = self.preferences[self.owners_N[number]].comparisons[self.numbers_N[number]]
        return found

    def take(self, kept: npt.NDArray[Any]) -> Pairs:
        """Return the pairs at these positions, or where a mask is true, of the same preferences."""
        names = ("owners_N", "numbers_N", "first_N", "second_N", "label_N", "margin_N", "weight_N", "prompts_N")
        return replace(self, **{name: getattr(self, name)[kept] for name in (*names, "roots_N")})

    def turned_round(self, wrong_N: npt.NDArray[np.bool_]) -> Pairs:
        """Return the same pairs with the labels flipped where `wrong_N` is true."""
        return replace(self, label_N=np.where(wrong_N, 1 - self.label_N, self.label_N))


def pairs_of(preferences: Sequence[Preference], roots_P: Numbers, *, seed: int) -> Pairs:
    """Return the judged pairs of preferences, each turned by a draw with the seed.

    `roots_P` are the numbers of `held_together`. Raises DataError if fewer than `FEWEST` are left.
    """
    judged, ties = [], 0
    for owner, preference in enumerate(preferences):
        decided = [number for number, one in enumerate(preference.comparisons) if one.label != 0.5]
        ties += len(preference.comparisons) - len(decided)
        judged += [(owner, number, 1 / len(decided)) for number in decided]
    if len(judged) < FEWEST:
        raise DataError(
            f"{len(judged)} judged pairs are too few to search for wrong labels: at least {FEWEST} are needed. "
            f"Name more data."
        )
    owners_N = np.array([owner for owner, _, _ in judged], dtype=np.int64)
    numbers_N = np.array([number for _, number, _ in judged], dtype=np.int64)
    of = [preferences[owner].comparisons[number] for owner, number, _ in judged]
    turn_N = np.random.default_rng((seed, 4)).integers(0, 2, len(judged)).astype(bool)
    first_N, second_N = np.array([(one.first, one.second) for one in of], dtype=np.int64).T
    label_N = np.array([one.label for one in of])
    keys = [preference.key for preference in preferences]
    return Pairs(
        preferences=preferences,
        owners_N=owners_N,
        numbers_N=numbers_N,
        first_N=np.where(turn_N, second_N, first_N),
        second_N=np.where(turn_N, first_N, second_N),
        label_N=np.where(turn_N, 1 - label_N, label_N),
        margin_N=np.array([one.margin for one in of]),
        weight_N=np.array([one.weight * share for one, (_, _, share) in zip(of, judged, strict=True)]),
        prompts_N=np.unique(keys, return_inverse=True)[1][owners_N],
        roots_N=roots_P[owners_N],
        num_ties=ties,
    )


def nearly_equal(preferences: Sequence[Preference]) -> Near:
    """Return the groups of near-duplicate prompts and replies.

    Raises DataError, saying how to install it, if datasketch is missing.
    """
    said = [[_text(reply) for reply in preference.replies] for preference in preferences]
    prompts_P = _groups([_text(preference.prompt) for preference in preferences])
    replies_R = iter(_groups([text for texts in said for text in texts]).tolist())
    return Near(prompts_P=prompts_P, replies=tuple(tuple(next(replies_R) for _ in texts) for texts in said))


def _text(turns: Sequence[Any]) -> str:
    return "\n".join(turn.content for turn in turns)


def _groups(texts: Sequence[str]) -> Numbers:
    """Return the group of each text; equal texts are hashed once."""
    different: dict[str, int] = {}
    number = [different.setdefault(text, len(different)) for text in texts]
    return near_groups(signatures(list(different)))[number]


def held_together(preferences: Sequence[Preference], near: Near | None) -> tuple[Numbers, str]:
    """Return ([P] the number of the root with which each row is held out, the rule in words).

    Roots (`data.splits.find_roots`) are joined if they share a near-duplicate prompt, or a near-duplicate reply of at
    least `JOINING_BYTES` that is not a phrase. If that would join more than half of the rows, the texts are similar
    only because of a common template, and roots are not joined.
    """
    roots_P, rule = find_roots(Texts.of(preferences))
    roots_P = np.unique(roots_P, return_inverse=True)[1]
    words = {"reply": "by first turn and reply", "first_turn": "by first turn", "prompt": "by prompt"}[rule]
    if near is None:
        return roots_P, words
    joined_P = _joined(roots_P, preferences, near)
    if np.bincount(joined_P).max() > MOST_TOGETHER * len(preferences):
        return roots_P, f"{words}; near duplicates would join more than half of the rows, and do not count"
    return joined_P, f"{words}, near duplicates together"


def _joined(roots_P: Numbers, preferences: Sequence[Preference], near: Near) -> Numbers:
    """Return [P] the component of each row in the graph of roots and near-duplicate groups."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = {(int(root), ("prompt", int(group))) for root, group in zip(roots_P, near.prompts_P, strict=True)}
    ends: dict[int, set[int]] = {}
    for root, preference, groups in zip(roots_P.tolist(), preferences, near.replies, strict=True):
        for reply, group in zip(preference.replies, groups, strict=True):
            if len(_text(reply).encode("utf-8", "surrogatepass")) >= JOINING_BYTES:
                ends.setdefault(group, set()).add(root)
    # A reply that occurs in many conversations counts as a phrase, as in `find_roots`.
    few = {group: of for group, of in ends.items() if 1 < len(of) <= MOST_FIRST_TURNS}
    edges |= {(root, ("reply", group)) for group, of in few.items() for root in of}
    nodes = {group: number for number, group in enumerate(dict.fromkeys(group for _, group in sorted(edges)))}
    count = int(roots_P.max()) + 1
    from_, to = np.array([(root, count + nodes[group]) for root, group in sorted(edges)]).T
    size = count + len(nodes)
    graph = coo_array((np.ones(len(from_), bool), (from_, to)), (size, size))
    numbers = np.asarray(connected_components(graph, directed=False)[1], dtype=np.int64)
    return np.unique(numbers[roots_P], return_inverse=True)[1]


def opposites(pairs: Pairs, near: Near | None) -> list[tuple[str, ...]]:
    """Return for each pair the ids of other rows with nearly the same prompt and replies and the opposite label, at
    most `MOST_OPPOSITE`: of filled-in templates there may be thousands."""
    if near is None:
        return [()] * len(pairs)
    keyed: dict[tuple[int, int, int], set[int]] = {}
    keys = []
    for number, owner in enumerate(pairs.owners_N.tolist()):
        replies = (int(pairs.first_N[number]), int(pairs.second_N[number]))
        preferred, other = replies if pairs.label_N[number] > 0.5 else replies[::-1]
        groups = near.replies[owner]
        keys.append((int(near.prompts_P[owner]), groups[preferred], groups[other]))
        keyed.setdefault(keys[-1], set()).add(owner)
    # One more than are told, since the pair's own row may be among them.
    earliest = {key: sorted(owners)[: MOST_OPPOSITE + 1] for key, owners in keyed.items()}
    return [
        tuple(
            pairs.preferences[other].id
            for other in earliest.get((prompt, second, first), ())
            if first != second and other != owner
        )[:MOST_OPPOSITE]
        for owner, (prompt, first, second) in zip(pairs.owners_N.tolist(), keys, strict=True)
    ]
