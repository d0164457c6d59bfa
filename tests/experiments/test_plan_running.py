"""`plan run` beside another process, after an amendment and behind a closed gate; what `status` and `amend` say."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rewardlab.cli import main
from rewardlab.core.errors import ConfigError, DataError, DiskFullError, RewardlabError
from rewardlab.core.lock import only_process
from rewardlab.core.signals import Terminated
from rewardlab.experiments import local, one_run, running
from rewardlab.experiments.config import RunConfig
from rewardlab.experiments.local import run_all
from rewardlab.experiments.one_run import do, redo
from rewardlab.experiments.plan import Run
from rewardlab.experiments.records import begin_record, end_record, record_of
from rewardlab.experiments.slurm.queue import Queue
from rewardlab.experiments.status import status_of, text_report
from rewardlab.experiments.study import Study, amend, open_study
from rewardlab.experiments.words import amendment_lines
from rewardlab.training.full_disk import told_when_full
from study_folders import PLAN, do_all, finished_study, frozen_study, train_by_hand

NOTHING = Queue(runs={}, others={})
GATED = PLAN.replace(
    "seeds: [0, 1, 2]\n",
    "seeds: [0, 1, 2]\nphases:\n- {name: one, arms: [plain], gate: {learns: accuracy(plain) > 0.95}}\n"
    "- {name: two, arms: [smooth, harsh]}\n",
)


def run(study: Study, **how: Any) -> tuple[int, list[str]]:
    told: list[str] = []
    return running.run_study(RunConfig(study=study.folder, **how), say=told.append, redo=redo), told


def changed(study: Study, before: str, after: str) -> Study:
    path = study.folder / "plan.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    return amend(study.folder, reason="why", seen="results", begun=True, judged=True)


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are written by hand and not trained; returns the names of those that were begun."""
    begun: list[str] = []

    def do_here(study: Study, runs: Sequence[Run], **how: Any) -> list[Run]:
        begun.extend(one.name for one in runs)
        do_all(study, runs)
        return []

    monkeypatch.setattr(running, "run_all", do_here)
    return begun


def test_a_run_that_another_process_is_at_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = frozen_study(tmp_path)
    monkeypatch.setattr(local, "POLL_S", 0.01)
    monkeypatch.setattr(local, "command_of", lambda study, run: pytest.fail("it is being done"))
    told: list[str] = []
    begin_record(study, study.runs[0])
    ending = threading.Thread(target=lambda: (time.sleep(0.2), end_record(study, study.runs[0], "done")))
    ending.start()
    assert run_all(study, study.runs[:1], jobs=1, say=told.append) == []
    ending.join()
    assert told[0].endswith("is at it; waiting for its end")
    assert told[1:] == ["plain/seed_0: done"]


def test_a_run_that_another_plan_run_has_begun_is_waited_for_before_it_has_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = frozen_study(tmp_path)
    monkeypatch.setattr(local, "POLL_S", 0.01)
    monkeypatch.setattr(local, "command_of", lambda study, run: pytest.fail("it is being done"))
    taken = local.taken_folder(study, study.runs[0])
    taken.mkdir(parents=True)
    told: list[str] = []

    def say(line: str) -> None:
        told.append(line)
        if line.endswith("waiting for its end"):
            begin_record(study, study.runs[0])
            end_record(study, study.runs[0], "done")
            other.close()

    with ExitStack() as other:
        other.enter_context(only_process(taken, "STUDY"))
        assert run_all(study, study.runs[:1], jobs=1, say=say) == []
    assert told == [
        "plain/seed_0: another `plan run` is at it; waiting for its end",
        "plain/seed_0: done",
    ]


@pytest.mark.slow
def test_a_run_that_ends_before_it_can_write_why_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = frozen_study(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from rewardlab.experiments.study import open_study; "
        "from rewardlab.experiments.records import begin_record; study = open_study(Path(sys.argv[1])); "
        "begin_record(study, study.runs[0]); os._exit(75)"
    )
    monkeypatch.setattr(local, "command_of", lambda study, run: [sys.executable, "-c", code, str(study.folder)])
    told: list[str] = []
    assert run_all(study, study.runs[:1], jobs=1, say=told.append) == [study.runs[0]]
    assert told[-1] == "plain/seed_0: interrupted: stopped while it began, or between two steps"
    assert record_of(study, study.runs[0]).state == "interrupted"


