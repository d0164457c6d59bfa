"""Scores of proxies: by which name, why some are missing, and which files do not belong to the rows."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

import labelled
from harness.gold_rows import Size, draw_rows, draw_scores, proxy
from reward_models import save_tiny
from rewardlab.core.errors import DataError
from rewardlab.gold.curving.config import CurveConfig
from rewardlab.gold.curving.run import curve
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.matching.columns import part_of
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.report import text_report
from rewardlab.gold.matching.run import match, match_parts
from rewardlab.gold.proxies import named_sources, proxy_scores
from rewardlab.serve.file_scoring import backends


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("proxy") / "qwen2.5-3b")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return labelled.write(tmp_path / "labels.jsonl", labelled.rows(24))


def test_a_name_with_a_dot_stays_whole(tmp_path: Path, model: Path) -> None:
    scores = [tmp_path / name for name in ("run.1.json", "x.jsonl.gz", "a.b")]
    for path in scores:
        path.touch()
    assert list(named_sources([str(model), *map(str, scores)])) == ["qwen2.5-3b", "run.1", "x", "a.b"]


def failing(monkeypatch: pytest.MonkeyPatch, entry=backends.entry) -> None:
    """Let the next six replies have no score."""
    count = 0

    def told(*given, **spread):
        nonlocal count
        count += 1
        return f"reason {count}" if count <= 6 else entry(*given, **spread)

    monkeypatch.setattr(backends, "entry", told)


@pytest.mark.slow
def test_why_scores_are_missing_is_told(tmp_path: Path, rows: Path, model: Path, monkeypatch) -> None:
    failing(monkeypatch)
    (one,) = proxy_scores([str(model)], list(read_gold_rows(rows)), tmp_path / "scores")
    assert one.causes == ("reason 1", "reason 2", "reason 3")
    assert one.scores[:3] == ((None, None),) * 3
    told = "qwen2.5-3b gave no score to some replies. The first causes: reason 1; reason 2; reason 3."
    failing(monkeypatch)
    assert match(MatchConfig.of(input=(rows,), proxies=(str(model),))).notes == (told,)
    failing(monkeypatch)
    assert f"in distribution: {told}" in curve(CurveConfig.of(input=(rows,), proxies=(str(model),), most=2)).notes


def test_lists_of_other_lengths_name_the_row(tmp_path: Path, rows: Path) -> None:
    scores = [row["gold"] for row in labelled.rows(24)]
    (tmp_path / "p.json").write_text(json.dumps([*scores[:6], [1.0, 2.0, 3.0], *scores[7:]]))
    told = r"p\.json:7: has 3 scores, and .*labels\.jsonl:7 has 2 replies"
    with pytest.raises(DataError, match=told):
        proxy_scores([str(tmp_path / "p.json")], list(read_gold_rows(rows)), tmp_path)


def test_lists_of_scores_may_have_a_row_a_line(tmp_path: Path, rows: Path) -> None:
    scores = [row["gold"] for row in labelled.rows(24)]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(own)}\n" for own in scores))
    (one,) = proxy_scores([str(tmp_path / "p.jsonl")], list(read_gold_rows(rows)), tmp_path)
    assert [list(own) for own in one.scores] == scores


def test_a_score_of_a_proxy_that_is_not_a_number_is_not_called_the_gold_score(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([[math.nan, 1.0]] * 24))
    with pytest.raises(DataError, match=r"p\.json:1: the proxy's score of reply 0 \(counted from 0\) is nan"):
        proxy_scores([str(tmp_path / "p.json")], list(read_gold_rows(rows)), tmp_path)


def test_several_proxies_beside_each_other_fit_80_columns(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = draw_rows(Size(60, 3), np.random.default_rng(0))
    rows = [dataclasses.replace(row, extra={"source": "rare"}) if n < 3 else row for n, row in enumerate(rows)]
    scores = [draw_scores(rows, rate, np.random.default_rng(1)) for rate in (0.95, 0.7)]
    proxies = [proxy(own, name) for own, name in zip(scores, ("strong", "weak"), strict=True)]
    matched = match_parts(part_of("test", rows, proxies))
    lines = text_report(matched).splitlines()
    assert max(map(len, lines)) <= 80
    (header,) = [line for line in lines if line.startswith("weak, slice")]
    assert header.split() == ["weak,", "slice", "pairs", "match", "apart,", "points", "p"]
    text = " ".join(" ".join(lines).split())
    few = sum(math.isnan(one.adjusted) for slices in matched.test.slices.values() for one in slices)
    assert few > 1
    assert f" {few} slices with too few prompts for an interval are on the page alone." in text
    assert "weak beside strong: " in text
    unknown = [one for one in matched.findings if one.status == "undecided"]
    assert [(one.name, one.about) for one in unknown] == [("hardly learned", "weak"), ("training", "strong, weak")]
