"""What can happen to a file: ways to harm one, by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def flip(path: Path) -> None:
    """One bit, in the middle; an empty file gets a byte."""
    content = bytearray(path.read_bytes() or b"\0")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    """Something else under the name of a file, whose content moves aside."""
    path.rename(path.with_name(path.name + ".moved"))
    make(path)


HARMS: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: replaced(path, lambda name: name.mkdir()),
    "a link elsewhere": lambda path: replaced(path, lambda name: name.symlink_to(f"{name.name}.moved")),
    "a link to nothing": lambda path: replaced(path, lambda name: name.symlink_to("nowhere")),
    "a link to itself": lambda path: replaced(path, lambda name: name.symlink_to(name.name)),
    "a pipe": lambda path: replaced(path, os.mkfifo),
}


def harm_folder(how: str, folder: Path) -> None:
    """The same for a folder, as far as it makes sense."""
    if how in ("gone", "empty"):
        shutil.rmtree(folder)
        if how == "empty":
            folder.mkdir()
    elif how == "a file":
        replaced(folder, Path.touch)
    else:
        HARMS[how](folder)
