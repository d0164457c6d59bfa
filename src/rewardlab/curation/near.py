"""Near-duplicate texts: those that share most of their words, found without comparing all pairs.

Texts are near duplicates if the Jaccard similarity of their sets of shingles (runs of words) reaches a threshold.
MinHash signatures estimate it (Broder 1997); locality-sensitive hashing finds the candidates; each candidate is then
checked by its signature. Texts are compared without regard to case and white space, as prompts are; `shingles` says
what a word is in scripts without spaces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import index
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.errors import DataError
from rewardlab.curation.shingles import Hashes, Numbers, shingle_hashes

Signatures = npt.NDArray[np.uint16]
PERMUTATIONS: Final = 256
"""Hashes of a signature. The estimate of a similarity s has the standard deviation √(s(1−s)/256): 0.025 at 0.8. Only
the lowest 16 bits of a hash are kept, which makes the estimate too large by at most 1/65,536."""
SHINGLE_WORDS: Final = 3
"""Words of a shingle. A text with fewer words is a single shingle, so it is similar only to equal texts."""
THRESHOLD: Final = 0.8
"""Similarity from which two texts count as near duplicates, unless a setting says otherwise."""
RECALL: Final = 0.98
"""Share of the pairs exactly at the threshold that become candidates. The share grows fast with the similarity."""
BAND_ROWS: Final = (32, 16, 8, 4, 2, 1)
LARGEST_BUCKET: Final = 128
"""The largest bucket whose pairs are all checked. Larger buckets are divided by further hashes."""
_NONE: Final = 2**32 - 1
_EMPTY: Final = _NONE & 0xFFFF
"""The hash of a text without words, and the part of it that a signature keeps."""
_BATCH: Final = 4096
"""Shingles hashed at a time (4 MB), and pairs checked at a time."""


def signatures(texts: Sequence[str]) -> Signatures:
    """Return [texts, PERMUTATIONS] the MinHash signatures. They do not depend on the other texts.

    Raises DataError, saying how to install it, if datasketch is missing.
    """
    return least_hashes(*shingle_hashes(texts, SHINGLE_WORDS)).astype(np.uint16)


def least_hashes(hashes_S: Hashes, offsets: Numbers) -> npt.NDArray[np.uint32]:
    """Return [texts, PERMUTATIONS] the least hash of each text's shingles, which are given as by `shingles_of`.

    The signature is its lowest 16 bits. The least hashes of several texts taken together are the minima of theirs.

    Raises DataError, saying how to install it, if datasketch is missing.
    """
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise DataError(
            f"finding near duplicates needs the package datasketch, which cannot be imported ({error}). "
            f'Install it with: pip install "rewardlab[data]"'
        ) from error
    # The shingles are hashed already, all at once: datasketch permutes the hashes.
    shingles = (hashes_S >> np.uint64(32)).tolist()
    sketch = MinHash(num_perm=PERMUTATIONS, hashfunc=index)
    least_TH = np.full((len(offsets) - 1, PERMUTATIONS), _NONE, dtype=np.uint32)
    for text, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if start < end:
            sketch.clear()
            for first in range(start, end, _BATCH):
                sketch.update_batch(shingles[first : min(first + _BATCH, end)])
            least_TH[text] = sketch.hashvalues
    return least_TH


def near_groups(signatures_AH: Signatures, *, threshold: float = THRESHOLD, texts_T: Numbers | None = None) -> Numbers:
    """Return [texts] the number of each text's group, from 0 in the order of first appearance.

    Two texts of a group need not be similar themselves: a chain of similar texts connects them. Which texts share a
    group does not depend on their order. Each text without words is a group by itself.

    Signatures may have fewer hashes than `PERMUTATIONS`, the same ones of each text: the estimate is coarser then.

    `texts_T` are the indices of the texts that are meant, by default all: so nobody copies their signatures, which for
    a million texts take half a GB.

    Memory: the signatures, and some 100 bytes a text.
    """
    assert 0 < threshold <= 1, threshold
    texts_T = np.arange(len(signatures_AH)) if texts_T is None else texts_T
    keys_T = _keys(signatures_AH, texts_T)
    is_empty_T = _are_empty(signatures_AH, texts_T)
    # Merge equal texts first, so that many copies of one text do not fill a bucket.
    _, first_U, unique_T = np.unique(keys_T, return_index=True, return_inverse=True)
    wanted_U = ~is_empty_T[first_U]
    groups_U = np.arange(len(first_U))
    groups_U[wanted_U] = np.flatnonzero(wanted_U)[_components(signatures_AH, texts_T[first_U[wanted_U]], threshold)]
    groups_T = groups_U[unique_T.reshape(-1)]
    groups_T[is_empty_T] = len(groups_U) + np.arange(int(is_empty_T.sum()))
    return numbered(groups_T)


def _are_empty(signatures_AH: Signatures, texts_T: Numbers) -> npt.NDArray[np.bool_]:
    """Return [texts] whether each text has no words. Few texts with words have the first hash of one without."""
    is_empty_T: npt.NDArray[np.bool_] = signatures_AH[texts_T, 0] == _EMPTY
    maybe = np.flatnonzero(is_empty_T)
    for first in range(0, len(maybe), _BATCH):
        some = maybe[first : first + _BATCH]
        is_empty_T[some] = (signatures_AH[texts_T[some]] == _EMPTY).all(axis=1)
    return is_empty_T


def numbered(labels: Numbers) -> Numbers:
    """Return the labels as numbers from 0 in the order of first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def _components(signatures_AH: Signatures, texts_U: Numbers, threshold: float) -> Numbers:
    """Return [texts] the index among `texts_U` of the first text of each text's group. All their signatures must
    differ."""
    num_texts = len(texts_U)
    num_hashes = signatures_AH.shape[1]
    rows = _rows_of_band(threshold, num_hashes)
    # [bands, texts]
    bands = [_keys(signatures_AH[:, first : first + rows], texts_U) for first in range(0, num_hashes, rows)]
    needed = math.ceil(threshold * num_hashes - 1e-9)
    group_U = np.arange(num_texts)
    for band in range(len(bands)):
        edges = []
        for pairs_P2 in _candidates(bands, band):
            pairs_P2 = pairs_P2[group_U[pairs_P2[:, 0]] != group_U[pairs_P2[:, 1]]]
            for start in range(0, len(pairs_P2), _BATCH):
                some = pairs_P2[start : start + _BATCH]
                one_PH, other_PH = (signatures_AH[texts_U[some[:, side]]] for side in (0, 1))
                same_P = (one_PH == other_PH).sum(axis=1)
                edges.append(some[same_P >= needed])
        if edges:
            group_U = _joined(group_U, np.concatenate(edges))
    return group_U


