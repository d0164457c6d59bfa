"""The spec's own protection: what it says is hashed, and the hash stands in the files that it is about.

The spec holds the hashes of `config.json` and of the weights, and these hold the digest of the spec. Neither could be
written first, so the digest leaves these hashes out (and what the weights are is proved by the canaries, which it does
cover). The weights are gigabytes and are written once: with room for a digest in their header, which is filled in when
the canaries are known. Only then are they hashed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
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
)

logger = logging.getLogger("rewardlab")
KEY: Final = "rewardlab_spec_sha256"
"""Where the digest stands in config.json and in the metadata of safetensors files."""
METADATA: Final = {"format": "pt", KEY: "0" * 64}
"""Metadata of weights that are to be sealed: the format, as transformers wants it, and room for the digest."""
OF_THE_RUN: Final = ("provenance", "max_rounding_error")
"""Parts of the spec that say where the model came from, and how near the one that trained was. Each has a digest of its
own."""


def seal(folder: Path, spec: RewardSpec) -> RewardSpec:
    """The spec with the hashes of all files and its digests, after writing their digest into the files that hold it.

    Weights are changed in place, in as many bytes as there were; nothing may change them afterwards.
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
    """Of everything but what tells of the run, so that two runs that end with the same model write the same files."""
    return sha256_json({name: digest for name, digest in digests.items() if name not in OF_THE_RUN})


def _fill_in(path: Path, digest: str) -> None:
    """Write the digest over the room for it in the header of a safetensors file (its length, then JSON).

    The metadata are put in order on the way: safetensors writes them in any, and the same model is the same file.
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
    """Raise ArtifactError, naming the part, unless the spec is the one that the model was saved with.

    A folder of an earlier version has no seal: a line of the log says what is not known about it.
    """
    weights = [name for name in spec.files if carries_digest(name) and name != "config.json"]
    found = {"config.json": _in_config(path)} | {
        name: _in_weights(path / name) for name in weights if (path / name).is_file()
    }
    if spec.schema_version == UNPROTECTED:
        if sealed := [name for name, digest in found.items() if digest is not None]:
            raise ArtifactError(
                f"{path}: schema_version in {SPEC_FILE} was changed after the model was saved: {sealed[0]} has a "
                f"digest, which came with a later version. {REMEDY}"
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
    for name in parts_by_default(spec) - spec.digests.keys():  # of fields that the model was saved without
        now.pop(name, None)
    if changed := sorted(name for name in {*now, *spec.digests} if now.get(name) != spec.digests.get(name)):
        raise ArtifactError(
            f"{path / SPEC_FILE}: {', '.join(changed)} changed after the model was saved, so its scores would not be "
            f"what they were trained to be. {REMEDY}"
        )
    digest = _digest_of(spec.digests)
    for name, recorded in found.items():
        if recorded != digest:
            what = "holds no digest of its spec" if recorded is None else f"holds the digest of another {SPEC_FILE}"
            raise ArtifactError(
                f"{path}: {name} {what}, so one of the two was replaced or written anew since the model was saved. "
                f"{REMEDY}"
            )


def _in_config(path: Path) -> str | None:
    digest = read_object(path / "config.json", DAMAGED).get(KEY)
    return digest if isinstance(digest, str) else None


def _in_weights(file: Path) -> str | None:
    try:
        with safe_open(file, framework="pt") as weights:
            return (weights.metadata() or {}).get(KEY)
    except SafetensorError as error:
        raise ArtifactError(f"{file}: damaged ({error}). {REMEDY}") from error
