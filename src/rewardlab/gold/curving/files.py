"""Where curves go. Only files of its own are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.curving.report import MADE_BY, csv_report, json_report, page
from rewardlab.gold.curving.run import Result
from rewardlab.report import outputs

NAME: Final = "curve"
TABLE: Final = "curve.csv"


def claim(config: CurveConfig) -> None:
    """Make the folder ready, before anything is computed.

    Raises DataError for rows that are not there, before a folder is made beside them, and as `outputs.claim`.
    """
    config.rows.files()
    outputs.claim(config.output_dir, NAME, MADE_BY, overwrite=config.curving.overwrite, also=(TABLE,))


def write(result: Result, config: CurveConfig) -> list[Path]:
    """Write curve.json, curve.md, curve.html and curve.csv; return their paths."""
    tables = {TABLE: csv_report(result)}
    return outputs.write(config.output_dir, NAME, page(result), json_report(result, config), tables)
