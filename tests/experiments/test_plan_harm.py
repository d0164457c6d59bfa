"""What would lose or bend a study: gates and choices on a part of the runs, files that change, names that collide."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rewardlab.commands import plan as commands
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import read_summed_json, write_summed_json
from rewardlab.experiments import running
from rewardlab.experiments.config import RunConfig
from rewardlab.experiments.expressions import Term
from rewardlab.experiments.gates import judge_gate, select
from rewardlab.experiments.one_run import do, redo
from rewardlab.experiments.outcomes import Outcomes
from rewardlab.experiments.plan import Run
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.records import record_of
from rewardlab.experiments.reporting.notices import notices
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.slurm.queue import Queue
from rewardlab.experiments.status import status_of, text_report
from rewardlab.experiments.study import Study, amend, freeze, open_study, require_same_data
from study_folders import PLAN, do_all, frozen_study, train_by_hand, write_plan

GATED = PLAN.replace(
    "seeds: [0, 1, 2]\n",
    "seeds: [0, 1, 2]\nphases:\n- {name: one, arms: [plain], gate: {learns: accuracy(plain) > LIMIT}}\n"
    "- {name: two, arms: [smooth, harsh]}\n",
)
SEARCH = """\
question: Which rate?
base: {model: a-model-3b, dataset: [train.jsonl], test_dataset: [test.jsonl], eval_fraction: 0.1, steps: 400}
arms: {base: {}}
phases:
- {name: search, seeds: [10], search: {grid: {lr: [1.0e-6, 1.0e-5]}}}
- {name: confirm, arms: [winner, base]}
"""


def by_hand(study: Study, runs: Sequence[Run], **how: Any) -> list[Run]:
    do_all(study, runs)
    return []


def test_a_gate_is_not_open_on_the_seeds_that_survived(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, GATED.replace("LIMIT", "0.5"))
    do_all(study, study.runs[:2])
    gate = judge_gate(study, study.plan.phases[0])
    assert (gate.state, gate.exit_status) == ("undecided", 2)
    assert "plain/seed_2" in gate.reason
    do_all(study, study.runs[2:3])
    assert judge_gate(study, study.plan.phases[0]).state == "open"


def test_a_later_phase_asked_for_by_name_still_waits_for_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "run_all", by_hand)
    study = frozen_study(tmp_path, GATED.replace("LIMIT", "0.5"))
    told: list[str] = []
    status = running.run_study(RunConfig(study=study.folder, phases=("two",)), say=told.append, redo=redo)
    assert (status, told[0][:24]) == (2, "gate of one: undecided (")
    assert {record_of(study, run).state for run in study.runs} == {"waiting"}


def test_a_winner_is_not_chosen_from_a_part_of_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "run_all", by_hand)
    study = frozen_study(tmp_path, SEARCH)
    asked = RunConfig(study=study.folder, phases=("search",), arms=("lr=1e-06",))
    running.run_study(asked, say=lambda line: None, redo=redo)
    assert open_study(study.folder).winner is None
    with pytest.raises(DataError, match="1 of the 2 runs of its search are not done, such as lr=1e-05/seed_10"):
        select(study, study.plan.phases[0])


def test_a_run_is_not_redone_while_it_is_running(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]

    def train(arguments: Sequence[str]) -> None:
        with pytest.raises(ConfigError, match="is being written by process"):
            redo(study, run)
        train_by_hand("plain", 0.7)(arguments)

    do(study, run, train)
    assert record_of(study, run).state == "done"
    assert [entry["kind"] for entry in open_study(study.folder).entries] == ["frozen"]


def test_a_run_behind_a_closed_gate_is_refused_whoever_asks_for_it(tmp_path: Path) -> None:
    study = frozen_study(tmp_path, GATED.replace("LIMIT", "0.95"))
    behind = next(run for run in study.runs if run.phase == "two")
    with pytest.raises(ConfigError, match="the gate of one is undecided .*3 of the runs it asks about are not done"):
        do(study, behind, train_by_hand(behind.arm, 0.7))
    do_all(study, study.runs[:3])
    with pytest.raises(ConfigError, match="the gate of one is closed. To pass all the same"):
        do(study, behind, train_by_hand(behind.arm, 0.7))
    assert record_of(study, behind).state == "waiting"
    study.note("gate passed", phase="one", reason="to see", state="closed")
    do(open_study(study.folder), behind, train_by_hand(behind.arm, 0.7))
    assert record_of(study, behind).is_over


def test_an_arm_has_the_same_seeds_in_all_its_phases(tmp_path: Path) -> None:
    phases = "phases:\n- {name: one, arms: [plain], seeds: [0]}\n- {name: two, arms: [plain, smooth, harsh]}\n"
    with pytest.raises(ConfigError, match=r"arm plain: has the seeds \[0\] in one and \[0, 1, 2\] in two"):
        frozen_study(tmp_path, PLAN + phases)


def test_a_record_that_is_damaged_stops_nothing_but_its_run(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:2])
    for run, text in zip(study.runs, ("{", '{"state": "done"}'), strict=False):
        (study.folder / "records" / f"{run.name}.json").write_text(text, encoding="utf-8")
    found = status_of(study, Queue(runs={}, others={}))
    assert "7 waiting, 2 damaged of 9 runs" in text_report(found)
    assert found.exit_status == 1
    with pytest.raises(ConfigError, match="plain/seed_0: its record cannot be read: .* Restore the file, or"):
        do(study, study.runs[0], train_by_hand("plain", 0.7))
    redo(study, study.runs[0])
    do_all(study, study.runs[:1])
    assert record_of(study, study.runs[0]).is_over
    assert open_study(study.folder).entries[-1]["test_reads"], "what lay in its folder was read before"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("state", "paused", "state: expected one of waiting, running, .*, found a text, 'paused'"),
        ("attempts", None, "attempts: expected a whole number, found null"),
        ("started", "2001-99-99", "started: expected a time such as .*, found a text, '2001-99-99'"),
        ("ended", "2026-01-01", "ended: expected a time such as .*, found a text, '2026-01-01'"),
        ("test_reads", [{"time": ""}], r"test_reads\[0\].scores: is missing; expected a text"),
        ("data", [], "data: expected an object or null, found a list"),
        ("log", {}, "log: expected a text or null, found an object"),
    ],
)
def test_a_record_with_a_value_that_no_run_writes_is_damaged_and_named(field, value, told, tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:2])
    path = study.folder / "records" / f"{study.runs[0].name}.json"
    write_summed_json(path, read_summed_json(path) | {field: value})
    found = status_of(study, Queue(runs={}, others={}))
    assert "1 done, 7 waiting, 1 damaged of 9 runs" in text_report(found)
    assert re.search(f"its record cannot be read: .*json: {told}. It was changed", found.runs[0].message)
    assert ("plain/seed_0", "damaged") in [(one.run, one.state) for one in summarise(study).progress.unfinished]


def test_test_data_read_by_a_run_that_was_killed_before_its_record_are_on_record(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    run = study.runs[0]

    def killed(arguments: Sequence[str]) -> None:
        train_by_hand("plain", 0.7)(arguments)
        raise SystemExit(75)

    with pytest.raises(SystemExit):
        do(study, run, killed)
    assert not record_of(study, run).test_reads
    redo(study, run)
    do(study, run, train_by_hand("other", 0.9))
    assert len(record_of(study, run).test_reads) == 2


def test_the_beginning_of_an_entry_that_a_kill_left_in_the_log_is_left_out(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    study.note("one")
    path = study.folder / "log.jsonl"
    whole = path.read_bytes()
    for left in (b'{"kind": "two", "ti', b'{"kind": "tw\xc3'):
        path.write_bytes(whole + left)
        assert [entry["kind"] for entry in open_study(study.folder).entries] == ["frozen", "one"]
    study.note("three")
    assert [entry["kind"] for entry in open_study(study.folder).entries] == ["frozen", "one", "three"]
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    study.note("four")
    assert [entry["kind"] for entry in open_study(study.folder).entries] == ["frozen", "one", "three", "four"]
    path.write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ConfigError, match="holds no study"):
        open_study(study.folder)


def test_a_pipe_in_the_place_of_the_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    os.mkfifo(tmp_path / "study/log.jsonl")
    with pytest.raises(DataError, match="it is a pipe, not a file"):
        freeze(write_plan(tmp_path), tmp_path / "study")


def test_a_value_at_a_step_is_not_that_of_the_seeds_that_reached_it(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    do_all(study, study.runs[:2])
    do_all(study, study.runs[2:3], last_step=200)
    wanted = [Term("gap", "plain", step=step) for step in (200, 300)]
    found, missing = Outcomes(study, may_read="validation").observe(wanted)
    assert list(found) == wanted[:1]
    assert missing[wanted[1]] == "1 of 3 runs of plain have no gap at step 300: seed 2 (it ended at step 200)"


@pytest.mark.slow
def test_arms_that_were_judged_on_different_rows_are_told_wherever_they_are_compared(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    do_all(study, [run for run in study.runs if run.arm != "smooth"])
    do_all(study, [run for run in study.runs if run.arm == "smooth"], prompts=150)
    summary = summarise(open_study(study.folder))
    (notice,) = (one for one in notices(summary) if one.startswith("DIFFERENT"))
    assert notice.endswith("plain, harsh: 200 comparisons of 200 prompts; smooth: 150 comparisons of 150 prompts.")
    said = {one.verdict.name: one.verdict.sentence for one in summary.hypotheses}
    assert "different test prompts (150 of 200 are common to all)" in said["keeps"]
    assert "different" not in said["harms"]
    assert "Every run was judged on" not in summary.methods


def test_an_amendment_with_line_ends_of_another_system_can_be_opened_again(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    path = study.folder / "plan.yaml"
    text = path.read_text(encoding="utf-8").replace("label_smoothing: 0.05", "label_smoothing: 0.06")
    path.write_bytes(text.replace("\n", "\r\n").encode())
    assert amend(study.folder, reason="why", seen="nothing-run", begun=False, judged=False).version == 2
    assert open_study(study.folder).plan.arms["smooth"].settings["label_smoothing"] == 0.06


def test_an_amendment_that_could_not_be_frozen_is_refused(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    path = study.folder / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("accuracy(harsh) >", "accuracy(hash) >"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is not amended: harms: .*Did you mean harsh"):
        commands.amend([str(study.folder), "--reason", "why", "--seen", "nothing-run"])
    entries = (study.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["kind"] for line in entries] == ["frozen"]


def test_data_that_went_or_came_after_freezing_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    study = frozen_study(tmp_path, PLAN.replace("[train.jsonl]", f"['{folder}']"))
    require_same_data(study)
    (folder / "b.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"b.jsonl: is not the file that the plan was frozen with"):
        require_same_data(study)
    (folder / "b.jsonl").unlink()
    (folder / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a.jsonl: is not there, and the plan was frozen with it"):
        require_same_data(study)


def test_a_program_that_writes_nothing_is_not_judged_by_the_run_before(tmp_path: Path) -> None:
    text = PLAN.replace("label_smoothing: 0.0}", "program: ['true'], label_smoothing: 0.0}")
    study = frozen_study(tmp_path, text)
    run = study.runs[0]
    scores = study.run_folder(run) / "evals" / "test.scores.jsonl"
    scores.parent.mkdir(parents=True)
    scores.write_text("{}\n", encoding="utf-8")
    with pytest.raises(DataError, match="left no evals/test.scores.jsonl"):
        do(study, run, train_by_hand("plain", 0.7))


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        *(pytest.param(f"sys.exit({code})", 75, marks=pytest.mark.slow) for code in (75, 3)),
        ("sys.exit(0)", 2),
    ],
)
def test_a_program_that_is_told_to_end_is_waited_for(tmp_path: Path, ends: str, status: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""\
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.5)
    pathlib.Path("saved").write_text("a checkpoint")
    {ends}
signal.signal(signal.SIGUSR2, end)
pathlib.Path("ready").touch()
while True:
    time.sleep(0.05)
""",
        encoding="utf-8",
    )
    study = frozen_study(tmp_path, PLAN.replace("label_smoothing: 0.0}", f'program: ["{{python}}", "{program}"]}}'))
    run = study.runs[0]
    words = [sys.executable, "-m", "rewardlab", "plan", "task", str(study.folder), "--run", run.name]
    task = subprocess.Popen(words, cwd=tmp_path, start_new_session=True)
    try:
        while not (tmp_path / "ready").exists():
            assert task.poll() is None
            time.sleep(0.05)
        os.killpg(task.pid, signal.SIGUSR2)
        assert task.wait() == status
    finally:
        task.kill()
    assert (tmp_path / "saved").read_text() == "a checkpoint"
    assert record_of(study, run).state == ("interrupted" if status == 75 else "failed")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("baseline: plain", "baseline: plain\ngrid: {lr: [1, 1.0]}", "there are two arms 'lr=1'"),
        ("  harsh:", "  Plain: {lr: 0.02}\n  harsh:", "plain and Plain differ in upper and lower case only"),
        ("  harsh:", "  winner: {lr: 0.02}\n  harsh:", "winner stands for the winner of a search"),
    ],
)
def test_arms_that_would_be_taken_for_each_other_are_refused(tmp_path: Path, before, after, told) -> None:
    path = write_plan(tmp_path, PLAN.replace(before, after))
    with pytest.raises(ConfigError, match=told):
        read_plan(path)


def test_a_study_has_one_search_and_phases_have_names_of_their_own(tmp_path: Path) -> None:
    again = SEARCH.replace("- {name: confirm", "- {name: NAME, search: {grid: {lr: [1.0e-4]}}}\n- {name: confirm")
    for name, told in (("other", "both search"), ("search", "two are called 'search'")):
        with pytest.raises(ConfigError, match=told):
            read_plan(write_plan(tmp_path, again.replace("NAME", name)))
