"""What commands print: reports and messages with control characters made visible, and the log on stdout."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from rewardlab.core.bars import over_bars
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import keep_report
from rewardlab.core.terminal import folded, visible, visible_message

NOISY: Final = "bitsandbytes.backends.cpu.ops"
"""bitsandbytes, which PEFT imports wherever it is installed, warns there on processors with bf16 that a package for its
products in 4 bits is missing."""


def say(*lines: str) -> None:
    """Print each text on a line of its own, with control characters in the names that it contains made visible."""
    print(*map(visible, lines), sep="\n")


def is_first_process() -> bool:
    """Return whether this process prints the report: torchrun starts several, and rank 0 reports for all."""
    return (os.environ.get("RANK") or "0") == "0"


def print_report(text: str, *, folder: Path | None = None) -> None:
    """Print a report, and write it to `report.txt` in the run folder if one is given."""
    if folder is not None:
        keep_report(text, folder)
    print(visible(text, lines=True))


def complain(message: str) -> None:
    """Print a message on stderr, with control characters made visible. If nobody can read it any more, as after the
    terminal was closed, it is lost, and the exit status stays what it is."""
    try:
        print(_fitting(visible_message(message), terminal=sys.stderr.isatty()), file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)


def _fitting(text: str, *, terminal: bool) -> str:
    """Return a text with its lines broken between words if it goes to a terminal, else as it is."""
    return folded(text, shutil.get_terminal_size().columns) if terminal else text


def answer_to(question: str) -> str:
    """Show a question and return the answer that is typed. Raises ConfigError at the end of the input."""
    try:
        return input(visible(question)).strip()
    except EOFError as error:
        raise ConfigError("no answer. Say it with flags: `rewardlab import --help` lists them.") from error


def open_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr, as by `>&-`, streams from and to nowhere.

    Otherwise the first files that it opens get their numbers, and what libraries print is written into these files.
    """
    modes = {"stdin": "r", "stdout": "w", "stderr": "w"}
    if not (closed := [name for name in modes if getattr(sys, name) is None]):
        return
    # The lowest free number is taken each time. The processes that are started have them too.
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)
    for name in closed:
        nowhere = os.open(os.devnull, os.O_RDWR)
        setattr(sys, name, os.fdopen(nowhere, modes[name], encoding="utf-8", errors="replace"))


def discard_output(stream: TextIO | None = None) -> None:
    """Send everything that is printed from now on nowhere, on stdout or the stream that is given."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def is_gone(error: OSError) -> bool:
    """Return whether an error says that nobody reads stdout any more: a pipe whose reader has ended, or a terminal that
    was closed."""
    if isinstance(error, BrokenPipeError):
        return True
    if error.errno != errno.EIO or error.filename is not None:
        return False
    try:
        os.write(sys.stdout.fileno(), b"")  # an EIO may also come from a disk; only a terminal refuses no bytes at all
    except OSError as own:
        return own.errno == errno.EIO
    return False


class Lines(logging.StreamHandler[TextIO]):
    """Log lines on stdout. If the reader has closed it, the run goes on without; its folder has the records."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record on a line of its own; a progress bar on the terminal is drawn again below it."""
        # An error of the progress bar must not end a run.
        try:
            with over_bars(self.stream):
                super().emit(record)
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, broken between words on a terminal."""
        return _fitting(super().format(record), terminal=self.stream.isatty())

    def handleError(self, record: logging.LogRecord) -> None:
        """Discard all further output if the reader has closed it; else report the error as logging does."""
        if isinstance(error := sys.exception(), OSError) and is_gone(error):
            discard_output()
        else:
            super().handleError(record)


@contextmanager
def log_on_stdout() -> Iterator[None]:
    """Within the block, print the package's log lines of level INFO and above on stdout, without a warning of
    bitsandbytes about what few commands use; restore the loggers after it."""
    logger, noisy = logging.getLogger("rewardlab"), logging.getLogger(NOISY)
    handler, level, loud = Lines(sys.stdout), logger.level, noisy.level
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        noisy.setLevel(loud)
