"""Decide which rows must stay together, and to which split each group goes.

A group consists of rows that must stay together: rows of one root (see `data.splits`), and rows whose prompts are near
duplicates. The smallest hash of the group's first turns, together with the seed, decides its split. So neither the
order of the rows, nor other groups, nor any number of rows matter, and rows that are added later move only groups
that they change.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rewardlab.core.errors import DataError
from rewardlab.core.terminal import number_of
from rewardlab.core.types import Preference
from rewardlab.curation.files.reading import Mask, Numbers
from rewardlab.curation.near import Signatures, near_groups, signatures
from rewardlab.data.splits import Keys, Texts, find_roots

logger = logging.getLogger("rewardlab")
FAR: Final = 0.25
"""A warning is logged if a split's number of rows differs from the wanted one by more than this fraction."""
HUGE: Final = 0.25
"""A group of more than this fraction of all rows is refused in a split that is to have fewer rows than the group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """What finding groups needs of a chunk of P preferences."""

    texts: Texts
    prompts_U: Keys
    """[U] hashes of its different prompts, sorted."""
    signatures_UH: Signatures | None
    """[U, hashes] MinHash signatures of the prompts; None if near duplicates are not looked for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The groups of P rows."""

    groups_P: Numbers
    """[P] the number of each row's group, from 0."""
    texts: Texts
    near_P: Numbers
    """[P] the number of each row's group of near-duplicate prompts; of equal prompts if near duplicates are not
    looked for."""
    rule: str
    """The rule by which rows of one root were found, see `splits.RULES`."""


def look(with_near: bool, preferences: Sequence[Preference]) -> Seen:
    """Return what finding groups needs of some preferences."""
    texts = Texts.of(preferences)
    prompts_U, first_U = np.unique(texts.prompts_P, return_index=True)
    sketches = signatures([_prompt_text(preferences[k]) for k in first_U.tolist()]) if with_near else None
    return Seen(texts=texts, prompts_U=prompts_U, signatures_UH=sketches)


def _prompt_text(preference: Preference) -> str:
    """Return the text of a prompt without its system turns, which many prompts share."""
    return "\n".join(turn.content for turn in preference.prompt if turn.role != "system")


def joined(seen: Sequence[Seen]) -> Seen:
    """Return the contents of several chunks as one, with one copy of their signatures."""
    if len(seen) == 1:
        return seen[0]
    texts = Texts.join([one.texts for one in seen])
    prompts_U = np.unique(np.concatenate([one.prompts_U for one in seen]))
    together: Signatures | None = None
    for one in seen:
        if one.signatures_UH is not None:
            if together is None:
                together = np.empty((len(prompts_U), one.signatures_UH.shape[1]), one.signatures_UH.dtype)
            # A prompt of several chunks has the same signature in each.
            together[np.searchsorted(prompts_U, one.prompts_U)] = one.signatures_UH
    return Seen(texts=texts, prompts_U=prompts_U, signatures_UH=together)


def taken(seen: Seen, mask_P: Mask) -> Seen:
    """Return the entries of the rows in the mask. All signatures stay; those of other prompts are never looked up."""
    return Seen(texts=take(seen.texts, mask_P), prompts_U=seen.prompts_U, signatures_UH=seen.signatures_UH)


def take(texts: Texts, mask_P: Mask) -> Texts:
    """Return the texts of the rows in the mask."""
    mask_R = mask_P[texts.owners_R]
    numbers_P = np.cumsum(mask_P) - 1
    return Texts(
        prompts_P=texts.prompts_P[mask_P],
        first_turns_P=texts.first_turns_P[mask_P],
        replies_R=texts.replies_R[mask_R],
        long_R=texts.long_R[mask_R],
        owners_R=numbers_P[texts.owners_R[mask_R]],
    )


def find_groups(seen: Sequence[Seen], near: float | str) -> Groups:
    """Return the groups: rows of one root, and rows whose prompts are near duplicates.

    Which rows share a group does not depend on their order.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    together = joined(seen)
    texts = together.texts
    roots_P, rule = find_roots(texts)
    near_P = _near_rows(together, near)
    num_roots, num_near = int(roots_P.max()) + 1, int(near_P.max()) + 1
    ends = (roots_P, num_roots + near_P)
    graph = coo_array((np.ones(len(roots_P), bool), ends), (num_roots + num_near,) * 2)
    _, labels = connected_components(graph, directed=False)
    _, groups_P = np.unique(labels[roots_P], return_inverse=True)
    return Groups(groups_P=groups_P, texts=texts, near_P=near_P, rule=rule)


def _near_rows(seen: Seen, near: float | str) -> Numbers:
    """Return [P] the number of each row's group of similar prompts."""
    prompts, of_P = np.unique(seen.texts.prompts_P, return_inverse=True)
    if seen.signatures_UH is None or isinstance(near, str):
        return of_P
    # Leave out the prompts that no row uses any more because of a limit.
    used = np.searchsorted(seen.prompts_U, prompts)
    return near_groups(seen.signatures_UH, texts_T=used, threshold=near)[of_P]


