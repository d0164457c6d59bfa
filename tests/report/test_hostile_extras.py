"""Names in suites, robustness, precision cards, controls, ensembles, probes and slices become no markup in a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from judged_folders import write_judged, write_probe
from parsed_pages import require_plain_html, require_plain_markdown
from rewardlab.core.terminal import visible
from rewardlab.report.build import Told, report_of, tell
from rewardlab.report.card import card_text
from rewardlab.report.document import Document
from rewardlab.report.folder import read_ensemble, read_folder
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page
from run_folders import HOSTILE

WRITERS = {"evaluation": write_judged, "probe": write_probe}
SECTIONS = {
    "evaluation": {"Suites", "Robustness", "Controls", "Ensemble", "Slices", "Precision"},
    "probe": {"Probe", "Precision"},
}


def made(folder: Path) -> tuple[Told, Document]:
    told = tell(read_folder(folder), find_texts=None, draws=20)
    ensemble = read_ensemble(folder)
    return told, report_of([told], [] if ensemble is None else [ensemble])


@pytest.fixture(scope="module", params=WRITERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def benign(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The report of a folder with harmless names."""
    _, document = made(WRITERS[kind](tmp_path_factory.mktemp("benign") / "run"))
    return document


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("text", HOSTILE)
def test_no_name_of_what_only_some_folders_have_becomes_markup(
    text: str, kind: str, benign: Document, tmp_path: Path
) -> None:
    told, document = made(WRITERS[kind](tmp_path / "run", text=text))
    assert not told.problems
    assert not told.record.problems
    for part in (*document.parts, *benign.parts):
        assert SECTIONS[kind] <= {section.title for section in part.sections}
    parsed = require_plain_html(html_page(document), html_page(benign))
    times = "".join(parsed.text).count(visible(text, lines=True).strip())
    assert times >= {"evaluation": 25, "probe": 8}[kind], "it is shown as it is, controls made visible"
    require_plain_markdown(markdown_page(document))
    if told.record.model is not None:
        require_plain_markdown(card_text(told.record, told.judgement, ceiling=None))
