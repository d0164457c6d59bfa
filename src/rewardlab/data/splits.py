"""Decide which rows belong together. They go to the same side of a split, and to the same fold of a cross-validation.

Preference data often hold several rows of one conversation. If some of them are trained on and others evaluated, the
model has seen half of the answer, and the evaluation overestimates it.

Two rows have the same root if they have the same first user turn, or a distinctive reply in common: one of at least
`JOINING_BYTES`, given after at most `MOST_FIRST_TURNS` different first turns. Shorter and more frequent replies are
phrases ("You're welcome!"). They do not show where a row comes from, and would join half of the data into one root.
System turns join nothing. Texts are compared like prompts, ignoring case and white space.

Texts are represented by hashes of eight bytes, so that millions of rows fit in memory. Legend: P preferences, R the
replies of all of them, N different prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.core.types import Conversation, Message, Preference, prompt_key
from rewardlab.data.rows import is_open_transcript, parse_transcript

Numbers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

JOINING_BYTES: Final = 50
"""Shortest distinctive reply, in bytes of UTF-8 with white space collapsed. In human dialogues, the texts that
different conversations share are phrases below this length, and statements about the question above it."""
MOST_FIRST_TURNS: Final = 8
"""A reply given after more different first turns than this is a phrase, however long: a refusal, a greeting."""
RULES: Final = ("reply", "first_turn", "prompt")
"""Rules that join rows, the strictest first: by first turns and replies, by first turns, by whole prompts alone."""
ENOUGH: Final = 0.5
"""The share of the wanted prompts that a rule must be able to hold out. Otherwise the next rule is taken."""
MOST_TOGETHER: Final = 0.5
"""The largest share of all prompts that one root may have in a cross-validation. Otherwise the next rule is taken."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """The texts of rows, as hashes."""

    prompts_P: Keys
    """[P] hash of each prompt."""
    first_turns_P: Keys
    """[P] hash of each first user turn."""
    replies_R: Keys
    """[R] hash of each reply."""
    long_R: Mask
    """[R] whether a reply has at least `JOINING_BYTES`."""
    owners_R: Numbers
    """[R] index of the preference of each reply."""

    @classmethod
    def of(cls, preferences: Sequence[Preference]) -> Texts:
        """Return the texts of preferences in memory."""
        replies = [reply_key(reply) for preference in preferences for reply in preference.replies]
        counts = [len(preference.replies) for preference in preferences]
        return cls(
            prompts_P=_keys(int(preference.key, 16) for preference in preferences),
            first_turns_P=_keys(first_turn_key(preference.prompt) for preference in preferences),
            replies_R=_keys(key for key, _ in replies),
            long_R=np.array([is_long for _, is_long in replies], dtype=bool),
            owners_R=np.repeat(np.arange(len(counts)), counts),
        )

    @classmethod
    def join(cls, parts: Sequence[Texts]) -> Texts:
        """Return the texts of all parts, one after the other."""
        starts = np.cumsum([0, *(len(part.prompts_P) for part in parts)])
        return cls(
            prompts_P=np.concatenate([_keys(()), *(part.prompts_P for part in parts)]),
            first_turns_P=np.concatenate([_keys(()), *(part.first_turns_P for part in parts)]),
            replies_R=np.concatenate([_keys(()), *(part.replies_R for part in parts)]),
            long_R=np.concatenate([np.empty(0, bool), *(part.long_R for part in parts)]),
            owners_R=np.concatenate(
                [np.empty(0, np.int64), *(part.owners_R + start for part, start in zip(parts, starts, strict=False))]
            ),
        )

    def with_others(self, others: Texts) -> Texts:
        """Return these texts followed by the others."""
        return Texts.join([self, others])


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """Rows held out of a dataset, always whole roots."""

    mask_P: Mask
    """[P] whether each row is held out."""
    rule: str
    """The rule that was used, one of `RULES`."""
    wanted: int
    """Number of prompts wanted."""
    prompts: int
    """Number of prompts held out."""
    roots: int
    """Number of roots held out."""
    largest: int
    """Number of prompts of the largest root, held out or not."""
    digest: str
    """Hash of the prompts held out: equal splits have equal digests."""

    def as_dict(self) -> dict[str, object]:
        """Return all but the mask, for the manifest."""
        names = ("rule", "wanted", "prompts", "roots", "largest", "digest")
        return {name: getattr(self, name) for name in names}


def first_turn_key(prompt: Conversation) -> int:
    """Return a hash of the first user turn that has text, or of the whole prompt if there is none.

    For a transcript kept as one text, its first Human turn is used.
    """
    said = next((turn.content for turn in prompt if turn.role == "user" and turn.content.strip()), None)
    if said is None:
        return int(prompt_key(prompt), 16)
    if is_open_transcript(said):
        said = parse_transcript(said)[0].content
    return int(prompt_key((Message("user", said),)), 16)


def reply_key(reply: Conversation) -> tuple[int, bool]:
    """Return (a hash of a reply, whether it is long enough to join rows)."""
    size = sum(len(" ".join(turn.content.split()).encode()) for turn in reply)
    return int(prompt_key(reply), 16), size >= JOINING_BYTES


def hold_out(texts: Texts, *, fraction: float, seed: int, rules: Sequence[str] = RULES) -> HeldOut:
    """Hold out a seeded `fraction` of the prompts, whole roots at a time, at least one root.

    Roots are taken in a random order as long as they fit into the wanted number of prompts; if none fits, the smallest
    root is taken. The first of the rules is used that can hold out at least half of the wanted number, or the last one.
    Which prompts are held out depends on the set of rows and the seed, not on the order of the rows. If no two rows
    share more than their prompt, all rules give the same result.

    Raises DataError if no prompts would be left to train on.
    """
    assert 0 < fraction <= 1, fraction
    # Unique keys are sorted, so the draw below does not depend on the order of the rows.
    prompts, numbers_P = np.unique(texts.prompts_P, return_inverse=True)
    wanted = max(1, round(fraction * len(prompts)))
    if wanted >= len(prompts):
        raise DataError(
            f"holding out {wanted} of {len(prompts)} different prompts leaves nothing to train on. "
            f"Name evaluation data with --eval-dataset or --eval-split, "
            f"or lower --eval-fraction (0 turns evaluation off)."
        )
    order_N = np.random.default_rng(seed).permutation(len(prompts))
    for rule in rules:
        roots_N = _roots(texts, numbers_P, rule)
        sizes_N = np.bincount(roots_N, minlength=len(prompts))
        taken = _take(sizes_N, order_N, wanted)
        out_N = np.isin(roots_N, taken)
        if np.count_nonzero(out_N) >= ENOUGH * wanted:
            break
    return HeldOut(
        mask_P=out_N[numbers_P],
        rule=rule,
        wanted=wanted,
        prompts=int(np.count_nonzero(out_N)),
        roots=len(taken),
        largest=int(sizes_N.max()),
        digest=hashlib.sha256(prompts[out_N].astype("<u8").tobytes()).hexdigest()[:16],
    )


def find_roots(texts: Texts) -> tuple[Numbers, str]:
    """Return ([P] the number of each row's root, the rule used). Rows of one root belong in one fold.

    The first of `RULES` is used by which no root has more than `MOST_TOGETHER` of the prompts, or the last one: with
    a root that contains nearly everything, balanced folds would be impossible.
    """
    prompts, numbers_P = np.unique(texts.prompts_P, return_inverse=True)
    for rule in RULES:
        roots_N = _roots(texts, numbers_P, rule)
        if np.bincount(roots_N).max() <= MOST_TOGETHER * len(prompts):
            break
    return roots_N[numbers_P], rule


def count_shared_roots(texts: Texts, others: Texts) -> int:
    """Return how many roots, by first turns and replies, have rows in both sets."""
    _, numbers_P = np.unique(np.concatenate([texts.prompts_P, others.prompts_P]), return_inverse=True)
    roots_P = _roots(texts.with_others(others), numbers_P, RULES[0])[numbers_P]
    count = len(texts.prompts_P)
    return len(np.intersect1d(roots_P[:count], roots_P[count:]))


def count_shared(texts: Texts, others: Texts) -> dict[str, int]:
    """Return counts of what two sets of rows have in common.

    `prompts`, `first_turns`, `replies` (distinctive ones) and `phrases` (the others) count different texts. `rows`
    counts the rows of `texts` that share a prompt, a first turn or a distinctive reply with `others`.
    """
    # Whether a reply is a phrase is decided over both sets together: it may be rare in each.
    joining = _joining(texts.with_others(others))
    other_replies = np.unique(others.replies_R)
    common = np.intersect1d(texts.replies_R, other_replies)
    replies = np.intersect1d(common, joining)
    by_reply = np.zeros(len(texts.prompts_P), dtype=bool)
    by_reply[texts.owners_R[_among(texts.replies_R, replies)]] = True
    rows = by_reply | _among(texts.prompts_P, others.prompts_P) | _among(texts.first_turns_P, others.first_turns_P)
    return {
        "rows": int(np.count_nonzero(rows)),
        "prompts": len(np.intersect1d(texts.prompts_P, others.prompts_P)),
        "first_turns": len(np.intersect1d(texts.first_turns_P, others.first_turns_P)),
        "replies": len(replies),
        "phrases": len(common) - len(replies),
    }


def _roots(texts: Texts, numbers_P: Numbers, rule: str) -> Numbers:
    """Return [N] the root of each prompt, given as the index of the first prompt of that root."""
    num_prompts = int(numbers_P.max()) + 1
    if rule == "prompt":
        return np.arange(num_prompts)
    turns, of_P = np.unique(texts.first_turns_P, return_inverse=True)
    if rule == "reply":
        of_P = _joined(texts, of_P, len(turns))[of_P]
    of_N = np.empty(num_prompts, dtype=np.int64)
    of_N[numbers_P] = of_P
    if (of_N[numbers_P] != of_P).any():
        # Rows of a prompt that differ in case or white space, of which only one is read as a transcript.
        of_N = _components(numbers_P, of_P, num_prompts, len(turns))
    _, firsts, of_N = np.unique(of_N, return_index=True, return_inverse=True)
    return firsts[of_N]


def _joined(texts: Texts, turns_P: Numbers, num_turns: int) -> Numbers:
    """Return [first turns] the number of a component: the same for first turns that a chain of replies connects."""
    # A graph with a node for each first turn and each distinctive reply, and an edge where the reply was given after
    # it.
    replies = _joining(texts)
    edges = np.flatnonzero(_among(texts.replies_R, replies))
    ends = np.searchsorted(replies, texts.replies_R[edges])
    return _components(turns_P[texts.owners_R[edges]], ends, num_turns, len(replies))


def _components(one_E: Numbers, other_E: Numbers, num_one: int, num_other: int) -> Numbers:
    """Return [num_one] the number of the component of each node of one kind, in a graph of edges to another kind."""
    # Imported here because it is slow, and commands that only read or tokenise data do not split them.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = num_one + num_other
    graph = coo_array((np.ones(len(one_E), bool), (one_E, num_one + other_E)), (size, size))
    _, numbers = connected_components(graph, directed=False)
    return np.asarray(numbers[:num_one], dtype=np.int64)


def _among(keys: Keys, others: Keys) -> Mask:
    """Return which keys are among others, by sorting: NumPy before 2.1 fails where it takes a table of such keys."""
    return np.isin(keys, others, kind="sort")


def _joining(texts: Texts) -> Keys:
    """Return the sorted keys of distinctive replies, those that join rows; replies that occur once are left out."""
    keys, counts = np.unique(texts.replies_R[texts.long_R], return_counts=True)
    repeated = texts.long_R & _among(texts.replies_R, keys[counts > 1])
    replies, turns = texts.replies_R[repeated], texts.first_turns_P[texts.owners_R[repeated]]
    # Sorted by reply, then by first turn, so that the different first turns of each reply can be counted.
    order = np.lexsort((turns, replies))
    replies, turns = replies[order], turns[order]
    is_new = np.ones(len(replies), dtype=bool)
    is_new[1:] = (replies[1:] != replies[:-1]) | (turns[1:] != turns[:-1])
    keys, counts = np.unique(replies[is_new], return_counts=True)
    return keys[counts <= MOST_FIRST_TURNS]


def _take(sizes_N: Numbers, order_N: Numbers, wanted: int) -> Numbers:
    """Return roots that fill the wanted number of prompts.

    A root is named by the index of its first prompt. In `sizes_N` all other prompts have size 0.
    """
    order_N = order_N[sizes_N[order_N] > 0]
    taken = _fill(sizes_N, order_N, wanted)
    if sizes_N[taken].sum() < ENOUGH * wanted:
        # Small roots came first and left too little room for the others. Taking the largest first leaves the least
        # room: at least half is filled, unless only roots that are larger than wanted are left.
        taken = _fill(sizes_N, order_N[np.argsort(-sizes_N[order_N], kind="stable")], wanted)
    if not taken:
        # The smallest root is larger than wanted. It is held out anyway, unless that is more than half of the data.
        smallest = order_N[np.argmin(sizes_N[order_N])]
        if 2 * sizes_N[smallest] <= sizes_N.sum():
            taken.append(int(smallest))
    return np.array(taken, dtype=np.int64)


def _fill(sizes_N: Numbers, order_N: Numbers, wanted: int) -> list[int]:
    """Return the roots, in this order, that fit into what is left of the wanted number of prompts."""
    taken, left = [], wanted
    for root in order_N.tolist():
        if (size := int(sizes_N[root])) <= left:
            taken.append(root)
            left -= size
            if not left:
                break
    return taken


def _keys(keys: Iterable[int]) -> Keys:
    return np.fromiter(keys, dtype=np.uint64)
