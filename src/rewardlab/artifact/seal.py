"""Protection of the spec against changes: its content is hashed, and the hash is stored in the model's other files.

The spec holds the hashes of `config.json` and of the weights, and these files hold the digest of the spec. Neither
could be written first, so the digest leaves these hashes out; it does cover the canaries, whose scores prove the
weights. The weights are gigabytes and are written only once, with room for a digest in their header. The digest is
filled in when the canaries are known, and only then are the weight files hashed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from rewardlab.core.errors import ArtifactError
from rewardlab.core.files import read_json, sha256_file, sha256_json, to_json, write_json
from rewardlab.core.schema import read_object
from rewardlab.core.spec import (
    DAMAGED,
    REMEDY,
    SPEC_FILE,
    UNPROTECTED,
    RewardSpec,
    carries_digest,
    part_digests,
    parts_by_default,
    read_spec,
)

logger = logging.getLogger("rewardlab")
KEY: Final = "rewardlab_spec_sha256"
"""Key of the digest in config.json and in the metadata of safetensors files."""
METADATA: Final = {"format": "pt", KEY: "0" * 64}
"""Metadata of weight files that will be sealed: the format, which transformers requires, and room for the digest."""
OF_THE_RUN: Final = ("provenance", "max_rounding_error")
"""Parts of the spec that describe the run: where the model came from, and how far its scores are from those of the
model in training. They have digests of their own."""


def seal(folder: Path, spec: RewardSpec) -> RewardSpec:
    """Write the digest of `spec` into config.json and the weights; return the spec with all file hashes and digests.

    The weight files are changed in place, without changing their size. Nothing may change any file afterwards.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    paths.pop(SPEC_FILE, None)
    files = {name: "" if carries_digest(name) else sha256_file(path) for name, path in paths.items()}
    digests = part_digests(replace(spec, files=files))
    digest = _digest_of(digests)
    for name in filter(carries_digest, paths):
        if name == "config.json":
            config = read_json(paths[name])
            assert isinstance(config, dict)
            write_json(paths[name], config | {KEY: digest})
        else:
            _fill_in(paths[name], digest)
        files[name] = sha256_file(paths[name])
    return replace(spec, files=files, digests=digests)


def _digest_of(digests: Mapping[str, str]) -> str:
    """Return one digest of all parts but those of the run, so that runs with the same result write the same files."""
    return sha256_json({name: digest for name, digest in digests.items() if name not in OF_THE_RUN})


def _fill_in(path: Path, digest: str) -> None:
    """Write the digest into the metadata in the header of a safetensors file (8 bytes of length, then JSON).

    The metadata are sorted on the way. safetensors writes them in any order, but the same model should give the same
    file.
    """
    sealed = f'"__metadata__":{to_json(METADATA | {KEY: digest}, indent=None).replace(" ", "")}'.encode()
    with path.open("r+b") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        place = re.search(rb'"__metadata__":\{[^}]*\}', header)
        assert place is not None, f"{path.name} was written with METADATA"
        assert len(place.group()) == len(sealed), f"{path.name} was written with METADATA"
        file.seek(8 + place.start())
        file.write(sealed)


def require_seal(path: Path, spec: RewardSpec) -> None:
    """Raise ArtifactError, naming the changed part, unless the spec is the one with which the model was saved.

    Folders of an earlier version have no seal. For those a line of the log says what is not checked.
    """
    weights = [name for name in spec.files if carries_digest(name) and name != "config.json"]
    recorded_in = {"config.json": recorded_digest(path)} | {
        name: _in_weights(path / name) for name in weights if (path / name).is_file()
    }
    if spec.schema_version == UNPROTECTED:
        # Without this check anybody could lower the version in the spec to switch off its protection.
        if sealed := [name for name, digest in recorded_in.items() if digest is not None]:
            raise ArtifactError(
                f"{path}: schema_version in {SPEC_FILE} was changed after the model was saved: {sealed[0]} has a "
                f"digest, which that version did not write. {REMEDY}"
            )
        logger.info(
            "%s: saved by an earlier version (schema %d): a change of its %s would not be noticed, and there are no "
            "references for half precision",
            path,
            spec.schema_version,
            SPEC_FILE,
        )
        return
    now = part_digests(spec)
    # A later version may add fields to the spec. A folder saved before has no digest for them; their default values
    # do not count as a change.
    for name in parts_by_default(spec) - spec.digests.keys():
        now.pop(name, None)
    if changed := sorted(name for name in {*now, *spec.digests} if now.get(name) != spec.digests.get(name)):
        raise ArtifactError(
            f"{path / SPEC_FILE}: {', '.join(changed)} changed after the model was saved, so its scores would differ "
            f"from those of the saved model. {REMEDY}"
        )
    digest = _digest_of(spec.digests)
    for name, recorded in recorded_in.items():
        if recorded != digest:
            what = "holds no digest of its spec" if recorded is None else f"holds the digest of another {SPEC_FILE}"
            raise ArtifactError(
                f"{path}: {name} {what}, so one of the two was replaced or rewritten since the model was saved. "
                f"{REMEDY}"
            )


def recorded_digest(path: Path) -> str | None:
    """Return the digest of its spec in a folder's config.json, or None if it holds none."""
    digest = read_object(path / "config.json", DAMAGED).get(KEY)
    return digest if isinstance(digest, str) else None


def digest_of(folder: Path) -> str:
    """Return the digest by which the model of a folder is known. Raises ArtifactError if the folder holds none."""
    try:
        # A folder of the first version holds no digest of its spec.
        return recorded_digest(folder) or sha256_file(folder / SPEC_FILE)
    except FileNotFoundError as error:
        # If the folder or its spec is missing, read_spec raises an error that says so more clearly.
        read_spec(folder)
        raise ArtifactError(f"{folder}: {Path(error.filename).name} is missing. Restore it.") from None


def require_digest(folder: Path, digest: str) -> None:
    """Raise ArtifactError unless the folder still holds the model whose digest was read before it was loaded."""
    if (now := digest_of(folder)) != digest:
        raise _replaced(folder, digest, now)


@contextmanager
def one_model_of(folder: Path) -> Iterator[None]:
    """Raise ArtifactError, which says so, if another model is put into a folder that is read inside this block.

    Files of two models contradict each other, or do so by less than half precision shows.
    """
    before, fault = _digest_if_any(folder), None
    try:
        yield
    except ArtifactError as error:
        fault = error
    now = _digest_if_any(folder)
    if before is not None and now is not None and now != before:
        raise _replaced(folder, before, now) from fault
    if fault is not None:
        raise fault


def _digest_if_any(folder: Path) -> str | None:
    try:
        return digest_of(folder)
    except (ArtifactError, OSError):  # what is wrong with the folder is told by those who read it
        return None


def _replaced(folder: Path, before: str, now: str) -> ArtifactError:
    return ArtifactError(
        f"{folder}: another model was put there while it was loaded: its digest was {before:.12}…, now it is "
        f"{now:.12}…. Name the folder again once it is written; better, give each model a folder of its own."
    )


def _in_weights(file: Path) -> str | None:
    """Return the digest in a weight file's metadata, or None. Raises ArtifactError if the file is damaged."""
    try:
        with safe_open(file, framework="pt") as weights:
            return (weights.metadata() or {}).get(KEY)
    except SafetensorError as error:
        raise ArtifactError(f"{file}: damaged ({error}). {REMEDY}") from error
