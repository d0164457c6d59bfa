"""The page is whole without network and script, its numbers are those of the files, and no text becomes markup."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from parsed_pages import Parsed, require_plain_html, require_plain_markdown
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_file
from rewardlab.core.run_folder import claim_folder, is_own_card
from rewardlab.core.terminal import visible
from rewardlab.evaluation.texts import find_texts
from rewardlab.report.build import Told, report_of, tell
from rewardlab.report.card import SETTINGS, card_text, write_card
from rewardlab.report.charts import CHARACTER
from rewardlab.report.document import Document, Paragraph, Part, Section
from rewardlab.report.folder import read_folder
from rewardlab.report.markdown import escaped, fenced, markdown_page
from rewardlab.report.page import html_page
from rewardlab.training.settings.config import LossConfig
from run_folders import HOSTILE, score_rows, write_evaluation, write_run


def told_of(folder: Path) -> Told:
    """A run judged with few resamples."""
    return tell(read_folder(folder), find_texts=find_texts, draws=20)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A finished run."""
    return told_of(write_run(tmp_path_factory.mktemp("runs") / "whole"))


@pytest.fixture(scope="module", params=range(len(HOSTILE)))
def hostile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Told]:
    """A run with the same hostile text in every name, prompt, reply, setting and message."""
    text = HOSTILE[request.param]
    return text, told_of(write_run(tmp_path_factory.mktemp("hostile") / "run", text=text))


@pytest.fixture(scope="module")
def page(told: Told) -> str:
    """Its report."""
    return html_page(report_of([told]))


def test_the_page_asks_for_nothing_and_allows_its_own_style_alone(page: str) -> None:
    parsed = Parsed.of(page)
    assert parsed.elements & {"script", "link", "iframe", "img", "object", "embed", "form", "base"} == set()
    for tag, name, value in parsed.attributes:
        assert not name.startswith("on")
        assert name != "style", "the policy refuses style attributes"
        assert name not in ("src", "action")
        assert name != "href" or value.startswith("#"), (tag, value)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = (
        dict(attributes)["content"]
        for attributes in [re.findall(r'([\w-]+)="([^"]*)"', meta) for meta in re.findall(r"<meta [^>]*>", page)]
        if dict(attributes).get("http-equiv") == "Content-Security-Policy"
    )
    assert f"style-src 'sha256-{digest}'" in policy.replace("&#39;", "'")
    assert "default-src 'none'" in policy.replace("&#39;", "'")
    assert "url(" not in style
    assert "@import" not in style


def test_ids_are_unique_and_every_reference_leads_somewhere(page: str) -> None:
    parsed = Parsed.of(page)
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    asked = [
        word
        for _, name, value in parsed.attributes
        if name in ("aria-labelledby", "aria-describedby")
        for word in value.split()
    ]
    asked += [value[1:] for _, name, value in parsed.attributes if name == "href"]
    assert asked
    assert set(asked) <= set(ids)


def test_every_drawing_is_well_formed_and_has_words(page: str) -> None:
    drawings = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(drawings) > 20
    for drawing in drawings:
        root = ET.fromstring(drawing)
        assert root.get("aria-hidden") == "true" or root.get("aria-label") or root.findtext("desc")
        assert "nan" not in drawing.lower()
    charts = re.findall(r'<figure class="chart">.*?</figure>', page, re.DOTALL)
    labels = [re.findall(r'<text class="label"[^>]*>([^<]+)</text>', chart) for chart in charts]
    assert all(len(found) == 2 and all(found) for found in labels), "both axes of every chart are named"


def box_of(text: ET.Element) -> tuple[float, float, float, float]:
    """Where a text of a chart lies (left, top, right, bottom), if its signs are as wide as those of common fonts."""
    sign = CHARACTER if text.get("class") == "tick" else 5.8  # letters are narrower than digits
    width, height = sign * len(text.text or ""), 11.5
    if turned := re.fullmatch(r"translate\(([\d.]+) ([\d.]+)\) rotate\(-90\)", text.get("transform", "")):
        x, y = map(float, turned.groups())
        return x - 0.8 * height, y - width / 2, x + 0.2 * height, y + width / 2
    x, y = float(text.get("x", "nan")), float(text.get("y", "nan"))
    left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")]
    return left, y - 0.8 * height, left + width, y + 0.2 * height


