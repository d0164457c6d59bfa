"""What `rewardlab compare` prints, and the paired lines below the closing tables of a run."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from rewardlab.analysis import paired
from rewardlab.analysis.aligned import ScoreSet
from rewardlab.analysis.comparison import compare_models
from rewardlab.analysis.metrics import by_source, evaluate
from rewardlab.report.compare import compare_report, format_p, paired_lines
from rewardlab.report.probe import probe_report
from rewardlab.report.run import judged_table, train_report
from scored import rows_of

N = 80
DRAW = np.random.default_rng(0)
TRUTH = DRAW.normal(1.0, 1.0, N)


def rows(noise: float, num: int = N):
    return rows_of(np.stack([TRUTH + DRAW.normal(0, noise, N), np.zeros(N)], 1)[:num])


def judged(own) -> SimpleNamespace:
    return SimpleNamespace(rows=own, overall=evaluate(own, beta=1.0), by_source=by_source(own, beta=1.0))


def report(*noises: float, names: str = "abc", **more: object) -> str:
    sets = [ScoreSet(name=name, rows=rows(noise), beta=1.0) for name, noise in zip(names, noises, strict=False)]
    return compare_report(compare_models(sets, **more), texts={})


@pytest.mark.parametrize(
    ("p", "text"),
    [(1.0, "1.00"), (0.234, "0.23"), (0.0456, "0.046"), (0.00078, "0.0008"), (9e-5, "<0.0001"), (math.nan, "—")],
)
def test_a_p_value_has_two_digits(p, text):
    assert format_p(p) == text


def test_every_line_fits_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = report(2.0, 1.0, 0.2, margin=0.03, slices={"longer": {}})
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"p +Holm +comparisons$", text, re.MULTILINE), "of K-wise rows these are no pairs"


def test_a_verdict_about_the_margin_is_said_with_its_p_and_interval():
    text = report(0.2, 3.0, margin=0.03)
    assert "b less than 0.03 worse in accuracy: not shown (p = " in text
    assert "b less than 0.9 worse in accuracy: shown (p < 0.0001" in report(0.2, 3.0, margin=0.9)


def test_tests_of_several_kinds_are_told_with_the_numbers_that_they_are_of():
    said = re.findall(r"^p.*:.*$", report(2.0, 0.2), re.MULTILINE)
    assert said[0] == "p of accuracy: sign flips by prompt, exact"
    assert said[1].startswith("p of NLL: sign flips by prompt, ")


def test_a_test_of_two_models_that_differ_nowhere_is_no_other_kind_of_test():
    own = {"a": judged(rows(2.0)), "b": judged(rows(0.2))}
    assert "p: sign flips by prompt, exact, after" in " ".join(paired_lines({"c": own["b"], **own}))


def test_what_is_left_out_is_counted():
    broken = rows(1.0)
    broken[0] = rows_of([(math.nan, 0.0)])[0]
    result = compare_models([ScoreSet(name="a", rows=rows(1.0)), ScoreSet(name="b", rows=broken)])
    text = compare_report(result, texts={}, chose=["a"])
    assert "b: 1 comparison without a finite score of it, left out for all models." in text
    assert "Judged on data that chose the checkpoint, which flatters them: a. p is too small where" in text
    assert "NLL: left out, since the β of a, b is not known; give it with --beta." in text


def test_texts_of_disagreements_are_shown_and_obey_nobody():
    result = compare_models([ScoreSet(name="a", rows=rows(3.0)), ScoreSet(name="\x1b[2Jb", rows=rows(0.1))])
    first = result.others[0].disagreements[0].pair
    texts = {(first.source, first.preference_id): {"prompt": "What\x1b[31m?", "preferred": "x " * 400}}
    text = compare_report(result, texts=texts)
    assert "prompt: What\\x1b[31m?" in text
    assert "…" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("kinds", "words", "margins"),
    [
        (("scores", "scores"), "the 3 furthest apart", r"; margins a [+-]\d\.\d\d, b [+-]\d\.\d\d sd"),
        (("verdicts", "scores"), "the 3 that b is surest of", r"; margin b [+-]\d\.\d\d sd"),
        (("verdicts", "verdicts"), "the first 3", ""),
    ],
)
def test_disagreements_show_the_margins_that_there_are_and_say_which_come_first(kinds, words, margins):
    sets = [
        ScoreSet(name=name, rows=rows(noise), verdicts_only=kind == "verdicts")
        for name, noise, kind in zip("ab", (3.0, 0.1), kinds, strict=True)
    ]
    lines = compare_report(compare_models(sets), texts={}).splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith("b is right where a is not")]
    assert lines[start].endswith(f", {words}")
    assert re.fullmatch(rf"  made-up: d\.jsonl:\d+, reply 0 over 1{margins}", lines[start + 1])


def test_the_last_model_is_compared_with_each_of_the_others():
    lines = paired_lines({"length only": judged(rows(9.0)), "before": judged(rows(3.0)), "after": judged(rows(0.1))})
    text = "\n".join(lines)
    assert "On the same pairs (after against each of the others):" in text
    assert [line.split("  ")[0] for line in lines[2].splitlines()][2:] == ["length only", "before"]
    assert "after Holm's correction" in text


def test_closing_tables_compute_no_test_that_they_do_not_show(monkeypatch):
    def unwanted(*args, **more):
        raise AssertionError("computed, and not shown")

    by_name = {"before": judged(rows(3.0)), "after": judged(rows(0.1))}
    lines = paired_lines(by_name)
    for name in ("smallest_difference", "significance_of_means", "mcnemar"):
        monkeypatch.setattr(paired, name, unwanted)
    assert paired_lines(by_name) == lines


def test_a_checkpoint_that_the_same_data_chose_has_no_p():
    by_name = {"before": judged(rows(3.0)), "after": judged(rows(0.1))}
    text = train_report(selection=by_name, test={}, speed="fast", ending="end")
    (head,) = [line for line in text.splitlines() if line.startswith("after minus")]
    assert head.split() == ["after", "minus", "accuracy", "right", "alone", "wrong", "alone"]
    assert "no p: after was chosen by these data" in text
    assert "sign flips" not in text
    assert "sign flips" in train_report(selection={}, test=by_name, speed="fast", ending="end")


def test_test_data_that_chose_the_checkpoint_are_not_said_to_have_chosen_nothing():
    by_name = {"before": judged(rows(3.0)), "after": judged(rows(0.1))}
    shared = {"test_with_evaluation": {"prompts": 4, "rows": 5}}
    text = train_report(selection={}, test=by_name, shared=shared, speed="fast", ending="end")
    assert "Test data (4 of their prompts chose the checkpoint too, so they flatter it):" in text
    assert "no p: after was chosen by these data" in text


def test_a_single_model_or_one_without_rows_gets_no_lines():
    assert paired_lines({"after": judged(rows(1.0))}) == []
    assert paired_lines({"before": SimpleNamespace(), "after": judged(rows(1.0))}) == []


def test_where_nothing_can_be_compared_one_line_says_why():
    (line, *more) = paired_lines({"before": judged(rows(1.0, 8)), "after": judged(rows(1.0, 8))})
    assert "paired differences: none (8 comparisons: at least 10" in " ".join([line, *more])


def test_the_closing_tables_keep_what_they_had_above_the_paired_lines():
    by_name = {"before": judged(rows(3.0)), "after": judged(rows(0.1))}
    text = train_report(selection={}, test=by_name, speed="fast", ending="end")
    assert f"Test data (they chose nothing):\n{judged_table(by_name)}\n\nOn the same pairs (after against" in text
    layer = SimpleNamespace(layer=3, penalty=0.1, at_edge=False, result=by_name["before"])
    probe = probe_report(
        layers=[layer],
        chosen=layer,
        curve=[],
        test=by_name["after"],
        baselines={"bag of words": by_name["before"]},
        spread=None,
        model="m",
    )
    assert "On the same pairs (probe, layer 3 against each of the others):" in probe
