"""The page of an inspection obeys no text and its charts are those of the counts; ceilings stand in run reports."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parsed_pages import require_plain_markdown
from rewardlab.analysis.ceiling import accuracy_from_agreement
from rewardlab.analysis.inspection import Sample, histogram, spread
from rewardlab.core.types import Comparison, Estimate
from rewardlab.curation.inspecting import run
from rewardlab.curation.inspecting.config import InspectConfig
from rewardlab.data.rows import CAUSES
from rewardlab.report.build import report_of, tell
from rewardlab.report.document import Document, Part, Section, Shown, Turn
from rewardlab.report.folder import read_folder
from rewardlab.report.inspection import label_notes
from rewardlab.report.inspection_page import MARK, inspection_page
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page
from run_folders import HOSTILE, score_rows, write_evaluation, write_run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    rows = [{"prompt": f"q{n}", "chosen": "a " * (n % 9 + 2), "rejected": "b " * (n % 5 + 1)} for n in range(40)]
    return run.inspect_datasets(
        InspectConfig.of(dataset=(str(written(tmp_path_factory.mktemp("data"), rows)),), num_workers=1, languages=20)
    )[0]


def written(folder: Path, rows) -> Path:
    path = folder / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_the_data_becomes_markup(found, text: str) -> None:
    sample = Sample(
        place=text, prompt=((text, text),), replies=(((text, text),), ((text, text),)), judged=text, rendered=(text,)
    )
    hostile = replace(
        found,
        name=text,
        why=text,
        examples={"bad_label": (text,)},
        dropped={"bad_label": 1},
        samples=(sample,),
    )
    page, plain = inspection_page([hostile], CAUSES), inspection_page([found], CAUSES)
    tags = re.compile(r"<([a-z]+)[ >]")
    assert set(tags.findall(page)) <= set(tags.findall(plain)) | {"table", "article"}
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2028]", page)
    page.encode()


def test_every_drawing_is_well_formed_and_the_page_is_known_as_its_own(found) -> None:
    page = inspection_page([found, found], CAUSES)
    assert page.splitlines().count(MARK) == 1
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) > 10
    for drawing in drawings:
        ET.fromstring(drawing)
    assert "default-src 'none'" in page


def test_histograms_hold_every_value_or_say_how_many_they_leave_out() -> None:
    values = np.concatenate([np.arange(100.0), [5000.0]])
    bars = histogram(values, whole=True)
    assert sum(bars.counts) + bars.beyond == 101
    assert bars.beyond == 1
    assert bars.edges[-1] < 200
    # Bars of whole numbers are equally many of them wide.
    assert len({round(right - left) for left, right in zip(bars.edges, bars.edges[1:], strict=False)}) == 1
    one = spread(np.full(7, 3.0)).histogram
    assert one.counts == (7,)
    assert spread(np.array([0.5, 0.25]), whole=False).histogram.beyond == 0
    assert spread(np.empty(0)).histogram.counts == ()


def test_a_row_with_all_its_replies_is_shown_in_html_and_markdown() -> None:
    block = Shown(
        title="row 1",
        facts=("fact",),
        prompt=(Turn(role="user", text="why"),),
        replies=(("Reply 1", (Turn(role="assistant", text="so"),)), ("Reply 2", (Turn(role="assistant", text="no"),))),
    )
    document = Document(
        title="x", made_by="y", parts=(Part(title="p", sections=(Section(title="s", blocks=(block,)),)),)
    )
    for made in (html_page(document), markdown_page(document)):
        assert all(word in made for word in ("row 1", "fact", "why", "Reply 1", "so", "Reply 2", "no"))


@pytest.mark.slow
def test_a_report_says_the_ceiling_that_repeated_judgements_tell(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    silent = markdown_page(report_of([tell(read_folder(folder), find_texts=None)]))
    assert "Ceiling" not in silent
    assert "so the ceiling, is not known" in silent
    rows = [
        row if row.reply else replace(row, comparisons=(*row.comparisons, Comparison(first=0, second=1, label=label)))
        for row, label in zip(score_rows(), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0) * 10, strict=True)
    ]
    write_evaluation(folder / "evals", "test", rows)
    told = tell(read_folder(folder), find_texts=None)
    text = markdown_page(report_of([told])).replace("\\", "")
    # Three of four pairs of judgements agree.
    assert f"Ceiling {accuracy_from_agreement(0.75):.3f} [" in text
    assert "from pairs that were judged several times (n = 40, 80 judgements" in text


def test_a_drawing_names_its_unit_and_one_row_is_not_called_many(found, tmp_path: Path) -> None:
    assert "size of the difference (words)" in inspection_page([found], CAUSES)
    rows = [{"prompt": "q", "chosen": "a b", "rejected": "c"}]
    alone = run.inspect_datasets(InspectConfig.of(dataset=(str(written(tmp_path, rows)),), num_workers=1))[0]
    text = inspection_page([alone], CAUSES)
    assert "1 comparison; in words" in text
    assert "1 prompt; in words" in text
    assert not re.search(r"(?<![\d.,])1 (?:comparison|prompt|row|pair)s\b", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_the_heading_of_a_reply_is_text_in_markdown(text: str) -> None:
    turns = (Turn(role="user", text="q"),)
    row = Shown(title=text, facts=(text,), prompt=turns, replies=((f"reply 1: {text} 0.5", turns),))
    sections = (Section(title="s", blocks=(row,)),)
    document = Document(title="x", made_by="y", parts=(Part(title="p", sections=sections),))
    require_plain_markdown(markdown_page(document))


@pytest.mark.parametrize(("low", "is_told"), [(0.52, True), (0.56, False), (0.48, False)])
def test_a_baseline_that_may_be_chance_is_said_to_be(found, low: float, is_told: bool) -> None:
    accuracy = {"length only": Estimate(value=0.6, low=low, high=1.2 - low, n=99, method="score interval")}
    notes = label_notes(replace(found, baselines=replace(found.baselines, accuracy=accuracy)))
    assert any(note.startswith("length only: may be chance") for note in notes) is is_told
