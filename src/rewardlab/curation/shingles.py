"""Texts as numbers: their words, and hashes of every run of words (shingle) in them, for all texts at once.

Words are separated by white space and compared without regard to case, as prompts are. In scripts that are written
without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan) every character counts as a word. Hashes are the
same in every process and on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from rewardlab.core.types import folded

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
_UNSPACED: Final = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Characters that are words by themselves."""
MOST_WORDS: Final = 200_000
"""Most words whose hashes are kept, about 30 MB."""


def words_of(text: str) -> list[str]:
    """Return the words of a text, in folded case, with the punctuation that touches them."""
    said = folded(text)
    return (said if text.isascii() else _UNSPACED.sub(r" \g<0> ", said)).split()


class WordHashes(dict[str, int]):
    """Word -> its hash of 64 bits, never 0; filled as words are looked up."""

    def bounded(self) -> WordHashes:
        """Return these hashes, emptied if they have become too many to keep."""
        if len(self) > MOST_WORDS:
            self.clear()
        return self

    def __missing__(self, word: str) -> int:
        digest = blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self[word] = value = int.from_bytes(digest, "little") | 1
        return value


def shingle_hashes(texts: Sequence[str], num_words: int) -> tuple[Hashes, Numbers]:
    """Return (all shingles of the texts, [texts + 1] where those of each begin and the last end), as `shingles_of`."""
    known = WordHashes()
    return shingles_of([[known[word] for word in words_of(text)] for text in texts], num_words)


def shingles_of(texts: Sequence[Sequence[int]], num_words: int) -> tuple[Hashes, Numbers]:
    """Return (all shingles of texts in their order, [texts + 1] offsets), from the hashes of the words of each text.

    A text with fewer than `num_words` words is a single shingle; a text without words has none. A shingle that occurs
    twice in a text is returned twice.
    """
    # Short texts are filled up with 0s, so count these as words.
    lengths_T = np.array([max(len(words), num_words) if words else 0 for words in texts], dtype=np.int64)
    words_W = np.zeros(int(lengths_T.sum()), dtype=np.uint64)
    ends_T = np.cumsum(lengths_T)
    starts_T = ends_T - lengths_T
    for words, start in zip(texts, starts_T.tolist(), strict=True):
        words_W[start : start + len(words)] = words
    counts_T = np.maximum(lengths_T - num_words + 1, 0)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts_T)])
    first_S = np.arange(int(offsets[-1])) + np.repeat(starts_T - offsets[:-1], counts_T)
    hashes_S = np.zeros(len(first_S), dtype=np.uint64)
    for place in range(num_words):
        hashes_S = _mixed(hashes_S + words_W[first_S + place])
    return hashes_S, offsets


def _mixed(values: Hashes) -> Hashes:
    """Return the finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection: every bit depends on all bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
