"""Verification that a reward-model folder still gives the scores it was saved with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rewardlab.analysis.faults import separated
from rewardlab.artifact.load import Where, assemble, require_canaries, require_files
from rewardlab.artifact.seal import one_model_of
from rewardlab.core.spec import SCORE_TOLERANCE, read_spec
from rewardlab.core.values import one_of, path_of
from rewardlab.model.load import PRECISION


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of a verification that found no fault."""

    folder: Path
    num_files: int
    num_canaries: int
    precision: str
    """The dtype of the arithmetic, such as `float32`."""
    largest_distance: float
    """Largest distance of a canary's score from its reference in this precision, in units of max(1, |score|)."""
    unnoticed: tuple[str, ...]
    """Faults that this model's canaries could not reveal, because they hardly change its scores."""


def verify(folder: str | Path, *, precision: str = "fp32") -> Verification:
    """Check files, spec, configuration, template, tokens and canary scores of a folder, on the CPU.

    `precision` is as in `load`; scores are compared with the references of the same precision.

    Raises ArtifactError naming what is wrong, and ConfigError for an unknown `precision`.
    """
    path = path_of(folder, "folder")
    precision = one_of(precision, PRECISION, "precision")
    with one_model_of(path):
        spec = read_spec(path)
        require_files(path, spec)
        cpu = Where(device=torch.device("cpu"))
        scorer = assemble(path, spec, where=cpu, precision=precision, attention_mode="auto")
        distance = require_canaries(scorer, spec, where=str(path))
    dtype = str(PRECISION[precision]).removeprefix("torch.")
    noticed = separated(spec.canaries, tolerance=SCORE_TOLERANCE[dtype])
    return Verification(
        folder=path,
        num_files=len(spec.files),
        num_canaries=len(spec.canaries),
        precision=dtype,
        largest_distance=distance,
        unnoticed=tuple(fault for fault, seen in noticed.items() if not seen),
    )
