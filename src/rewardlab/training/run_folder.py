"""The folder of a run: claimed before anything is computed, cleared only once there is something to put there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rewardlab.core.errors import ConfigError
from rewardlab.core.files import remove, require_writable_folder
from rewardlab.core.lock import only_process
from rewardlab.core.spec import SPEC_FILE, read_spec
from rewardlab.training.presets import SAME_THING

CHECKPOINTS = "checkpoints"
"""Folder, in that of a run, of what resuming needs."""
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
    CHECKPOINTS,
)
"""What a training run writes, beside its `step_N/` folders."""
PROBE_FILES = ("probe.json", "heads.npz")
"""What only a probe writes."""
OWN = (*RUN_FILES, *PROBE_FILES)


def run_of(name: str) -> Path:
    """The folder of the run that a name after `--resume` means: a run's, or a checkpoint's.

    Raises ConfigError if it is neither.
    """
    path = Path(name)
    run = path.parent.parent if path.parent.name == CHECKPOINTS else path
    if not (run / "config.json").is_file():
        raise ConfigError(
            f"--resume {name}: there is no run. Give the folder of a run, or of one of its {CHECKPOINTS}/step_N."
        )
    return run


def with_settings_of_run(arguments: Sequence[str]) -> list[str]:
    """Flags of `rewardlab train`, with the settings of the run that `--resume` names where no --config does; with
    `--resume auto` they are given again. Raises ConfigError for a name that is no run.

    What is given goes before what the run says, in other units too: `--epochs` before its steps.
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = {flag: value for flag, value in pairwise([*words, ""]) if flag in ("--resume", "--config", "--output-dir")}
    if given.get("--resume", "auto") in ("auto", ""):
        return list(arguments)
    run = run_of(given["--resume"])
    settings: list[str] = []
    if "--config" not in given:
        asked = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
        settings = ["--config", str(run / "config.json")]
        for name, other in SAME_THING:  # a run's own settings have the first of each
            if other in asked and name not in asked:
                settings += [f"--{name}", "None"]
    return [*settings, *([] if "--output-dir" in given else ["--output-dir", str(run)]), *arguments]


@contextmanager
def only_writer(folder: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Create the folder of a run if need be, and keep other processes from writing there (`only_process`).

    Raises RewardlabError if nothing can be written, ConfigError if another process is at work there.
    """
    require_writable_folder(folder, "--output-dir")
    with only_process(folder, "--output-dir", wait_s=wait_s):
        yield


def claim_folder(folder: Path, inputs: Iterable[str], *, overwrite: bool) -> None:
    """Raise ConfigError unless a run may write to `folder`, which this process holds (`only_writer`).

    `inputs` are the names of what the run reads: none of them may lie in the run that it would replace.
    """
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


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every `step_N/` in a folder, in order."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := re.fullmatch(r"step_(\d+)", path.name))]
    return sorted(found)


def sweep(folder: Path) -> None:
    """Remove what killed processes left of files and folders that they were writing in a run (see core.files)."""
    rooms = (folder, folder / "evals", folder / CHECKPOINTS)
    for path in [path for room in rooms if room.is_dir() for path in room.iterdir()]:
        match = re.fullmatch(r"\.(.+)\.(tmp|old)-\d+", path.name)
        if match and match[2] == "old" and not (target := path.with_name(match[1])).exists():
            path.rename(target)  # it was moved aside, and its successor never came
        elif match:
            remove(path)


def holds_models(folder: Path) -> bool:
    """Whether there is more in the folder of a run than what its first seconds leave."""
    checkpoints = folder / CHECKPOINTS
    return folder.is_dir() and bool(
        (folder / "best").exists() or saved_steps(folder) or (checkpoints.is_dir() and any(checkpoints.glob("step_*")))
    )


def saved_step(folder: Path) -> int | None:
    """The step at which a reward-model folder of a run was saved; None if it is not there or does not say."""
    if not (folder / SPEC_FILE).is_file():
        return None
    step = read_spec(folder).provenance.get("step")
    return step if isinstance(step, int) else None
