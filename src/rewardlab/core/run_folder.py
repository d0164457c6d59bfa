"""The folder of a run: who may write to it, what belongs to a run, and what is removed before a new one.

A folder is claimed before anything is computed, so that a mistake costs seconds, and it is cleared only when the new
run has something to write, so that a run that fails early destroys nothing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, get_args

from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import UTF8, read_json, sha256_text
from rewardlab.core.folders import move, remove, require_writable_folder
from rewardlab.core.lock import LOCK, only_process
from rewardlab.core.other_names import SAME_THING
from rewardlab.core.placing import MOVING, WRITTEN, settle, settle_to_read
from rewardlab.core.spec import SPEC_FILE, part_digests, read_spec
from rewardlab.core.suite_names import SuiteName

logger = logging.getLogger("rewardlab")

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""Folder, inside the run's, that holds what resuming needs."""
ENDED: Final = "ended.json"
"""What ended a run before its last step; a run that goes on, or came to its end, has no such file."""
RUN_FILES = (
    "config.json",
    "manifest.json",
    "metrics.csv",
    "metrics.jsonl",
    "warnings.jsonl",
    ENDED,
    "memory.csv",
    "gpu.csv",
    "tensorboard",
    "profile",
    "reward_distributions.json",
    "samples.txt",
    "report.txt",
    "report.html",
    "report.md",
    "evals",
    "best",
    CHECKPOINTS,
)
"""Names that a training run writes, beside its `step_N/` folders."""
FOLDERS = ("tensorboard", "profile", "evals", "best", CHECKPOINTS)
"""The names in `RUN_FILES` that are folders."""
PROBE_FILES = ("probe.json", "heads.npz")
"""Names that only a probe writes."""
CARD = "README.md"
"""Name of the model card that `rewardlab report --card` adds to a reward-model folder."""
CARD_MARK = "<!-- rewardlab card "
"""Begins the line of a card that holds its checksum."""
INSIDE: Mapping[str, str] = {
    "evals": r"(step_\d+|(selection|test)\w*|cross_validated)\.(scores\.jsonl|metrics\.json|uncertainty\.jsonl)|"
    r"(precision|live|states)\.json",
    CHECKPOINTS: r"step_\d+(\.damaged)?",
    "profile": r"trace\.json|operators\.txt",
    "tensorboard": r"events\.out\.tfevents\..+",
}
"""Folder of a run -> pattern of the names that a run writes in it. Other files there belong to somebody else."""
BEGUN = {"config_hash", "provenance"}
EVALUATED = {"config", "data", "tokens", "provenance"}
SET = {"model", "dataset", "output_dir"}
"""Keys by which three files are recognised: the manifest of a run (`BEGUN`), the manifest of an evaluation
(`EVALUATED`) and the settings of a run (`SET`)."""
LEFT_OVER = r"\..+\.(tmp|old)-\d+"
"""Pattern of the temporary names of core.files: something is being written, or its process was killed."""
OWN = (*RUN_FILES, *PROBE_FILES)
SCORES_SUM: Final = "scores_sha256"
"""Entry in the metrics of an evaluation: the SHA-256 of the file with its scores."""
ALL: Final = "all"
"""Entry there, and row of tables, with the results over all rows; those of each source stand beside it."""
JUDGED_BY: Final = ("beta", "calibrated")
"""Entries there that say by which β the scores were judged."""
SPEC_SUM: Final = "spec_sha256"
"""Entry in the manifest of an evaluation: the SHA-256 of the spec of the model that was judged."""
MODELS_FILE: Final = "models.json"
"""The file that `rewardlab eval` writes for several models: name of a model, and of its folder -> facts about it."""
MISTAKES: Final = "mistakes.jsonl"
SLICES: Final = "slices.jsonl"
GOLD: Final = "gold.jsonl"
"""Endings of three files beside the scores of an evaluation: the texts of its worst mistakes, the columns by which it
is divided into slices, and the gold scores of its replies."""
COMBINED = ("mean", "minimum", "lower")
"""Endings of the names of combinations of an ensemble (analysis.ensembles.COMBINATIONS)."""
SCORED = ("eval", "fitted", "judged", *(f"ensemble.{how}" for how in COMBINED))
"""Names of evaluations that `rewardlab eval` and `rewardlab calibrate` write."""
SUITE_FILES = tuple(f"suite.{name}.{ending}" for name in get_args(SuiteName) for ending in ("scores.jsonl", "json"))
EVALUATION_FILES = (
    *(f"{name}.{ending}" for name in SCORED for ending in ("scores.jsonl", "metrics.json")),
    "manifest.json",
    "precision.json",
    "eval.judgement.json",
    f"eval.{MISTAKES}",
    f"eval.{SLICES}",
    f"eval.{GOLD}",
    "eval.perturbed.json",
    MODELS_FILE,
    "ensemble.json",
    "calibration.json",
    "report.txt",
    "report.html",
    "report.md",
    *SUITE_FILES,
)
"""Names that `rewardlab eval` and `rewardlab calibrate` write; those of `SUITE_FILES` for `--suite`."""


