"""Which rows belong together: those of one conversation, or with a reply in common, go to one side of a split, and to
one fold of a cross-validation.

Two rows have the same root if they have the same first user turn, or a reply in common that says something: at least
`JOINING_BYTES` long, and given after at most `MOST_FIRST_TURNS` different first turns. Shorter and more frequent ones
are phrases ("You're welcome!"), which say nothing about where a row comes from and would join half of the data. A
system turn joins nothing. Texts are compared as prompts are: case and white space aside.

Texts are known by keys of eight bytes. Legend: P preferences, R the replies of all of them, N different prompts.
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
"""Of UTF-8, white space made single. In human dialogues what different conversations have in common below this are
phrases, and above it statements about the question."""
MOST_FIRST_TURNS: Final = 8
"""A reply after more of them is a phrase, however long: a refusal, a greeting."""
RULES: Final = ("reply", "first_turn", "prompt")
"""What rows on one side have for themselves: all of it, all but replies, or whole prompts alone."""
ENOUGH: Final = 0.5
"""The share of the prompts asked for that has to be found under a rule, or the next one is taken."""
MOST_TOGETHER: Final = 0.5
"""The share of all prompts that may have one root where folds are made, or the next rule is taken."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Texts:
    """What rows say, as keys."""

    prompts_P: Keys
    first_turns_P: Keys
    replies_R: Keys
    long_R: Mask
    """Whether a reply has at least `JOINING_BYTES`."""
    owners_R: Numbers
    """The preference that each reply is of."""

    @classmethod
    def of(cls, preferences: Sequence[Preference]) -> Texts:
        """Of preferences in memory."""
        replies = [reply_key(reply) for preference in preferences for reply in preference.replies]
        counts = [len(preference.replies) for preference in preferences]
        return cls(
            prompts_P=_keys(int(preference.key, 16) for preference in preferences),
            first_turns_P=_keys(first_turn_key(preference.prompt) for preference in preferences),
            replies_R=_keys(key for key, _ in replies),
            long_R=np.array([is_long for _, is_long in replies], dtype=bool),
            owners_R=np.repeat(np.arange(len(counts)), counts),
        )

    def with_others(self, others: Texts) -> Texts:
        """These, and behind them the others."""
        return Texts(
            prompts_P=np.concatenate([self.prompts_P, others.prompts_P]),
            first_turns_P=np.concatenate([self.first_turns_P, others.first_turns_P]),
            replies_R=np.concatenate([self.replies_R, others.replies_R]),
            long_R=np.concatenate([self.long_R, others.long_R]),
            owners_R=np.concatenate([self.owners_R, others.owners_R + len(self.prompts_P)]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """Rows held out of others, with all that share their roots."""

    mask_P: Mask
    rule: str
    """One of `RULES`."""
    wanted: int
    """Prompts asked for."""
    prompts: int
    """Prompts held out."""
    roots: int
    """Roots that these have."""
    largest: int
    """Prompts of the largest root, held out or not."""
    digest: str
    """Of the keys of the prompts held out."""

    def as_dict(self) -> dict[str, object]:
        """For the manifest."""
        names = ("rule", "wanted", "prompts", "roots", "largest", "digest")
        return {name: getattr(self, name) for name in names}


def first_turn_key(prompt: Conversation) -> int:
    """A key of the first user turn with text, in a transcript kept as one text of its first Human turn; of the whole
    prompt if there is none."""
    said = next((turn.content for turn in prompt if turn.role == "user" and turn.content.strip()), None)
    if said is None:
        return int(prompt_key(prompt), 16)
    if is_open_transcript(said):
        said = parse_transcript(said)[0].content
    return int(prompt_key((Message("user", said),)), 16)


def reply_key(reply: Conversation) -> tuple[int, bool]:
    """(a key of a reply, whether it is long enough to join rows)."""
    size = sum(len(" ".join(turn.content.split()).encode()) for turn in reply)
    return int(prompt_key(reply), 16), size >= JOINING_BYTES


def split_by_root(
    preferences: Sequence[Preference], *, fraction: float, seed: int
) -> tuple[tuple[Preference, ...], tuple[Preference, ...]]:
    """(train, held out) by `hold_out`, both in the order given; nothing is held out if the fraction is 0."""
    if fraction == 0:
        return tuple(preferences), ()
    mask_P = hold_out(Texts.of(preferences), fraction=fraction, seed=seed).mask_P
    sides: tuple[list[Preference], list[Preference]] = ([], [])
    for preference, out in zip(preferences, mask_P, strict=True):
        sides[int(out)].append(preference)
    return tuple(sides[0]), tuple(sides[1])


def hold_out(texts: Texts, *, fraction: float, seed: int, rules: Sequence[str] = RULES) -> HeldOut:
    """A seeded `fraction` of the prompts, whole roots at a time, at least one of them.

    Roots are taken in a random order while they fit into the number of prompts asked for; if none fits, the smallest
    is. Of the rules the first is taken by which half of that number or more can be held out, the last one anyway. Which
    prompts are held out depends on the set of rows and the seed, not on the order of the rows. Without two rows that
    share more than their prompt all rules give the same.

    Raises DataError if no prompt were left to train on.
    """
    assert 0 < fraction <= 1, fraction
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
    """([P] a number for each row, the same for rows that folds keep together, the rule by which).

    Of the `RULES` the first is taken by which no root has more than `MOST_TOGETHER` of the prompts, or the last one.
    """
    prompts, numbers_P = np.unique(texts.prompts_P, return_inverse=True)
    for rule in RULES:
        roots_N = _roots(texts, numbers_P, rule)
        if np.bincount(roots_N).max() <= MOST_TOGETHER * len(prompts):
            break
    return roots_N[numbers_P], rule


def count_shared(texts: Texts, others: Texts) -> dict[str, int]:
    """What rows have in common with others: different prompts, first turns, replies that join and phrases (the other
    replies), and how many of the rows share a prompt, a first turn or a reply that joins."""
    joining = _joining(texts.with_others(others))
    other_replies = np.unique(others.replies_R)
    common = np.intersect1d(texts.replies_R, other_replies)
    replies = np.intersect1d(common, joining)
    by_reply = np.zeros(len(texts.prompts_P), dtype=bool)
    by_reply[texts.owners_R[np.isin(texts.replies_R, replies)]] = True
    rows = by_reply | np.isin(texts.prompts_P, others.prompts_P) | np.isin(texts.first_turns_P, others.first_turns_P)
    return {
        "rows": int(np.count_nonzero(rows)),
        "prompts": len(np.intersect1d(texts.prompts_P, others.prompts_P)),
        "first_turns": len(np.intersect1d(texts.first_turns_P, others.first_turns_P)),
        "replies": len(replies),
        "phrases": len(common) - len(replies),
    }


def _roots(texts: Texts, numbers_P: Numbers, rule: str) -> Numbers:
    """[N] the first of the prompts that have the same root."""
    num_prompts = int(numbers_P.max()) + 1
    if rule == "prompt":
        return np.arange(num_prompts)
    turns, of_P = np.unique(texts.first_turns_P, return_inverse=True)
    if rule == "reply":
        of_P = _joined(texts, of_P, len(turns))[of_P]
    of_N = np.empty(num_prompts, dtype=np.int64)
    of_N[numbers_P] = of_P  # a prompt has one first turn
    _, firsts, of_N = np.unique(of_N, return_index=True, return_inverse=True)
    return firsts[of_N]


def _joined(texts: Texts, turns_P: Numbers, num_turns: int) -> Numbers:
    """[first turns] the same number for those that a chain of replies joins."""
    from scipy.sparse import coo_array  # slow to import, and whoever only reads or tokenises divides nothing
    from scipy.sparse.csgraph import connected_components

    replies = _joining(texts)
    edges = np.flatnonzero(np.isin(texts.replies_R, replies))
    ends = np.searchsorted(replies, texts.replies_R[edges])
    size = num_turns + len(replies)
    graph = coo_array((np.ones(len(edges), bool), (turns_P[texts.owners_R[edges]], num_turns + ends)), (size, size))
    _, numbers = connected_components(graph, directed=False)
    return np.asarray(numbers[:num_turns], dtype=np.int64)


def _joining(texts: Texts) -> Keys:
    """The keys of the replies after which rows are joined, in order; those of one row alone are left out."""
    keys, counts = np.unique(texts.replies_R[texts.long_R], return_counts=True)
    repeated = texts.long_R & np.isin(texts.replies_R, keys[counts > 1])
    replies, turns = texts.replies_R[repeated], texts.first_turns_P[texts.owners_R[repeated]]
    order = np.lexsort((turns, replies))
    replies, turns = replies[order], turns[order]
    is_new = np.ones(len(replies), dtype=bool)
    is_new[1:] = (replies[1:] != replies[:-1]) | (turns[1:] != turns[:-1])
    keys, counts = np.unique(replies[is_new], return_counts=True)
    return keys[counts <= MOST_FIRST_TURNS]


def _take(sizes_N: Numbers, order_N: Numbers, wanted: int) -> Numbers:
    """Roots that fill the number of prompts wanted, by the numbers of their first prompts (others have size 0)."""
    order_N = order_N[sizes_N[order_N] > 0]
    taken, left = [], wanted
    for root in order_N.tolist():
        if (size := int(sizes_N[root])) <= left:
            taken.append(root)
            left -= size
            if not left:
                break
    if not taken:
        smallest = order_N[np.argmin(sizes_N[order_N])]
        if 2 * sizes_N[smallest] <= sizes_N.sum():
            taken.append(int(smallest))
    return np.array(taken, dtype=np.int64)


def _keys(keys: Iterable[int]) -> Keys:
    return np.fromiter(keys, dtype=np.uint64)
