"""Make text from outside safe to print on a terminal.

File names, templates, rows and the errors of other libraries may hold escape sequences that clear the screen, marks
that reverse the reading direction, and line breaks that fake our own messages. The log (whose logger has `OneLine`),
tables, reports, bars and errors show them escaped as in a Python string: `\\x1b`, `\\u202e`, `\\n`. JSON and CSV files
keep the original text.
"""

from __future__ import annotations

import logging
import os
import re
import reprlib
import shlex
import textwrap
import unicodedata
from collections.abc import Sequence
from datetime import date, time
from typing import Final

HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""Unicode categories that are not drawn: controls, marks of direction and format, surrogates, line separators."""
JOINERS: Final = "\u200c\u200d"
"""Format marks that are part of emoji and of words in some languages, and so are kept."""
BRIEF: Final = 80
"""Most characters of a value in a message."""
_UNBROKEN: Final = "\ue000"
"""Stands for a space at which no line is broken; a character of private use."""


def visible(text: str, *, lines: bool = False) -> str:
    """Return `text` with control and invisible characters escaped. With `lines`, line feeds stay."""
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
    """Return an error or a notice, escaped as by `visible`, with all lines after the first indented.

    Without the indent, a line break inside a file name could fake another message.
    """
    first, *rest = visible(text, lines=True).split("\n")
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in rest)])


def folded(text: str, width: int) -> str:
    """Return `text` with its lines broken between words, where a terminal of this width would break within words.

    Lines are never broken at spaces in backticks, so that a command can be copied whole.
    """
    text = re.sub(r"`[^`\n]*`", lambda quoted: quoted[0].replace(" ", _UNBROKEN), text)
    wrapper = textwrap.TextWrapper(
        width=max(width, 1),
        subsequent_indent="  " if width > 20 else "",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    lines = (wrapper.fill(line) if len(line) > width else line for line in text.split("\n"))
    return "\n".join(lines).replace(_UNBROKEN, " ")


def short(text: str) -> str:
    """Return a text for a message, escaped, on one line of at most `BRIEF` characters."""
    return cut_to(visible(text[: 2 * BRIEF]), BRIEF)


def cut_to(text: str, most: int) -> str:
    """Return a text of at most so many characters; where it was longer, the last is an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names as a list for a message: the first of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def brief(value: object) -> str:
    """Return the `repr` of a value for a message, on one short line, whatever the size and depth of the value."""
    if isinstance(value, (date, time)):
        return f"the date {value}"
    try:
        return short(_SHORT.repr(value))
    except ValueError:
        # Python refuses to print an integer of more than some thousand digits.
        return f"{'an' if isinstance(value, int) else 'a'} {type(value).__name__} too long to show"


def plural(count: float, one: str, several: str = "") -> str:
    """Return the word that goes with a count: `one` of 1, else `several`, by default the plural of a regular noun."""
    regular = re.sub(r"(?<![aeiou])y$", "ie", one) + "s"
    return one if count == 1 else several or regular


def number_of(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 arm``, ``1,024 arms``."""
    return f"{count:,} {plural(count, noun)}"


def quoted(word: str) -> str:
    """Return a word of a command so that it can be pasted into a shell as it is printed.

    Half a surrogate pair, which JSON can hold and no command line can, is shown as the bytes that it would have.
    """
    if visible(word) == word:
        return shlex.quote(word)
    try:
        code = os.fsencode(word)
    except UnicodeEncodeError:
        code = word.encode("utf-8", "surrogatepass")
    letters = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in code)
    return f"$'{''.join(letters)}'"


class OneLine(logging.Filter):
    """Filter of our logger: makes every message one escaped line, whichever handler prints it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape the message of a record. Return True: no record is dropped."""
        record.msg, record.args = visible(record.getMessage()), None
        return True


_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 3 * BRIEF
