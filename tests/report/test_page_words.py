"""What pages say: every interval with its method, nothing good of a run that did not end, whole sentences."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from judged_folders import write_judged, write_probe
from rewardlab.analysis.health import WarningSign
from rewardlab.analysis.precision import precision_card
from rewardlab.core.files import write_json
from rewardlab.core.types import Estimate
from rewardlab.report.build import report_of, tell
from rewardlab.report.checklist import checklist_section
from rewardlab.report.curves import curves_side_by_side, training_curves
from rewardlab.report.document import Document, Paragraph, Part, Section
from rewardlab.report.folder import Record, read_folder
from rewardlab.report.markdown import markdown_page
from rewardlab.report.page import html_page
from rewardlab.report.paired import runs_section
from rewardlab.report.robustness import moves
from rewardlab.report.run_facts import speed_section
from rewardlab.report.sections import data_section, side_by_side, signs_section
from run_folders import score_rows, write_run
from told_tables import tables, tables_of, without_method


@pytest.mark.parametrize("write", [write_judged, write_probe, write_run])
def test_every_table_with_intervals_says_how_they_were_made(write, tmp_path: Path) -> None:
    folder = write(tmp_path / "it")
    assert without_method(tables(report_of([tell(read_folder(folder), find_texts=None, draws=20)]))) == []


def test_so_does_that_of_paired_differences() -> None:
    found = runs_section({"a": (score_rows(60, shift=0.2), 1.0), "b": (score_rows(60, shift=1.5), 1.0)})
    assert without_method(tables_of(found.blocks)) == []


def test_a_subset_of_a_suite_that_is_too_small_for_an_interval_is_named(tmp_path: Path) -> None:
    score = {"value": 0.5, "low": None, "high": None, "n": 7, "method": "fewer than 10 prompts", "level": 0.95}
    write_json(tmp_path / "suite.llmbar.json", {"suite": "llmbar", "rows": [{"name": "Natural", "score": score}]})
    write_json(tmp_path / "manifest.json", {"config": {"model": "m"}, "data": [], "tokens": {}, "provenance": {}})
    (table,) = (
        one
        for one in tables(report_of([tell(read_folder(tmp_path), find_texts=None, draws=20)]))
        if one.caption.startswith("llmbar")
    )
    assert "No interval below ten prompts: Natural." in table.notes


def test_what_a_sentence_names_between_backticks_is_code_with_its_flags_in_one_piece() -> None:
    said = (
        'Look with `rewardlab data inspect --samples 20` at 3 < 4 (`pip install "x[y]"`) of `a<b`; '
        "or raise --max-seq-len, `or"
    )
    document = Document(
        title="a `b`",
        made_by="m",
        parts=(Part(title="p", sections=(Section(title="s", blocks=(Paragraph(text=said),)),)),),
    )
    page = html_page(document)
    assert '<code>rewardlab data inspect <span class="flag">--samples</span> 20</code> at 3 &lt; 4' in page
    assert "(<code>pip install &#34;x[y]&#34;</code>)" in page
    assert "of `a&lt;b`; or raise" in page, "no text with signs of HTML becomes an element"
    assert '<span class="flag">--max-seq-len</span>, `or</p>' in page
    assert "<h1>a `b`</h1>" in page, "a title is shown as it is"
    text = markdown_page(document)
    assert 'samples 20` at 3 &#60; 4 (`pip install "x[y]"`) of \\`a&#60;b\\`;' in text
    assert text.startswith("# a \\`b\\`")


def test_a_report_on_suites_says_what_was_read_of_each(unfinished: Record) -> None:
    suite = {"suite": "llmbar", "items": 40, "left_out": {"too few": 2}, "repeated": 1, "sources": {"a.json": "0f"}}
    (table,) = data_section(replace(unfinished, manifest={"data": [suite]})).blocks
    assert table.caption == "Rows of the suites"
    assert table.rows == (("llmbar", "40", "1", "too few 2", "a.json"),)


@pytest.fixture
def unfinished(tmp_path: Path) -> Record:
    record = replace(read_folder(write_run(tmp_path / "run", reached=30)), signs=())
    assert not record.finished
    return record


def test_that_a_run_without_an_end_told_no_sign_is_nothing_good(unfinished: Record) -> None:
    assert signs_section(unfinished).blocks == (Paragraph(text="The run told no warning signs so far.", tone="note"),)
    (checks,) = checklist_section(unfinished, None).blocks
    (check,) = (one for one in checks.checks if "warning signs" in one.question)
    assert (check.answer, check.numbers) == ("not known", "None told so far.")


def test_a_sign_is_one_sentence_with_its_name(unfinished: Record) -> None:
    sign = WarningSign(step=20, name="no_skill", text="the training loss is 0.7.", advice="Look.")
    (said,) = signs_section(replace(unfinished, signs=(sign,))).blocks
    assert said.text.startswith("Step 20, no skill: the training loss is 0.7. ")


def test_what_data_share_is_a_sentence_and_phrases_alone_are_no_warning(unfinished: Record) -> None:
    shared = {
        "evaluation_with_training": {"rows": 0, "replies": 0, "phrases": 1},
        "test_with_training": {"rows": 2, "replies": 1, "phrases": 15},
        "test_with_evaluation": {"rows": 0, "replies": 0, "phrases": 0},
    }
    found = data_section(replace(unfinished, manifest={"data": {"shared": shared}})).blocks
    means = " Phrases are replies that are short or stand in many conversations."
    assert found == (
        Paragraph(text=f"The evaluation data share 1 phrase with the training data.{means}", tone="note"),
        Paragraph(
            text=f"The test data share 2 rows, 1 reply and 15 phrases with the training data.{means}", tone="warning"
        ),
    )


def test_nothing_is_said_of_data_that_are_not_there(unfinished: Record) -> None:
    none = {"rows": 0, "replies": 0, "phrases": 0}
    for shared, said in (
        ({}, "The manifest says nothing about the data."),
        ({"test_with_training": none}, "The training and test data share no prompt and no reply."),
        (
            {"evaluation_with_training": none, "test_with_training": none},
            "The training, evaluation and test data share no prompt and no reply.",
        ),
    ):
        (block,) = data_section(replace(unfinished, manifest={"data": {"shared": shared}})).blocks
        assert block.text == said


def test_replies_that_were_left_out_of_kept_rows_stand_beside_dropped_rows(unfinished: Record) -> None:
    source = {"name": "k", "split": "train", "rows_read": 9, "kept": 8, "dropped": {"bad_label": 1}}
    lost = {"left_out_replies": {"reply_not_text": 3, "bad_scores": 1}}
    for more, told in (({}, ()), ({"left_out_replies": {}}, ()), (lost, ("reply_not_text 3, bad_scores 1",))):
        manifest = {"data": {"train": [{**source, **more}]}}
        (table,) = data_section(replace(unfinished, manifest=manifest)).blocks
        assert table.rows[0][4:-1] == ("bad_label 1", *told)
        assert ("replies left out of kept rows" in table.header) == bool(told)


def test_a_probe_has_no_warning_signs_and_no_last_stretch(tmp_path: Path) -> None:
    record = read_folder(write_probe(tmp_path / "probe"))
    assert signs_section(record).blocks == ()
    assert [block.caption for block in speed_section(record).blocks] == ["Time"]


def test_rates_of_the_whole_run_stand_beside_those_of_its_last_stretch(unfinished: Record) -> None:
    rows = [
        {"step": 0.0, "eval_accuracy": 0.5},
        {"step": 10.0, "seconds": 30.0, "pairs_per_second": 5.0, "tokens_per_second": 100.0, "peak_memory_gib": 3.0},
        {"step": 12.0, "seconds": 10.0, "pairs_per_second": 9.0, "tokens_per_second": 300.0, "peak_memory_gib": 2.0},
    ]
    whole, stretch = speed_section(replace(unfinished, rows=rows, manifest={})).blocks
    assert (whole.caption, stretch.caption) == ("Over the whole run", "In its last stretch")
    assert dict(whole.pairs) == {
        "time in training steps": "40.0 s",
        "comparisons per second": "6.00",
        "tokens per second": "150",
        "most memory": "3.00 GiB",
    }
    assert dict(stretch.pairs) == {"comparisons per second": "9.00", "tokens per second": "300"}


@pytest.mark.parametrize(("last", "said"), [(0.7, "0.700 at step 20, the last, which is"), (0.6, "0.6")])
def test_the_last_evaluation_is_not_told_twice_if_it_is_the_best(unfinished: Record, last: float, said: str) -> None:
    rows = [{"step": 10.0, "eval_accuracy": 0.65}, {"step": 20.0, "eval_accuracy": last, "eval_accuracy_low": 0.69}]
    (checks,) = checklist_section(replace(unfinished, rows=rows), None).blocks
    (check,) = (one for one in checks.checks if "stay at its best" in one.question)
    assert said in check.numbers
    assert check.numbers.count("at step 20") == 1


def test_a_single_evaluation_is_drawn_at_step_0_with_its_interval(unfinished: Record) -> None:
    row = {"step": 0.0, "eval_accuracy": 0.4375, "eval_accuracy_low": 0.307, "eval_accuracy_high": 0.577}
    (chart,) = training_curves(replace(unfinished, rows=[row])).charts
    assert chart.x.low == 0
    assert [(dot.at, dot.low, dot.high) for dot in chart.dots] == [((0.0, 0.4375), 0.307, 0.577)]
    assert chart.legend == ((0, "evaluation data, 95% interval"),)
    assert chart.words == "0.438 [0.307, 0.577] at step 0 on evaluation data."
    (chart,) = training_curves(replace(unfinished, rows=[row, {**row, "step": 10.0, "eval_accuracy": 0.5}])).charts
    assert chart.words.startswith("From 0.438 [0.307, 0.577] at step 0 to 0.500 [0.307, 0.577] at step 10")
    assert not chart.dots


def test_mean_and_standard_deviation_of_the_scores_are_each_told_from_where_to_where(unfinished: Record) -> None:
    rows = [{"step": step, "eval_score_mean": step / 10, "eval_score_std": 0.5} for step in (0.0, 10.0)]
    (chart,) = training_curves(replace(unfinished, rows=rows)).charts
    assert chart.words == (
        "Mean: from 0 at step 0 to 1 at step 10. Standard deviation: from 0.5 at step 0 to 0.5 at step 10."
    )


def test_a_change_of_accuracy_that_is_rounded_to_zero_has_no_minus() -> None:
    rows = score_rows(60)
    card = precision_card({"float32": rows, "bf16": rows}, beta=1.0, num_available=60, seed=0)
    least = Estimate(value=0.0178, low=-0.0001, high=0.0357, n=60, method="score interval")
    measures = {**card.measures, "bf16": {**card.measures["bf16"], "accuracy − float32's": least}}
    (verdict,) = replace(card, measures=measures).verdicts()
    assert verdict.evidence.endswith("accuracy changes by +0.018 [+0.000, +0.036].")


def test_an_evaluation_of_suites_alone_is_not_asked_what_only_pairs_can_answer(tmp_path: Path) -> None:
    score = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 70, "method": "bootstrap", "level": 0.95}
    write_json(tmp_path / "suite.llmbar.json", {"suite": "llmbar", "rows": [{"name": "Natural", "score": score}]})
    manifest = {"config": {"model": "m"}, "data": [], "tokens": {"llmbar": {}}, "provenance": {}}
    write_json(tmp_path / "manifest.json", manifest)
    text = markdown_page(report_of([tell(read_folder(tmp_path), find_texts=None, draws=20)]))
    assert "The folder does not say." not in text
    assert "| yes | 1 suite, 0 files missing or damaged. |" in text
    assert "longest (tokens)" not in text, "a table of nothing"


def test_names_of_settings_are_broken_after_their_parts(unfinished: Record) -> None:
    page = html_page(report_of([tell(unfinished, find_texts=None, draws=20)]))
    assert "<dt>eval_<wbr>fraction</dt>" in page


def test_runs_side_by_side_say_which_data_they_are_judged_on(tmp_path: Path) -> None:
    records = [read_folder(write_run(tmp_path / "ended")), read_folder(write_run(tmp_path / "on", reached=30))]
    (table, note, _) = side_by_side(records, ["ended", "on"]).blocks
    assert [row[0] for row in table.rows] == ["ended (test)", "on (step 30)"]
    assert note.text == (
        "The data are not of one kind. test: test data, which chose nothing; step 30: evaluation data at step 30, on "
        "the way."
    )
    assert len(side_by_side(records[:1] * 2, ["a", "b"]).blocks) == 2
    accuracy, *_ = curves_side_by_side(records, ["ended", "on"]).charts
    assert re.match(r"ended ends at [\d.]+ \[[\d., ]+\] at step 40; on ends at [\d.]+ \[", accuracy.words)


def test_what_changed_texts_move_is_a_list() -> None:
    assert moves(0.0001, 0.037) == "score (p < 0.001), accuracy (p 0.037)"
