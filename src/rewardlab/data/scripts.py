"""The script of letters (Latin, Han, Cyrillic …), by their Unicode names.

The standard library has no table of scripts, but the Unicode name of nearly every letter begins with its script.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Final

OTHER: Final = "other"
_NO_ASCII_LETTERS: Final = bytes(byte for byte in range(256) if not (65 <= byte <= 90 or 97 <= byte <= 122))
_FOREIGN: Final = re.compile(r"[^\x00-\x7f]")
_WIDTHS: Final = ("FULLWIDTH", "HALFWIDTH")
_NAMES: Final = {"CJK": "Han", "IDEOGRAPHIC": "Han", "CANADIAN": "Canadian syllabics", "OLD": OTHER}
_NO_SCRIPTS: Final = ("MODIFIER", "MATHEMATICAL", "FEMININE", "MASCULINE", "SCRIPT", "BLACK", "DOUBLE", "COMBINING")


def count_scripts(texts: Iterable[str]) -> Counter[str]:
    """Return script -> how many letters of it the texts have. Characters that are not letters are not counted."""
    counts: Counter[str] = Counter()
    foreign: Counter[str] = Counter()
    for text in texts:
        # Most characters of most texts are ASCII, and bytes are counted much faster than characters.
        latin = len(text.encode("ascii", "ignore").translate(None, _NO_ASCII_LETTERS))
        if latin:
            counts["Latin"] += latin
        if not text.isascii():
            foreign.update(_FOREIGN.findall(text))
    for letter, count in foreign.items():
        if (script := _script(letter)) is not None:
            counts[script] += count
    return counts


@cache
def _script(letter: str) -> str | None:
    """Return the script of a letter; None for a character that is not a letter."""
    if not unicodedata.category(letter).startswith("L"):
        return None
    words = unicodedata.name(letter, "").split()
    if words and words[0] in _WIDTHS:
        words = words[1:]
    if not words or words[0] in _NO_SCRIPTS:
        return OTHER
    return _NAMES.get(words[0], words[0].capitalize())
