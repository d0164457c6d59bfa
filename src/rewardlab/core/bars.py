"""Progress of long work: a bar on a terminal, a line a minute where there is none (log files, batch systems)."""

from __future__ import annotations

import io
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tqdm import tqdm

from rewardlab.core.terminal import visible

logger = logging.getLogger("rewardlab")

LINE_EVERY_S: Final = 60.0
ECHO: Final = 4
"""Columns left free behind a bar."""


class _Lines(io.TextIOBase):
    """Takes what a bar would draw, as lines of the log."""

    def write(self, text: str) -> int:
        if line := text.strip():
            logger.info("%s", line)
        return len(text)


@contextmanager
def over_bars(stream: Any) -> Iterator[None]:
    """Meanwhile no bar is drawn where a text stream goes, if bars are drawn on a terminal."""
    # Only there: elsewhere a bar writes to the log itself, and two locks would be taken in two orders.
    if not getattr(sys.stderr, "isatty", bool)():
        yield
        return
    with tqdm.external_write_mode(file=stream):
        yield


def _width() -> int:
    """Columns of a bar: so many that a terminal can show `^C` behind it, or the line would wrap and stay."""
    return max(shutil.get_terminal_size().columns - ECHO, 1)


def bar(items: Iterable[Any] | None = None, *, title: str, unit: str = "") -> Any:
    """`items`, or something with `update`, that shows how far it is; what takes less than a minute writes no line."""
    title = visible(title)
    if getattr(sys.stderr, "isatty", bool)():
        return tqdm(items, desc=title, unit=unit or "it", unit_scale=bool(unit), leave=False, ncols=_width())
    known = hasattr(items, "__len__")
    return tqdm(
        items,
        desc=title,
        unit_scale=bool(unit),
        leave=False,
        position=0,  # whatever bars there are besides
        file=_Lines(),
        delay=LINE_EVERY_S,
        mininterval=LINE_EVERY_S,
        miniters=1,  # else tqdm's monitor would repeat lines
        bar_format="{desc}: {percentage:.0f} %, {remaining} left" if known else "{desc}: {n_fmt}" + unit,
    )


def steps_bar(num_steps: int, step: int) -> Any:
    """The bar of a run that has done `step` steps, on a terminal; its log has lines of its own."""
    return tqdm(total=num_steps, initial=step, desc="training", ncols=_width(), disable=None, leave=False)
