"""The report of a study: every number is that of its runs, and nothing that departs from the plan is left unsaid."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.study_folders import PLAN, STEPS, do_all, finished_study, frozen_study, train_by_hand, write_plan
from rewardlab.analysis.multiple import holm
from rewardlab.commands.plan import plan
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import read_summed_json, write_summed_json
from rewardlab.experiments import outcomes
from rewardlab.experiments.one_run import do, redo
from rewardlab.experiments.plan import Run
from rewardlab.experiments.reporting.files import arms_csv, hypotheses_csv, json_report, seeds_csv
from rewardlab.experiments.reporting.hypotheses import exit_status
from rewardlab.experiments.reporting.page import page
from rewardlab.experiments.reporting.summary import Summary, summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import Study, amend, freeze, open_study
from rewardlab.report.document import Beside, Table
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page

ONE = """\
title: One claim
question: Is it good?
base: {model: m, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
seeds: [0, 1]
arms: {plain: {says: nothing added}}
hypotheses: {good: accuracy(plain) > 0.5}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return finished_study(tmp_path_factory.mktemp("finished"), PLAN.replace("- 0.05", "- 0.1"))


@pytest.fixture(scope="module")
def summary(study: Study) -> Summary:
    return summarise(study)


def every_form(summary: Summary) -> tuple[str, str, str]:
    document = page(summary)
    return " ".join(text_report(summary).split()), markdown_page(document), html_page(document)


def test_test_rows_that_were_trained_on_are_told_first(tmp_path: Path, summary: Summary) -> None:
    assert summary.arms.shared == ()
    study = finished_study(tmp_path)
    for seed, rows in ((0, 12), (1, 30), (2, 0)):
        path = study.folder / f"runs/smooth/seed_{seed}/manifest.json"
        values = read_summed_json(path)
        shared = {"test_with_training": {"rows": rows, "prompts": rows}, "test_with_evaluation": {"rows": 0}}
        write_summed_json(path, {**values, "data": {"shared": shared}, "tokens": {"test": {"kept": 200}}})
    for form in every_form(summarise(study)):
        assert "with what was trained on (up to 30 of 200 rows, in 2 of 9 runs)." in form


def test_however_many_tables_a_run_is_in_its_files_are_read_once(
    study: Study, summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()

    def counting(name: str, of: Callable[[Any], str]) -> None:
        function = getattr(outcomes, name)

        def counted(*given: Any, **how: Any) -> Any:
            read.update([f"{name} {of(given[-1])}"])
            return function(*given, **how)

        monkeypatch.setattr(outcomes, name, counted)

    counting("read_folder", str)
    counting("sha256_file", str)
    counting("record_of", lambda run: run.name)
    assert every_form(summarise(study)) == every_form(summary)
    of_records = [count for name, count in read.items() if name.startswith("record_of")]
    others = [count for name, count in read.items() if not name.startswith("record_of")]
    assert (len(others), set(others)) == (2 * len(study.runs), {1})
    # Whether it is done, which log it saw, which scores it left.
    assert len(of_records) == len(study.runs)
    assert max(of_records) <= 3


def test_the_scores_of_all_runs_are_kept_as_columns_alone(study: Study) -> None:
    tables = [outcome.table("test") for outcome in outcomes.Outcomes(study, may_read="test").done("plain")]
    assert [(len(table.pairs.label), table.rows) for table in tables] == [(200, ())] * 3


def test_an_arm_is_the_mean_over_seeds_of_the_pairs_that_it_ranks_right(study: Study, summary: Summary) -> None:
    for row in summary.arms.rows:
        by_hand = []
        for seed in range(3):
            path = study.folder / "runs" / row.arm / f"seed_{seed}/evals/test.scores.jsonl"
            scores = [json.loads(line)["score"] for line in path.read_text(encoding="utf-8").splitlines()]
            wins = [first > second for first, second in zip(scores[::2], scores[1::2], strict=True)]
            by_hand.append(sum(wins) / len(wins))
        assert list(row.cells[0].by_seed.values()) == pytest.approx(by_hand)
        assert row.cells[0].estimate is not None
        assert row.cells[0].estimate.value == pytest.approx(sum(by_hand) / 3)
        assert row.cells[0].estimate.low < min(by_hand) <= max(by_hand) < row.cells[0].estimate.high
    assert [row.arm for row in summary.arms.rows] == ["plain", "smooth", "harsh"], "losing arms are shown too"
    assert summary.arms.data == ("200 comparisons of 200 prompts",)


def test_differences_are_paired_and_adjusted_over_all_arms(summary: Summary) -> None:
    means = {row.arm: row.cells[0].estimate.value for row in summary.arms.rows if row.cells[0].estimate}
    alone = {row.arm: row.cells[0].estimate for row in summary.arms.rows}
    assert [(one.arm, one.other) for one in summary.against_baseline] == [("smooth", "plain"), ("harsh", "plain")]
    for one in summary.against_baseline:
        assert one.estimate is not None
        assert alone[one.arm] is not None
        assert one.estimate.value == pytest.approx(means[one.arm] - means["plain"])
        assert one.shared_seeds == 3
    assert [one.adjusted for one in summary.against_baseline] == holm([one.p for one in summary.against_baseline])
    assert [(one.arm, one.other) for one in summary.steps] == [("smooth", "plain"), ("harsh", "smooth")]


def test_verdicts_come_with_what_was_expected_and_what_would_decide(summary: Summary) -> None:
    found = {one.verdict.name: one for one in summary.hypotheses}
    assert {name: one.verdict.verdict for name, one in found.items()} == {
        "keeps": "supported",
        "harms": "refuted",
        "close": "undecided",
    }
    assert summary.exit_status == 1
    text, markdown, html = every_form(summary)
    for form in (text, markdown, html):
        assert "smoothing moves no ranks" in form
        assert "a loss" in form
        assert "test prompts in place of 200" in form, "an undecided claim says what would decide it"
        assert "To decide close, in a new study: " in " ".join(form.split())
    assert found["keeps"].terms[0].estimate is not None
    assert not found["keeps"].is_provisional


def test_no_estimate_is_printed_without_an_interval_or_its_reason(summary: Summary) -> None:
    blocks = [block for section in page(summary).parts[0].sections for block in section.blocks]
    tables = [
        block.table if isinstance(block, Beside) else block for block in blocks if isinstance(block, Table | Beside)
    ]
    assert len(tables) >= 7
    bare = re.compile(r"-?\d+\.\d+")
    for table in tables:
        if table.caption.startswith(("Every seed", "Bands")):
            continue  # a run is one value, and the table says so; the edges of bands are the plan's own numbers
        columns = [number for number, name in enumerate(table.header) if name != "p" and number]
        for row in table.rows:
            assert not [row[number] for number in columns if bare.fullmatch(row[number])], table.caption
        if any("[—]" in cell for row in table.rows for cell in row):
            assert any("the same in" in note or "one seed" in note for note in table.notes), table.caption


def test_exit_status_tells_support_refutation_and_the_rest(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, ONE)
    nothing = summarise(study)
    assert nothing.exit_status == 2
    assert nothing.hypotheses[0].verdict.verdict == "not tested"
    for form in every_form(nothing):
        assert "0 of 2 runs are done" in form
    do_all(study, study.runs[:1], skills={"plain": 0.8})
    half = summarise(open_study(study.folder))
    assert half.exit_status == 2, "what is not finished is not supported yet"
    do_all(study, study.runs[1:], skills={"plain": 0.8})
    assert summarise(open_study(study.folder)).exit_status == 0
    assert exit_status(()) == 2, "without hypotheses nothing was supported"


@pytest.mark.slow
def test_an_unfinished_study_says_so_first_and_why(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)

    def fails(arguments: object) -> None:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError):
        do(study, study.run_named("harsh/seed_2"), fails)
    do_all(study, [run for run in study.runs if run.name not in ("harsh/seed_1", "harsh/seed_2")])
    found = summarise(open_study(study.folder))
    for form in every_form(found):
        assert form.index("UNFINISHED: 7 of 9 runs are done") < form.index("Of 3 hypotheses")
        assert "CUDA out of memory" in form
        assert "harsh (seed 2)" in form
    by_name = {one.verdict.name: one for one in found.hypotheses}
    assert by_name["harms"].is_provisional
    assert not by_name["keeps"].is_provisional
    assert "refuted, so far" in text_report(found) or "undecided, so far" in text_report(found)
    assert [row.seeds for row in found.arms.rows] == [3, 3, 1]


def test_an_amendment_heads_every_form_and_markup_in_it_stays_text(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, ONE)
    path = study.folder / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("> 0.5", "> 0.4"), encoding="utf-8")
    reason = "0.5 was a <script>alert(1)</script> slip"
    study = amend(study.folder, reason=reason, seen="nothing-run", begun=False, judged=False)
    do_all(study, study.runs)
    text, markdown, html = every_form(summarise(open_study(study.folder)))
    for form, verdict in ((text, "Verdicts"), (markdown, "**Verdicts**"), (html, "<table")):
        assert form.index("AMENDED PLAN: Amended to version 2") < form.index(verdict)
        assert "no run had begun" in form
    assert "with --probe: no" in " ".join(markdown.split()), "arms may train heads without it"
    assert "<script>" not in html
    assert "<script>" not in markdown
    for claim in ("accuracy(plain) &gt; 0.4", "accuracy(plain) &gt; 0.5"):
        assert claim in html, "both texts, and what changed"