def test_no_texts_of_a_chart_overlap_and_none_leaves_it(page: str) -> None:
    charts = re.findall(r'<svg viewBox="0 0 \d+ \d+" role="img" aria-labelledby.*?</svg>', page, re.DOTALL)
    assert len(charts) > 8
    for chart in charts:
        root = ET.fromstring(chart)
        texts = [text for text in root.iter("text") if text.text]
        boxes = {f"{text.text} {number}": box_of(text) for number, text in enumerate(texts)}
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for name, (left, top, right, bottom) in boxes.items():
            assert min(left, top, width - right, height - bottom) >= -0.5, name
        for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, f"{one} overlaps {other}"


def test_headings_go_down_by_one(page: str) -> None:
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))


def test_the_numbers_are_those_of_the_files(told: Told, page: str) -> None:
    metrics = json.loads((told.record.folder / "evals/test.metrics.json").read_text())
    accuracy = metrics["all"]["estimates"]["eval_accuracy"]
    number = f"{accuracy['value']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]"
    assert f"Accuracy {number} on test data" in page
    assert told.judgement is not None
    auc = told.judgement["eval_roc_auc"]
    assert f"{auc.value:.3f} [{auc.low:.3f}, {auc.high:.3f}]" in page
    assert "Bad answer" in page, "the worst mistakes are shown as conversations"


def test_every_section_that_was_asked_for_is_there(told: Told) -> None:
    titles = [section.title for part in report_of([told]).parts for section in part.sections]
    assert titles == [
        "Headline",
        "Warning signs",
        "Training curves",
        "Calibration",
        "Rewards and margins",
        "Length",
        "Slices",
        "ROC and ranks",
        "Worst mistakes",
        "Precision",
        "Checklist after the run",
        "Data",
        "Speed",
        "Configuration and provenance",
    ]


def test_runs_are_set_side_by_side_under_names_that_differ(told: Told, tmp_path: Path) -> None:
    other = told_of(write_run(tmp_path / "whole", reached=20))
    document = report_of([told, other])
    assert next(part.title for part in document.parts) == "All runs"
    assert len({part.title for part in document.parts}) == 3
    Parsed.of(html_page(document))
    assert "rewardlab compare" in markdown_page(document)


@pytest.mark.quick_cases(4)
def test_no_text_becomes_an_element_or_an_attribute(hostile: tuple[str, Told], page: str) -> None:
    text, told = hostile
    parsed = require_plain_html(html_page(report_of([told])), page)
    assert visible(text, lines=True) in "".join(parsed.text), "it is shown as it is, controls made visible"


def test_no_text_becomes_markdown_or_html(hostile: tuple[str, Told]) -> None:
    _text, told = hostile
    for made in (markdown_page(report_of([told])), card_text(told.record, told.judgement, ceiling=told.ceiling)):
        require_plain_markdown(made)
    assert len(re.findall(r"(?:^\| .*\|\n)+", markdown_page(report_of([told])), re.MULTILINE)) > 8


def test_the_metadata_of_a_card_are_yaml_of_the_same_form_whatever_the_names(hostile: tuple[str, Told]) -> None:
    _, told = hostile
    card = card_text(told.record, told.judgement, ceiling=None)
    _, head, _ = card.split("---\n", 2)
    values = yaml.safe_load(head)
    assert set(values) == {"library_name", "pipeline_tag", "tags", "model-index"}
    (index,) = values["model-index"]
    sources = [result["dataset"]["name"] for result in index["results"]]
    assert len(sources) == 2
    accuracy = index["results"][0]["metrics"][0]
    assert accuracy["type"] == "accuracy"
    assert 0 <= accuracy["args"]["low"] <= accuracy["value"] <= accuracy["args"]["high"] <= 1


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "[x](y)\n# z", '"><b>', "\x1b[2J|x|", "`a` *b*"])
def test_the_name_of_a_folder_becomes_no_markup(name: str, tmp_path: Path, page: str) -> None:
    told = told_of(write_run(tmp_path / name, reached=0))
    parsed = Parsed.of(html_page(report_of([told])))
    assert parsed.elements <= Parsed.of(page).elements
    assert "".join(parsed.text).count(visible(name, lines=True)) >= 2
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown_page(report_of([told])))
    assert tokens[1].content.startswith("Reward model ")
    assert {child.type for child in tokens[1].children or []} <= {"text", "text_special"}