@pytest.mark.slow
def test_a_program_that_fails_is_shown_with_the_end_of_its_output(tmp_path: Path) -> None:
    code = "import sys; print('no such folder: data'); sys.exit(3)"
    words = json.dumps(["{python}", "-c", code])
    study = frozen_study(tmp_path, PLAN.replace("plain: {says", f"plain: {{program: {words}, says"))
    told: list[str] = []
    run_all(study, study.runs[:1], jobs=1, say=told.append)
    assert "plain/seed_0: failed: exit status 3" in told
    assert any(line.strip() == "no such folder: data" for line in told)


def test_a_full_disk_in_a_run_is_told_without_flags_that_a_plan_has_not(tmp_path: Path) -> None:
    study = frozen_study(tmp_path)
    one = study.runs[0]
    file = study.run_folder(one) / "metrics.csv"

    def fills_the_disk(arguments: Sequence[str]) -> None:
        with told_when_full(study.run_folder(one)):
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

    with pytest.raises(DiskFullError) as full:
        do(study, one, fills_the_disk)
    assert str(full.value) == (
        f"{study.run_folder(one)}: No space left on device while writing {file}. Make room there; then the same "
        f"command goes on, from the newest checkpoint if there is one. What was saved before is still there."
    )
    record = record_of(study, one)
    assert (record.state, record.message) == ("failed", f"DiskFullError: {full.value}")
    do(study, one, train_by_hand("plain", 0.7))
    assert record_of(study, one).state == "done", "as the message says"


def test_a_record_that_a_full_disk_does_not_take_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "records/plain/seed_0.json")

    def fails(arguments: Sequence[str]) -> None:
        raise DataError("no such column")

    study = frozen_study(tmp_path)
    monkeypatch.setattr(one_run, "end_record", full)
    with pytest.raises(DataError, match="no such column"):
        do(study, study.runs[0], fails)


def test_a_run_that_can_write_neither_record_nor_output_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, flag: str) -> None:
        raise RewardlabError(f"cannot write to {folder} (No space left on device).") from OSError(errno.ENOSPC, "full")

    study = frozen_study(tmp_path)
    monkeypatch.setattr(local, "command_of", lambda study, run: ["false"])
    told: list[str] = []
    assert run_all(study, study.runs[:2], jobs=1, say=told.append) == list(study.runs[:2])
    assert told[-1] == "plain/seed_1: waiting: exit status 1"
    monkeypatch.setattr(local, "require_writable_folder", full)
    with pytest.raises(DiskFullError, match="plain/seed_0 found its disk full"):
        run_all(study, study.runs[:2], jobs=1, say=told.append)
    assert told[-1] == "plain/seed_0: waiting: exit status 1"


@pytest.mark.slow
@pytest.mark.parametrize("records", [True, False])
def test_no_run_is_begun_after_one_that_found_the_disk_full(
    records: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = frozen_study(tmp_path)
    code = (
        "import errno, os, sys; from pathlib import Path; from rewardlab.experiments import one_run; "
        "from rewardlab.experiments.study import open_study; study = open_study(Path(sys.argv[1])); "
        "full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'checkpoints');\n"
        "def fill(*given, **more): raise full\n"
        f"{'' if records else 'one_run.end_record = fill'}\n"
        "one_run.do(study, study.runs[0], fill)"
    )
    monkeypatch.setattr(local, "command_of", lambda study, run: [sys.executable, "-c", code, str(study.folder)])
    told: list[str] = []
    with pytest.raises(DiskFullError) as stopped:
        running.run_study(RunConfig(study=study.folder), say=told.append, redo=redo)
    assert str(stopped.value) == (
        "plain/seed_0 found its disk full, which others would too: no further run is begun. Make room there; then the "
        "same command goes on from what is finished."
    )
    assert [line for line in told if "begins" in line] == [told[0]]
    assert record_of(study, study.runs[0]).state == ("failed" if records else "interrupted")
    assert {record_of(study, one).state for one in study.runs[1:]} == {"waiting"}


@pytest.mark.parametrize(("error", "by", "status"), [(KeyboardInterrupt, "Ctrl-C", 130), (Terminated, "SIGTERM", 75)])
def test_whoever_stops_a_study_is_told_how_it_goes_on(error, by, status, tmp_path, monkeypatch, capsys) -> None:
    def stopped(*given: object, **more: object) -> None:
        raise error("SIGTERM")

    monkeypatch.setattr(running, "run_study", stopped)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "run", str(tmp_path)])
    assert ended.value.code == status
    assert capsys.readouterr().err == f"stopped by {by}. The same command goes on from what is finished.\n"


