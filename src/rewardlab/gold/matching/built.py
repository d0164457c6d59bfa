"""What `gold build` made of rows: which pairs of replies, where it kept some of them, and how soft their labels are.

A proxy's run knows only these pairs, and no loss below the entropy of these labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from rewardlab.analysis.matching import BoolArray
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import at_home, read_json, sha256_file
from rewardlab.curation.files.writing import MANIFEST
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.building.pairing import compared
from rewardlab.gold.building.run import TOOL
from rewardlab.gold.matching.columns import Part
from rewardlab.gold.matching.runs import RunFacts

DECIDING: Final = ("pairs", "min_margin", "drop_cut", "seed", "soft_tau")
"""Settings of `gold build` that decide which pairs of a row are kept, and their labels."""
CERTAIN: Final = 100.0
"""Log-odds from which on a label leaves no loss that counts."""


def marked(part: Part, files: Sequence[Path]) -> Part:
    """Return a part with what `gold build` made of it, if its rows are those that lie beside preferences."""
    folders = {path.parent for path in files}
    if len(folders) != 1 or not all(path.name.startswith("labels.") for path in files):
        return part
    folder = folders.pop()
    config = _settings(folder)
    if config is None:
        return part
    built_N = _built(part, config)
    return replace(
        part, built_N=built_N, least_loss=_least_loss(part, built_N, config.soft_tau), built_in=folder.resolve()
    )


def least_loss_of(part: Part, run: RunFacts) -> float:
    """Return the lowest loss that a run can have by its data; 0 where they are not known to be those of the part.

    They are known by their names, or by what the files held: a relative name is that of a place which nobody wrote
    down.
    """
    if part.built_in is None or not part.least_loss:
        return 0.0
    files = [at_home(name).resolve() for name in run.dataset]
    are_built = bool(files) and all(part.built_in in (file, file.parent) for file in files)
    if not are_built and run.sums:
        are_built = run.sums <= {sha256_file(file) for file in part.built_in.glob("train.*") if file.is_file()}
    return part.least_loss if are_built else 0.0


def _least_loss(part: Part, built_N: BoolArray | None, tau: float | None) -> float:
    """Return the mean entropy of the labels: no model has a lower loss on them. 0 where all are certain."""
    if tau is None:
        return 0.0
    own = part.replies
    known_N = own.decided_N if built_N is None else own.decided_N & built_N
    if not known_N.any():
        return 0.0
    logit_N = np.minimum(np.abs(own.gold_N[known_N]) / tau, CERTAIN)
    # The entropy of σ(x) is log(1 + exp(−x)) + x·σ(−x).
    return float(np.mean(np.logaddexp(0.0, -logit_N) + logit_N * np.exp(-np.logaddexp(0.0, logit_N))))


def _built(part: Part, config: BuildConfig) -> BoolArray | None:
    """Return [N] whether a comparison was made of each pair; None where one was of every decided pair, or of none."""
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
