"""Where the results of `rewardlab gold match` go."""

from __future__ import annotations

from pathlib import Path

from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.report import MADE_BY, NAME, json_report, page
from rewardlab.gold.matching.run import Matched
from rewardlab.report import outputs


def claim(config: MatchConfig) -> None:
    """Make the folder ready, before anything is scored.

    Raises DataError for rows that are not there, before a folder is made beside them, and as `outputs.claim`.
    """
    config.rows.files()
    config.train.files()
    outputs.claim(config.output_dir, NAME, MADE_BY, overwrite=config.matching.overwrite)


def write(matched: Matched, config: MatchConfig) -> list[Path]:
    """Write match.json, match.md and match.html; return their paths."""
    return outputs.write(config.output_dir, NAME, page(matched), json_report(matched, config))
