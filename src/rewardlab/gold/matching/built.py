"""Which pairs of replies `gold build` made of rows, where it kept some of them: a proxy's run knows only these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.matching import BoolArray
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_json
from rewardlab.curation.files.writing import MANIFEST
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.building.pairing import compared
from rewardlab.gold.building.run import TOOL
from rewardlab.gold.matching.columns import Part

DECIDING: Final = ("pairs", "min_margin", "drop_cut", "seed")
"""Settings of `gold build` that decide which pairs of a row are kept."""


def marked(part: Part, files: Sequence[Path]) -> Part:
    """Return a part with the pairs that `gold build` made comparisons of, if its rows are those of a folder of it."""
    return replace(part, built_N=_built(part, files))


def _built(part: Part, files: Sequence[Path]) -> BoolArray | None:
    """Return [N] whether a comparison was made of each pair, by the manifest beside the rows.

    None where no manifest tells, or where every decided pair was compared, or none.
    """
    folders = {path.parent for path in files}
    if len(folders) != 1 or not all(path.name.startswith("labels.") for path in files):
        return None
    config = _settings(folders.pop())
    if config is None:
        return None
    kept = [compared(row, config) for row in part.rows]
    own = part.replies
    places = zip(
        own.row_N.tolist(), part.reply_R[own.first_N].tolist(), part.reply_R[own.second_N].tolist(), strict=True
    )
    built_N = np.array([(first, second) in kept[row] for row, first, second in places], dtype=bool)
    of_decided = built_N[own.decided_N]
    return built_N if of_decided.any() and not of_decided.all() else None


def _settings(folder: Path) -> BuildConfig | None:
    """Return how the preferences of a folder were built; None where nothing that can be read says so."""
    try:
        told = read_json(folder / MANIFEST)
        if not isinstance(told, dict) or told.get("tool") != TOOL:
            return None
        return BuildConfig(output_dir=folder, **{name: told["settings"][name] for name in DECIDING})
    except (OSError, ValueError, KeyError, TypeError, ConfigError, DataError):
        # A manifest of an earlier version, or one that was edited: then nothing is known of the pairs.
        return None
