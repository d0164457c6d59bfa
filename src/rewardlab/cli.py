"""The command line: finds the command, calls it, and turns errors into messages and exit statuses."""

from __future__ import annotations

import io
import os
import re
import sys
from codecs import lookup
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version

from rewardlab.console import complain, discard_output, is_first_process, is_gone, log_on_stdout, open_streams
from rewardlab.core.errors import ConfigError, RewardlabError, RunInterrupted, words_of
from rewardlab.core.signals import ignore_at_exit, leave_quickly
from rewardlab.core.terminal import brief, short
from rewardlab.core.values import did_you_mean

OUT_OF_MEMORY = (
    "error: out of memory. Lower --micro-token-budget, end other programs that use the device, or take a smaller model."
    " What was saved before is still there."
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `rewardlab` script.

    Exit status: 2 for an error that the user can correct, 130 after Ctrl-C, 141 if the reader of the output is gone,
    and that of RunInterrupted for a run that was ended early.
    """
    open_streams()
    # A terminal that cannot show σ gets a question mark instead of an error that loses the report.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        _told(arguments)
    finally:
        if arguments is None:  # as a process of its own, which ends now
            ignore_at_exit()
            leave_quickly()


def _told(arguments: Sequence[str] | None) -> None:
    """Run a command, and turn errors into messages and exit statuses."""
    try:
        with log_on_stdout():
            _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
    except RunInterrupted as interrupted:
        complain(str(interrupted))
        sys.exit(interrupted.exit_status)
    except (RewardlabError, OSError) as error:
        if isinstance(error, OSError) and is_gone(error):
            # The reader of the output has closed it, as `| head` does, or the terminal was closed. Python flushes
            # stdout once more at exit, so it is redirected; otherwise that would print an error. 141 is what a shell
            # gives for SIGPIPE.
            discard_output()
            sys.exit(141)
        message = str(error) if isinstance(error, RewardlabError) else words_of(error)
        complain(f"error: {_who(message)}{message}")
        sys.exit(2)
    except (RuntimeError, MemoryError, UnicodeEncodeError) as error:
        if (said := _words_for(error)) is None:
            raise
        complain(said)
        sys.exit(2)
    except KeyboardInterrupt:
        complain("interrupted")
        sys.exit(130)


def _who(message: str) -> str:
    """Return what goes before the error of another process than the first one, unless its message names it already."""
    own = "" if is_first_process() else f"rank {os.environ['RANK']}"
    return f"{own}: " if own and not re.search(rf"\b{re.escape(own)}\b", message) else ""


def _words_for(error: RuntimeError | MemoryError | UnicodeEncodeError) -> str | None:
    """Return the message for an error of Python or torch that the user can correct; None for any other."""
    if isinstance(error, UnicodeEncodeError):
        by = sys.getfilesystemencoding()
        # Python calls all tables of one byte a character by one name.
        own = lookup(by).name if error.encoding == "charmap" else lookup(error.encoding).name
        if lookup(by).name != own or own == "utf-8":
            return None
        return (
            f"error: {brief(error.object)}: cannot be the name of a file here, where the locale's names are in {by}. "
            f"Set PYTHONUTF8=1, or a locale of UTF-8."
        )
    if str(error).startswith("Symlink loop"):  # raised by pathlib before Python 3.13, for a file to write
        return f"error: {error}: it leads back to itself. Remove this link, or name another place."
    from rewardlab.model.out_of_memory import is_out_of_memory

    return OUT_OF_MEMORY if is_out_of_memory(error) else None


def commands() -> Mapping[str, Callable[[Sequence[str]], None]]:
    """Return the commands by their names.

    They are imported here, where Ctrl-C is told in a word, and not above: it takes a part of a second.
    """
    from rewardlab.commands import folders, judging, scoring, training
    from rewardlab.commands.data import data
    from rewardlab.commands.diagnosing import diagnose
    from rewardlab.commands.gold import gold
    from rewardlab.commands.plan import plan
    from rewardlab.commands.rl import rl

    return {
        "quickstart": training.quickstart,
        "train": training.train,
        "probe": training.probe,
        "eval": judging.evaluate,
        "calibrate": judging.calibrate,
        "compare": judging.compare,
        "diagnose": diagnose,
        "data": data,
        "gold": gold,
        "plan": plan,
        "rl": rl,
        "report": judging.report,
        "watch": judging.watch,
        "import": folders.import_,
        "card": folders.card,
        "push": folders.push,
        "score": scoring.score,
        "serve": scoring.serve,
        "verify": folders.verify,
        "export": folders.export,
        "average": folders.average,
    }


def _run(arguments: Sequence[str]) -> None:
    """Run the command that the first argument names. Raises ConfigError if no command has that name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
    elif arguments[0] in ("-V", "--version"):
        print(f"rewardlab {version('rewardlab')}")
    elif (command := (known := commands()).get(arguments[0])) is None:
        near = did_you_mean(short(arguments[0]), known)
        raise ConfigError(f"unknown command {brief(arguments[0])}.{near} Commands: {', '.join(known)}.")
    else:
        command(arguments[1:])


def _overview() -> str:
    """Return the text of `rewardlab --help`."""
    from rewardlab.commands.parsing import PURPOSES, listed

    head = ["rewardlab: reward models you can trust.", "", "usage: rewardlab COMMAND [flags]", ""]
    foot = ["", "rewardlab COMMAND --help lists the flags of a command; --config FILE reads them from YAML or TOML."]
    return "\n".join([*head, *listed(PURPOSES), *foot])
