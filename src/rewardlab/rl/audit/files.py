"""Where the results of an audit go. Only files of its own are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rewardlab.report import outputs
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.report import MADE_BY, json_report, page
from rewardlab.rl.audit.run import Audit

NAME: Final = "audit"


def folder_of(config: AuditConfig) -> Path:
    """Return the folder of the results."""
    if config.output_dir is not None:
        return config.output_dir
    return (config.run.parent if config.run.is_file() else config.run) / "audit"


def claim(config: AuditConfig) -> None:
    """Make the folder ready, before anything is computed. Raises as `outputs.claim`."""
    outputs.claim(folder_of(config), NAME, MADE_BY, overwrite=config.overwrite)


def write(audit: Audit, config: AuditConfig) -> list[Path]:
    """Write audit.json, audit.md and audit.html; return their paths."""
    return outputs.write(folder_of(config), NAME, page(audit), json_report(audit, config))
