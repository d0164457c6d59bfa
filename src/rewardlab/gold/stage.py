"""The output of a stage: whose work it is, what is done of it, and whether it is whole.

NAME.jsonl                   the rows
NAME.json                    the same facts in the layout with one JSON file a fact
NAME.jsonl.manifest.json     what decided them: settings, hashes of what was read, counts
.NAME.jsonl.partial/         what is finished, until the output is written
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import (
    provenance,
    read_summed_json,
    remove,
    require_writable_folder,
    sha256_file,
    to_json,
    write_summed_json,
)
from rewardlab.core.lock import only_process
from rewardlab.core.terminal import short
from rewardlab.gold.kept import Kept

logger = logging.getLogger("rewardlab")
FORMAT: Final = 1
State = Literal["new", "complete", "has errors", "other"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the output of a stage is."""

    rows: Path
    """JSON Lines."""
    twin: Path
    """The layout with one JSON file a fact."""

    @classmethod
    def of(cls, output: Path) -> Place:
        """Return the files for `--output`, which names either. Raises ConfigError for another ending."""
        name = output.name
        for ending in (".jsonl.gz", ".jsonl", ".json"):
            if name.endswith(ending) and len(name) > len(ending):
                stem = name.removesuffix(ending)
                lines = ".jsonl.gz" if ending == ".jsonl.gz" else ".jsonl"
                return cls(rows=output.with_name(stem + lines), twin=output.with_name(stem + ".json"))
        raise ConfigError(f"--output {output}: wanted a name that ends in .jsonl, .jsonl.gz or .json.")

    @property
    def manifest(self) -> Path:
        """What decided the output."""
        return self.rows.with_name(f"{self.rows.name}.manifest.json")

    @property
    def partial(self) -> Path:
        """Where finished work is kept until the output is written."""
        return self.rows.with_name(f".{self.rows.name}.partial")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What decides the output of a stage."""

    stage: str
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]
    """File that is read -> its SHA-256."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as it is written and read back."""
        whole: dict[str, Any] = json.loads(
            to_json({"format": FORMAT, "stage": self.stage, "settings": self.settings, "inputs": self.inputs})
        )
        return whole


def read_manifest(place: Place) -> dict[str, Any] | None:
    """Return the manifest of an output; None if there is none. Raises DataError if it was changed."""
    return read_summed_json(place.manifest) if place.manifest.exists() else None


def state_of(place: Place, asked: Asked) -> State:
    """Return whether the output is there, whole, and what was asked for.

    Raises DataError if the output is not the one that its manifest describes.
    """
    if not place.rows.exists():
        return "new"
    manifest = read_manifest(place)
    if manifest is None or manifest["asked"] != asked.as_dict():
        return "other"
    if manifest["sha256"] != sha256_file(place.rows):
        raise DataError(
            f"{place.rows}: it was changed after it was written. Restore it, or make it again with --overwrite."
        )
    return "has errors" if manifest["counts"].get("errors") or not place.twin.exists() else "complete"


def require_own(place: Place, asked: Asked, *, overwrite: bool) -> None:
    """Raise ConfigError if the output is there and was made of something else, and is not to be overwritten."""
    if overwrite or state_of(place, asked) != "other":
        return
    manifest = read_manifest(place)
    if manifest is None:
        raise ConfigError(f"--output {place.rows}: exists. Name another file, or replace it with --overwrite.")
    raise ConfigError(
        f"--output {place.rows}: was made of something else: {differences(manifest['asked'], asked.as_dict())}. Name "
        f"another file, or make it again with --overwrite, which keeps what is still of use."
    )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words what is not the same."""
    told = []
    for section in ("settings", "inputs"):
        old, new = before.get(section) or {}, now.get(section) or {}
        told += [
            f"{name} was {_short(old.get(name))}, now {_short(new.get(name))}"
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        ]
    return "; ".join(told) or "another stage"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else to_json(value, indent=None)
    return short(text if len(text) <= 60 else f"{text[:59]}…")


@contextmanager
def claimed(place: Place, *, restart: bool = False) -> Iterator[Kept]:
    """Yield what is finished of an output, and keep other processes away from it in the block.

    The folder of finished work goes when the block ends without an error, or has nothing in it.

    Raises ConfigError if another process is at work there.
    """
    require_writable_folder(place.rows.parent, "--output")
    place.partial.mkdir(exist_ok=True)
    kept: Kept | None = None
    with only_process(place.partial, "--output"):
        try:
            if restart:
                (place.partial / "kept.jsonl").unlink(missing_ok=True)
            kept = Kept(place.partial)
            yield kept
        except BaseException:
            if kept is not None and len(kept):
                logger.warning(
                    "%d results are kept in %s; the same command goes on from there", len(kept), place.partial
                )
            else:
                remove(place.partial)
            raise
        remove(place.partial)


def write_manifest(place: Place, asked: Asked, *, decided: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """Write what decided an output that is whole. `decided` is what was found out, such as the digest of a server's
    model."""
    write_summed_json(
        place.manifest,
        {
            "asked": asked.as_dict(),
            "decided": dict(decided),
            "counts": dict(counts),
            "sha256": sha256_file(place.rows),
            "twin_sha256": sha256_file(place.twin),
            "provenance": provenance(),
        },
    )
