"""What a file that is not UTF-8 is instead, where, and how to make it UTF-8."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Any, Final

PIECE = 1 << 20
"""Most bytes of a line that are in memory at a time."""
SAVE_AGAIN = "Save it again as UTF-8 (in Excel: CSV UTF-8)"
KINDS = (
    (b"\xff\xfe", f"it is UTF-16. {SAVE_AGAIN}, or: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    (b"\xfe\xff", f"it is UTF-16. {SAVE_AGAIN}, or: iconv -f UTF-16 -t UTF-8 OLD > NEW"),
    (
        b"PK\x03\x04",
        "it is a zip archive, as Excel's workbooks are. Save the table as CSV UTF-8, or unpack the archive",
    ),
    (b"\x1f\x8b", "it is compressed by gzip. Unpack it, or name it .jsonl.gz if every line is a row"),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd. Unpack it, or name it .jsonl.zst if every line is a row"),
    (b"PAR1", "it is a Parquet file. Name it .parquet"),
)
"""How a file begins -> what it is, and what to do."""


PACKED: Final = {".gz": (b"\x1f\x8b", "gzip"), ".zst": (b"\x28\xb5\x2f\xfd", "zstd")}
"""Ending of a compressed file -> how such a file begins, and by what it is compressed."""


def misnamed(path: Path) -> str:
    """Return a sentence, with its remedy, on a file that is not compressed as its name says; "" for any other."""
    begin, packer = PACKED.get(path.suffix, (b"", ""))
    with path.open("rb") as file:
        first = file.read(16)
    if not first or first.startswith(begin):
        return ""
    known = next((f"{says}." for start, says in KINDS if first.startswith(start)), None)
    return known or f"it is not compressed by {packer}, as its name says. Rename it to {path.stem}."


def about_bytes(file: Any) -> tuple[int, str]:
    """Return the line of the first byte that is not UTF-8, and a sentence on it with its remedy, of a file that was
    opened for reading bytes and has such a byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    first, number = file.readline(PIECE), 1
    piece = first
    try:
        while piece:
            decoder.decode(piece)
            number += piece.endswith(b"\n")
            piece = file.readline(PIECE)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        known = next((f"{says}." for begin, says in KINDS if first.startswith(begin)), None)
        # A file that ends within a character was cut off.
        is_text = b"\0" not in first and error.reason != "unexpected end of data"
        return number, known or _about_byte(error, is_text=is_text)
    return number, "it changed while it was read. Try again."


def _about_byte(error: UnicodeDecodeError, *, is_text: bool) -> str:
    byte = error.object[error.start : error.start + 1]
    letter = byte.decode("cp1252", "replace")
    if not is_text or not (letter.isalpha() or letter in "“”‘’–—…€\N{NO-BREAK SPACE}"):
        return f"byte 0x{byte.hex()}, {error.reason}. Is it UTF-8 text, and complete?"
    # In Western languages such letters stand alone. Several in a row may be any other encoding's.
    if re.search(rb"[\x80-\xff]{2}", error.object[error.start :]):
        return (
            f"byte 0x{byte.hex()}. {SAVE_AGAIN}, or, with its encoding in place of ENCODING (such as GB18030, "
            f"SHIFT_JIS, WINDOWS-1251): iconv -f ENCODING -t UTF-8 OLD > NEW."
        )
    return (
        f"byte 0x{byte.hex()}, which is {letter!r} in Windows-1252. {SAVE_AGAIN}, or, if that is what it is: "
        f"iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW."
    )
