"""Settings of the tools of `rewardlab plan`. Needs nothing but the standard library and tyro."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rewardlab.core.config import require_between
from rewardlab.core.errors import ConfigError
from rewardlab.core.terminal import short
from rewardlab.core.values import Section, require

Seen = Literal["nothing-run", "no-results", "results-not-opened", "results"]


@dataclass(frozen=True, kw_only=True)
class ReadConfig(Section):
    """Which plan is read, and at which scale."""

    plan: Annotated[Path, tyro.conf.Positional]
    """YAML or TOML file with the plan."""
    scale: str | None = None
    """One of the scales that the plan names, such as `tiny`: smaller models and data, the same questions."""
    probe: bool = False
    """Train heads on the frozen backbone only, whose states are computed once for all runs; arms that need the
    backbone to train are left out and named."""
    set: tuple[str, ...] = ()
    """Settings of the plan's base that are replaced, as `NAME=VALUE`: `dataset=mine.jsonl model=my-model`."""

    def sets(self) -> dict[str, Any]:
        """Return the settings of `--set` by name. Raises ConfigError for one that is not `NAME=VALUE`."""
        from rewardlab.core.config_yaml import parse_yaml

        found: dict[str, Any] = {}
        for word in self.set:
            name, equals, value = word.partition("=")
            if not name or not equals:
                raise ConfigError(f"--set {word}: wanted NAME=VALUE, such as dataset=mine.jsonl.")
            try:
                found[name.replace("-", "_")] = parse_yaml(value)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"--set {word}: {error}") from error
        return found


@dataclass(frozen=True, kw_only=True)
class FreezeConfig(ReadConfig):
    """A plan, and the folder that becomes its study."""

    output_dir: Path | None = None
    """Folder of the study; by default `studies/` with the name of the plan and its scale."""

    @property
    def folder(self) -> Path:
        """The folder of the study."""
        if self.output_dir is not None:
            return self.output_dir
        ending = "".join(f"-{one}" for one in (self.scale, "probe" if self.probe else None) if one)
        return Path("studies") / f"{self.plan.stem}{ending}"


@dataclass(frozen=True, kw_only=True)
class AmendConfig(Section):
    """Why the plan of a study, edited in its folder, is changed."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study, whose plan.yaml was edited."""
    reason: str = ""
    """Why; the report shows it."""
    seen: Seen | None = None
    """What had been seen: no run had begun, none had been judged, nobody had looked at the results, or results had been
    seen."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Which runs of a study are done here, and how many at a time."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study."""
    jobs: int = 1
    """Runs at a time."""
    gpus: tuple[str, ...] = ()
    """GPUs to use, one for each run at a time: `0 1 2 3`."""
    phases: tuple[str, ...] = ()
    """Phases to run; by default all, each after the gate of the one before."""
    arms: tuple[str, ...] = ()
    """Arms to run; by default all."""
    redo: tuple[str, ...] = ()
    """Runs to do again from the start, such as `full/seed_0`, or all runs of an arm, `full`; the report says so."""
    past_gate: str | None = None
    """Phase whose gate is passed though it is not open; a reason is asked for, and the report says so."""
    reason: str = ""
    """Why a gate is passed though it is not open."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a number out of its range, names of no GPUs, and a gate without a reason."""
        require_between(self, jobs=(1, 1024))
        for name in self.gpus:
            # CUDA hides all GPUs from a process that is given a name it does not know, and the run would take the CPU.
            require(
                re.fullmatch(r"\d+|(GPU|MIG)-\S+", name) is not None,
                f"--gpus {short(name)}: name each GPU by its number, as in --gpus 0 1, or by its UUID (GPU-…).",
            )
        require(
            len(self.gpus) <= self.jobs,
            f"--gpus {' '.join(self.gpus)}: with --jobs {self.jobs} only {self.jobs} of them would be used. Add --jobs "
            f"{len(self.gpus)}.",
        )
        require(
            self.past_gate is None or bool(self.reason.strip()),
            f"--past-gate {short(self.past_gate or '')}: say why with --reason. The report shows it.",
        )


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Section):
    """One run of a study."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study."""
    run: str
    """The run, such as `full/seed_0`."""
    redo: bool = False
    """Do it again from the start."""


@dataclass(frozen=True, kw_only=True)
class GateConfig(Section):
    """A gate of a study."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study."""
    phase: str
    """Phase whose gate is judged."""


@dataclass(frozen=True, kw_only=True)
class StatusConfig(Section):
    """A study whose state is shown."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Section):
    """A study to report on."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study."""
    output_dir: Path | None = None
    """Folder of the report; by default `report/` in that of the study."""
    overwrite: bool = False
    """Replace files of these names that `rewardlab plan report` did not write."""


@dataclass(frozen=True, kw_only=True)
class ArchiveConfig(Section):
    """A study to keep."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study."""
    output: Path | None = None
    """The archive, .tar.gz; by default beside the folder of the study."""
    weights: bool = False
    """Keep the models and checkpoints too, and not only what the report needs and says."""


@dataclass(frozen=True, kw_only=True)
class SubmitConfig(Section):
    """A study to hand to Slurm."""

    study: Annotated[Path, tyro.conf.Positional]
    """Folder of the study."""
    phases: tuple[str, ...] = ()
    """Phases to submit; by default all that are not done."""
    dry_run: bool = False
    """Write the files, and say what would be submitted."""
    again: bool = False
    """Submit even if jobs of this study are queued."""