@pytest.mark.slow
def test_a_run_that_cannot_be_begun_is_told_at_once_and_a_signal_still_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, first, told = frozen_study(tmp_path), threading.Event(), list[str]()

    def folder(_study: Study, run: Run) -> Path:
        if run is study.runs[1]:
            first.wait()
            raise PermissionError(errno.EACCES, "Permission denied", "lock")
        return tmp_path / run.name

    def command(_study: Study, _run: Run) -> list[str]:
        first.set()
        return [sys.executable, "-c", "import time; time.sleep(3600)"]

    def say(line: str) -> None:
        told.append(line)
        if line.startswith("no further run is begun"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(local, "taken_folder", folder)
    monkeypatch.setattr(local, "command_of", command)
    with pytest.raises(Terminated):
        run_all(study, study.runs[:3], jobs=2, say=say)
    assert any("those under way are waited for: lock: Permission denied" in line for line in told)
    assert f"{study.runs[0].name}: waiting: exit status -15" in told
    assert not any(study.runs[2].name in line for line in told)


def test_a_plan_may_be_amended_while_its_runs_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = frozen_study(tmp_path)
    harsh = [one for one in study.runs if one.arm == "harsh"]

    def amended_then_done(study: Study, run: Run) -> list[str]:
        if run.seed == 0:
            changed(study, "lr: 0.01", "lr: 0.02")
        now = open_study(study.folder)
        do_all(now, [now.run_named(run.name)])
        return ["true"]

    monkeypatch.setattr(local, "command_of", amended_then_done)
    told: list[str] = []
    assert run_all(study, harsh, jobs=1, say=told.append) == []
    assert [line for line in told if "begins" not in line] == [f"{one.name}: done" for one in harsh]


@pytest.mark.slow
def test_outdated_runs_are_left_alone_with_the_command_that_does_them_again(tmp_path: Path, by_hand: list[str]) -> None:
    study = changed(finished_study(tmp_path), "lr: 0.01", "lr: 0.02")
    lines = amendment_lines(study)
    assert lines[1][:3] == "  -"
    assert lines[2][:3] == "  +"
    assert lines[-1].startswith(
        "3 runs of harsh began with other settings or data. To do them again: rewardlab plan run"
    )
    assert lines[-1].endswith("--redo harsh")
    status, told = run(study)
    assert (status, by_hand) == (1, [])
    assert told[0] == (
        "harsh/seed_0: outdated: it was begun with other settings than the plan has now: lr 0.01, now 0.02; do it "
        "again with --redo harsh/seed_0, or --redo harsh"
    )
    status, told = run(study, redo=("harsh",))
    assert (status, by_hand) == (0, ["harsh/seed_0", "harsh/seed_1", "harsh/seed_2"])
    with pytest.raises(ConfigError, match="it has no run 'harsch'"):
        run(study, redo=("harsch",))


@pytest.mark.slow
def test_status_tells_that_a_closed_gate_is_what_runs_wait_for(tmp_path: Path, by_hand: list[str]) -> None:
    study = frozen_study(tmp_path, GATED)
    assert "gate" not in text_report(status_of(study, NOTHING))
    assert run(study)[0] == 1
    found = status_of(open_study(study.folder), NOTHING)
    assert "the gate of one is closed, so the runs behind it are not begun" in text_report(found)
    assert found.as_dict()["closed_gates"] == {"one": "closed"}
    assert found.seconds_left is None


def test_the_exit_status_of_the_last_gate_is_told_too(tmp_path: Path, by_hand: list[str]) -> None:
    last = "- {name: two, arms: [smooth, harsh], gate: {learns: accuracy(harsh) > 0.95}}"
    first_open = GATED.replace("accuracy(plain) > 0.95", "accuracy(plain) > 0.5")
    study = frozen_study(tmp_path, first_open.replace("- {name: two, arms: [smooth, harsh]}", last))
    status, told = run(study)
    assert status == 1
    assert not any("--past-gate" in line for line in told)
