"""`rewardlab gold` from its command line: finds the stage that is named, and calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rewardlab.commands.parsing import parse_command, run_tool
from rewardlab.console import say
from rewardlab.core.errors import RunInterrupted

THEIRS: Final[Mapping[str, Mapping[str, str]]] = {
    "sample": {"prompts_path": "prompts", "target_path": "output", "model_path": "model"},
    "label": {"target_path": "output", "model_name": "model", "model_path": "model"},
}
"""Stage -> flag of the scripts that this replaces -> ours."""


def translated(arguments: Sequence[str], stage: str) -> list[str]:
    """Return arguments with the flags of the scripts that `rewardlab gold` replaces by our names."""
    ours = THEIRS.get(stage, {})
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = ours.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        found.append(argument if name is None else f"--{name.replace('_', '-')}{equals}{value}")
    return found


def settings_for(config_type: type[Any], arguments: Sequence[str], stage: str) -> Any:
    """Return the settings of a stage from its arguments. Raises as `parse_command`."""
    return parse_command(config_type, translated(arguments, stage), f"gold {stage}")


@contextmanager
def going_on_later() -> Iterator[None]:
    """Let signals end a stage at once, and say that the same command goes on."""
    from rewardlab.core.signals import RESUME_LATER, Terminated, raised_at_once

    try:
        with raised_at_once():
            yield
    except Terminated as ended:
        message = f"stopped by {ended}. The same command goes on from what is finished."
        raise RunInterrupted(message, exit_status=RESUME_LATER) from None


def sample(arguments: Sequence[str]) -> None:
    from rewardlab.gold.sampling.config import SampleConfig

    config = settings_for(SampleConfig, arguments, "sample")
    from rewardlab.gold.sampling.report import text_report
    from rewardlab.gold.sampling.run import sample

    with going_on_later():
        say(text_report(sample(config)))


def label(arguments: Sequence[str]) -> None:
    from rewardlab.gold.labelling.config import LabelConfig

    config = settings_for(LabelConfig, arguments, "label")
    from rewardlab.gold.labelling.report import text_report
    from rewardlab.gold.labelling.run import label

    with going_on_later():
        say(text_report(label(config)))


TOOLS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {"sample": sample, "label": label}


def gold(arguments: Sequence[str]) -> None:
    """Run the stage that the first argument names. Raises ConfigError if there is none of that name."""
    run_tool("gold", TOOLS, arguments, usage="")
