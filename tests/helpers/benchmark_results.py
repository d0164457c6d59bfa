"""What a benchmark wrote: its data, and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def result(folder: Path) -> dict[str, Any]:
    """The one result in a folder, which has a page with ratios before anything else."""
    (path,) = folder.glob("*.json")
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert "**" in page, "no ratio"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["machine"]["processor"]
    assert "command" not in found["machine"]
    assert str(folder) not in page + path.read_text(encoding="utf-8"), "a place on this machine"
    return found


def page_in(folder: Path) -> str:
    """The one page in a folder."""
    (path,) = folder.glob("*.md")
    return path.read_text(encoding="utf-8")