@pytest.mark.parametrize("text", ["", "a`b``c```d", "```", "~~~", "x\n````\n# y"])
def test_a_block_of_code_is_not_closed_by_its_text(text: str) -> None:
    (block,) = MarkdownIt("commonmark").parse(fenced(text))
    assert block.content == f"{text}\n"


@pytest.mark.parametrize(
    "text", [*HOSTILE, "- item", "1) item", "=== x", "---", "+ x", "# x", "    code", "a\\", "<a@b.example>"]
)
def test_a_line_of_markdown_reads_as_the_text_it_was(text: str) -> None:
    tokens = MarkdownIt("commonmark").parse(escaped(text))
    assert [token.type for token in tokens] == ["paragraph_open", "inline", "paragraph_close"]
    assert {child.type for child in tokens[1].children or []} <= {"text", "text_special"}
    shown = "".join(child.content for child in tokens[1].children or [])
    assert shown == " ".join(visible(text).split())


def test_a_page_that_is_watched_loads_itself_again() -> None:
    document = Document(
        title="t", made_by="m", parts=(Part(title="", sections=(Section(title="s", blocks=(Paragraph(text="p"),)),)),)
    )
    assert '<meta http-equiv="refresh" content="5">' in html_page(document, refresh_s=5)
    assert "refresh" not in html_page(document)


@pytest.fixture
def run(told: Told, tmp_path: Path) -> Told:
    """A copy that may be changed."""
    return told_of(Path(shutil.copytree(told.record.folder, tmp_path / "run")))


def test_a_card_is_replaced_while_it_is_ours_and_kept_once_somebody_edited_it(run: Told) -> None:
    path = write_card(run.record, run.judgement, ceiling=None, overwrite=False)
    assert is_own_card(path)
    assert write_card(run.record, run.judgement, ceiling=None, overwrite=False) == path
    path.write_text(path.read_text() + "\nMy own words.\n")
    assert not is_own_card(path)
    with pytest.raises(ConfigError, match="changed since"):
        write_card(run.record, run.judgement, ceiling=None, overwrite=False)
    write_card(run.record, run.judgement, ceiling=None, overwrite=True)
    assert is_own_card(path)


def test_a_card_has_every_setting_of_the_loss() -> None:
    assert [setting.name for setting in fields(LossConfig) if setting.name not in SETTINGS] == []


def test_an_own_card_does_not_keep_a_new_run_out_and_an_edited_one_does(run: Told) -> None:
    path = write_card(run.record, run.judgement, ceiling=None, overwrite=False)
    claim_folder(run.record.folder, (), overwrite=True)
    path.write_text(path.read_text().replace("0.7", "0.9"))
    with pytest.raises(ConfigError, match=r"README\.md, which no run wrote"):
        claim_folder(run.record.folder, (), overwrite=True)


def test_a_card_of_a_run_without_numbers_is_refused(run: Told, tmp_path: Path) -> None:
    shutil.rmtree(run.record.folder / "evals")
    with pytest.raises(ConfigError, match="not finished or was not judged"):
        write_card(read_folder(run.record.folder), None, ceiling=None, overwrite=False)
    shutil.rmtree(run.record.folder / "best")
    with pytest.raises(ConfigError, match="no reward model"):
        write_card(read_folder(run.record.folder), None, ceiling=None, overwrite=False)