def source_apart(source: str, others: Sequence[str] = (ALL,)) -> str:
    """Return the name of a source, in quotes if it is one of the names that stand beside those of sources."""
    return f"'{source}'" if source.strip("'") in others else source


def run_of(name: str) -> Path:
    """Return the folder of the run that the value of `--resume` names: the run's own, or that of a checkpoint in it.

    Raises ConfigError if it is neither.
    """
    path = Path(name)
    run = path.parent.parent if path.parent.name == CHECKPOINTS else path
    if (run / SPEC_FILE).is_file():
        raise ConfigError(
            f"--resume {name}: a model, not a run. Give its run's folder, or begin one by --model {name}."
        )
    if not (run / "config.json").is_file():
        raise ConfigError(
            f"--resume {name}: no run found there. Give the folder of a run, or of one of its {CHECKPOINTS}/step_N."
        )
    if run != path and not os.path.lexists(path):
        there = ", ".join(folder.name for _, folder in saved_steps(path.parent)) if path.parent.is_dir() else ""
        raise ConfigError(f"--resume {name}: no such checkpoint. There is {there or 'none'} in {path.parent}.")
    return run


def with_settings_of_run(arguments: Sequence[str]) -> list[str]:
    """Return the flags of `rewardlab train`, with the settings of the run that `--resume` names added in front.

    Settings are added only if no `--config` is given. `--resume auto` adds none: there the settings are given again.
    A flag that is given overrides the run's setting, also in other units: `--epochs` overrides the run's steps.

    Raises ConfigError if `--resume` names something that is not a run.
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = {flag.replace("_", "-"): value for flag, value in pairwise([*words, ""]) if flag.startswith("--")}
    if given.get("--resume", "auto") in ("auto", "", "None"):
        return list(arguments)
    run = run_of(given["--resume"])
    settings: list[str] = []
    if "--config" not in given:
        asked = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
        settings = ["--config", str(run / "config.json")]
        # The settings of a run have the first of each pair (steps, not epochs): beside the other it would be an error.
        for name, other in SAME_THING:
            if other in asked and name not in asked:
                settings += [f"--{name}", "None"]
        if given.get("--lr-scheduler") == "constant" and "warmup_steps" not in asked:  # it has no warm-up
            settings += ["--warmup_steps", "None"]
    return [*settings, *([] if "--output-dir" in given else ["--output-dir", str(run)]), *arguments]


@contextmanager
def only_writer(folder: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Create the folder of a run if needed, and lock it against other processes (see `only_process`).

    What a process left there that was killed while it moved results into place is put back (see `settle`).

    Raises RewardlabError if nothing can be written there, ConfigError if another process holds the folder.
    """
    require_writable_folder(folder, "--output-dir")
    with only_process(folder, "--output-dir", wait_s=wait_s):
        settle(folder)
        yield


def settle_if_free(folder: Path) -> None:
    """Do what `only_writer` does to what a killed process left, before a folder is claimed without being locked.

    Raises as `only_writer` does, but only if there is anything to do.
    """
    if (folder / MOVING).exists():
        with only_writer(folder):
            pass


def judged_together(folder: Path) -> list[Path]:
    """Return the folders of the models that one `rewardlab eval` judged, in its order; empty for a single model.

    Missing folders are left out, with a warning. Raises as `settle_to_read` does.
    """
    settle_to_read(folder)
    try:
        value = read_json(folder / MODELS_FILE) if (folder / MODELS_FILE).is_file() else None
    except (OSError, DataError):
        value = None
    places = [folder / name for name in value if Path(name).name == name] if isinstance(value, dict) else []
    found = [place for place in places if place.is_dir() and any(place.glob("*.scores.jsonl"))]
    if found and (gone := [place.name for place in places if place not in found]):
        logger.warning("%s: %s names %s, of which nothing is there", folder, MODELS_FILE, ", ".join(gone))
    return found


