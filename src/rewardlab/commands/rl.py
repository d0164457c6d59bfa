"""`rewardlab rl` from its command line: finds the tool that is named, and calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rewardlab.commands.parsing import parse_command, run_tool
from rewardlab.console import print_report, say
from rewardlab.core.signals import BEGINS_ANEW, ended_by_signals
from rewardlab.rl.audit.config import AuditConfig


@ended_by_signals(BEGINS_ANEW)
def audit(arguments: Sequence[str]) -> None:
    """Audit a run. Exit status: 0 if the reward was not exploited, 1 if it was or the evidence did not follow, 2 for an
    error."""
    config = parse_command(AuditConfig, arguments, "rl audit")
    from rewardlab.rl.audit.files import claim, write
    from rewardlab.rl.audit.report import text_report
    from rewardlab.rl.audit.run import audit as audit_run
    from rewardlab.rl.audit.verdicts import exit_status
    from rewardlab.rl.rollout_log import find_logs

    # Report a mistyped name before creating a folder for the results.
    find_logs(config.run)
    claim(config)
    found = audit_run(config)
    # Write files before printing: if a pipe such as `| head` closes the output early, no file is lost.
    written = write(found, config)
    print_report(text_report(found))
    say("", *(f"wrote {path}" for path in written))
    if status := exit_status(found.findings):
        sys.stdout.flush()
        sys.exit(status)


TOOLS: Final[Mapping[str, Callable[[Sequence[str]], None]]] = {"audit": audit}


def rl(arguments: Sequence[str]) -> None:
    """Run the tool that the first argument names. Raises ConfigError if no tool has that name."""
    run_tool("rl", TOOLS, arguments, usage="RUN")
