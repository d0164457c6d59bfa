"""The folder of a run: claimed before anything is computed, cleared only once there is something to put there."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import read_json, remove, require_writable_folder
from rewardlab.core.lock import only_process
from rewardlab.core.other_names import SAME_THING
from rewardlab.core.spec import SPEC_FILE, part_digests, read_spec

logger = logging.getLogger("rewardlab")

MANIFEST = "manifest.json"
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
FOLDERS = ("tensorboard", "profile", "evals", "best", CHECKPOINTS)
"""Those of them that are folders."""
PROBE_FILES = ("probe.json", "heads.npz")
"""What only a probe writes."""
INSIDE: Mapping[str, str] = {
    "evals": r"(step_\d+|(selection|test)\w*|cross_validated)\.(scores\.jsonl|metrics\.json|uncertainty\.jsonl)|"
    r"(precision|live)\.json",
    CHECKPOINTS: r"step_\d+(\.damaged)?",
    "profile": r"trace\.json|operators\.txt",
    "tensorboard": r"events\.out\.tfevents\..+",
}
"""Folders of a run, and what it writes there."""
BEGUN = {"config_hash", "provenance"}
EVALUATED = {"config", "data", "tokens", "provenance"}
SET = {"model", "dataset", "output_dir"}
"""Keys by which the manifest of a run, that of an evaluation, and the settings of a run are known."""
LEFT_OVER = r"\..+\.(tmp|old)-\d+"
"""Names of what is being written, or was when its process was killed (core.files)."""
OWN = (*RUN_FILES, *PROBE_FILES)
EVALUATION_FILES = ("eval.scores.jsonl", "eval.metrics.json", "manifest.json", "precision.json")
"""What `rewardlab eval` writes."""


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


def claim_evaluation(folder: Path, inputs: Iterable[str], *, overwrite: bool) -> None:
    """Raise ConfigError unless `rewardlab eval` may write to `folder`, which this process holds (`only_writer`)."""
    name, parent = folder.absolute().name, folder.absolute().parent
    of_a_run = name in OWN or re.fullmatch(r"step_\d+", name)
    for place in (folder, parent) if of_a_run else (folder,):
        if holds_run(place):
            raise ConfigError(
                f"--output-dir {folder}: {place} holds a run, with files of its own. Choose another folder."
            )
    there = [name for name in EVALUATION_FILES if (folder / name).exists()]
    own = {(folder / name).resolve() for name in there}
    for name in inputs:
        if Path(name).exists() and Path(name).resolve() in own:
            raise ConfigError(f"{name} is a file that --output-dir {folder} would replace. Choose another folder.")
    if there and not _manifest_keys(folder) >= EVALUATED:
        raise ConfigError(
            f"{folder} holds {', '.join(there)}, which no evaluation of rewardlab's wrote. Choose another "
            f"--output-dir, or move them away."
        )
    if there and not overwrite:
        raise ConfigError(
            f"{folder} already holds an evaluation ({', '.join(there)}). Choose another --output-dir, or replace it "
            f"with --overwrite."
        )


def claim_folder(folder: Path, inputs: Iterable[str], *, overwrite: bool, replaces: bool = True) -> None:
    """Raise ConfigError unless a run may write to `folder`, which this process holds (`only_writer`).

    `inputs` are the names of what the run reads: none of them may lie in the run that it would replace. A run that goes
    on in its folder replaces nothing.
    """
    for name in inputs:
        real = Path(os.path.realpath(name))  # not `resolve`, which links that lead to themselves make raise
        if Path(name).exists() and any(
            Path(os.path.realpath(folder / own)) in (real, *real.parents)
            for own in (*OWN, *(p.name for p in folder.glob("step_*")))
        ):
            raise ConfigError(
                f"{name} lies in the run that --output-dir {folder} would replace. Choose another folder."
            )
    steps = [path.name for _, path in saved_steps(folder)]
    found = [name for name in (*OWN, *steps) if (folder / name).exists()]
    if not found:
        return
    if not holds_run(folder):
        raise ConfigError(
            f"{folder} holds {', '.join(found[:4])}{' …' if len(found) > 4 else ''}, which a run would replace, but no "
            f"run of rewardlab's. Choose another --output-dir, or move them away."
        )
    if not overwrite:
        raise ConfigError(f"{folder} already holds a run. Choose another --output-dir, or replace it with --overwrite.")
    _require_own_names(folder)
    if replaces:
        _require_removable(folder, ["best", *steps])


def _require_own_names(folder: Path) -> None:
    """Raise ConfigError if a folder has the name of a file of a run."""
    rooms = [room for room in INSIDE if room != CHECKPOINTS and (folder / room).is_dir()]
    names = [name for name in OWN if name not in FOLDERS] + [
        f"{room}/{path.name}"
        for room in rooms
        for path in sorted((folder / room).iterdir())
        if re.fullmatch(INSIDE[room], path.name)
    ]
    for name in names:
        if (folder / name).is_dir():
            raise ConfigError(
                f"{folder / name} is a folder, and has the name of a file that a run writes. Move it away, or choose "
                f"another --output-dir."
            )


def _require_removable(folder: Path, models: Sequence[str]) -> None:
    """Raise ConfigError unless the folders of models that are there are nothing but what a run saved."""
    there = [folder / name for name in models if (folder / name).exists()]
    for path in there:
        if not (path / SPEC_FILE).is_file():
            raise ConfigError(
                f"{path} is no reward model that a run saved, and would be replaced. Move it away, or choose another "
                f"--output-dir."
            )
    for path in there:
        if added := _added_to_model(path):
            raise ConfigError(
                f"{path} holds {', '.join(added[:4])}{' …' if len(added) > 4 else ''}, which no run wrote, and would "
                f"be removed with it. Move what you need away, or choose another --output-dir."
            )


def holds_run(folder: Path) -> bool:
    """Whether a run began in a folder: its manifest, which is there before anything else, says so.

    Earlier versions wrote the settings first.
    """
    return _manifest_keys(folder) >= BEGUN or _keys(folder / "config.json") >= SET


def _manifest_keys(folder: Path) -> set[str]:
    return _keys(folder / MANIFEST)


def _keys(path: Path) -> set[str]:
    """Those of a JSON object; none if there is none."""
    try:
        found = read_json(path) if path.is_file() else None
    except (OSError, DataError):
        return set()
    return set(found) if isinstance(found, dict) else set()


def clear_folder(folder: Path) -> None:
    """Remove an earlier run that `holds_run`, but for its manifest, and what an interrupted save left. Other files
    stay, also those in folders of the run that no run wrote; `best/` and `step_N/` go as a whole: `claim_folder` has
    seen that nothing else is in them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not holds_run(folder):
        return
    for path in list(folder.iterdir()):
        if path.name in INSIDE and path.is_dir() and not path.is_symlink():
            _clear_inside(path)
        elif path.name != MANIFEST and (path.name in OWN or re.fullmatch(rf"step_\d+|{LEFT_OVER}", path.name)):
            remove(path)