def claim_folder(folder: Path, inputs: Iterable[str], *, overwrite: bool, replaces: bool = True) -> None:
    """Raise ConfigError unless a run may write to `folder`, which this process has locked (`only_writer`).

    `inputs` are the names of what the run reads: none of them may lie in the run that it would replace. `replaces` is
    False for a run that is resumed in its folder, which replaces nothing.
    """
    for name in inputs:
        # `Path.resolve` raises for a link that leads to itself; `os.path.realpath` does not.
        real = Path(os.path.realpath(name))
        if Path(name).exists() and any(
            Path(os.path.realpath(folder / own)) in (real, *real.parents)
            for own in (*OWN, *(p.name for p in folder.glob("step_*")))
        ):
            raise ConfigError(
                f"{name} lies in the run that --output-dir {folder} would replace. Choose another folder."
            )
    steps = [path.name for _, path in saved_steps(folder)]
    there = [name for name in (*OWN, *steps) if (folder / name).exists()]
    if not there:
        return
    if not holds_run(folder):
        raise ConfigError(
            f"{folder} holds {', '.join(there[:4])}{' …' if len(there) > 4 else ''}, which a run would replace, but no "
            f"rewardlab run. Choose another --output-dir, or move them away."
        )
    if not overwrite:
        held = any((folder / CHECKPOINTS).glob("step_*"))
        raise ConfigError(
            f"{folder} already holds a run. "
            + ("Go on with it by --resume auto, choose" if held else "Choose")
            + " another --output-dir, or replace it with --overwrite."
        )
    _require_own_names(folder)
    if replaces:
        _require_removable(folder, ["best", *steps])


def _require_own_names(folder: Path) -> None:
    """Raise ConfigError if a folder has the name of a file that a run writes, since writing the file would fail."""
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
    """Raise ConfigError unless the folders of saved models hold only what a run saved.

    These folders are removed as a whole before a new run, so anything that somebody put there would be lost.
    """
    there = [folder / name for name in models if (folder / name).exists()]
    for path in there:
        if not (path / SPEC_FILE).is_file():
            raise ConfigError(
                f"{path} is not a reward model that a run saved, and would be replaced. Move it away, or choose "
                f"another --output-dir."
            )
    for path in there:
        if added := _added_to_model(path):
            raise ConfigError(
                f"{path} holds {', '.join(added[:4])}{' …' if len(added) > 4 else ''}, which no run wrote and which "
                f"would be removed with it. Move what you need away, or choose another --output-dir."
            )


def holds_run(folder: Path) -> bool:
    """Return whether a run began in a folder, by its manifest, which a run writes before anything else.

    Earlier versions wrote config.json first, so its settings are taken as a sign too.
    """
    return manifest_keys(folder) >= BEGUN or _keys(folder / "config.json") >= SET


def manifest_keys(folder: Path) -> set[str]:
    """Return the keys of the manifest in a folder; none if there is no manifest that can be read."""
    return _keys(folder / MANIFEST)


def _keys(path: Path) -> set[str]:
    """Return the keys of the JSON object in a file; none if there is no such object."""
    try:
        value = read_json(path) if path.is_file() else None
    except (OSError, DataError):
        return set()
    return set(value) if isinstance(value, dict) else set()


