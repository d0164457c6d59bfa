"""A file with the settings of all stages, as the arguments of their commands.

Each stage reads what the stage before wrote into the folder of the plan:

    samples.jsonl → labels.jsonl → pairs/ → proxy/ → match/, curve/, check/
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rewardlab.core.config_file import read_config_file
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import at_home
from rewardlab.core.terminal import brief
from rewardlab.core.values import did_you_mean

STAGES: Final = ("sample", "label", "build", "train", "match", "curve", "check")
"""Stages in the order of work."""
READS: Final = {
    "label": ("sample", "samples.jsonl"),
    "build": ("label", "labels.jsonl"),
    "train": ("build", "pairs"),
    "match": ("build", "pairs"),
    "curve": ("build", "pairs"),
}
"""Stage -> the stage that writes what it reads, and where."""
SET_HERE: Final = (
    *("output", "output_dir", "target_path", "folder", "plan"),
    *("resume", "overwrite", "restart", "follow_input", "dry_run"),
)
"""Settings that the plan decides for every stage."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the stages do, and where."""

    path: Path
    folder: Path
    settings: Mapping[str, Mapping[str, Any]]
    """Stage -> its settings, in the order of work."""

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that are wanted, in order."""
        return tuple(self.settings)

    def arguments(self, stage: str) -> list[str]:
        """Return the arguments of the command of a stage: those of the plan, and where it reads and writes."""
        given = self.settings[stage]
        return flags_of({name: value for name, value in self._places(stage).items() if name not in given} | dict(given))

    def _places(self, stage: str) -> dict[str, Any]:
        """Return what a stage is given unless the plan says otherwise."""
        at, pairs = self.folder, self.folder / "pairs"
        if self._reads_layout(stage):
            return self._written(stage)
        read: dict[str, dict[str, Any]] = {
            "sample": {},
            "label": {"input": at / "samples.jsonl"},
            "build": {"input": at / "labels.jsonl"},
            "train": {"data": pairs},
            "match": {"input": pairs / "labels.test.jsonl", "train_input": pairs / "labels.train.jsonl"},
            "curve": {"input": pairs / "labels.test.jsonl"},
            "check": {"folder": at},
        }
        return read[stage] | self._written(stage)

    @property
    def labels_its_own_samples(self) -> bool:
        """Whether `label` reads what `sample` of this plan wrote."""
        return {"sample", "label"} <= set(self.stages) and not {"input", "prompts_path"} & set(self.settings["label"])

    def _reads_layout(self, stage: str) -> bool:
        """Return whether a stage reads the layout with one JSON file a fact, so that it is given no file of ours."""
        return stage in ("label", "build", "match", "curve") and "prompts_path" in self.settings[stage]

    def _written(self, stage: str) -> dict[str, Any]:
        at = self.folder
        proxy: dict[str, Any] = {"proxies": [f"proxy={at / 'proxy'}"]}
        written: dict[str, dict[str, Any]] = {
            "sample": {"output": at / "samples.jsonl"},
            "label": {"output": at / "labels.jsonl"},
            "build": {"output_dir": at / "pairs"},
            "train": {"output_dir": at / "proxy"},
            "match": proxy | {"output_dir": at / "match"},
            "curve": proxy | {"output_dir": at / "curve"},
            "check": {"output_dir": at / "check"},
        }
        return written[stage]


def read_plan(path: Path) -> Plan:
    """Return the plan in a file. Raises ConfigError for one that cannot be used."""
    values = {name.replace("-", "_"): value for name, value in read_config_file(path, given_by="PLAN").items()}
    folder = values.pop("folder", None)
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"{path}: `folder` is missing: name the folder in which all stages write.")
    if unknown := [name for name in values if name not in STAGES]:
        near = did_you_mean(unknown[0], STAGES)
        raise ConfigError(f"{path}: unknown stage {unknown[0]!r}.{near} Stages: {', '.join(STAGES)}.")
    if not values:
        raise ConfigError(f"{path}: it has no stage. Write a section for each that is wanted: {', '.join(STAGES)}.")
    settings: dict[str, Mapping[str, Any]] = {}
    for stage in STAGES:
        if stage not in values:
            continue
        section = {} if values[stage] is None else values[stage]
        if not isinstance(section, Mapping):
            raise ConfigError(f"{path}: {stage}: wanted settings by name, got {section!r:.60}.")
        named = {str(name).replace("-", "_"): value for name, value in section.items()}
        if odd := [name for name in section if not str(name)[:1].isalpha()]:
            raise ConfigError(
                f"{path}: {stage}: unknown setting {brief(odd[0])}. `rewardlab gold {stage} --help` lists its flags, "
                f"and a plan names them without the dashes before them."
            )
        if taken := [name for name in named if name in SET_HERE]:
            raise ConfigError(f"{path}: {stage}: {taken[0]} is set by the plan, in `folder`. Leave it out.")
        settings[stage] = named
    return Plan(path=path, folder=at_home(folder), settings=settings)


def require_makers(plan: Plan) -> None:
    """Raise ConfigError for a stage whose input is not there, and is not written by a stage of the plan."""
    for stage, (maker, name) in READS.items():
        given = plan.settings.get(stage, {})
        if stage not in plan.stages or maker in plan.stages or {"input", "data", "prompts_path"} & given.keys():
            continue
        if not (plan.folder / name).exists() and not list(plan.folder.glob(f"{Path(name).stem}-*")):
            raise ConfigError(
                f"{plan.path}: {stage} reads {plan.folder / name}, which is not there, and the plan has no {maker}. "
                f"Add a section {maker}, or give {stage} a file."
            )


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return settings as they are written on the command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{name.replace('_', '-')}")
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        else:
            words.append(f"{flag}={value}")
    return words