def _joined(group_U: Numbers, edges_E2: Numbers) -> Numbers:
    """Return the groups, as the index of their first text, after texts were joined by edges."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    num_texts = len(group_U)
    first = np.concatenate([edges_E2[:, 0], np.arange(num_texts)])
    second = np.concatenate([edges_E2[:, 1], group_U])
    graph = coo_array((np.ones(len(first), dtype=np.float32), (first, second)), shape=(num_texts, num_texts))
    _, labels = connected_components(graph, directed=False)
    _, firsts, inverse = np.unique(labels, return_index=True, return_inverse=True)
    joined: Numbers = firsts[inverse.reshape(-1)].astype(np.int64)
    return joined


def _rows_of_band(threshold: float, num_hashes: int) -> int:
    """Return the largest band, in hashes, with which a pair at the threshold shares a band with probability `RECALL`.

    Pairs of similarity s share one of b bands of r hashes with probability 1 − (1 − s^r)^b.
    """
    for rows in BAND_ROWS:
        if 1 - (1 - threshold**rows) ** (num_hashes // rows) >= RECALL:
            return rows
    return BAND_ROWS[-1]


def _candidates(bands: Sequence[Hashes], band: int) -> Iterator[Numbers]:
    """Yield arrays [pairs, 2] of indices of texts that share a bucket of a band.

    A bucket of more than `LARGEST_BUCKET` texts, such as prompts that share a long instruction, is divided by the
    hashes of the next bands, as often as needed.
    """
    keys_U = bands[band]
    members = np.arange(len(keys_U))
    for further in range(1, len(bands) + 1):
        order = np.argsort(keys_U[members], kind="stable")
        members = members[order]
        starts = np.flatnonzero(np.diff(keys_U[members], prepend=keys_U[members[:1]] ^ np.uint64(1)) != 0)
        sizes = np.diff(starts, append=len(members))
        for size in np.unique(sizes[(sizes > 1) & (sizes <= LARGEST_BUCKET)]).tolist():
            first, second = np.triu_indices(size, 1)
            these = starts[sizes == size]
            step = max(1, _BATCH // len(first))
            for at in range(0, len(these), step):
                bucket_BS = members[these[at : at + step, None] + np.arange(size)]
                yield np.stack([bucket_BS[:, first].reshape(-1), bucket_BS[:, second].reshape(-1)], axis=1)
        large = np.repeat(sizes > LARGEST_BUCKET, sizes)
        if further == len(bands) or not large.any():
            return
        members = members[large]
        keys_U = keys_U * np.uint64(0x9E3779B97F4A7C15) + bands[(band + further) % len(bands)]


def _keys(signatures_AR: Signatures, texts_T: Numbers) -> Hashes:
    """Return [texts] a number of 64 bits for each row of hashes, equal for equal rows."""
    keys_T = np.zeros(len(texts_T), dtype=np.uint64)
    for first in range(0, len(texts_T), _BATCH):
        # A few rows at a time, which are gathered once for all of their hashes.
        of_T = keys_T[first : first + _BATCH]
        for hashes_T in signatures_AR[texts_T[first : first + _BATCH]].T:
            of_T ^= hashes_T.astype(np.uint64)
            of_T *= np.uint64(0xFF51AFD7ED558CCD)
            of_T ^= of_T >> np.uint64(32)
    return keys_T
