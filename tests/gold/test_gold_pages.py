"""The examples of the pages on making data run, and print what the pages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import blocks, read, run_examples

COUNTS = {"gold-build.md": 4, "gold-judge.md": 3, "gold-match.md": 4, "gold-check.md": 3}


@pytest.mark.slow
@pytest.mark.parametrize("page", COUNTS)
def test_the_example_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    ran = run_examples(page)
    assert len(ran.promised) == COUNTS[page]
    assert ran.printed == ran.promised
    if "report" in ran.names:
        assert str(ran.names["report"]).strip() in [block.text.strip() for block in blocks(read(page), "text")]
