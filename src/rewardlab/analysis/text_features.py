"""Features of replies that see no more than their words or their lengths, and how they are scaled.

Legend: R replies, V words of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Final, TypeVar

import numpy as np
from scipy.sparse import csr_matrix

from rewardlab.analysis.intervals import FloatArray
from rewardlab.analysis.linear import Matrix

MIN_COUNT: Final = 2
"""Replies in which a word must occur to be counted."""
WORD_PENALTIES: Final = tuple(float(penalty) for penalty in np.geomspace(1e-4, 1.0, 9))
"""Candidate penalties, for rows of mean squared length 1."""
Word = TypeVar("Word", bound=Hashable)


def length_features(lengths_R: FloatArray) -> Matrix:
    """Return [R, 2]: the length of each reply, and log(1 + length)."""
    return np.stack([lengths_R, np.log1p(lengths_R)], axis=1)


def vocabulary_of(bags_R: Iterable[Iterable[Word]], *, most: int | None = None) -> dict[Word, int]:
    """Return the number of each word that at least `MIN_COUNT` bags have, for at most the `most` frequent words."""
    counts = Counter(word for bag in bags_R for word in bag)
    if most is None or len(counts) <= most:
        return {word: number for number, word in enumerate(word for word, n in counts.items() if n >= MIN_COUNT)}
    return {word: number for number, (word, n) in enumerate(counts.most_common(most)) if n >= MIN_COUNT}


def word_features(bags_R: Iterable[Iterable[Word]], vocabulary: Mapping[Word, int]) -> Matrix:
    """Return [R, V]: 1 where a reply's bag, which holds each word once, has the word, else 0."""
    columns: list[int] = []
    ends = [0]
    for bag in bags_R:
        columns += sorted(vocabulary[word] for word in bag if word in vocabulary)
        ends.append(len(columns))
    # An empty vocabulary still gives one column, of zeros, so that the fit needs no special case.
    shape = (len(ends) - 1, max(len(vocabulary), 1))
    return csr_matrix((np.ones(len(columns)), columns, ends), shape=shape)


def scale_of(differences: Matrix) -> FloatArray:
    """Return the divisors of features, so that one set of penalties suits any data.

    Dense columns are each divided by their root mean square, sparse rows all by the root mean square of their length.
    `differences` are those of the comparisons that are fitted.
    """
    if isinstance(differences, np.ndarray):
        scale = np.sqrt((differences**2).mean(0))
    else:
        squares = differences.multiply(differences)
        scale = np.sqrt(np.asarray(squares.sum()) / max(differences.shape[0], 1)).reshape(1)
    return np.where(scale > 0, scale, 1.0)


def scaled(features: Matrix, scale: FloatArray) -> Matrix:
    """Return features divided by their scale."""
    return features / scale if isinstance(features, np.ndarray) else features / float(scale[0])
