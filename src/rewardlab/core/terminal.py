"""Text from elsewhere on its way to a terminal: shown as what it is, and never obeyed.

File names, templates, rows and the errors of other libraries may hold escape sequences that clear the screen, marks
that turn the reading direction around, and new lines that look like ours. The log (whose logger has `OneLine`), tables,
reports, bars and errors write them out as in a Python string: `\\x1b`, `\\u202e`, `\\n`. JSON and CSV files keep what
they were given.
"""

from __future__ import annotations

import logging
import os
import reprlib
import shlex
import unicodedata
from datetime import date, time
from typing import Final

HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Categories of Unicode that are never drawn: controls, marks of direction and format, half characters, line ends."""
JOINERS: Final = "\u200c\u200d"
"""Marks of format that words of some languages, and emoji, are written with."""
BRIEF: Final = 80
"""Characters of a value in a message."""


def visible(text: str, *, lines: bool = False) -> str:
    """`text` with what a terminal would obey, or not show, written out; with `lines`, line feeds stay."""
    if text.isprintable():
        return text
    kept = JOINERS + ("\n" if lines else "")
    return "".join(
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in HIDDEN and letter not in kept
        else letter
        for letter in text
    )


def visible_message(text: str) -> str:
    """An error or a notice, perhaps of several lines: those after the first are indented, so that none in the middle
    of a name passes for another message.
    """
    first, *rest = visible(text, lines=True).split("\n")
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in rest)])


def short(text: str) -> str:
    """A text in a message, on one short line."""
    text = visible(text[: 2 * BRIEF])
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"


def brief(value: object) -> str:
    """A value in a message, as Python writes it, on one short line, whatever its size and depth."""
    if isinstance(value, (date, time)):
        return f"the date {value}"
    try:
        return short(_SHORT.repr(value))
    except ValueError:  # an integer of more digits than Python writes out
        return f"{'an' if isinstance(value, int) else 'a'} {type(value).__name__} too long to show"


def quoted(word: str) -> str:
    """A word of a command that can be typed, or pasted, into a shell as it is printed."""
    if visible(word) == word:
        return shlex.quote(word)
    letters = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(letters)}'"


class OneLine(logging.Filter):
    """Of our logger: every message, whoever shows it, is one line that a terminal only shows."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Writes the message out; keeps every record."""
        record.msg, record.args = visible(record.getMessage()), None
        return True


_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 3 * BRIEF
