"""Score files that cannot be used end a command with status 2, one message in clear words, and no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import refusal, write_rows
from judged_folders import write_judged
from scored import evaluation, rows_of

N = 30
SCORES = np.random.default_rng(0).normal(size=(N, 2))


def pairs(scores: Any = SCORES, *, name: str = "", **cells: object) -> list[dict[str, object]]:
    """Rows of a file of somebody else: two scores a row."""
    return [
        {"id": f"{name}{n}", "prompt": f"p{n}", "scores_chosen": float(a), "scores_rejected": float(b), **cells}
        for n, (a, b) in enumerate(scores)
    ]


def written(folder: Path, form: str, number: str, **how: Any) -> Path:
    """The scores of a model, as `rewardlab eval` or as somebody else writes them."""
    scores = how.pop("scores", SCORES)
    if form == "folder":
        return evaluation(folder / number, rows_of(scores, **how))
    return write_rows(folder / f"{number}.jsonl", *pairs(scores, **how))


FORMS = ("folder", "file")
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another data set": ({}, {"name": "other"}, "the score files have no comparison in common"),
    "missing rows": ({}, {"scores": SCORES[:-3]}, "lacks 3 of 30 comparisons"),
    "all NaN": ({}, {"scores": SCORES * np.nan}, "no score is finite. Look at how it was computed"),
    "one class": ({"label": 0.5}, {"label": 0.5}, "0 comparisons (30 more are labelled as ties"),
    "fewer than ten": ({"scores": SCORES[:9]}, {"scores": SCORES[:9]}, "9 comparisons: at least 10 are needed"),
    "other labels": ({}, {"label": 0.0}, "judge the replies to"),
}
"""What is wrong -> how the scores of two models are made, and what is said."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_cannot_be_compared_are_refused_in_words(
    kind: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, said = KINDS[kind]
    models = written(tmp_path, form, "a", **first), written(tmp_path, form, "b", **second)
    found = refusal(capsys, "compare", *models, "--output-dir", tmp_path / "out")
    assert said in " ".join(found.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
def test_an_id_that_occurs_twice_is_refused(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if form == "folder":
        twice = evaluation(tmp_path / "b", rows_of(SCORES))
        path = twice / "eval.scores.jsonl"
        path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
        (twice / "eval.metrics.json").unlink()
    else:
        twice = write_rows(tmp_path / "b.jsonl", *pairs(), pairs()[0])
    found = refusal(capsys, "compare", written(tmp_path, form, "a"), twice)
    assert "has two scores. Every id must occur once" in " ".join(found.split())


def test_scores_of_another_model_than_their_numbers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = written(tmp_path, "folder", "a"), written(tmp_path, "folder", "b", scores=-SCORES)
    shutil.copy(one / "eval.scores.jsonl", other / "eval.scores.jsonl")
    assert "does not match its checksum in eval.metrics.json" in refusal(capsys, "compare", one, other)


def test_numbers_of_another_model_are_no_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_judged(tmp_path / "judged")
    spec = folder / "model/reward_spec.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "provenance": {"step": 41}}))
    assert "another than the one that was judged" in refusal(capsys, "report", folder, "--card")
    assert not (folder / "model/README.md").exists()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: write_rows(path, *pairs(name="other")), "they are of other data"),
        (lambda path: write_rows(path, *pairs(), pairs()[0]), "has two scores"),
        (lambda path: write_rows(path, *pairs(SCORES * np.nan)), "no score is finite"),
        (lambda path: write_rows(path, {"text": "no scores"}), "are not a known layout of scores"),
        (lambda path: write_rows(path, "{torn"), "gold.jsonl:1"),
        (lambda path: path, "no such file or folder"),
    ],
)
def test_gold_scores_that_cannot_be_used_are_refused(
    make: Callable[[Path], Path], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = written(tmp_path, "file", "a"), written(tmp_path, "file", "b", scores=-SCORES)
    found = refusal(capsys, "compare", *models, "--gold", make(tmp_path / "gold.jsonl"))
    assert said in " ".join(found.split())
