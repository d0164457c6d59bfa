"""Where the results of an audit go. Only files of its own are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, require_writable_folder, write_json, write_text
from rewardlab.rl.audit.config import AuditConfig
from rewardlab.rl.audit.report import MADE_BY, json_report, markdown, page
from rewardlab.rl.audit.run import Audit

FILES: Final = ("audit.json", "audit.md", "audit.html")


def folder_of(config: AuditConfig) -> Path:
    """Return the folder of the results."""
    if config.output_dir is not None:
        return config.output_dir
    return (config.run.parent if config.run.is_file() else config.run) / "audit"


def claim(config: AuditConfig) -> None:
    """Make the folder ready, before anything is computed.

    Raises ConfigError if it holds files of these names that an audit did not write, RewardlabError if it cannot be
    written.
    """
    folder = folder_of(config)
    require_writable_folder(folder, "--output-dir")
    there = [name for name in FILES if (folder / name).exists()]
    if there and not config.overwrite and not _is_own(folder / FILES[0]):
        raise ConfigError(
            f"{folder / there[0]} is there, and `{MADE_BY}` did not write it. Name another folder with --output-dir, "
            f"or replace it with --overwrite."
        )


def write(audit: Audit, config: AuditConfig) -> list[Path]:
    """Write audit.json, audit.md and audit.html; return their paths."""
    folder = folder_of(config)
    write_text(folder / "audit.html", page(audit))
    write_text(folder / "audit.md", markdown(audit))
    write_json(folder / "audit.json", json_report(audit, config))
    return [folder / name for name in FILES]


def _is_own(path: Path) -> bool:
    try:
        values = read_json(path)
    except (OSError, DataError):
        return False
    return isinstance(values, Mapping) and values.get("made_by") == MADE_BY
