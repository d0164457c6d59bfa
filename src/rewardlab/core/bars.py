"""Show the progress of long work: a bar on a terminal, elsewhere (log files, batch systems) one line a minute."""

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
"""Seconds between two lines where there is no terminal."""
ECHO: Final = 4
"""Columns left free to the right of a bar."""


class _Lines(io.TextIOBase):
    """A stream that writes what a bar would draw to the log, as lines."""

    def write(self, text: str) -> int:
        if line := text.strip():
            logger.info("%s", line)
        return len(text)


@contextmanager
def over_bars(stream: Any) -> Iterator[None]:
    """Remove bars from the terminal while the block writes to `stream`, and draw them again afterwards."""
    # Only on a terminal: elsewhere a bar writes to the log itself, so that two threads could take tqdm's lock and that
    # of the log handler in opposite orders and deadlock.
    if not getattr(sys.stderr, "isatty", bool)():
        yield
        return
    with tqdm.external_write_mode(file=stream):
        yield


def _width() -> int:
    """Return the columns of a bar. It leaves room for the `^C` of a terminal: a line that wraps would stay there."""
    return max(shutil.get_terminal_size().columns - ECHO, 1)


def bar(
    items: Iterable[Any] | None = None, *, title: str, unit: str = "", total: int | None = None, done: int = 0
) -> Any:
    """Return a tqdm bar over `items`, or without items one to call `update` of, of which `done` of `total` are done.

    Without a terminal, work of less than a minute writes no line.
    """
    title = visible(title)
    if getattr(sys.stderr, "isatty", bool)():
        how: dict[str, Any] = {"unit": unit or "it", "unit_scale": bool(unit), "leave": False, "ncols": _width()}
        return tqdm(items, desc=title, total=total, initial=done, **how)
    known = hasattr(items, "__len__") or total is not None
    return tqdm(
        items,
        total=total,
        initial=done,
        desc=title,
        unit_scale=bool(unit),
        leave=False,
        # tqdm writes cursor movements for bars below the first one, which have no place in a log.
        position=0,
        file=_Lines(),
        delay=LINE_EVERY_S,
        mininterval=LINE_EVERY_S,
        # With another value the monitor thread of tqdm refreshes the bar as well, which repeats lines.
        miniters=1,
        bar_format="{desc}: {percentage:.0f} %, {remaining} left{postfix}" if known else "{desc}: {n_fmt}" + unit,
    )


def steps_bar(num_steps: int, step: int) -> Any:
    """Return the bar of a run that has done `step` steps. Without a terminal it is silent: the log has the steps."""
    return tqdm(total=num_steps, initial=step, desc="training", ncols=_width(), disable=None, leave=False)
