"""Verdicts of `gold match` on one proxy: each by its whole interval."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from gold_matched import drawn, facts, findings, judged, part, scored, sure
from harness.gold_rows import gold_of, with_gold
from rewardlab.core.errors import ConfigError
from rewardlab.core.types import Estimate
from rewardlab.gold.files.layouts import write_rows
from rewardlab.gold.findings import Finding, Status, exit_status
from rewardlab.gold.matching.config import MatchConfig
from rewardlab.gold.matching.judged import Judged, Limits, more_training
from rewardlab.gold.matching.learning import hardly_learned
from rewardlab.gold.matching.order import order_of
from rewardlab.gold.matching.report import json_report, text_report
from rewardlab.gold.matching.run import match, match_parts
from rewardlab.gold.pages import finding_paragraph


@pytest.mark.slow
def test_a_good_proxy_passes_everything_that_can_be_known() -> None:
    rows, train = drawn(rows=600), drawn(rows=900, seed=4, tag="t")
    matched = match_parts(
        part(rows, scored(rows)), part(train, scored(train, 0.95, seed=3), name="train"), runs={"p0": facts()}
    )
    assert {one.status for one in matched.findings} == {"pass"}, [
        one for one in matched.findings if one.status != "pass"
    ]
    assert exit_status(matched.findings) == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("match_rate", "rows", "status"),
    [(0.88, 600, "pass"), (0.75, 1000, "warn"), (0.6, 600, "fail"), (0.5, 600, "fail"), (0.8, 100, "undecided")],
)
def test_the_match_is_judged_by_its_interval(match_rate: float, rows: int, status: str) -> None:
    own = drawn(rows=rows)
    found = judged(own, scored(own, match_rate))["match on test"]
    assert found.status == status, found.evidence
    assert ("not shown to be better than chance" in found.evidence) == (match_rate == 0.5)


@pytest.mark.slow
def test_compressed_scores_fail_with_a_poor_match_and_are_told_with_a_good_one() -> None:
    rows = drawn(rows=600)
    poor = judged(rows, scored(rows, 0.66, scale=0.1))["compressed scores"]
    assert poor.status == "fail"
    assert "--lr 5e-5 and --epochs 2" in poor.advice
    assert judged(rows, scored(rows, 0.9, scale=0.1))["compressed scores"].status == "warn"
    assert judged(rows, scored(rows, 0.66, scale=0.8))["compressed scores"].status == "pass"


@pytest.mark.parametrize(
    ("times", "status"), [(1.0, "pass"), (0.5, "pass"), (0.1, "warn"), (10.0, "fail"), (0.0, "fail")]
)
def test_scores_that_are_gold_times_a_number_are_judged_by_the_number(times: float, status: str) -> None:
    rows = drawn(rows=40)
    found = judged(rows, gold_of(rows) * times)["compressed scores"]
    assert found.status == status, found.evidence
    assert "label more prompts" not in found.advice.lower()


@pytest.mark.parametrize(
    ("rate", "epochs", "said"),
    [
        (2e-5, 1.0, "Train it again with --lr 5e-5 and --epochs 2, and"),
        (5e-5, 1.0, "Train it again with --epochs 2, and"),
        (2e-5, 2.0, "Train it again with --lr 5e-5, and"),
        (None, math.nan, "Train it again with --lr 5e-5 and --epochs 2, and"),
        (5e-5, 3.0, "Its run had --lr 5e-05 and 3 epochs, which is enough elsewhere."),
    ],
)
def test_a_proxy_is_advised_what_its_run_did_not_have(rate: float | None, epochs: float, said: str) -> None:
    assert more_training(dataclasses.replace(facts(), learning_rate=rate, epochs=epochs)).startswith(said)
    assert (
        more_training(None) == "Train it again with --lr 5e-5 and --epochs 2, and look at the loss from step to step."
    )


@pytest.mark.slow
def test_compressed_gold_is_named() -> None:
    rows = drawn(rows=300)
    narrow = with_gold(rows, gold_of(rows) / 20)
    found = judged(narrow, scored(rows))["compressed scores"]
    assert found.status == "fail"
    assert "gold's own scores are the narrow ones" in found.evidence


@pytest.mark.parametrize(("match_rate", "status"), [(0.88, "pass"), (0.501, "undecided")])
def test_the_order_passes_only_where_a_wrong_one_would_be_seen(match_rate: float, status: str) -> None:
    rows = drawn(rows=300)
    found = judged(rows, scored(rows, match_rate))["order of scores"]
    assert found.status == status, found.evidence
    assert ("would not be noticed" in found.evidence) == bool(found.advice) == (status == "undecided")


def test_what_a_run_had_is_told_of_a_proxy_that_hardly_learned() -> None:
    rows = drawn(rows=600)
    own = facts(train_accuracy=sure(0.5), learning_rate=2e-5, epochs=2.0)
    found = judged(rows, scored(rows, 0.6), runs={"p0": own})["hardly learned"]
    assert "Its run had --lr 2e-05 and --epochs 2." in found.evidence
    assert "--epochs" not in found.advice


def test_a_proxy_that_learned_its_rows_by_heart_is_not_held_against_a_match_that_shows_little_training() -> None:
    rows = drawn(rows=600)
    found = judged(rows, scored(rows, 0.501), runs={"p0": facts(train_accuracy=sure(0.95))})["hardly learned"]
    assert found.status == "pass"
    assert "learned its training rows (95.0% [93.0, 97.0])" in found.evidence


@pytest.mark.slow
def test_low_training_accuracy_and_learning_by_heart_are_told_apart() -> None:
    rows, train = drawn(rows=600), drawn(rows=900, seed=4, tag="t")
    test_part = part(rows, scored(rows, 0.6))
    low = findings(match_parts(test_part, part(train, scored(train, 0.66), name="train")))
    assert low["training accuracy"].status == "fail"
    assert low["generalisation"].status == "pass"
    assert low["hardly learned"].status == "warn"
    by_heart = findings(match_parts(test_part, part(train, scored(train, 0.96), name="train")))
    assert by_heart["training accuracy"].status == "pass"
    assert by_heart["generalisation"].status == "fail"
    assert by_heart["hardly learned"].status == "pass"


@pytest.mark.parametrize(
    ("rows", "match_rate", "status"),
    [(600, 0.501, "warn"), (600, 0.6, "warn"), (30, 0.7, "undecided"), (600, 0.88, "pass")],
)
def test_a_match_near_chance_is_not_called_one_of_a_proxy_that_has_learned(rows, match_rate, status) -> None:
    draw = drawn(rows=rows)
    found = judged(draw, scored(draw, match_rate))["hardly learned"]
    assert found.status == status
    assert ("better than chance" in found.evidence) == (match_rate < 0.55)
    assert bool(found.advice) == (status != "pass")


@pytest.mark.parametrize(
    ("low", "value", "high", "good", "status"),
    [
        (0.69, 0.75, 0.795, 0.8, "undecided"),
        (0.15, 0.2, 0.25, 0.8, "pass"),
        (0.64, 0.66, 0.69, 0.6, "pass"),
        (0.64, 0.66, 0.69, 0.8, "warn"),
        (0.46, 0.5, 0.54, 0.8, "warn"),
        (math.nan, 0.66, math.nan, 0.8, "undecided"),
    ],
)
def test_whether_a_proxy_has_hardly_learned_is_judged_by_the_whole_interval(low, value, high, good, status) -> None:
    rows = drawn(rows=30)
    (found,) = match_parts(part(rows, scored(rows))).test.matches.values()
    agreed = dataclasses.replace(found.agreement, match=Estimate(value=value, low=low, high=high, n=200, method="-"))
    order = order_of(scored(rows).reshape(30, 2), gold_of(rows), [row.key for row in rows])
    tested = dataclasses.replace(found, agreement=agreed)
    own = Judged(name="p", test=tested, train=None, order=order, train_order=None, run=None)
    assert hardly_learned(own, Limits(good_match=good)).status == status


@pytest.mark.parametrize(
    ("end", "epoch", "statuses"),
    [
        (sure(0.2), sure(0.2), ("pass", "pass")),
        (sure(0.4), sure(0.4), ("warn", "pass")),
        (sure(0.6), sure(0.6), ("warn", "fail")),
        (sure(0.31), None, ("undecided", "undecided")),
    ],
)
def test_losses_are_judged_by_their_intervals(end: Estimate, epoch: Estimate | None, statuses: Sequence[str]) -> None:
    rows = drawn()
    found = judged(rows, scored(rows), runs={"p0": facts(end_loss=end, epoch_loss=epoch)})
    assert (found["loss at the end"].status, found["loss after an epoch"].status) == tuple(statuses)


def test_a_loss_of_too_few_steps_says_why_it_is_not_judged() -> None:
    rows = drawn()
    few = Estimate(value=0.2, low=math.nan, high=math.nan, n=7, method="")
    found = judged(rows, scored(rows), runs={"p0": facts(end_loss=few, epoch_loss=None)})
    assert found["loss at the end"].status == "undecided"
    assert "Fewer than ten logged steps have no interval" in found["loss at the end"].advice


@pytest.mark.slow
def test_scores_of_other_texts_than_the_run_was_judged_on_are_named() -> None:
    rows = drawn(rows=400)
    found = judged(rows, scored(rows, 0.6), runs={"p0": facts()})["template and texts"]
    assert found.status == "fail"
    assert "another template, another system turn" in found.advice
    assert judged(rows, scored(rows), runs={"p0": facts()})["template and texts"].status == "pass"


def test_what_follows_from_a_wrong_order_says_so() -> None:
    rows = drawn()
    found = judged(rows, scored(rows)[:, ::-1], runs={"p0": facts()})
    assert found["match on test"].advice.startswith("First put the scores in order")
    assert found["template and texts"].status != "fail"


@pytest.mark.parametrize(
    ("status", "advice", "tone"),
    [
        ("undecided", "Match more prompts.", "warning"),
        ("undecided", "", "note"),
        ("pass", "", "good"),
        ("warn", "", "warning"),
        ("fail", "Label again.", "alarm"),
    ],
)
def test_a_verdict_that_says_what_to_do_stands_out_on_the_page(status: Status, advice: str, tone: str) -> None:
    found = Finding(name="match on test", status=status, evidence="So it is.", advice=advice)
    assert finding_paragraph(found, with_about=False).tone == tone


# --- several proxies -------------------------------------------------------------------------------------------


def test_training_rows_alone_say_what_was_learned_and_nothing_of_new_prompts() -> None:
    rows = drawn(rows=600)
    good = facts(train_accuracy=sure(0.95), own_accuracy=sure(0.6))
    matched = match_parts(part(rows, scored(rows, 0.95), name="train"), source="labels.jsonl", runs={"p0": good})
    found = findings(matched)
    assert {"match on test", "generalisation", "hardly learned"}.isdisjoint(found)
    assert found["training accuracy"].status == "pass"
    assert "order of scores, train rows" in found
    assert "held-out" not in found["template and texts"].evidence, "the rows are not those that its run held out"
    assert "labels.jsonl (training rows): 1,200 replies" in " ".join(text_report(matched).split())
    poor = findings(match_parts(part(rows, scored(rows, 0.6), name="train")))
    assert poor["training accuracy"].status == "fail"


def test_training_rows_alone_are_read_by_the_flags_of_training_rows(tmp_path: Path) -> None:
    rows = drawn(rows=40)
    write_rows(tmp_path / "labels.jsonl", (row.as_json() for row in rows))
    (tmp_path / "scores.json").write_text(json.dumps(scored(rows).tolist()), encoding="utf-8")
    given = {"train_input": (tmp_path / "labels.jsonl",), "proxies": (str(tmp_path / "scores.json"),)}
    config = MatchConfig.of(**given)
    assert config.output_dir == tmp_path / "match"
    found = json_report(match(config), config)
    assert found["test"] is None
    assert found["train"]["num_rows"] == 40
    assert list(found["inputs"]) == ["labels.jsonl"]
    with pytest.raises(ConfigError, match="--train-proxies: without --input the files of --proxies are scores"):
        MatchConfig.of(**given, train_proxies=("a=b.json",))
