"""Settings of `rewardlab gold run`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from rewardlab.core.values import Section

Stage = Literal["sample", "label", "build", "train", "match", "curve", "check"]


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Which stages are done."""

    plan: Annotated[Path, tyro.conf.Positional]
    """YAML or TOML with `folder` and a section for each stage that is wanted, which holds the flags of its command."""
    until: Stage | None = None
    """Last stage that is done."""
    redo: Stage | None = None
    """Do this stage and those after it again, though they are complete or were made of something else; replies and
    scores that are still right are kept."""
    dry_run: bool = False
    """Say which commands would be run, and which stages are complete."""
