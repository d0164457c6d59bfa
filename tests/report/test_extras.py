"""Precision cards, probes and suites are told where their files are, and left out where these are of another form."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rewardlab.core.files import write_json
from rewardlab.core.types import Comparison, Estimate
from rewardlab.report.build import report_of, tell
from rewardlab.report.document import Paragraph
from rewardlab.report.extras import precision_section, probe_section, served_section, suites_section
from rewardlab.report.folder import read_folder
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page
from run_folders import score_rows, write_evaluation


def estimate(value: float) -> dict[str, object]:
    """An estimate as JSON."""
    return asdict(Estimate(value=value, low=value - 0.1, high=value + 0.1, n=100, method="Wilson"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A probe with a card."""
    write_json(tmp_path / "config.json", {"model": "m", "dataset": ["d"], "folds": 5})
    write_evaluation(tmp_path / "evals", "test", score_rows())
    write_json(
        tmp_path / "probe.json",
        {
            "chosen_layer": 12,
            "layers": [
                {
                    "layer": 12,
                    "penalty": 0.3,
                    "held_out": {"eval_accuracy": estimate(0.71), "eval_loss": estimate(0.6)},
                },
                {"layer": 6, "penalty": 1.0, "held_out": {"eval_accuracy": estimate(0.61), "eval_loss": estimate(0.7)}},
            ],
            "learning_curve": [
                {"comparisons": 50.0, "eval_accuracy": estimate(0.55), "eval_loss": estimate(0.69)},
                {"comparisons": 400.0, "eval_accuracy": estimate(0.72), "eval_loss": estimate(0.58)},
            ],
            "uncertainty": {"over_heads": estimate(0.7), "sure": estimate(0.8), "unsure": estimate(0.6)},
            "seconds": 75.0,
        },
    )
    card = {
        "preferences": 200,
        "measures": {"float32": {"accuracy": estimate(0.7)}, "bf16": {"accuracy": estimate(0.69)}},
        "off": ["bf16"],
    }
    write_json(tmp_path / "evals/precision.json", card)
    return tmp_path


def test_a_probe_is_told_with_layers_curve_and_uncertainty(folder: Path) -> None:
    record = read_folder(folder)
    assert record.kind == "probe"
    text = markdown_page(report_of([tell(record, find_texts=None, draws=20)]))
    assert r"| 12 (chosen) | 0.710 \[0.610, 0.810\] | 0.600 \[0.500, 0.700\] | 0.3 |" in text
    assert r"| 400 | 0.720 \[0.620, 0.820\] | 0.580 \[0.480, 0.680\] |" in text
    assert "move the accuracy within 0.600 to 0.800" in text
    assert "whole probe: 1 min 15 s" in text


def test_a_precision_card_is_told_and_what_it_warns_of(folder: Path) -> None:
    record = read_folder(folder)
    text = markdown_page(report_of([tell(record, find_texts=None, draws=20)]))
    assert "The saved model in other precisions, 200 preferences" in text
    assert r"| accuracy | 0.700 \[0.600, 0.800\] | 0.690 \[0.590, 0.790\] |" in text
    assert "In bf16 margins are off" in text


def test_the_verdicts_of_a_card_are_told_in_report_and_model_card(folder: Path) -> None:
    verdicts = [
        {"precision": "bf16", "answer": "may be served", "evidence": "Margins are off by 0.01."},
        {"precision": "nearest bf16", "answer": "may not be served", "evidence": "<b>2 replies</b> have no score."},
    ]
    card = json.loads((folder / "evals/precision.json").read_text())
    write_json(folder / "evals/precision.json", {**card, "off": ["nearest bf16"], "verdicts": [*verdicts, 3]})
    record = read_folder(folder)
    said = [block for block in precision_section(record).blocks if isinstance(block, Paragraph)]
    assert said == list(served_section(record).blocks)
    assert [(block.text, block.tone) for block in said] == [
        ("bf16: may be served. Margins are off by 0.01.", "good"),
        ("nearest bf16: may not be served. <b>2 replies</b> have no score.", "warning"),
    ]


def test_a_suite_is_told_beside_the_better_length_rule(tmp_path: Path) -> None:
    row = {
        "name": "<b>hard</b>",
        "rows": 50,
        "score": estimate(0.62),
        "baselines": {"longest": estimate(0.4), "shortest": estimate(0.55)},
        "better_baseline": "shortest",
        "gain": estimate(0.07),
    }
    write_json(tmp_path / "suite.rm-bench.json", {"suite": "rm-bench", "rows": [row, 7, {"name": "none"}]})
    write_json(tmp_path / "manifest.json", {"config": {"model": "m"}, "data": [], "tokens": {}, "provenance": {}})
    record = read_folder(tmp_path)
    assert (record.kind, record.finished) == ("eval", True)
    document = report_of([tell(record, find_texts=None, draws=20)])
    assert r"| &#60;b&#62;hard&#60;/b&#62; | 0.620 \[0.520, 0.720\] | shortest 0.550" in markdown_page(document)
    assert "<b>hard</b>" not in html_page(document)


def test_rankings_and_soft_labels_are_told_where_there_are_some(tmp_path: Path) -> None:
    rows = [
        replace(
            row, comparisons=tuple(Comparison(first=reply, second=other, label=0.8) for other in range(reply + 1, 4))
        )
        for number in range(30)
        for reply in range(4)
        for row in [replace(score_rows(30)[2 * number], reply=reply, score=float((number * 7 + reply * 5) % 11))]
    ]
    write_evaluation(tmp_path, "eval", rows)
    write_json(tmp_path / "manifest.json", {"config": {"model": "m"}, "data": [], "tokens": {}, "provenance": {}})
    told = tell(read_folder(tmp_path), find_texts=None, draws=20)
    assert told.judgement is not None
    text = markdown_page(report_of([told]))
    for name in ("kendall tau", "ndcg", "best of k", "regret", "kwise spearman", "agreement with soft labels"):
        assert f"| {name} | " in text
    tau = told.judgement["eval_kendall_tau"]
    assert rf"| kendall tau | {tau.value:.3f} \[{tau.low:.3f}, {tau.high:.3f}\] | 30 |" in text


@pytest.mark.parametrize("value", [None, 3, [], {}, {"layers": [1, {"held_out": 5}], "learning_curve": {"x": 1}}])
def test_results_of_another_form_are_left_out(folder: Path, value: object) -> None:
    for name in ("probe.json", "evals/precision.json", "suite.x.json"):
        write_json(folder / name, value)
    record = read_folder(folder)
    assert probe_section(record).blocks == ()
    assert precision_section(record).blocks == ()
    assert suites_section(record).blocks == ()
