"""Files compared with what others say about them: hashes in manifests, and the JSON files beside JSON Lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import DataError
from rewardlab.core.files import read_json, sha256_file
from rewardlab.gold.checking.reading import Stages
from rewardlab.gold.files.layouts import read_responses, read_rewards
from rewardlab.gold.files.rows import GoldRow
from rewardlab.gold.findings import Finding

SHA: Final = re.compile(r"[0-9a-f]{64}")


def file_findings(stages: Stages) -> Iterator[Finding]:
    """Yield the findings from manifests, and from JSON files beside ours."""
    yield from _manifests(stages.folders)
    if stages.responses is None:
        yield from _twins(stages)


def _manifests(folders: Sequence[Path]) -> Iterator[Finding]:
    there: dict[str, Path] = {path.name: path for folder in folders for path in folder.iterdir() if path.is_file()}
    for path in sorted({path for folder in folders for path in folder.glob("*manifest*.json")}):
        try:
            values = read_json(path)
        except DataError as error:
            yield Finding(name="manifest", about=path.name, status="fail", evidence=str(error))
            continue
        found = {**dict(_digests(values)), **_of_stage(path, values)}
        named = {name: digest for name, digest in found.items() if (path.parent / name).is_file() or name in there}
        changed = [
            name
            for name, digest in named.items()
            if sha256_file(path.parent / name if (path.parent / name).is_file() else there[name]) != digest
        ]
        yield Finding(
            name="manifest",
            about=str(path),
            status="fail" if changed else "pass" if named else "undecided",
            evidence=f"{', '.join(changed)} changed after it was written."
            if changed
            else f"{len(named)} files have the hash that it names.",
            advice="Run the stages again from the first file that changed; what was made from the earlier one is stale."
            if changed
            else "",
        )


def _of_stage(path: Path, values: object) -> dict[str, str]:
    """Return the hashes of the output of a stage, whose manifest is named after it."""
    rows = path.name.removesuffix(".manifest.json")
    if rows == path.name or not isinstance(values, Mapping):
        return {}
    files = {"rows_sha256": rows, "twin_sha256": f"{rows.removesuffix('.gz').removesuffix('.jsonl')}.json"}
    return {file: values[key] for key, file in files.items() if isinstance(values.get(key), str)}


def _digests(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every name of a file with the hash that a manifest gives it, however it is nested."""
    if isinstance(value, str) and SHA.fullmatch(value) and name:
        yield name, value
    elif isinstance(value, Mapping):
        own, file = value.get("sha256"), value.get("file", value.get("path", value.get("name", name)))
        if isinstance(own, str) and SHA.fullmatch(own) and isinstance(file, str) and file:
            yield Path(file).name, own
        for key, entry in value.items():
            if key != "sha256":
                yield from _digests(entry, Path(str(key)).name)
    elif isinstance(value, list):
        for entry in value:
            yield from _digests(entry)


def _twins(stages: Stages) -> Iterator[Finding]:
    """Yield whether `samples.json` and `labels.json` hold what the JSON Lines of the same name do."""
    for what, rows in (("samples", stages.samples), ("labels", stages.labels)):
        path = stages.names.get(what)
        twin = None if path is None else path.with_suffix(".json")
        if rows is None or twin is None or twin == path or not twin.is_file():
            continue
        try:
            wrong, count = _differing(what, rows, twin)
        except DataError as error:
            yield Finding(name=f"{what} as JSON", about=twin.name, status="fail", evidence=str(error))
            continue
        same = not wrong and count == len(rows)
        yield Finding(
            name=f"{what} as JSON",
            about=twin.name,
            status="pass" if same else "fail",
            evidence=f"{count:,} rows, {wrong:,} of them other than in the {len(rows):,} rows of {path}.",
            advice="" if same else f"One of the two was changed. Remove {twin.name}, and run the stage again.",
        )


def _differing(what: str, rows: Sequence[GoldRow], twin: Path) -> tuple[int, int]:
    if what == "samples":
        texts = [tuple(row) for row in read_responses(twin)]
        return sum(row.responses != own for row, own in zip(rows, texts, strict=False)), len(texts)
    scores = [tuple(row) for row in read_rewards(twin)]
    return sum((row.gold or ()) != own for row, own in zip(rows, scores, strict=False)), len(scores)
