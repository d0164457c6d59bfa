"""The output of a stage: whose work it is, what is done of it, and whether it is whole.

NAME.jsonl                   the rows
NAME.json                    the same facts in the layout with one JSON file a fact
NAME.jsonl.manifest.json     what decided them: settings, hashes of what was read, counts
.NAME.jsonl.partial/         what is finished, until the output is written
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import (
    provenance,
    read_json,
    read_summed_json,
    sha256_file,
    to_json,
    write_json,
    write_summed_json,
)
from rewardlab.core.folders import remove_left_over, removed_at_end, require_writable_folder
from rewardlab.core.lock import only_process
from rewardlab.core.terminal import cut_to, short
from rewardlab.gold.kept_results import FILE as KEPT_FILE
from rewardlab.gold.kept_results import Kept

logger = logging.getLogger("rewardlab")
FORMAT: Final = 1
WRITING: Final = "writing.json"
"""File in the folder of finished work that says what the output is being written for, until its manifest is written."""
State = Literal["new", "complete", "has errors", "half written", "other", "changed"]


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

    `half written` is one whose run ended between its files, with everything still kept; `changed` is one that is not
    what its manifest describes. Raises DataError for a manifest that was changed.
    """
    if _is_being_written(place, asked):
        return "half written"
    if not place.rows.exists():
        # A file that merely has the name of the twin is somebody else's, unless a manifest says that it is ours.
        return "other" if place.twin.exists() and not place.manifest.exists() else "new"
    manifest = read_manifest(place)
    if manifest is None or manifest["asked"] != asked.as_dict():
        return "other"
    if changed_file(place, manifest) is not None:
        return "changed"
    return "has errors" if manifest["counts"].get("errors") or not place.twin.exists() else "complete"


def changed_file(place: Place, manifest: Mapping[str, Any]) -> Path | None:
    """Return a file of an output that is not as its manifest describes it; None if every file that is there is."""
    told = ((place.rows, manifest["rows_sha256"]), (place.twin, manifest["twin_sha256"]))
    return next((path for path, digest in told if path.exists() and sha256_file(path) != digest), None)


def earlier(place: Place) -> dict[str, Any] | None:
    """Return the manifest of an output that is there and as it was written, so that its rows can be taken over."""
    manifest = read_manifest(place) if place.rows.exists() else None
    return None if manifest is None or changed_file(place, manifest) is not None else manifest


def require_own(
    place: Place, asked: Asked, *, read: Iterable[Path] = (), overwrite: bool, follow_input: bool = False
) -> State:
    """Return the state of the output, if it may be written. With `follow_input`, its inputs may have changed since.

    Raises ConfigError if it would replace what is `read`, or is of something else and not to be overwritten; DataError
    if it was changed after it was written, and is not to be overwritten.
    """
    inputs = {path.resolve() for path in read}
    for path in (place.rows, place.twin):
        if path.resolve() in inputs:
            raise ConfigError(f"--output {path}: is read. Name another file; both {_names(place)} are written.")
        if path.is_dir():
            raise ConfigError(f"--output {path}: is a folder. Name a file.")
    state = state_of(place, asked)
    if overwrite or state not in ("changed", "other"):
        return state
    manifest = read_manifest(place)
    changed = None if manifest is None else changed_file(place, manifest)
    if state == "changed" or (follow_input and changed is not None):
        raise DataError(
            f"{changed}: it was changed after it was written. Restore it, or make it again with --overwrite."
        )
    if manifest is None:
        there = place.rows if place.rows.exists() else place.twin
        raise ConfigError(
            f"--output {there}: exists. Name another file, or replace it with --overwrite; both {_names(place)} are "
            f"written."
        )
    if follow_input and {**manifest["asked"], "inputs": {}} == {**asked.as_dict(), "inputs": {}}:
        return state
    raise ConfigError(
        f"--output {place.rows}: was made of something else: {differences(manifest['asked'], asked.as_dict())}. Name "
        f"another file, or make it again with --overwrite, which keeps what is still of use."
    )


def require_same_source(place: Place, identity: Mapping[str, Any], *, overwrite: bool) -> None:
    """Raise ConfigError if an output that is to be completed was made by another model than the one at hand.

    `identity` is what identifies the model at hand: a hash of its files, a commit of the hub, or what a server tells.
    """
    manifest = None if overwrite else earlier(place)
    if manifest is None:
        return
    before, now = manifest["decided"].get("identity") or {}, json.loads(to_json(dict(identity)))
    if before and before != now:
        told = differences({"settings": before}, {"settings": now})
        raise ConfigError(
            f"--output {place.rows}: was made by another model than the one that is there now: {told}. Serve the "
            f"earlier one again, name another file, or make it again with --overwrite."
        )


def _names(place: Place) -> str:
    return f"{place.rows.name} and {place.twin.name}"


def _is_being_written(place: Place, asked: Asked) -> bool:
    """Return whether a run for the same thing ended after it began to write the output, before its manifest."""
    mark = place.partial / WRITING
    try:
        return mark.is_file() and read_json(mark) == asked.as_dict()
    except DataError:
        return False


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words which settings and inputs differ."""
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
    return short(cut_to(value if isinstance(value, str) else to_json(value, indent=None), 60))


@contextmanager
def claimed(place: Place, *, restart: bool = False) -> Iterator[Kept]:
    """Yield what is finished of an output, and keep other processes away from it in the block.

    The folder of finished work is removed when the block ends without an error and the work `is_done`, or if it is
    empty after an error.

    Raises ConfigError if another process is at work there.
    """
    require_writable_folder(place.rows.parent, "--output")
    place.partial.mkdir(exist_ok=True)
    file = place.partial / KEPT_FILE
    with ExitStack() as ended, only_process(place.partial, "--output"):
        for path in (place.rows, place.twin, place.manifest, place.partial):
            remove_left_over(path, alone=True)
        try:
            if restart:
                file.unlink(missing_ok=True)
            kept = Kept(place.partial)
            yield kept
        except BaseException:
            # The file decides, and not `kept`: an interrupt while it is opened must not cost what is in it.
            if (place.partial / WRITING).exists() or (file.exists() and file.stat().st_size):
                logger.warning("results are kept in %s; the same command goes on from there", place.partial)
            else:
                removed_at_end(place.partial, ended)
            raise
        if kept.is_done:
            removed_at_end(place.partial, ended)


@contextmanager
def writing(place: Place, asked: Asked) -> Iterator[None]:
    """Mark an output as half written in the block, which writes its files and then its manifest."""
    mark = place.partial / WRITING
    write_json(mark, asked.as_dict())
    yield
    mark.unlink()


def require_few_errors(place: Place, *, errors: int, replies: int, most: float, examples: Sequence[str]) -> None:
    """Raise DataError if more than the fraction `most` of the replies failed. `examples` are causes."""
    if errors > most * replies:
        raise DataError(
            f"{place.rows}: {errors} of {replies} replies failed, more than --max-error-fraction {most:g}. The first "
            f"causes: {'; '.join(examples).rstrip('.')}. The file is written; the same command asks for the missing "
            f"ones again."
        )


def write_manifest(place: Place, asked: Asked, *, decided: Mapping[str, Any], counts: Mapping[str, Any]) -> None:
    """Write what decided an output that is whole. `decided` is what was found out, such as the digest of a server's
    model."""
    write_summed_json(
        place.manifest,
        {
            "asked": asked.as_dict(),
            "decided": dict(decided),
            "counts": dict(counts),
            "rows_sha256": sha256_file(place.rows),
            "twin_sha256": sha256_file(place.twin),
            "provenance": provenance(),
        },
    )
