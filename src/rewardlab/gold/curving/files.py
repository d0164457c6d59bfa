"""Where curves go. Only files of its own are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json, require_writable_folder, write_json, write_text
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.curving.report import MADE_BY, csv_report, json_report, markdown, page
from rewardlab.gold.curving.run import Result

FILES: Final = ("curve.json", "curve.csv", "curve.md", "curve.html")


def claim(config: CurveConfig) -> None:
    """Make the folder ready, before anything is computed.

    Raises ConfigError if it holds files of these names that `gold curve` did not write, RewardlabError if it cannot be
    written.
    """
    folder = config.output_dir
    require_writable_folder(folder, "--output-dir")
    there = [name for name in FILES if (folder / name).exists()]
    if there and not config.curving.overwrite and not _is_own(folder / FILES[0]):
        raise ConfigError(
            f"{folder / there[0]} is there, and `{MADE_BY}` did not write it. Name another folder with --output-dir, "
            f"or replace it with --overwrite."
        )


def write(result: Result, config: CurveConfig) -> list[Path]:
    """Write curve.json, curve.csv, curve.md and curve.html; return their paths."""
    folder = config.output_dir
    write_text(folder / "curve.html", page(result))
    write_text(folder / "curve.md", markdown(result))
    write_text(folder / "curve.csv", csv_report(result))
    write_json(folder / "curve.json", json_report(result, config))
    return [folder / name for name in FILES]


def _is_own(path: Path) -> bool:
    try:
        values = read_json(path)
    except (OSError, DataError):
        return False
    return isinstance(values, Mapping) and values.get("made_by") == MADE_BY