def test_everything_that_departs_from_the_plan_is_listed(tmp_path: Path) -> None:
    text = ONE + "phases: [{name: first, arms: [plain], gate: {learns: accuracy(plain) > 0.95}}]\n"
    study = finished_study(tmp_path, text, skills={"plain": 0.7})
    run = study.run_named("plain/seed_1")
    redo(study, run)
    do(study, run, train_by_hand("plain", 0.75))
    study.note("gate passed", phase="first", reason="time was short", state="closed")
    study.note("reported", done=1, total=2)
    found = summarise(open_study(study.folder))
    kinds = [one.kind for one in found.deviations]
    assert kinds == ["gate passed by hand", "run done again", "test data read again", "look on the way"]
    assert "time was short" in found.deviations[0].text
    assert found.gates[0].state == "passed by hand"
    assert "read twice, by" in found.deviations[2].text
    for form in every_form(found):
        assert "DEVIATIONS from the frozen plan" in form


@pytest.mark.slow
def test_looking_at_results_is_noted_and_cannot_be_denied_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = frozen_study(tmp_path, ONE)
    do_all(study, study.runs[:1], skills={"plain": 0.8})
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            plan(["report", str(study.folder)])
        assert ended.value.code == 2
    assert [entry["kind"] for entry in open_study(study.folder).entries] == ["frozen", "reported"]
    path = study.folder / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "# more\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="results were looked at"):
        amend(study.folder, reason="r", seen="results-not-opened", begun=True, judged=True)
    amend(study.folder, reason="r", seen="results", begun=True, judged=True)
    do_all(open_study(study.folder), study.runs[1:], skills={"plain": 0.8})
    plan(["report", str(study.folder)])
    assert "1 of 2 runs done" in " ".join(capsys.readouterr().out.split())


