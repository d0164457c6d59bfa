"""The examples of the pages on matching and checking run, and print what the pages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pages import blocks, read


@pytest.mark.parametrize(("page", "count"), [("gold-match.md", 4), ("gold-check.md", 3)])
def test_the_example_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, count: int
) -> None:
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    names: dict[str, Any] = {
        "__name__": "page",
        "print": lambda *values: printed.append(" ".join(map(str, values))),
    }
    (example,) = blocks(read(page), "python")
    exec(compile(example.text, page, "exec", dont_inherit=True), names)
    promised = [line.rpartition("  # -> ")[2] for line in example.text.splitlines() if "  # -> " in line]
    assert len(promised) == count
    assert printed == promised