# --- assignment ----------------------------------------------------------------------------------------------


def assign(found: Groups, shares: Mapping[str, float], seed: int) -> Numbers:
    """Return [P] the index of each row's split. A hash of the seed and of its group's smallest first turn chooses it.

    Raises DataError for a group that fits into no split, for a huge one in a small split, and if a split gets no row.
    """
    num_rows = len(found.groups_P)
    wanted_S = np.array(list(shares.values())) * num_rows
    sizes_G = np.bincount(found.groups_P)
    firsts_G = np.full(len(sizes_G), np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(firsts_G, found.groups_P, found.texts.first_turns_P)
    largest = int(sizes_G.max())
    if largest > wanted_S.max():
        raise DataError(
            f"{largest} of {num_rows} rows belong together, which is more than any split may have. Choose fractions of "
            f"which one has room for them{_looser(found)}."
        )
    # The shares of the splits, laid out on a line from 0 to 1.
    ends = np.cumsum(wanted_S) / wanted_S.sum()
    points_G = [_point(seed, first) for first in firsts_G.tolist()]
    splits_G = np.minimum(np.searchsorted(ends, points_G, side="right"), len(shares) - 1)
    largest_S = np.zeros(len(shares), dtype=np.int64)
    np.maximum.at(largest_S, splits_G, sizes_G)
    _require_room(largest_S, num_rows, shares, found, seed)
    splits_P = splits_G[found.groups_P]
    _require_filled(splits_P, largest_S, shares, found, seed)
    return splits_P


def _require_room(largest_S: Numbers, num_rows: int, shares: Mapping[str, float], found: Groups, seed: int) -> None:
    """Raise DataError if a huge group goes to a split that is to have fewer rows.

    It is not put elsewhere, since it would move from there once more rows make room for it.
    """
    for (name, share), largest in zip(shares.items(), largest_S.tolist(), strict=True):
        if largest > max(share, HUGE) * num_rows:
            raise DataError(
                f"{largest} of {num_rows} rows belong together and go to the split {name}, for which "
                f"{share * num_rows:.0f} were wanted. Try another seed than --seed {seed}, or give it a larger "
                f"fraction{_looser(found)}."
            )


def _point(seed: int, first_turn: int) -> float:
    """Return a number from 0 to 1 that depends only on the two arguments."""
    digest = hashlib.sha256(f"{seed}\x1f{first_turn}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def _require_filled(
    splits_P: Numbers, largest_S: Numbers, shares: Mapping[str, float], found: Groups, seed: int
) -> None:
    """Raise DataError if a split has no rows; log a warning if it has far more or fewer than wanted."""
    counts_S = np.bincount(splits_P, minlength=len(shares))
    rows = zip(shares.items(), counts_S.tolist(), largest_S.tolist(), strict=True)
    for (name, share), count, largest in rows:
        wanted = share * len(splits_P)
        if not count:
            groups = len(np.unique(found.groups_P))
            raise DataError(
                f"the split {name} would get none of {len(splits_P)} rows in {groups} groups, and {wanted:.1f} were "
                f"wanted. Give it a larger fraction, or try another seed than --seed {seed}{_looser(found)}."
            )
        if abs(count - wanted) > FAR * wanted:
            got = f"split: {name} gets {number_of(count, 'row')} instead of {wanted:.0f}"
            if largest > 1:
                logger.warning("%s, since only whole groups are moved; its largest has %d rows", got, largest)
                continue
            drawn = "by its first turn and --seed alone, so that few rows meet a fraction roughly"
            logger.warning("%s: each row is drawn %s. A larger fraction gives it more", got, drawn)


def _looser(found: Groups) -> str:
    """Return a further remedy if groups contain prompts that are similar but not equal; else an empty text."""
    alike = int(found.near_P.max()) + 1 < len(np.unique(found.texts.prompts_P))
    return ", or join fewer prompts with a higher --near or none" if alike else ""
