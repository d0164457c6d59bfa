"""Command lines of the scripts that `rewardlab gold` replaces (RMOOD's), in its own flags.

Needs nothing but the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ConfigError

THEIRS: Final[Mapping[str, Mapping[str, str]]] = {
    "sample": {"prompts_path": "prompts", "target_path": "output", "model_path": "model"},
    "label": {"target_path": "output", "model_name": "model", "model_path": "model"},
    "match": {"model_path": "proxies", "models": "proxies", "target_path": "output_dir"},
    "check": {"target_path": "output_dir"},
}
"""Stage -> flag of the scripts -> ours."""
DATASET: Final = "dataset_name"
"""Flag of a script that names a folder of data."""
WITH_DATASET: Final = ("match", "curve")
"""Stages that take it."""
OF_DATASET: Final = {
    "--prompts-path": "test/test_prompts.json",
    "--responses-path": "rm/test_sft.json",
    "--rewards-path": "rm/test_reward_gold.json",
}
"""Flag -> the file of such a folder that it names."""
BY_TOKENS: Final = "batches are filled by tokens (--micro-token-budget), and change no score"
WITHOUT_EFFECT: Final[Mapping[str, Mapping[str, str]]] = {
    "label": {"batch_size": BY_TOKENS},
    "match": {"batch_size": BY_TOKENS},
    "check": {"batch_size": "no model computes anything here"},
}
"""Stage -> flag of the scripts that is accepted and does nothing -> why."""


def theirs(stage: str) -> list[str]:
    """Return the flags of the scripts that a stage takes besides its own."""
    dataset = [DATASET] if stage in WITH_DATASET else []
    return [*THEIRS.get(stage, {}), *WITHOUT_EFFECT.get(stage, {}), *dataset]


def translated(arguments: Sequence[str], stage: str, *, say: Callable[[str], object]) -> list[str]:
    """Return arguments with the flags of the scripts replaced by ours; `say` is called for those without effect.

    Raises ConfigError for the name of a dataset whose files are not found.
    """
    ours, idle, found = THEIRS.get(stage, {}), WITHOUT_EFFECT.get(stage, {}), list[str]()
    dataset: Path | None = None
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        if name in idle:
            say(f"{flag}: has no effect here; {idle[name]}")
            if not equals:
                next(words, None)
        elif name == DATASET and stage in WITH_DATASET:
            dataset = _dataset(value if equals else next(words, ""))
            found += [part for one, file in OF_DATASET.items() for part in (one, str(dataset / file))]
        elif name in ours:
            found.append(f"--{ours[name].replace('_', '-')}{equals}{value}")
        else:
            found.append(word)
    return found if dataset is None else _with_models(found, dataset)


def _dataset(name: str) -> Path:
    """Return the folder of a dataset: one of that path, or `datasets/NAME` here or in RMOOD_HOME.

    Raises ConfigError if none of them has its files.
    """
    homes = [home for home in (os.environ.get("RMOOD_HOME"), ".") if home]
    places = [Path(name), *(Path(home) / "datasets" / name for home in homes)] if name else []
    for place in places:
        if all((place / file).is_file() for file in OF_DATASET.values()):
            return place
    raise ConfigError(
        f"--{DATASET} {name}: no folder {name}, and none in `datasets` here or in $RMOOD_HOME, has the files "
        f"{', '.join(OF_DATASET.values())}. Name them with --prompts_path, --responses_path and --rewards_path."
    )


def _with_models(arguments: Sequence[str], dataset: Path) -> list[str]:
    """Return arguments with the short names of proxies (`rm`) replaced by folders in `models` beside `datasets`.

    A name is replaced where exactly one folder ends with the dataset and the name (`…-alpacafarm-rm`).
    """
    found, naming = list[str](), False
    for word in arguments:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        naming = flag == "--proxies" if flag else naming
        short = naming and value and "=" not in value and not Path(value).exists()
        there = sorted((dataset.parent.parent / "models").glob(f"*-{dataset.name}-{value}")) if short else []
        found.append(f"{flag}{equals}{value}={there[0]}" if len(there) == 1 else word)
    return found
