"""Read and write text compressed with Zstandard (.zst), with the package zstandard (extra `data`)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rewardlab.core.optional import import_optional

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

FED_BYTES: Final = 1024
"""Compressed bytes that are expanded at a time. Four bytes can stand for a block of 128 KiB, so this many for 32 MiB at
most: a file that is made to explode is never in memory as a whole."""
LEVEL: Final = 6
"""Compression level of what is written, from 1 to 22."""


class DamagedZstError(ValueError):
    """A file is not Zstandard, is damaged, or ends in the middle."""


class _Expanded(io.RawIOBase):
    """The bytes of a .zst file, which may consist of several frames.

    The stream reader of the package takes a file that was cut off for one that ended, so frames are followed here.
    """

    def __init__(self, path: Path, package: Any) -> None:
        self._package = package
        self._frames: Any = self._package.ZstdDecompressor()
        self._frame: Any = None
        """What expands the current frame; None between two."""
        self._ready = memoryview(b"")
        self._file = path.open("rb")

    def readable(self) -> bool:
        """A stream to read from."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill `buffer` with the bytes that follow; 0 at the end. Raises DamagedZstError."""
        while not self._ready:
            fed = self._file.read(FED_BYTES)
            if not fed:
                if self._frame is not None:
                    raise DamagedZstError("the compressed file ends before its content does")
                return 0
            self._expand(fed)
        target = memoryview(buffer).cast("B")
        taken = min(len(target), len(self._ready))
        target[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken

    def _expand(self, fed: bytes) -> None:
        """Expand some compressed bytes, which may end one frame and begin others. Raises DamagedZstError."""
        expanded = []
        try:
            while fed:
                if self._frame is None:
                    self._frame = self._frames.decompressobj()
                expanded.append(self._frame.decompress(fed))
                fed = b""
                if self._frame.eof:
                    fed, self._frame = self._frame.unused_data, None
        except self._package.ZstdError as error:
            raise DamagedZstError(str(error)) from error
        self._ready = memoryview(b"".join(expanded))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def open_zst(path: Path, encoding: str, *, errors: str | None = None, newline: str | None = None) -> io.TextIOWrapper:
    """Open a .zst file of text for reading. Reading it raises DamagedZstError where it is damaged or cut off.

    `errors` and `newline` are those of `open`.

    Raises DataError, saying how to install it, without the package zstandard.
    """
    # Imported before the stream is made: Python closes one that was made in part, which then has no file.
    package = import_optional("zstandard", f"{path}: reading .zst", "data")
    return io.TextIOWrapper(
        io.BufferedReader(_Expanded(path, package), 1 << 16), encoding=encoding, errors=errors, newline=newline
    )


def packing_zst(file: Any, what: str) -> Any:
    """Return a stream that writes compressed bytes into `file`, which stays open. The same bytes give the same file.

    Raises DataError, saying how to install it, without the package zstandard.
    """
    package = import_optional("zstandard", what, "data")
    return package.ZstdCompressor(level=LEVEL, write_checksum=True).stream_writer(file, closefd=False)
