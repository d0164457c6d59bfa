"""`rewardlab diagnose` from its command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rewardlab.commands.parsing import parse_command
from rewardlab.console import print_report
from rewardlab.core.signals import GOES_ON, ended_by_signals
from rewardlab.diagnosing.config import DiagnoseConfig


@ended_by_signals(GOES_ON)
def diagnose(arguments: Sequence[str]) -> None:
    """Run all controls and print their report. Exit status: 0 if no control failed, 1 if one did, 2 for an error."""
    given: set[str] = set()
    config = parse_command(DiagnoseConfig, arguments, "diagnose", given_names=given)
    from rewardlab.data.dataset_names import require_sources

    require_sources(config.data)
    from rewardlab.diagnosing.report import text_report
    from rewardlab.diagnosing.run import diagnose
    from rewardlab.diagnosing.verdicts import exit_status

    diagnosis = diagnose(config, given=given)
    print_report(text_report(diagnosis))
    if status := exit_status(diagnosis.findings):
        sys.stdout.flush()
        sys.exit(status)
