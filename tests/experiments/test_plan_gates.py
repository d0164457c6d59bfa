"""Gates and choices read validation data only; phases wait for gates; a search ends in a winner on fresh seeds."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewardlab.core.errors import ConfigError
from rewardlab.experiments import outcomes, running
from rewardlab.experiments.checking import check
from rewardlab.experiments.claims import parse
from rewardlab.experiments.config import RunConfig
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.gates import gate_claim, judge_gate, select
from rewardlab.experiments.one_run import redo
from rewardlab.experiments.outcomes import Outcome, Outcomes
from rewardlab.experiments.plan import Run
from rewardlab.experiments.records import TEST_SCORES, record_of
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.reporting.text import text_report
from rewardlab.experiments.study import Study, amend, begun_and_judged, freeze, open_study
from rewardlab.report.folder import read_folder
from study_folders import PLAN, do_all, edit, finished_study, frozen_study, write_plan

PHASES = """\
[0, 1, 2]
phases:
- {name: one, arms: [plain], gate: {learns: accuracy(plain) > LIMIT}}
- {name: two, arms: [smooth, harsh]}
"""
GATED = PLAN.replace("[0, 1, 2]\n", PHASES)
SEARCH = """\
question: Which rate?
base: {model: a-model-3b, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
arms: {base: {}}
phases:
- {name: search, seeds: [10, 11, 12], search: {grid: {lr: [1.0e-6, 1.0e-5]}}}
- {name: confirm, arms: [winner, base]}
hypotheses: {better: accuracy(winner) > accuracy(base)}
"""
RATES = {"lr=1e-06": 0.6, "lr=1e-05": 0.8, "winner": 0.8, "base": 0.6}


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written by hand and not trained."""

    def do_here(study: Study, runs: Sequence[Run], **how: Any) -> list[Run]:
        do_all(study, runs, skills={**{"plain": 0.75, "smooth": 0.76, "harsh": 0.6}, **RATES})
        return []

    monkeypatch.setattr(running, "run_all", do_here)


def run(study: Study, **how: Any) -> tuple[int, list[str]]:
    told: list[str] = []
    return running.run_study(RunConfig(study=study.folder, **how), say=told.append, redo=redo), told


@pytest.mark.slow
def test_an_open_gate_lets_the_next_phase_begin(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, GATED.replace("LIMIT", "0.6"))
    status, told = run(study)
    assert status == 0
    assert told[0] == "gate of one: open"
    assert all(record_of(study, one).is_over for one in study.runs)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("limit", "state", "status"), [("0.9", "closed", 1), ("0.75", "undecided", 2)])
def test_a_gate_that_is_not_open_keeps_the_next_phase_from_beginning(tmp_path: Path, limit, state, status) -> None:
    study = frozen_study(tmp_path, GATED.replace("LIMIT", limit))
    found, told = run(study)
    assert (found, told[0]) == (status, f"gate of one: {state}")
    assert {record_of(study, one).state for one in study.runs if one.phase == "two"} == {"waiting"}
    status, told = run(study, past_gate="one", reason="we want to see it")
    assert status == 0
    assert told[0] == "gate of one: passed by hand (we want to see it)"
    entry = open_study(study.folder).entries[-1]
    assert (entry["kind"], entry["reason"], entry["state"]) == ("gate passed", "we want to see it", state)


def test_a_gate_is_passed_by_hand_with_a_reason_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="say why with --reason"):
        RunConfig(study=tmp_path, past_gate="one")


@pytest.mark.slow
def test_gates_and_choices_cannot_read_the_test_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="validation data only"):
        gate_claim('accuracy(plain, on="test") > 0.6')
    study = finished_study(tmp_path, GATED.replace("LIMIT", "0.6"))
    with pytest.raises(ConfigError, match="validation data only"):
        Outcomes(study, may_read="validation").observe([Term("accuracy", "plain")])
    for one in study.runs:
        (study.run_folder(one) / TEST_SCORES).unlink()
    assert judge_gate(study, study.plan.phases[0]).state == "open", "it needs none of them"


@pytest.mark.slow
def test_a_search_chooses_by_validation_and_its_winner_is_run_with_fresh_seeds(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, SEARCH)
    assert [one.name for one in study.runs if one.arm == "winner"] == []
    status, told = run(study)
    assert status == 0
    assert "search: chosen on validation data: lr=1e-05, of 2 arms" in told
    study = open_study(study.folder)
    winners = [one for one in study.runs if one.arm == "winner"]
    assert [one.seed for one in winners] == [0, 1, 2]
    assert winners[0].settings["lr"] == 1e-5
    assert all(record_of(study, one).is_over for one in study.runs)
    assert not any((study.run_folder(one) / TEST_SCORES).exists() for one in study.runs if one.phase == "search")
    (entry,) = [entry for entry in study.entries if entry["kind"] == "selected"]
    assert (entry["arm"], entry["on"], entry["tried"]) == ("lr=1e-05", "validation", 2)
    assert select(study, study.plan.phases[0])["arm"] == "lr=1e-05", "what was chosen stays"


