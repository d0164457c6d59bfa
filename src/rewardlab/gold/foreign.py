"""Reward models of other projects, named as gold or as a proxy: fetched from the hub, imported once, and kept.

REWARDLAB_CACHE/imported/KEY/model         what `rewardlab import` makes of a folder, after its comparison
REWARDLAB_CACHE/imported/KEY/source.json   what it was made of; written last
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rewardlab.core.errors import ArtifactError, ConfigError, DataError, ModelError, RenderError
from rewardlab.core.files import cache_folder, read_json, sha256_file, sha256_json, write_json
from rewardlab.core.lock import only_process
from rewardlab.core.spec import SPEC_FILE
from rewardlab.model.hub import FILES, NAME, REVISION, snapshot

logger = logging.getLogger("rewardlab")
HUB_NAME: Final = re.compile(rf"(?P<repository>{NAME}/{NAME})(?:{REVISION})?")
"""`organisation/name`, perhaps with a branch, a tag or a commit behind an @."""
KINDS: Final = ("ForSequenceClassification",)
"""Endings of the names of architectures that are imported unasked."""
IMPORT_FORMAT: Final = 1
"""Counted up when an import makes another folder of the same files, so that earlier ones are made anew."""
TOLD: Final = "source.json"
WAIT_S: Final = 3600.0
"""Seconds to wait for another process that imports the same model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A reward model that was named."""

    folder: Path
    """Its reward-model folder."""
    name: str
    """The name by which another process finds the same: a folder, or a hub name with its commit."""
    source: str | None = None
    """For a model of another project: its hub name and commit, or the hash of its files, and the format of the import.
    For a reward-model folder: its hub name and commit; None if it was named as a folder."""


def is_hub_name(name: str) -> bool:
    """Return whether a name can only be one on the hub: no file has it here, and no folder has its first part."""
    match = HUB_NAME.fullmatch(name)
    # A revision may have slashes too, so the enclosing folder is not `parent` of the whole name.
    return match is not None and not Path(name).exists() and not Path(match["repository"]).parent.exists()


def is_classifier(folder: Path) -> bool:
    """Return whether a folder is a sequence classifier of another project."""
    if (folder / SPEC_FILE).exists() or not (folder / "config.json").is_file():
        return False
    try:
        facts = read_json(folder / "config.json")
    except DataError:
        return False
    kinds = facts.get("architectures") if isinstance(facts, dict) else None
    return isinstance(kinds, list) and any(str(kind).endswith(KINDS) for kind in kinds)


def find_model(name: str, *, flag: str = "--model") -> Found:
    """Return the reward model of a name: a reward-model folder, a plain sequence-classification folder, or a hub name.

    A model of another project is imported into the cache, as `rewardlab import` does without further flags, with its
    comparison of scores; how its conversations are rendered is logged. The next call finds it there.

    Raises ConfigError for a model that the hub does not give, and for one that leaves open how it is read or rendered,
    naming `rewardlab import`. Any other name is returned as a folder, for `read_spec` to refuse.
    """
    if is_hub_name(name):
        folder, pinned = _fetched(name, flag)
        if (folder / SPEC_FILE).is_file():
            return Found(folder=folder, name=pinned, source=pinned)
        return _imported(folder, pinned, pinned, made_of=pinned, flag=flag)
    folder = Path(name)
    if not is_classifier(folder):
        return Found(folder=folder, name=name)
    files = files_of(folder)
    facts = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return _imported(folder, name, None, made_of=[str(folder.resolve()), facts], flag=flag)


def pinned_name(name: str, *, flag: str = "--model") -> str:
    """Return a hub name with its current commit; nothing but config.json is fetched.

    Raises ConfigError as `find_model` for one that the hub does not give.
    """
    match = HUB_NAME.fullmatch(name)
    assert match is not None
    if re.fullmatch(r"[0-9a-f]{40}", match["revision"] or ""):
        return name
    return f"{match['repository']}@{_snapshot(name, match['revision'], ['config.json'], flag).name}"


def files_of(folder: Path) -> Sequence[Path]:
    """Return the files of a sequence classifier of another project."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _fetched(name: str, flag: str) -> tuple[Path, str]:
    """Return where the files of a model on the hub are, and its name with its commit.

    Raises ConfigError, before weights are fetched, for one that is neither a reward-model folder nor of KINDS.
    """
    match = HUB_NAME.fullmatch(name)
    assert match is not None
    place = _snapshot(name, match["revision"], ["config.json", SPEC_FILE], flag)
    if not ((place / SPEC_FILE).is_file() or is_classifier(place)):
        raise ConfigError(
            f"{flag} {name}: its config.json on the hub names no architecture …{', …'.join(KINDS)}, so it cannot be "
            f"taken as it is, and its weights were not fetched. Download it and import it with `rewardlab import`, "
            f"which can be told more, and name the new folder."
        )
    commit = place.name
    place = _snapshot(name, commit, list(FILES), flag)
    if not any(place.glob("*.safetensors")):
        place = _snapshot(name, commit, [*FILES, "*.bin"], flag)
    return place, f"{match['repository']}@{commit}"