def test_the_card_of_an_evaluation_names_the_run_of_its_model(run: Told, tmp_path: Path) -> None:
    folder = tmp_path / "judged"
    write_evaluation(folder, "eval", score_rows())
    settings = {"model": str(run.record.folder / "best"), "hf_split": "validation"}
    spec = run.record.folder / "best/reward_spec.json"
    manifest = {"config": settings, "data": [], "tokens": {}, "spec_sha256": sha256_file(spec), "provenance": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    told = told_of(folder)
    path = write_card(told.record, told.judgement, ceiling=None, overwrite=False)
    assert path == run.record.folder / "best/README.md"
    values = yaml.safe_load(path.read_text().split("---\n", 2)[1])
    assert values["model-index"][0]["name"] == "run"
    assert values["model-index"][0]["results"][0]["dataset"]["split"] == "validation"
    assert "# Reward model run\n" in path.read_text()


@pytest.mark.parametrize("overwrite", [False, True])
def test_numbers_of_another_model_are_no_card(run: Told, tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "judged"
    write_evaluation(folder, "eval", score_rows())
    spec = run.record.folder / "best/reward_spec.json"
    manifest = {
        "config": {"model": str(spec.parent)},
        "data": [],
        "tokens": {},
        "spec_sha256": sha256_file(spec),
        "provenance": {},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    told = told_of(folder)
    values = json.loads(spec.read_text())
    spec.write_text(json.dumps({**values, "provenance": {"step": 41}}))
    with pytest.raises(ConfigError, match=r"another than the one that was judged"):
        write_card(told.record, told.judgement, ceiling=None, overwrite=overwrite)
    assert not (spec.parent / "README.md").exists()


@pytest.mark.parametrize("ties", [0, 4])
@pytest.mark.parametrize(
    ("rows", "said"), [(9, "9 comparisons of as many prompts"), (11, "11 comparisons of 9 prompts")]
)
def test_the_headline_says_how_many_prompts_there_are(rows: int, said: str, ties: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder)
    for path in (folder / "evals").glob("*.metrics.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        found["all"]["estimates"]["eval_accuracy"] |= {
            "n": 9,
            "low": None,
            "high": None,
            "method": "too few prompts (9)",
        }
        found["all"]["sums"] |= {"comparisons": rows + ties, "decided": rows, "label_ties": ties}
        path.write_text(json.dumps(found), encoding="utf-8")
    written = markdown_page(report_of([told_of(folder)]))
    assert said in written
    for data in ("test data, which chose nothing", "the data that chose the checkpoint, which flatters it"):
        assert f"> No interval for the accuracy on {data}: too few prompts (9). Hold out more" in written


def test_the_headline_says_that_no_checkpoint_was_better(told: Told, tmp_path: Path) -> None:
    said = "There is no best/: no checkpoint beat the untrained model on the evaluation data"
    folder = write_run(tmp_path / "run")
    assert said not in markdown_page(report_of([told_of(folder)]))
    (folder / "best").rename(folder / "step_40")
    (head, *_) = report_of([told_of(folder)]).parts[0].sections
    (paragraph,) = [block for block in head.blocks if isinstance(block, Paragraph) and said in block.text]
    assert paragraph.tone == "warning"
    assert "This model is step_40/" in paragraph.text
    first = folder / "evals" / "step_0.metrics.json"
    found = json.loads(first.read_text(encoding="utf-8"))
    found["all"]["estimates"]["eval_accuracy"] |= {"value": None, "low": None, "high": None}
    first.write_text(json.dumps(found), encoding="utf-8")
    written = markdown_page(report_of([told_of(folder)]))
    assert said not in written
    assert "There is no best/: the evaluation data have no accuracy to choose by" in written


def test_of_one_a_page_speaks_in_the_singular(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=1)
    rows = score_rows(1, shift=-9.0)
    for name in ("test", "test_before_training"):
        write_evaluation(folder / "evals", name, rows)
    write_evaluation(folder / "evals", "test_length_only", [replace(row, score=0.0) for row in rows])
    text = markdown_page(report_of([tell(read_folder(folder), find_texts=None, draws=20)]))
    assert "1 comparison." in text
    assert "1 comparison is ranked against its label; it is shown here." in text
    assert "length only: 1 score tied, counted one half" in text
    assert (
        re.findall(r"(?<![\d.,])1 (?:comparison|reply|replie|row|preference|pair|prompt|score|slice|file)s\b", text)
        == []
    )