def test_the_tables_hold_every_arm_every_seed_and_every_claim(summary: Summary) -> None:
    arms = list(csv.DictReader(io.StringIO(arms_csv(summary))))
    assert {row["arm"] for row in arms} == {"plain", "smooth", "harsh"}
    accuracy = next(row for row in arms if row["arm"] == "harsh" and row["quantity"] == "accuracy")
    assert float(accuracy["low"]) < float(accuracy["value"]) < float(accuracy["high"])
    seeds = [row for row in csv.DictReader(io.StringIO(seeds_csv(summary))) if row["quantity"] == "accuracy"]
    assert len(seeds) == 9
    claims = list(csv.DictReader(io.StringIO(hypotheses_csv(summary))))
    assert [row["verdict"] for row in claims] == ["supported", "refuted", "undecided"]
    values = json.loads(json.dumps(json_report(summary)))
    assert values["made_by"] == "rewardlab plan report"
    assert values["hypotheses"][1]["verdict"]["verdict"] == "refuted"
    assert "title: What" in values["frozen"]["text"]


def test_an_arm_that_is_left_out_is_shown_with_its_reason(tmp_path: Path) -> None:
    text = PLAN + "scales: {tiny: {leave_out: {harsh: too slow here}}}\n"
    study = freeze(write_plan(tmp_path, text), tmp_path / "study", scale="tiny")
    do_all(study, study.runs)
    found = summarise(open_study(study.folder))
    for form in every_form(found):
        assert "too slow here" in form
    assert next(one for one in found.hypotheses if one.verdict.name == "harms").verdict.verdict == "not tested"
    assert "harsh,0,0" in arms_csv(found)


def test_curves_end_where_the_first_seed_does_and_bands_are_the_range(tmp_path: Path) -> None:
    study = finished_study(tmp_path, ONE)
    path = study.run_folder(study.runs[0]) / "metrics.csv"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    curve = summarise(study).curves[0]
    assert [point.step for point in curve.points] == list(STEPS[:-1])
    assert sorted(curve.ends) == [300, 400]
    assert curve.seeds == 2
    values = [float(rows["eval_accuracy"]) for run in study.runs for rows in _rows(study, run) if rows["step"] == "300"]
    assert (curve.points[-1].least, curve.points[-1].most) == (min(values), max(values))
    assert curve.points[-1].mean == pytest.approx(sum(values) / 2)


def _rows(study: Study, run: Run) -> list[dict[str, str]]:
    path = study.run_folder(run) / "metrics.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_foreign_file_is_not_replaced(tmp_path: Path) -> None:
    study = finished_study(tmp_path, ONE, skills={"plain": 0.8})
    (study.folder / "report").mkdir()
    (study.folder / "report/arms.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="did not write it"):
        plan(["report", str(study.folder)])
    assert (study.folder / "report/arms.csv").read_text(encoding="utf-8") == "mine"


def test_a_run_whose_scores_were_changed_counts_for_nothing(tmp_path: Path) -> None:
    study = finished_study(tmp_path, ONE)
    path = study.run_folder(study.runs[0]) / "evals/test.scores.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"score": 0.0', '"score": -9.0'), encoding="utf-8")
    found = summarise(study)
    assert found.hypotheses[0].verdict.verdict == "not tested"
    assert "is not what the run left" in found.arms.rows[0].cells[0].why


def test_the_noise_ceiling_of_the_test_rows_stands_below_the_arms(tmp_path: Path, summary: Summary) -> None:
    assert summary.arms.ceilings == ()
    found = summarise(finished_study(tmp_path, ONE, strength=0.7))
    (ceiling,) = found.arms.ceilings
    assert (ceiling.origin, ceiling.accuracy.n) == ("strengths", 200)
    for form in every_form(found):
        assert form.count("Ceiling 0.700") == 1
        assert "It is not a bound on accuracy" in form
