"""Writes an inspection: JSON for programs, a page for people. It replaces only files that an inspection wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rewardlab.analysis.inspection import Inspection
from rewardlab.analysis.json_form import encode
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import provenance, read_json, write_json, write_text
from rewardlab.core.folders import remove_left_over, require_writable_folder
from rewardlab.curation.inspecting.config import InspectConfig, InspectionConfig
from rewardlab.curation.rewriting import require_apart
from rewardlab.data.finding import Source
from rewardlab.data.rows import CAUSES
from rewardlab.report.inspection_page import MARK, inspection_page

JSON_NAME: Final = "inspection.json"
HTML_NAME: Final = "inspection.html"
KIND: Final = "rewardlab data inspect"
"""The mark of a JSON file that an inspection wrote and may replace."""


def places(config: InspectionConfig) -> dict[str, list[Path]]:
    """Return the paths of the output for `json` and for `html`."""
    found = {"json": [config.json], "html": [config.html]}
    if config.output_dir is not None:
        found["json"].append(config.output_dir / JSON_NAME)
        found["html"].append(config.output_dir / HTML_NAME)
    return {kind: [path for path in paths if path is not None] for kind, paths in found.items()}


def claim_files(config: InspectionConfig, sources: Sequence[Source]) -> None:
    """Raise ConfigError for a file that an inspection did not write, unless --overwrite is given.

    With it too for a dataset that is inspected and for a file that is named twice. Raises RewardlabError for a folder
    that cannot be written.
    """
    require_apart([path for paths in places(config).values() for path in paths], sources)
    if config.output_dir is not None:
        require_writable_folder(config.output_dir, "--output-dir")
    for kind, paths in places(config).items():
        for path in paths:
            if path.parent != config.output_dir:
                require_writable_folder(path.parent, f"--{kind}")
            remove_left_over(path)
            if path.exists() and not config.overwrite and not is_own(path, kind):
                raise ConfigError(
                    f"{path} is there, and `{KIND}` did not write it. Name another file, or replace it with "
                    "--overwrite."
                )


def is_own(path: Path, kind: str) -> bool:
    """Return whether an inspection wrote a file."""
    try:
        if kind == "html":
            return MARK in path.read_text(encoding="utf-8", errors="replace").splitlines()
        values = read_json(path)
    except (OSError, DataError):
        return False
    return isinstance(values, Mapping) and values.get("made_by") == KIND


def write_files(found: Sequence[Inspection], config: InspectConfig) -> list[Path]:
    """Write what was asked for; return the paths."""
    wanted = places(config.inspection)
    for path in wanted["json"]:
        write_json(path, as_json(found, config))
    for path in wanted["html"]:
        write_text(path, inspection_page(found, CAUSES))
    return [*wanted["json"], *wanted["html"]]


def as_json(found: Sequence[Inspection], config: InspectConfig) -> dict[str, object]:
    """Return everything as JSON values; missing numbers are null."""
    return {
        "made_by": KIND,
        "settings": to_mapping(config),
        "provenance": provenance(),
        "datasets": [json.loads(json.dumps(encode(one))) for one in found],
    }
