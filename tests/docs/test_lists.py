"""The lists on the pages are those of the code: files, columns, signs, causes, layouts, fields, metrics."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from harness.in_memory import load_preferences
from pages import blocks, first_cells, read
from rewardlab.analysis.faults import FAULTS
from rewardlab.analysis.health import ADVICE
from rewardlab.analysis.measures import AT_THRESHOLD, MEASURES
from rewardlab.analysis.metrics import EARLIER_COLUMNS, METRICS
from rewardlab.core.run_folder import RUN_FILES
from rewardlab.core.spec import SCORE_TOLERANCE, CalibrationSpec, Canary, RendererSpec, RewardSpec
from rewardlab.data.config import ReadingConfig
from rewardlab.data.finding import EXTENSIONS
from rewardlab.data.formats import SCHEMAS
from rewardlab.data.rows import CAUSES
from rewardlab.training.monitoring import gpu, memory_watch
from rewardlab.training.monitoring.records import COLUMNS
from rewardlab.training.monitoring.sinks import OPEN


def test_the_page_of_the_run_folder_lists_its_files_and_the_columns_of_its_metrics() -> None:
    listed = [name.rstrip("/") for name in first_cells(read("run-folder.md"))]
    assert [name for name in RUN_FILES if name not in listed] == []
    assert sorted(name for name in listed if name in COLUMNS) == sorted(COLUMNS)


def test_the_page_of_the_run_folder_lists_the_columns_of_earlier_versions() -> None:
    page = read("run-folder.md")
    shown = {name: today for name, today in EARLIER_COLUMNS.items() if not name.endswith(("_low", "_high"))}
    assert first_cells(page, "Columns of earlier versions") == list(shown)
    assert [name for name, today in shown.items() if f"| `{name}` | `{today}` |" not in page] == []


def test_the_page_of_a_healthy_run_has_columns_of_metrics_and_the_numbers_of_the_runs_that_it_names() -> None:
    page = read("healthy-run.md")
    listed = first_cells(page)
    assert listed
    assert set(listed) <= set(COLUMNS)
    said = (read("quickstart.md") + read("results.md")).replace("-", "−")
    numbers = re.findall(r"−?\d\.\d+ \[[^\]]*\]", page)
    assert len(numbers) > 10
    assert [number for number in numbers if number not in said] == []


def test_every_warning_sign_viewer_and_watched_column_is_listed() -> None:
    assert first_cells(read("warning-signs.md")) == list(ADVICE)
    page = read("watching.md")
    assert first_cells(page) == list(OPEN)
    columns = {*gpu.COLUMNS, *memory_watch.COLUMNS}
    assert [name for name in columns if f"`{name}`" not in page] == []


def test_the_pages_of_data_give_every_cause_and_extension() -> None:
    page = read("data.md")
    assert first_cells(read("dropped-rows.md"), "Why a row is dropped") == [
        *CAUSES,
        "template_refuses",
        "overlong",
        "reply_too_long",
        "identical_tokens",
        "ends_in_padding",
        "prompt_too_long",
    ]
    assert [extension for extension in EXTENSIONS if f"`{extension}`" not in page] == []


def test_every_row_on_the_pages_of_formats_becomes_a_preference_and_no_schema_is_missing(tmp_path: Path) -> None:
    pages = read("formats.md") + read("published.md")
    examples = [rows_of(block.text) for block in blocks(pages, "json")]
    schemas = set()
    for number, rows in enumerate(examples):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path = tmp_path / f"{number}.jsonl"
        path.write_text(text, encoding="utf-8")
        reading = ReadingConfig(max_drop_fraction=0.0)
        loaded = load_preferences([str(path)], split="train", reading=reading, seed=0, limit=None)
        assert len(loaded.preferences) == 1, text
        (report,) = loaded.reports
        schemas.add(report.format.partition(", by the columns ")[0])
    assert schemas == {schema.name for schema in SCHEMAS}


def rows_of(text: str) -> list[dict[str, Any]]:
    """JSON objects one after the other, each over as many lines as it likes."""
    found, decoder = list[dict[str, Any]](), json.JSONDecoder()
    while text := text.lstrip():
        row, end = decoder.raw_decode(text)
        found.append(row)
        text = text[end:]
    return found


def test_the_fields_of_the_spec_the_faults_and_the_tolerances_are_listed() -> None:
    page = read("artifact.md")
    fields = first_cells(page, "reward_spec.json")
    parts = {RewardSpec: "", RendererSpec: "renderer.", Canary: "canaries[].", CalibrationSpec: "calibration."}
    for part, prefix in parts.items():
        missing = [field.name for field in dataclasses.fields(part) if f"{prefix}{field.name}" not in fields]
        assert missing == [], f"{part.__name__}: not on the page"
    assert first_cells(read("verify.md"), "Canaries and decoys") == list(FAULTS)
    tolerances = dict(re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", read("one-score.md"), re.MULTILINE))
    assert {name: float(value) for name, value in tolerances.items()} == SCORE_TOLERANCE


def test_the_page_of_metrics_lists_every_one() -> None:
    assert [name for name in METRICS if f"| `{name}` |" not in read("api-metrics.md")] == []
    names = [*MEASURES, *(f"{stem}@T" for stem in AT_THRESHOLD)]
    page = read("metrics.md")
    assert [name for name in names if f"`{name}`" not in page] == []
    assert [name for name in re.findall(r"`(eval_[^`]+)`", page) if name not in names] == []
