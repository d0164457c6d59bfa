"""Finds the tool that `rewardlab data` names, and calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rewardlab.commands.data import auditing, files, inspecting, mislabels, showing
from rewardlab.commands.parsing import run_tool

TOOLS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {
    "inspect": inspecting.inspect,
    "audit": auditing.audit,
    "mislabels": mislabels.mislabels,
    "convert": files.convert,
    "split": files.split,
    "mix": files.mix,
    "show": showing.show,
}


def data(arguments: Sequence[str]) -> None:
    """Run the tool that the first argument names. Raises ConfigError if there is none of that name."""
    run_tool("data", TOOLS, arguments, usage="DATASET ...")
