"""The folder of a run: claimed before anything is computed, cleared only once there is something to put there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import remove, require_writable_folder

RUN_FILES = (
    "config.json",
    "manifest.json",
    "metrics.csv",
    "metrics.jsonl",
    "warnings.jsonl",
    "memory.csv",
    "gpu.csv",
    "tensorboard",
    "profile",
    "reward_distributions.json",
    "samples.txt",
    "report.txt",
    "evals",
    "best",
)
"""What a training run writes, beside its `step_N/` folders."""
PROBE_FILES = ("probe.json", "heads.npz")
"""What only a probe writes."""
OWN = (*RUN_FILES, *PROBE_FILES)


def claim_folder(folder: Path, inputs: Iterable[str], *, overwrite: bool) -> None:
    """Raise ConfigError unless a run may write to `folder`.

    `inputs` are the names of what the run reads: none of them may lie in the run that it would replace.
    """
    require_writable_folder(folder, "--output-dir")
    for name in inputs:
        path = Path(name)
        if path.exists() and any(
            (folder / own).resolve() in (path.resolve(), *path.resolve().parents)
            for own in (*OWN, *(p.name for p in folder.glob("step_*")))
        ):
            raise ConfigError(
                f"{name} lies in the run that --output-dir {folder} would replace. Choose another folder."
            )
    if not any((folder / name).exists() for name in OWN) and not list(folder.glob("step_*")):
        return
    if not overwrite:
        raise ConfigError(f"{folder} already holds a run. Choose another --output-dir, or replace it with --overwrite.")


def clear_folder(folder: Path) -> None:
    """Remove an earlier run, and what an interrupted save left; other files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name in OWN or re.fullmatch(r"step_\d+|\.(best|step_\d+)\.(tmp|old)-\d+", path.name):
            remove(path)
