"""Proof that a reward-model folder still gives the scores it was saved with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rewardlab.artifact.load import Where, assemble, require_canaries, require_files
from rewardlab.core.spec import read_spec


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was checked."""

    folder: Path
    num_files: int
    num_canaries: int
    largest_distance: float
    """Of the canaries' scores from the canonical ones, in units of max(1, |score|)."""
    unnoticed: tuple[str, ...]
    """Faults that this model's canaries could not reveal, because they hardly change its scores."""


def verify(folder: str | Path) -> Verification:
    """Check files, configuration, template, tokens and canary scores of a folder, in float32.

    Raises ArtifactError naming what is wrong.
    """
    path = Path(folder)
    spec = read_spec(path)
    require_files(path, spec)
    scorer = assemble(path, spec, where=Where(device=torch.device("cpu")), precision="fp32", attention_mode="auto")
    distance = require_canaries(scorer, spec, where=str(path))
    noticed = spec.provenance.get("faults_noticed", {})
    return Verification(
        folder=path,
        num_files=len(spec.files),
        num_canaries=len(spec.canaries),
        largest_distance=distance,
        unnoticed=tuple(fault for fault, seen in noticed.items() if not seen),
    )
