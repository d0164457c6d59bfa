"""Models of the hub at a revision: `organisation/name@revision`, a branch, a tag or a commit.

Such a model is fetched as a whole and read from its folder in the hub's cache, whose name is its commit. A name
without a revision is left to transformers, which takes the newest state of the main branch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ModelError

logger = logging.getLogger("rewardlab")
NAME: Final = r"[\w-][\w.-]*"
REVISION: Final = r"@(?P<revision>[\w./-]+)"
AT_REVISION: Final = re.compile(rf"(?P<repository>{NAME}(?:/{NAME})?){REVISION}")
FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files that are fetched of a model on the hub; weights in .bin files only where there are no others."""
CODE: Final = "*.py"
"""Code that comes with a model, which runs with --trust-remote-code alone."""
NESTED: Final = ("*/*.safetensors", "*/*.bin")
"""Files that are never fetched: weights in the subfolders of a model are other copies of it."""


@cache
def say_sought(name: str) -> None:
    """Say, once, that a model which is in no folder is looked for on the hub: without a network that takes a minute."""
    if not Path(name).exists():
        logger.info(
            "model %s: there is no such folder here, so it is looked for on the Hugging Face hub, or in its cache", name
        )


def at_revision(name: str) -> tuple[str, str] | None:
    """Return the repository and the revision that a name consists of; None for any other name, or a path that is there.

    >>> at_revision("Qwen/Qwen3-0.6B@main")
    ('Qwen/Qwen3-0.6B', 'main')
    >>> at_revision("Qwen/Qwen3-0.6B") is None
    True
    """
    match = AT_REVISION.fullmatch(name)
    return None if match is None or Path(name).exists() else (match["repository"], match["revision"])


def fetch(repository: str, revision: str) -> Path:
    """Return the folder of a model at a revision, fetched from the hub if it is not in the cache.

    Raises ModelError if the hub does not give it.
    """
    place = snapshot(repository, revision, [*FILES, CODE])
    if any(place.glob("*.safetensors")):
        return place
    return snapshot(repository, place.name, [*FILES, CODE, "*.bin"])


def snapshot(repository: str, revision: str | None, files: Sequence[str]) -> Path:
    """Return the folder with these files of a model on the hub, which is named after its commit.

    Raises ModelError if the hub does not give them.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled

    wanted: dict[str, Any] = {"revision": revision, "allow_patterns": list(files), "ignore_patterns": [*NESTED]}
    try:
        try:
            return Path(snapshot_download(repository, **wanted))
        except OfflineModeIsEnabled:
            # Before 2.0 the library lists the files of a commit on the hub, though they are in the cache.
            return Path(snapshot_download(repository, **wanted, local_files_only=True))
    except Exception as error:
        # The library raises its own errors, those of the hub and those of the network, which have no common base.
        said = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(f"the hub did not give a model of this name ({type(error).__name__}: {said})") from error


def source_of(folder: str | Path) -> tuple[str, str] | None:
    """Return the repository and the commit of a model's folder in the hub's cache; None for any other folder."""
    path = Path(folder)
    kind, *name = path.parent.parent.name.split("--")
    if path.parent.name != "snapshots" or kind != "models" or not name:
        return None
    return "/".join(name), path.name


def commit_of(path: str) -> str | None:
    """Return the commit of a model of the hub; None for a folder of another kind, or if it is not known.

    A model that is named without a revision is looked up in the hub's cache, so it must have been read before.
    """
    if (source := source_of(path)) is not None:
        return source[1]
    if Path(path).is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, "config.json")
    except ValueError:
        return None  # a model of the hub cannot have this name
    source = source_of(Path(found).parent) if isinstance(found, str) else None
    return None if source is None else source[1]


def cached_file(model: str, name: str) -> Path | None:
    """Return a file of a model that is on this machine, in a folder or in the cache of the hub; None if it is not.

    Nothing is fetched.
    """
    if (found := Path(model) / name).is_file():
        return found
    if Path(model).exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    repository, revision = at_revision(model) or (model, None)
    try:
        cached = try_to_load_from_cache(repository, name, revision=revision)
    except ValueError:
        return None  # a model of the hub cannot have this name
    return Path(cached) if isinstance(cached, str) else None


def file_of(path: str, name: str) -> Path | None:
    """Return a file of a model, which is fetched if `path` is a name of the hub; None if there is none, or no model."""
    if (found := Path(path) / name).is_file():
        return found
    if Path(path).exists() or not re.fullmatch(f"{NAME}(/{NAME})?", path):
        return None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, name))
    except Exception:
        # Of any class: there is no such file or model, no model of the hub can have this name, or the hub does not give
        # it to this account or is not reached, for which the library of HTTP has errors of its own. Where the model
        # itself is missing, its configuration is refused for it.
        return None