def test_what_a_search_chose_is_a_result(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, SEARCH)
    run(study, phases=("search",))
    assert begun_and_judged(study.folder) == (True, True)


def test_what_was_run_after_the_choice_is_named(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, SEARCH)
    _, told = run(study, phases=("search",))
    assert not any("no part" in line for line in told)
    edit(study.folder, "[1.0e-6, 1.0e-5]", "[1.0e-6, 1.0e-5, 1.0e-4]")
    amend(study.folder, reason="wider", seen="results", begun=True, judged=True)
    late, again = "Run after the choice, and no part of it: lr=0.0001.", "which went by the runs before: "
    _, told = run(study, phases=("search",))
    assert f"{late} It is made once" in told[-1]
    for name in ("lr=1e-06", "lr=1e-05"):  # the second is what was chosen
        redo(study, study.run_named(f"{name}/seed_10"))
    _, told = run(study, phases=("search",))
    assert late in told[-1]
    assert f"{again}lr=1e-06, lr=1e-05. It is made once" in told[-1]
    found = " ".join(text_report(summarise(open_study(study.folder))).split())
    assert f"{late} Done again after the choice, {again}lr=1e-06, lr=1e-05." in found


def test_unknown_phases_arms_and_gates_are_told(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    for how, told in (
        ({"phases": ("mian",)}, "--phases: the study has no 'mian'.*main"),
        ({"arms": ("plan",)}, "--arms: the study has no 'plan'.*plain"),
        ({"past_gate": "x", "reason": "y"}, "--past-gate: the study has no 'x'"),
        ({"redo": ("plain/seed_9",)}, "it has no run 'plain/seed_9'. Did you mean plain/seed_"),
    ):
        with pytest.raises(ConfigError, match=told):
            run(study, **how)


# --- outcomes ----------------------------------------------------------------------------------------------------


def test_quantities_are_read_from_scores_curves_and_records(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    claims = [
        "accuracy(plain) > 0",
        'accuracy(plain, on="validation") > 0',
        "gap(plain) > 0",
        "accuracy(plain, step=100) > 0",
        "stopped_at(plain) > 0",
        "best_step(plain) > 0",
        "trainable_share(plain) > 0",
    ]
    terms = [term for claim in claims for term in parse(claim).terms]
    found, missing = Outcomes(study, may_read="test").observe(terms)
    assert not missing
    test, validation, gap, at_step, stopped, best, share = (found[term] for term in terms)
    assert test.influence_SC is not None
    assert test.seeds == (0, 1, 2)
    assert test.mean == pytest.approx(0.75, abs=0.05)
    assert not set(validation.clusters) & set(test.clusters)
    assert gap.influence_SC is None
    assert (stopped.mean, best.mean) == (400, 300)
    assert share.by_seed_S.tolist() == [0.02] * 3
    assert at_step.influence_SC is None


def test_the_noise_of_a_curve_is_that_of_the_longer_side_of_its_interval(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    for run in study.runs:
        path = study.run_folder(run) / "metrics.csv"
        head, *rows = path.read_text().splitlines()
        place = head.split(",").index("eval_loss")
        loss = [float(row.split(",")[place]) for row in rows]
        wide = [f"{row},{own - 0.0196},{own + 0.0392}" for row, own in zip(rows, loss, strict=True)]
        path.write_text("\n".join([f"{head},eval_loss_low,eval_loss_high", *wide]))
    [term] = parse("loss(plain, step=100) < 1").terms
    found, _ = Outcomes(study, may_read="test").observe([term])
    assert found[term].row_error == pytest.approx(0.02), "a loss that looks too small lies below the truth"


@pytest.mark.slow
def test_the_spread_of_the_speed_leaves_out_the_first_row_which_warms_up(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    path = study.run_folder(study.runs[0]) / "metrics.csv"
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [bool(row["pairs_per_second"]) for row in rows] == [False, True, True, True, True]
    for row, speed in zip(rows[1:], (5, 900, 1000, 1100), strict=True):
        row["pairs_per_second"] = str(speed)
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]), encoding="utf-8")
    term = Term("speed_spread", "plain")
    found, _ = Outcomes(study, may_read="validation").observe([term])
    assert found[term].by_seed_S == pytest.approx([0.1, 0.0, 0.0])


@pytest.mark.slow
def test_the_spread_of_the_speed_leaves_out_each_start_and_weighs_rows_by_their_seconds(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    whole = read_folder(study.run_folder(study.runs[0]))
    # Steps, seconds, pairs/s: 30, 40 and 50 count, the last of them for twice as long; the run went on after 10 and 50.
    of_rows = ((10, 9, 5), (20, 9, 7), (30, 10, 900), (40, 10, 1000), (50, 20, 1100), (60, 9, 8))
    rows = [{"step": step, "seconds": time, "pairs_per_second": speed} for step, time, speed in of_rows]

    def spread(rows: list[dict[str, float]], *resumed: int) -> float:
        record = replace(whole, rows=rows, manifest={"resumed": [{"step": step} for step in resumed]})
        return Outcome.of(study.runs[0], record).of_record("speed_spread")

    # The sum of squares around 1025, weighted, over the weights less the sum of their squares over their sum.
    assert spread([{"step": 0}, *rows], 10, 50) == pytest.approx((10 * (125**2 + 25**2 + 2 * 75**2) / 25) ** 0.5 / 1025)
    equal = [{**row, "seconds": 10} for row in rows]
    assert spread(equal, 10, 50) == pytest.approx(0.1), "as with n - 1"
    assert math.isnan(spread(rows[:2])), "one row says nothing"


@pytest.mark.slow
def test_of_the_metrics_of_a_run_only_what_is_asked_of_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study of long runs would not fit into memory with all their rows. While they are read a bar says so."""
    told: list[str] = []
    monkeypatch.setattr(outcomes, "bar", lambda items, *, title, unit: told.append(title) or items)
    study = finished_study(tmp_path)
    whole = read_folder(study.run_folder(study.runs[0]))
    outcome = Outcomes(study, may_read="test").done(study.runs[0].arm)[0]
    assert (len(whole.rows) > 1, list(outcome.record.rows)) == (True, [whole.rows[-1]])
    assert told == [f"reading runs of {study.runs[0].arm}"]
    for column in ("eval_accuracy", "gap_loss", "peak_memory_gib", "eval_ece"):
        for step in (int(whole.rows[1]["step"]), int(whole.rows[-1]["step"])):
            (row,) = (row for row in whole.rows if row["step"] == step)
            assert outcome.at_step(column, step) == pytest.approx(row.get(column, math.nan), rel=0, nan_ok=True)
    assert math.isnan(outcome.at_step("eval_accuracy", step + 1))
    assert math.isnan(outcome.at_step("eval_accuracy", 1))


@pytest.mark.slow
def test_a_run_that_recorded_nothing_has_no_time_and_no_last_step(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    record = read_folder(study.run_folder(study.runs[0]))
    recorded, nothing = (
        Outcome.of(study.runs[0], one) for one in (record, replace(record, rows=[], manifest={}, steps_saved=()))
    )
    for name in ("seconds", "stopped_at"):
        assert recorded.of_record(name) > 0
        assert math.isnan(nothing.of_record(name)), "0 would be the best of all"


@pytest.mark.slow
def test_a_gate_does_not_ask_about_arms_that_are_left_out_unless_none_is_left(tmp_path: Path) -> None:
    text = GATED.replace("LIMIT", "0.6, as_good: accuracy(plain) >= accuracy(harsh) - 0.1").replace(
        "arms: [plain]", "arms: [plain, harsh]"
    )
    text = text.replace("arms: [smooth, harsh]", "arms: [smooth]") + "scales: {small: {leave_out: {harsh: costly}}}\n"
    path = write_plan(tmp_path, text)
    study = freeze(path, tmp_path / "study", scale="small")
    status, told = run(study)
    assert (status, [line.split(":")[0].strip() for line in told]) == (0, ["gate of one", "learns"])
    warned = [problem.text for problem in check(study.plan).problems]
    assert "gate of one: as_good: is not asked at this scale: no harsh" in warned

    path.write_text(path.read_text(encoding="utf-8").replace("{harsh: costly}", "{plain: costly}"), encoding="utf-8")
    none_left = freeze(path, tmp_path / "other", scale="small")
    assert run(none_left)[0] == 2
    assert check(none_left.plan).errors == [
        "gate of one: cannot open at this scale: each of its claims is about an arm that is left out (plain). Keep "
        "that arm, or add a claim about arms that are run."
    ]
    assert not check(study.plan).errors


@pytest.mark.slow
def test_scores_that_were_changed_afterwards_are_refused(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    path = study.run_folder(study.runs[0]) / TEST_SCORES
    path.write_text(path.read_text(encoding="utf-8").replace('"score": ', '"score": 1'), encoding="utf-8")
    _, missing = Outcomes(study, may_read="test").observe([Term("accuracy", "plain")])
    assert "is not what the run left when it ended" in next(iter(missing.values()))


def test_what_is_not_there_is_missing_with_the_reason(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    found, missing = Outcomes(study, may_read="test").observe([Term("accuracy", "plain"), Term("mfu", "smooth")])
    assert not found
    assert list(missing.values()) == ["no run of plain is done", "no run of smooth is done"]


@pytest.mark.slow
def test_a_log_whose_last_line_was_changed_after_the_runs_is_noticed(tmp_path: Path) -> None:
    study = finished_study(tmp_path)
    path = study.folder / "log.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace('"time": "2', '"time": "1'), encoding="utf-8")
    _, missing = Outcomes(open_study(study.folder), may_read="test").observe([Term("accuracy", "plain")])
    assert "it was changed after plain/seed_0 began" in next(iter(missing.values()))
