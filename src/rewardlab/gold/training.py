"""`rewardlab gold train`: `rewardlab train` with the preset for proxies and the data of `rewardlab gold build`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from rewardlab.core.config import read_settings
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import at_home, read_json, sha256_file
from rewardlab.core.terminal import quoted
from rewardlab.curation.files.writing import MANIFEST
from rewardlab.gold.building.run import TOOL

PRESET: Final = "proxy-rm"
"""Batch 64, warm-up ratio 0.05, cosine, learning rate 5e-6, one epoch, all weights."""
DATA: Final = "--data"
HELP: Final = (
    "--data FOLDER names what `rewardlab gold build` wrote: its train.jsonl is trained on and its test.jsonl is test "
    f"data, so --dataset is left out. The preset is {PRESET} unless another is named. Every other flag is that of "
    "`rewardlab train`."
)
"""Text of the help besides the flags of `rewardlab train`."""
OURS: Final = ("--dataset", "--hf-dataset")
"""Flags of `rewardlab train` that --data stands for."""


def train_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `rewardlab train` for those of `rewardlab gold train`.

    `--data FOLDER` becomes the training and the test data that `rewardlab gold build` wrote there, and the preset is
    `proxy-rm`. Every other argument stays as it is and wins: over the preset, as a preset or test data of its own, as a
    configuration file with a preset. `--resume RUN` goes on with the settings of that run, and then needs no --data.

    Raises ConfigError without --data, or with other training data beside it; DataError for a folder that is not whole.
    """
    folder, rest = _split_data(arguments)
    given = _flags(rest)
    if folder is None:
        if given.get("--resume", "auto") != "auto":
            return rest
        like = next((f", and there is no {flag}" for flag in given if flag.startswith(f"{DATA}-")), "")
        raise ConfigError(
            f"--data is missing{like}: name the folder that `rewardlab gold build` wrote. Other data are trained on "
            f"with `rewardlab train --preset {PRESET} --dataset …`."
        )
    if also := [flag for flag in OURS if flag in given]:
        raise ConfigError(f"{also[0]}: --data {folder} names the training data. Keep one of them.")
    train, test = _files(folder)
    added = [] if _has_preset(given) else ["--preset", PRESET]
    added += ["--dataset", str(train)]
    if test is not None and not {"--test-dataset", "--test-split"} & given.keys():
        added += ["--test-dataset", str(test)]
    return [*added, *rest]


def next_step(arguments: Sequence[str]) -> str | None:
    """Return what to do after `rewardlab gold train` with these arguments; None where they do not say of which files.

    It is to match the proxy on the prompts that were held out.
    """
    folder, rest = _split_data(arguments)
    given = _flags(rest)
    run = given.get("--output-dir", "")
    if folder is None or not run or "--dry-run" in given:
        return None
    test, train = (folder / f"labels.{side}.jsonl" for side in ("test", "train"))
    if not (test.is_file() and train.is_file()):
        return None
    files = [quoted(str(path)) for path in (test, train, run)]
    return "next: rewardlab gold match --input {} --train-input {} --proxies {}".format(*files)


def _split_data(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Return (the folder that --data names, the other arguments). Raises ConfigError if it names none, or several."""
    rest: list[str] = []
    folders: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != DATA:
            rest.append(word)
            continue
        folders.append(value if equals else next(words, ""))
    if len(folders) > 1 or "" in folders or any(folder.startswith("--") for folder in folders):
        raise ConfigError(f"{DATA}: name one folder that `rewardlab gold build` wrote.")
    return (at_home(folders[0]) if folders else None), rest


def _flags(arguments: Sequence[str]) -> Mapping[str, str]:
    """Return flag -> the word after it, with dashes for underscores; an empty text where there is none."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return {flag.replace("_", "-"): value for flag, value in pairwise([*words, ""]) if flag.startswith("--")}


def _has_preset(given: Mapping[str, str]) -> bool:
    """Return whether a preset, or the settings of a run or of TRL, are named already."""
    if {"--preset", "--compat"} & given.keys() or given.get("--resume", "auto") != "auto":
        return True
    return "--config" in given and bool({"preset", "compat"} & read_settings(Path(given["--config"])).keys())


def _files(folder: Path) -> tuple[Path, Path | None]:
    """Return training and test data of a folder; None where nothing was held out.

    Raises ConfigError for a folder that `gold build` did not write, DataError for files that are not those it wrote.
    """
    path = folder / MANIFEST
    told = read_json(path) if path.is_file() else None
    if not isinstance(told, dict) or told.get("tool") != TOOL:
        raise ConfigError(
            f"{DATA} {folder}: is not a folder that `{TOOL}` wrote: it has no {MANIFEST} of it. Other pairs are "
            f"trained on with `rewardlab train --preset {PRESET} --dataset {quoted(str(folder))}`."
        )
    found: dict[str, Path] = {}
    for facts in told["outputs"]:
        if facts["file"] in ("train.jsonl", "test.jsonl"):
            file = found[facts["file"]] = folder / facts["file"]
            if not file.is_file() or sha256_file(file) != facts["sha256"]:
                raise DataError(
                    f"{file}: is not the file that `{TOOL}` wrote. Build it again, or train on it as it is with "
                    f"`rewardlab train --preset {PRESET} --dataset {quoted(str(file))}`."
                )
    return found["train.jsonl"], found.get("test.jsonl")