def _clear_inside(folder: Path) -> None:
    """Remove what a run writes in one of its folders, and the folder if nothing else is in it."""
    for path in list(folder.iterdir()):
        foreign = folder.name == CHECKPOINTS and path.suffix != ".damaged" and not (path / "checkpoint.json").is_file()
        if re.fullmatch(LEFT_OVER, path.name) or (re.fullmatch(INSIDE[folder.name], path.name) and not foreign):
            remove(path)
    if left := sorted(path.name for path in folder.iterdir()):
        logger.warning("%s: left as they are, since no run wrote them: %s", folder, ", ".join(left[:5]))
    else:
        folder.rmdir()


def _added_to_model(folder: Path) -> list[str]:
    """Files in a reward-model folder that were not saved with the model: those that its spec does not list."""
    try:
        known = {SPEC_FILE, *read_spec(folder).files}
    except (ArtifactError, DataError) as error:
        raise ConfigError(
            f"{error} So it cannot be told what in {folder} is the run's. Move it away, or choose another --output-dir."
        ) from error
    found = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [name for path in found if (name := path.relative_to(folder).as_posix()) not in known]


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
    """The step at which a reward-model folder of a run was saved; None if it is not there or does not say.

    Raises ArtifactError if what it says changed after it was saved.
    """
    if not (folder / SPEC_FILE).is_file():
        return None
    spec = read_spec(folder)
    if spec.digests and spec.digests.get("provenance") != part_digests(spec)["provenance"]:
        raise ArtifactError(
            f"{folder / SPEC_FILE}: provenance changed after the model was saved. Restore {folder} from a copy, or go "
            f"back to a checkpoint before it with --resume RUN/{CHECKPOINTS}/step_N, once {folder} is moved away."
        )
    step = spec.provenance.get("step")
    return step if isinstance(step, int) else None
