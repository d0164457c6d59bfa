"""`gold match`: a system turn that is not that of training is found by scoring rows again, and named on evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.gold_rows import Size, draw_rows, draw_scores, proxy
from reward_models import save_tiny
from rewardlab.core.types import Message
from rewardlab.gold.files.layouts import write_rows
from rewardlab.gold.files.rows import GoldRow, with_system
from rewardlab.gold.findings import Finding
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.run import match
from rewardlab.gold.matching.texts import EMPTY, JOINED, WITHOUT, other_texts
from rewardlab.gold.proxies import Proxy
from rewardlab.gold.scoring import ScoringConfig


def drawn(rows: int = 300) -> list[GoldRow]:
    return draw_rows(Size(rows, 2), np.random.default_rng(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("texts") / "model")


def found_by(
    folder: Path, model: Path, rows: list[GoldRow], *, good: str | None, poor: float = 0.55, **more: object
) -> tuple[Finding, list[int]]:
    """The verdict on a proxy that agrees with gold where the system turn is `good`, and how many rows it scored."""
    scores = {right: draw_scores(rows, right, np.random.default_rng(1)) for right in (0.9, poor)}
    place = {row.id: number for number, row in enumerate(rows)}
    asked: list[int] = []

    def scored(
        sources: Sequence[str], given: Sequence[GoldRow], folder: Path, scoring: ScoringConfig, most: int | None
    ) -> list[Proxy]:
        asked.append(len(given))
        system = [row.prompt[0].content if row.prompt[0].role == "system" else None for row in given]
        table = [scores[0.9 if turn == good else poor][place[row.id]] for row, turn in zip(given, system, strict=True)]
        return [proxy(np.array(table), "p")]

    write_rows(folder / "labels.jsonl", (row.as_json() for row in rows))
    config = MatchConfig.of(input=(folder / "labels.jsonl",), proxies=(f"p={model}",), **more)
    findings = {one.name: one for one in match(config, scores=scored).findings}
    return findings["template and texts"], asked


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("has", "good", "form"), [("", None, WITHOUT), (None, "", EMPTY)])
def test_a_system_turn_that_is_not_that_of_training_is_named_with_the_gain(tmp_path, model, has, good, form) -> None:
    rows = [replace(row, prompt=with_system(row.prompt, has)) for row in drawn()]
    finding, asked = found_by(tmp_path, model, rows, good=good)
    assert finding.status == "fail"
    assert f"It agrees better with gold {form}" in finding.advice
    assert "of the pairs in 200 rows that were scored again are ordered as gold orders them " + form in finding.evidence
    assert "difference " in finding.evidence
    assert asked == [300, 200]


@pytest.mark.slow
def test_no_gain_names_nothing_and_is_told(tmp_path, model) -> None:
    finding, _ = found_by(tmp_path, model, drawn(), good=None)
    assert finding.status != "fail"
    assert EMPTY in finding.evidence
    alike, _ = found_by(tmp_path, model, drawn(), good=None, poor=0.9)
    assert "difference 0.0 points" in alike.evidence


@pytest.mark.slow
def test_none_are_scored_again_where_that_is_asked_for_and_it_is_said(tmp_path, model) -> None:
    finding, asked = found_by(tmp_path, model, drawn(), good="", num_rescored=0)
    assert asked == [300]
    assert "is not seen" in finding.evidence


def test_forms_are_those_that_change_a_row() -> None:
    (row,) = drawn(1)
    bare = row.prompt
    cases = {
        None: {EMPTY: (Message("system", ""), *bare)},
        "": {WITHOUT: bare},
        "Be brief.": {JOINED: (Message("user", f"Be brief.\n\n{bare[0].content}"), *bare[1:])},
    }
    for system, wanted in cases.items():
        _, forms = other_texts([replace(row, prompt=with_system(bare, system))], 5)
        assert {name: rows[0].prompt for name, rows in forms.items()} == wanted


def test_rows_are_spread_over_the_file_and_have_gold_scores() -> None:
    rows = drawn(100)
    rows[0] = replace(rows[0], gold=None)
    places, _ = other_texts(rows, 10)
    assert places[0] == 1
    assert len(places) == 10
    assert places[-1] >= 89
