"""What only some folders have is told where its files are, and left out where these are of another form."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import write_json
from rewardlab.core.types import Comparison, Estimate
from rewardlab.evaluation.records import write_slices
from rewardlab.report.build import report_of, tell, write_report
from rewardlab.report.checklist import checklist_section
from rewardlab.report.document import Paragraph, shown
from rewardlab.report.extras import (
    controls_section,
    ensemble_section,
    precision_section,
    probe_section,
    robustness_section,
    served_section,
    suites_section,
)
from rewardlab.report.folder import EnsembleRecord, read_folder
from rewardlab.report.from_scores import RANKS
from rewardlab.report.markdown import markdown_page
from rewardlab.report.mistakes import KnownTexts
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


def test_what_a_suite_an_ensemble_and_changed_texts_leave_out_is_told(tmp_path: Path) -> None:
    suite = {
        "suite": "llmbar", "rows": [{"name": "Natural", "rows": 30, "score": estimate(0.6)}],
        "ties": "a tie is an error", "weighting": "mean of five sets", "unscored_rows": 1,
        "unscored_replies": {"longer than the model's limit": 2, "odd": "many"}, "truncated_replies": 3,
        "shortened_replies": True, "left_out": {"votes for a tie": 4},
        "incomplete": {"Natural": {"there": 30, "published": 100}, "Manual": {"there": 0, "published": None}, "x": 7},
    }  # fmt: skip
    write_json(tmp_path / "suite.llmbar.json", suite)
    in_eval(tmp_path)
    perturbed = {"perturbations": {"typos": {"estimates": {"shift": estimate(0.2)}, "not_applicable": 5, "lost": 6}}}
    write_json(tmp_path / "eval.perturbed.json", perturbed)
    record = read_folder(tmp_path)
    assert [one.text for one in suites_section(record).blocks if isinstance(one, Paragraph)] == [
        "2 replies in 1 row have no score (2 longer than the model's limit). Each comparison with one of them counts "
        "as lost.",
        "The prompts of 3 replies were cut to fit the model's limit.",
        "Left out by the suite's rule: 4 rows (votes for a tie).",
        "Not the published suite, so not comparable with published numbers: rows of Natural 30 of 100, Manual 0.",
    ]
    assert "Rule: a tie is an error. Total: mean of five sets." in markdown_of(tmp_path)
    said = [one.text for one in robustness_section(record).blocks if isinstance(one, Paragraph)]
    assert said == ["typos: left out 5 with nothing to change, 6 without a score for every reply."]
    facts = EnsembleRecord(facts={"members": ["a", "b"], "penalty": 1, "left_out": 28}, evaluations={}, problems=())
    assert ensemble_section(facts).blocks[-1] == Paragraph(
        text="28 preferences left out, which not all members have scored alike.", tone="note"
    )


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
    for name in (*list(RANKS.values())[:5], "agreement with soft labels"):
        assert f"| {name} | " in text
    assert "Compare it with the agreement with these labels, which stands among the ranks." in text
    tau = told.judgement["eval_kendall_tau"]
    assert (
        rf"| mean Kendall's τ of the replies to a prompt | {tau.value:.3f} \[{tau.low:.3f}, {tau.high:.3f}\] | 30 |"
        in text
    )


def in_eval(folder: Path, **config: object) -> Path:
    """An evaluation with score rows and these settings."""
    write_evaluation(folder, "eval", score_rows())
    write_json(
        folder / "manifest.json", {"config": {"model": "m", **config}, "data": [], "tokens": {}, "provenance": {}}
    )
    return folder


def markdown_of(folder: Path) -> str:
    return markdown_page(report_of([tell(read_folder(folder), find_texts=None, draws=20)]))


def test_rates_at_the_thresholds_of_an_evaluation_and_percentiles_of_rewards_are_told(tmp_path: Path) -> None:
    folder = in_eval(tmp_path, thresholds=[0.5, "x", None])
    told = tell(read_folder(folder), find_texts=None, draws=20)
    assert told.judgement is not None
    text = markdown_of(folder)
    rates = " | ".join(shown(told.judgement[f"eval_{rate}@0.5"]) for rate in ("tpr", "fnr", "fpr"))
    assert f"| 0.5 | {rates} |".replace("[", r"\[").replace("]", r"\]") in text
    rewards = told.judgement.distributions["chosen"]
    assert rf"| lowest | {rewards.lowest.value:.2f} \[—\] |" in text
    assert f"| 50 % | {shown(rewards.percentiles['p50'], digits=2)} |".replace("[", r"\[").replace("]", r"\]") in text
    assert "lowest; highest: extreme of the sample" in text
    assert re.search(r"1 %.*; 99 %: too few values for this percentile", text)
    assert "Replies accepted at thresholds" not in markdown_of(in_eval(tmp_path / "without"))


def test_a_run_with_thresholds_has_their_rates_in_its_report(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model": "m", "thresholds": [0.5]})
    write_evaluation(tmp_path / "evals", "test", score_rows())
    record = read_folder(tmp_path)
    assert record.kind == "train"
    assert record.thresholds == (0.5,)
    assert "Replies accepted at thresholds" in markdown_of(tmp_path)


@pytest.mark.parametrize("known", ["all", "one is missing", "all alike"])
def test_a_run_is_divided_by_turns_where_the_data_tell_those_of_every_preference(tmp_path: Path, known: str) -> None:
    write_json(tmp_path / "config.json", {"model": "m"})
    write_evaluation(tmp_path / "evals", "test", score_rows())
    keys = sorted({(row.source, row.preference_id) for row in score_rows()})
    turns = {key: 2 if known == "all alike" else 2 + 2 * (n % 2) for n, key in enumerate(keys)}
    if known == "one is missing":
        turns.popitem()
    texts = KnownTexts(preferences={}, ceiling=None, turns=turns, problems=())
    told = tell(read_folder(tmp_path), find_texts=lambda *given: texts, draws=20)
    assert told.judgement is not None
    labels = [one.label for one in told.judgement.slices.get("turns", ())]
    assert labels == (["2", "4"] if known == "all" else [])
    write_slices(tmp_path / "evals", "test", {"turns": dict.fromkeys(keys, 7)})
    told = tell(read_folder(tmp_path), find_texts=lambda *given: texts, draws=20)
    assert told.judgement is not None
    assert [one.label for one in told.judgement.slices["turns"]] == ["7"], "what was written comes first"


def test_a_suite_is_told_with_corrected_p_values_and_ties_at_random_where_these_differ(tmp_path: Path) -> None:
    row = {"name": "hard", "kind": "subset", "rows": 50, "score": estimate(0.62), "p_value": 0.01, "p_holm": 0.04}
    total = {**row, "name": "all", "kind": "total"}
    in_eval(tmp_path)
    for fair, cells in ((0.62, r"0.040 | 50 |"), (0.65, r"0.040 | 50 | 0.650 \[0.550, 0.750\] |")):
        rows = [{**one, "ties_at_random": estimate(fair)} for one in (row, total)]
        write_json(tmp_path / "suite.rm-bench.json", {"suite": "rm-bench", "rows": rows})
        text = markdown_of(tmp_path)
        assert cells in text
        assert r"| \= all | 0.620" in text
        assert "| 0.010 | 50 |" in text, "of a total the plain one"
        assert ("ties at random" in text) == (fair != 0.62)


def test_changed_texts_are_told_with_what_moves_the_score(tmp_path: Path) -> None:
    effect = {
        "estimates": {"shift": estimate(0.2), "flipped": estimate(0.1)},
        "p_shift_holm": 0.0002,
        "p_accuracy_holm": None,
        "preferences": 90,
    }
    write_json(in_eval(tmp_path) / "eval.perturbed.json", {"preferences": 100, "perturbations": {"typos": effect}})
    assert r"| typos | 0.200 \[0.100, 0.300\] |  | 0.100 \[0.000, 0.200\] |  |  | score (p &#60; 0.001) | 90 |" in (
        markdown_of(tmp_path)
    )


@pytest.mark.slow
def test_an_ensemble_is_told_with_its_members_as_one_and_what_their_disagreement_predicts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        in_eval(tmp_path / name)
    write_json(tmp_path / "models.json", {"a": {}, "b": {}})
    write_evaluation(tmp_path, "ensemble.mean", score_rows())
    facts = {
        "members": ["a", "<b>"],
        "scaled_by": "what each holds",
        "penalty": 1.0,
        "combinations": {"ensemble mean": "mean of the members"},
        "disagreement": {"by_spread": estimate(0.7), "num_errors": 12, "num_right": 30},
    }
    write_json(tmp_path / "ensemble.json", facts)
    (path, _) = write_report([tmp_path], output_dir=tmp_path / "out")
    page = path.read_text()
    assert "Ensemble of a, &lt;b&gt; (λ = 1), each put on one scale by what each holds." in page
    assert "ensemble mean" in page
    assert "a mistake of the mean (12) has more of it than a right answer (30)" in page
    (tmp_path / "ensemble.json").write_text("[")
    write_report([tmp_path], output_dir=tmp_path / "out")
    assert "The ensemble cannot be read" in path.read_text()


def found_controls(verdict: str) -> dict[str, object]:
    """Results of `rewardlab diagnose`."""
    names = ("label_shuffle", "prompt_only", "random_negatives", "length_matched")
    measured = {"name": "held out", "seeds": estimate(0.5), "conversations": estimate(0.51)}
    return {
        "headline": "Controls: as they came out.",
        "what": "m, heads on layer 3, on d.jsonl",
        "model_itself": {"over_seeds": estimate(0.7), "over_conversations": estimate(0.71)},
        "controls": [
            {"control": name, "verdict": verdict, "sentence": "It says so.", "measured": [measured]} for name in names
        ],
    }


@pytest.mark.parametrize(
    ("verdict", "answer", "place"),
    [
        ("pass", "yes", "run/diagnose.json"),
        ("fail", "look", "run/diagnose/diagnose.json"),
        ("undecided", "look", "named"),
    ],
)
def test_controls_are_told_and_answer_the_checklist(tmp_path: Path, verdict: str, answer: str, place: str) -> None:
    folder = in_eval(tmp_path / "run")
    path = tmp_path / ("named/diagnose.json" if place == "named" else place)
    path.parent.mkdir(exist_ok=True)
    write_json(path, found_controls(verdict))
    page, text = write_report([folder], output_dir=folder, controls=path.parent if place == "named" else None)
    assert (
        rf"| label shuffle | held out | 0.500 \[0.400, 0.600\] | 0.510 \[0.410, 0.610\] | {verdict} |"
        in text.read_text()
    )
    assert f"prompt only: {verdict}. It says so." in page.read_text()
    record = replace(read_folder(folder), controls=found_controls(verdict))
    (checks,) = checklist_section(record, None).blocks
    (check,) = (one for one in checks.checks if "controls" in one.question)
    assert (check.answer, check.numbers.startswith("Controls: as they came out. Label shuffle:")) == (answer, True)


def test_a_control_run_says_what_it_should_show_and_is_not_asked_for_controls(folder: Path) -> None:
    write_json(folder / "manifest.json", {"data": {"control": {"mode": "label_shuffle", "splits": ["train"]}}})
    record = read_folder(folder)
    notice, expected = controls_section(record).blocks
    assert "THIS IS A CONTROL" in notice.text
    assert expected.text.startswith("Such a run is expected to reach 0.5 on the true labels")
    (checks,) = checklist_section(record, None).blocks
    assert any("controls are run of models to use" in check.numbers for check in checks.checks)


@pytest.mark.parametrize(
    ("control", "told"),
    [
        ({"mode": "label_shuffle", "splits": ["train"]}, True),
        ({"mode": "label_shuffle", "splits": ["train", "eval"]}, False),
        ({"mode": "response_only", "splits": ["train"]}, False),
    ],
)
def test_where_true_labels_chose_best_the_last_step_is_to_be_read(
    tmp_path: Path, control: dict[str, object], told: bool
) -> None:
    write_json(tmp_path / "config.json", {"model": "m"})
    write_json(tmp_path / "manifest.json", {"data": {"control": control}})
    write_evaluation(tmp_path / "evals", "test", score_rows())
    assert ("Read it at the last step, under the training curves." in markdown_of(tmp_path)) is told


def test_a_folder_without_controls_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--controls .*: no diagnose\.json\. Name the --output-dir of"):
        write_report([folder], output_dir=folder, controls=folder)
    write_json(folder / "diagnose.json", {"x": 1})
    with pytest.raises(DataError, match="is not what `rewardlab diagnose` writes"):
        write_report([folder], output_dir=folder, controls=folder)


@pytest.mark.parametrize("value", [None, 3, [], {}, {"layers": [1, {"held_out": 5}], "learning_curve": {"x": 1}}])
def test_results_of_another_form_are_left_out(folder: Path, value: object) -> None:
    for name in ("probe.json", "evals/precision.json", "suite.x.json", "diagnose.json", "eval.perturbed.json"):
        write_json(folder / name, value)
    record = read_folder(folder)
    assert probe_section(record).blocks == ()
    assert precision_section(record).blocks == ()
    assert suites_section(record).blocks == ()
    assert controls_section(record).blocks == ()
    assert robustness_section(record).blocks == ()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"precision": "fp32", "precision_card": "auto"}, "a run in float32 of fewer than 10,000 preferences"),
        ({"precision": "bf16", "precision_card": "never"}, "it was switched off"),
        ({"precision": "bf16", "precision_card": "auto"}, "the log may say why"),
    ],
)
def test_a_run_without_a_card_says_why_and_how_to_make_one(tmp_path: Path, config: dict[str, object], why: str) -> None:
    config = {"model": "m", "dataset": ["d"], "test_dataset": ["held out.jsonl"], **config}
    write_json(tmp_path / "config.json", config)
    write_evaluation(tmp_path / "evals", "test", score_rows())
    (said,) = precision_section(read_folder(tmp_path)).blocks
    assert isinstance(said, Paragraph)
    assert why in said.text
    assert said.text.endswith("rewardlab eval MODEL --dataset 'held out.jsonl' --output-dir runs/card")


def test_a_probe_without_test_data_says_that_nothing_could_make_a_card(folder: Path) -> None:
    for path in (folder / "evals").iterdir():
        path.unlink()
    (said,) = precision_section(read_folder(folder)).blocks
    assert isinstance(said, Paragraph)
    assert "the run has no data to make one on" in said.text


def test_a_run_that_goes_on_does_not_miss_a_card(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model": "m", "dataset": ["d"], "test_dataset": ["t"], "steps": 9})
    assert not precision_section(read_folder(tmp_path)).blocks
