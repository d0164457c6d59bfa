"""Controls that the data are too few for are left out with a reason; the others still say what they say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diagnose_simulation
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.types import Comparison, ScoreRow
from rewardlab.diagnosing import runs
from rewardlab.diagnosing.config import DiagnoseConfig
from rewardlab.diagnosing.heads import Settings, Variants, run_controls, why_no_lengths
from rewardlab.diagnosing.report import Diagnosis, markdown_report, text_report
from rewardlab.diagnosing.run import _identity
from rewardlab.diagnosing.verdicts import Finding, Limits, judge_all
from rewardlab.evaluation.evaluate import judge
from test_verdicts import HONEST

SETTINGS = Settings(seeds=range(5), threshold=6)


def simulated() -> Variants:
    return diagnose_simulation.draw("honest", 80, np.random.default_rng(3))


def with_comparisons(of: Variants, change) -> Variants:
    groups = [replace(group, comparisons=tuple(map(change, group.comparisons))) for group in of.groups]
    return replace(of, groups=groups)


def matched(group) -> bool:
    lengths = [length - group.prompt_tokens[k] for k, length in enumerate(group.lengths)]
    return any(abs(lengths[one.first] - lengths[one.second]) < SETTINGS.threshold for one in group.comparisons)


@pytest.mark.slow
def test_pairs_of_equal_length_in_a_single_conversation_leave_the_other_controls():
    of = simulated()
    roots = np.array([0 if matched(group) else 1 + n for n, group in enumerate(of.groups)])
    of = replace(of, roots_G=roots)
    assert "one conversation" in why_no_lengths(of, SETTINGS)
    arms, _ = run_controls(of, SETTINGS)
    assert "length_matched" not in arms
    assert {"full", "label_shuffle", "length_only"} <= set(arms)


@pytest.mark.slow
def test_pairs_of_equal_length_that_are_all_ties_leave_the_other_controls():
    of = simulated()
    groups = [
        replace(group, comparisons=tuple(replace(one, label=0.5) for one in group.comparisons))
        if matched(group)
        else group
        for group in of.groups
    ]
    of = replace(of, groups=groups)
    assert why_no_lengths(of, SETTINGS).startswith("in only 0 comparisons that are not ties")
    assert "length_matched" not in run_controls(of, SETTINGS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [1, 10_000])
def test_a_threshold_that_matches_nothing_or_everything_is_answered_by_one_that_keeps_half(threshold):
    of = simulated()
    said = why_no_lengths(of, replace(SETTINGS, threshold=threshold))
    named, kept, every = map(int, re.search(r"--diagnostic-length-threshold (\d+) keeps (\d+) of (\d+)", said).groups())
    assert every / 4 < kept <= every / 2
    assert why_no_lengths(of, replace(SETTINGS, threshold=named)) is None


def test_nothing_but_ties_is_an_error_in_words():
    of = with_comparisons(simulated(), lambda one: replace(one, label=0.5))
    with pytest.raises(DataError, match="all judgements of the data are ties"):
        run_controls(of, SETTINGS)


def reports_of(found: list[Finding], **facts: Any) -> tuple[str, str]:
    """The report of these findings for a terminal, in one line, and in Markdown."""
    full = HONEST["full"]
    diagnosis = Diagnosis(
        findings=found,
        full=full.over_seeds(),
        full_conversations=full.over_conversations(),
        full_test=None,
        ceiling=None,
        facts={"what": "m", "comparisons": 400, "conversations": 400, "num_seeds": 5, **facts},
    )
    return " ".join(text_report(diagnosis).split()), markdown_report(diagnosis)


def test_a_control_without_what_it_is_shown_beside_is_left_out_and_the_report_says_why():
    few = {name: one for name, one in HONEST.items() if name not in ("random_subset", "random_negatives_changed")}
    found = judge_all(few, Limits())
    assert {"length_matched", "random_negatives"}.isdisjoint(one.control for one in found)
    for report in reports_of(found, not_run={"length_matched": "in only 3 comparisons"}):
        assert "Length matched was not run: in only 3 comparisons." in report
        assert "Random negatives was not run: of some seed nothing was held out" in report


def test_intervals_say_how_they_were_made_and_none_is_over_seeds_that_change_nothing():
    found = judge_all(HONEST, Limits())
    assert any(one.seeds.low == one.seeds.high for control in found for one in control.measured)
    for report in reports_of(found):
        assert "over seeds: 95% intervals: t interval over 5 seeds; the same with all 5 seeds" in report
        assert "over conversations: 95% intervals: score interval" in report
        assert "0.500 [0.500, 0.500]" not in report
        assert "0.500 [—]" in report


# --- training runs -------------------------------------------------------------------------------------------


def configured(tmp_path: Path, **more) -> DiagnoseConfig:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (tmp_path / "run.yaml").write_text("steps: 3\neval_fraction: 0.3\n")
    values = {
        "model": "tiny",
        "dataset": (str(tmp_path / "pairs.jsonl"),),
        "output_dir": tmp_path / "found",
        "train": True,
        "train_config": tmp_path / "run.yaml",
    }
    return DiagnoseConfig.of(**{**values, **more})


def run_with(monkeypatch, tmp_path, outcome):
    """`run_trained` with `outcome` of the name of a control and its settings in place of training."""

    def done(settings):
        name = settings.run.output_dir.parent.name
        right = {f"{n:x} data row{n} 0 1 1": float(n % 3 > 0) for n in range(30)}
        return {"kept": 0.5, "selection": right, "selection changed": right, **outcome(name, settings)}

    monkeypatch.setattr(runs, "_run", done)
    monkeypatch.setattr(runs, "_rows_of", lambda folder: 100)
    monkeypatch.setattr(runs, "_conversations", lambda *_: {"selection": {}})
    return runs.run_trained(configured(tmp_path), range(5), tmp_path / "runs")


@pytest.mark.slow
def test_a_control_with_too_few_rows_to_train_on_does_not_end_the_others(monkeypatch, tmp_path):
    def outcome(name, settings):
        if name == "length_matched" and settings.run.seed == 2:
            raise DataError("no two replies differ by fewer than 50 tokens.")
        return {}

    arms, _, facts = run_with(monkeypatch, tmp_path, outcome)
    assert "no two replies differ" in facts["not_run"]["length_matched"]
    assert {one.control for one in judge_all(arms, Limits())} == {
        "label_shuffle", "prompt_only", "response_only", "random_negatives",
    }  # fmt: skip


@pytest.mark.slow
def test_data_of_equal_lengths_alone_have_no_control_of_lengths(monkeypatch, tmp_path):
    arms, _, facts = run_with(monkeypatch, tmp_path, lambda *_: {"kept": 1.0})
    assert "length_matched" not in {one.control for one in judge_all(arms, Limits())}
    assert "about equally long" in facts["not_run"]["length_matched"]


def test_an_error_of_the_model_itself_ends_everything(monkeypatch, tmp_path):
    def outcome(name, settings):
        raise DataError("nothing to train on")

    with pytest.raises(DataError, match="nothing to train on"):
        run_with(monkeypatch, tmp_path, outcome)


def test_several_judgements_of_the_same_two_replies_all_count():
    judged = (Comparison(first=0, second=1, label=1.0), Comparison(first=0, second=1, label=0.0))
    rows = [
        ScoreRow(
            preference_id="r",
            source="s",
            prompt_key="ab",
            reply=reply,
            score=1.0 - reply,
            num_tokens=3,
            prompt_tokens=1,
            truncated_tokens=0,
            comparisons=() if reply else judged,
        )
        for reply in (0, 1)
    ]
    found = dict(runs._right(judge(rows, beta=1.0)))
    assert sorted(found.values()) == [0.0, 1.0]
    assert {name.split(" ")[0] for name in found} == {"ab"}


def test_runs_that_hold_out_too_little_to_decide_anything_end_with_the_first(monkeypatch, tmp_path):
    ran = []

    def outcome(name, settings):
        ran.append(name)
        return {"selection": {f"{n:x} data row{n} 0 1 1": 1.0 for n in range(9)}}

    with pytest.raises(DataError, match=r"a run holds out 9 comparisons.* Raise eval_fraction \(0.3\)"):
        run_with(monkeypatch, tmp_path, outcome)
    assert ran == ["full"]


def test_without_a_share_of_its_own_a_run_holds_out_enough_to_judge(tmp_path):
    config = configured(tmp_path)
    (tmp_path / "run.yaml").write_text("steps: 3\n")
    held = runs._settings(config, "full", 0, tmp_path / "runs", 1.0).data.selection.eval_fraction
    assert held == runs.HELD_OUT
    (tmp_path / "run.yaml").write_text("steps: 3\neval-fraction: 0.1\n")
    assert runs._settings(config, "full", 0, tmp_path / "runs", 1.0).data.selection.eval_fraction == 0.1


def test_runs_are_kept_only_for_the_same_data_and_settings_of_training(tmp_path):
    config = configured(tmp_path)
    first = _identity(config)
    same = {"seeds": 9, "most_from_length": 0.2, "num_workers": 1, "output_dir": tmp_path / "moved"}
    assert _identity(config.replace(**same)) == first
    (tmp_path / "run.yaml").write_text("steps: 4\neval_fraction: 0.3\n")
    other = _identity(config)
    assert other != first
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "c", "rejected": "b"}\n')
    assert _identity(config) != other


@pytest.mark.parametrize("names", [{"diagnostic_seed": 3}, {"diagnostic_shuffle_rate": 0.2}])
def test_settings_that_diagnose_decides_itself_are_refused(names, tmp_path):
    with pytest.raises(ConfigError, match="diagnose"):
        configured(tmp_path, **names)