def _snapshot(name: str, revision: str | None, files: Sequence[str], flag: str) -> Path:
    """Return the folder with these files of a model on the hub. Raises ConfigError if the hub does not give them."""
    try:
        return snapshot(name.partition("@")[0], revision, files)
    except ModelError as error:
        raise ConfigError(
            f"{flag} {name}: no such folder, and {error}. Check the name and the network, or name a folder."
        ) from error


def _imported(folder: Path, name: str, source: str | None, *, made_of: object, flag: str) -> Found:
    """Return a model of another project as it lies in the cache, imported now if it is not there.

    `made_of` decides where it lies; `source` is its hub name and commit, None for a folder, whose files are hashed.
    """
    place = cache_folder(os.environ) / "imported" / sha256_json([IMPORT_FORMAT, made_of])[:32]
    if not _is_whole(place):
        place.mkdir(parents=True, exist_ok=True)
        with only_process(place, "REWARDLAB_CACHE", wait_s=WAIT_S):
            # Another process may have imported it meanwhile.
            if not _is_whole(place):
                _import(folder, place / "model", name, flag)
                digests = {path.name: sha256_file(path) for path in files_of(folder)} if source is None else {}
                own = f"{source or f'files {sha256_json(digests)}'}, import format {IMPORT_FORMAT}"
                write_json(place / TOLD, {"name": name, "source": own})
    facts = read_json(place / TOLD)
    if not isinstance(facts, dict) or not isinstance(facts.get("source"), str):
        raise DataError(f"{place / TOLD}: it is damaged. Remove {place}, and the model is imported again.")
    logger.info("%s: as it was imported, %s", name, place / "model")
    return Found(folder=place / "model", name=name, source=facts["source"])


def _is_whole(place: Path) -> bool:
    """Return whether a model was imported here, and is still there."""
    return (place / TOLD).is_file() and (place / "model" / SPEC_FILE).is_file()


def _import(folder: Path, target: Path, name: str, flag: str) -> None:
    """Import a model. Raises ConfigError where that needs flags of `rewardlab import`."""
    from rewardlab.artifact.foreign.config import ImportConfig
    from rewardlab.serve.folders.import_model import import_model, import_report

    logger.info("%s: is a model of another project; it is imported as `rewardlab import` does, into %s", name, target)
    try:
        made = import_model(folder, target, ImportConfig(layout="seq-cls"), overwrite=target.exists())
    except (ArtifactError, ConfigError, ModelError, RenderError) as error:
        raise ConfigError(
            f"{flag} {name}: it cannot be taken as it is. {str(error).rstrip('.')}. Import it with `rewardlab import "
            f"{folder} --output-dir NEW`, which can be told more, and name the new folder."
        ) from error
    for line in import_report(made, target):
        logger.info("%s", line)
    logger.info("%s: if it was trained with another rendering, import it with `rewardlab import`", name)