def clear_folder(folder: Path) -> None:
    """Remove an earlier run (see `holds_run`) except its manifest, and what an interrupted save left.

    Files that no run wrote stay, also inside the folders of the run. `best/` and `step_N/` are removed as a whole:
    `claim_folder` has checked that they hold nothing else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not holds_run(folder):
        return
    for path in [folder / name for name in written_by_run(folder)]:
        # The manifest stays until the new run replaces it: if this process is killed halfway, it still marks the
        # folder as a run, so that the next one may clear the rest.
        if path != folder / MANIFEST:
            remove(path)
    for room in [folder / name for name in INSIDE]:
        if room.is_dir() and not room.is_symlink() and not any(room.iterdir()):
            room.rmdir()


def written_by_run(folder: Path) -> list[str]:
    """Return the names of what an earlier run (see `holds_run`) wrote to a folder, and an interrupted save left there;
    none if there is no run. Those in the folders of the run are paths."""
    if not holds_run(folder):
        return []
    names: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.name in INSIDE and path.is_dir() and not path.is_symlink():
            names += _written_inside(path) if any(path.iterdir()) else [path.name]
        elif path.name in OWN or re.fullmatch(rf"step_\d+|{LEFT_OVER}", path.name):
            names.append(path.name)
    return [name for name in names if not name.startswith(WRITTEN)]


def _written_inside(room: Path) -> list[str]:
    """Return what a run wrote in one of its folders, as paths, and warn of what else is there, which stays."""
    own: list[str] = []
    others: list[str] = []
    for path in sorted(room.iterdir()):
        # A folder that is named like a checkpoint but has no checkpoint.json was not written by a run.
        foreign = room.name == CHECKPOINTS and path.suffix != ".damaged" and not (path / "checkpoint.json").is_file()
        is_own = re.fullmatch(LEFT_OVER, path.name) or (re.fullmatch(INSIDE[room.name], path.name) and not foreign)
        (own if is_own else others).append(path.name)
    if others:
        logger.warning("%s: not removed, since no run wrote them: %s", room, ", ".join(others[:5]))
    return [f"{room.name}/{name}" for name in own]


def _added_to_model(folder: Path) -> list[str]:
    """Return the files in a reward-model folder that were not saved with the model: those that its spec does not list.

    Raises ConfigError if the spec cannot be read, since it is then unknown which files belong to the model.
    """
    try:
        known = {SPEC_FILE, *read_spec(folder).files}
    except (ArtifactError, DataError) as error:
        raise ConfigError(
            f"{error} So it is unknown which files in {folder} a run wrote. Move it away, or choose another "
            f"--output-dir."
        ) from error
    if is_own_card(folder / CARD):
        known.add(CARD)
    if (folder / LOCK).is_file() and not (folder / LOCK).is_symlink():
        known.add(LOCK)  # of `rewardlab calibrate --store`
    files = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    return [name for path in files if (name := path.relative_to(folder).as_posix()) not in known]


def sealed_card(metadata: str, text: str) -> str:
    """Return a model card: metadata as YAML, then the checksum of both, then its text as Markdown."""
    return f"---\n{metadata}---\n{CARD_MARK}{sha256_text(metadata + text)} -->\n\n{text}"


def is_own_card(path: Path) -> bool:
    """Return whether a file is a model card as `sealed_card` made it, and unchanged since."""
    try:
        card = path.read_text(encoding=UTF8) if path.is_file() and not path.is_symlink() else ""
    except (OSError, UnicodeDecodeError):
        return False
    head, mark, rest = card.partition(f"---\n{CARD_MARK}")
    digest, end, text = rest.partition(" -->\n\n")
    return bool(mark and end) and digest == sha256_text(head.removeprefix("---\n") + text)


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every `step_N/` in a folder, in the order of the steps."""
    steps = [(int(match[1]), path) for path in folder.iterdir() if (match := re.fullmatch(r"step_(\d+)", path.name))]
    return sorted(steps)


def sweep(folder: Path) -> None:
    """Remove the temporary files and folders that killed processes left in a run (see core.files)."""
    rooms = (folder, folder / "evals", folder / CHECKPOINTS)
    for path in [path for room in rooms if room.is_dir() for path in room.iterdir()]:
        match = re.fullmatch(r"\.(.+)\.(tmp|old)-\d+", path.name)
        # The process was killed after it had moved the previous folder aside and before the new one took its name, so
        # the previous one is put back.
        if match and match[2] == "old" and not (target := path.with_name(match[1])).exists():
            move(path, target)
        elif match:
            remove(path)


def holds_models(folder: Path) -> bool:
    """Return whether the folder of a run holds a saved model or a checkpoint. A run that has just begun has neither."""
    checkpoints = folder / CHECKPOINTS
    return folder.is_dir() and bool(
        (folder / "best").exists() or saved_steps(folder) or (checkpoints.is_dir() and any(checkpoints.glob("step_*")))
    )


def saved_step(folder: Path) -> int | None:
    """Return the step at which a reward-model folder was saved; None if there is no such folder or no step in it.

    Raises ArtifactError if the recorded provenance was changed after the model was saved.
    """
    if not (folder / SPEC_FILE).is_file():
        return None
    spec = read_spec(folder)
    if spec.digests and spec.digests.get("provenance") != part_digests(spec)["provenance"]:
        raise ArtifactError(
            f"{folder / SPEC_FILE}: its provenance was changed after the model was saved. Restore {folder} from a "
            f"copy, or go back to an earlier checkpoint with --resume RUN/{CHECKPOINTS}/step_N after moving {folder} "
            f"away."
        )
    step = spec.provenance.get("step")
    return step if isinstance(step, int) else None
