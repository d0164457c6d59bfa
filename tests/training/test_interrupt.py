"""Asking a run to end: signals and a limit in hours."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

import rewardlab.report.run as report_module
import rewardlab.training.run as run_module
import runs
from resuming import config_for, stop_after
from rewardlab.cli import main
from rewardlab.core import signals as interrupt
from rewardlab.core.errors import RunInterrupted
from rewardlab.core.files import read_json
from rewardlab.core.run_folder import ENDED
from rewardlab.core.signals import StopRequests
from rewardlab.report.folder import read_folder
from rewardlab.report.sections import status as status_of
from rewardlab.training.loop.reward_judge import RewardJudge
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.run import train

pytestmark = pytest.mark.usefixtures("verified_here")


def ticking(stops: StopRequests) -> int:
    """How often it was asked."""
    vars(stops)["asked"] = vars(stops).get("asked", 0) + 1
    return vars(stops)["asked"]


@pytest.mark.slow
def test_a_limit_in_hours_ends_a_run_with_a_status_of_its_own(base_model, pairs_file, tmp_path, monkeypatch, capsys):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--max-hours", "0.0000001"])
    assert ended.value.code == 1, "queued again, it would never end"
    assert "stopped by --max-hours 1e-07 after step 0 of 8. Not one step was done" in capsys.readouterr().err
    monkeypatch.setattr(StopRequests, "reason", property(lambda stops: "--max-hours 1" if ticking(stops) > 12 else ""))
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--overwrite"])
    assert ended.value.code == 75


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("how", "status"),
    [  # the other tests raise SIGUSR1; its like and it go the way of SIGTERM
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGHUP, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR2, 75, marks=pytest.mark.slow),
        (signal.SIGINT, 130),
    ],
)
def test_signals_end_a_run_between_two_steps(how, status, base_model, pairs_file, tmp_path, monkeypatch, capsys):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    before = signal.getsignal(how)
    with monkeypatch.context() as patched:
        stop_after(patched, 3, how=how)
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
    assert ended.value.code == status
    assert "after step 3 of 8. Start the same command again with --resume auto" in capsys.readouterr().err
    assert signal.getsignal(how) is before
    kept = read_json(tmp_path / "run" / ENDED)
    assert kept["error"] == "RunInterrupted"
    assert "after step 3 of 8. Start the same command again with --resume auto" in kept["text"]
    said = f"Ended before its time (last record: step 3 of 8): {kept['text']}"
    assert status_of(read_folder(tmp_path / "run")).startswith(said)
    main(["train", *words, "--resume", "auto"])
    assert (tmp_path / "run/step_8").exists()
    assert not (tmp_path / "run" / ENDED).exists()


def test_a_second_signal_ends_the_process_as_ever(capfd):
    with StopRequests() as stops:
        assert stops.reason == ""
        signal.raise_signal(signal.SIGTERM)
        assert stops.reason == "SIGTERM"
        said = "SIGTERM: the run ends after its present step or evaluation; a second one ends it at once\n"
        assert capfd.readouterr().err.endswith(said)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_closed_terminal_ends_a_run_as_asked_unless_it_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequests() as stops, interrupt.raised_at_once():
            signal.raise_signal(signal.SIGHUP)
        assert not stops.signalled
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequests() as stops:
            signal.raise_signal(signal.SIGHUP)
        assert (stops.reason, stops.exit_status) == ("SIGHUP", 75)
        with pytest.raises(interrupt.Terminated, match="SIGHUP"), interrupt.raised_at_once():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_whose_terminal_takes_no_word_ends_as_asked(monkeypatch, ends):
    def refuse(handle, text):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(interrupt.os, "write", refuse)
    with StopRequests() as stops:
        signal.raise_signal(signal.SIGTERM)
    assert stops.reason == "SIGTERM"
    with interrupt.ending_with_status(), pytest.raises(Ended):
        signal.raise_signal(signal.SIGTERM)
    assert ends == [75]


def test_usr2_may_come_twice_and_term_after_it_ends_the_process_as_ever():
    before = signal.getsignal(signal.SIGUSR2)
    with StopRequests() as stops:
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
        assert (stops.reason, stops.exit_status) == ("SIGUSR2", 75)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is before


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def ends(monkeypatch):
    """Statuses with which the process would have ended at once."""
    found = []

    def end(status):
        found.append(status)
        raise Ended

    monkeypatch.setattr(interrupt.os, "_exit", end)
    return found


def signal_oneself(*_, **__):
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "it would end the tests"
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "where"),
    [
        (run_module, "load_reward_model"),
        (run_module, "write_run_start"),
        (run_module, "_judge_untrained"),
        (run_module, "verify_in_clean_process"),
        (report_module, "train_report"),
    ],
)
def test_a_signal_outside_of_training_ends_the_process_with_a_status_of_its_own(
    module, where, base_model, pairs_file, tmp_path, monkeypatch, capfd, ends
):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    with monkeypatch.context() as patched:
        patched.setattr(module, where, signal_oneself)
        with pytest.raises(Ended):
            main(["train", *words])
    assert ends == [75]
    assert "error: stopped at once by SIGUSR1. --resume auto goes on" in capfd.readouterr().err
    # Before that the folder is not the run's yet, and a report is made of a run that is done.
    kept = where in ("_judge_untrained", "verify_in_clean_process")
    assert (tmp_path / "run" / ENDED).exists() == kept
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    main(["train", *words, "--resume", "auto"])
    assert (tmp_path / "run/report.txt").exists()


@pytest.mark.slow
def test_a_second_signal_of_any_kind_ends_the_process_in_the_step(base_model, pairs_file, tmp_path, monkeypatch, ends):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    train_step = Trainer.train_step

    def computes(trainer, batches):
        if trainer.step == 4:
            signal.raise_signal(signal.SIGUSR1)
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "it would end the tests"
            signal.raise_signal(signal.SIGTERM)
        return train_step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", computes)
    with pytest.raises(Ended):
        main(["train", *words])
    assert ends == [75]


@pytest.mark.slow
def test_a_signal_in_the_last_evaluation_leaves_the_judging_for_later(
    base_model, pairs_file, tmp_path, monkeypatch, capsys
):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    with monkeypatch.context() as patched:
        evaluate = RewardJudge.evaluate

        def last_is_signalled(judge, step, budget):
            if step == 8:
                signal_oneself()
            evaluate(judge, step, budget)

        patched.setattr(RewardJudge, "evaluate", last_is_signalled)
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
    assert ended.value.code == 75
    assert "stopped by SIGUSR1 after step 8 of 8. Start the same command again" in capsys.readouterr().err
    assert not (tmp_path / "run/report.txt").exists()
    main(["train", *words, "--resume", "auto"])
    assert (tmp_path / "run/report.txt").exists()


@pytest.mark.slow
def test_a_model_is_saved_only_where_the_run_can_go_on(base_model, pairs_file, tmp_path, monkeypatch):
    settings = {"checkpoint_every": None, "eval_fraction": 0.0, "save_every": 2}
    config = config_for(base_model, pairs_file, tmp_path / "run", **settings)
    train_step = Trainer.train_step

    def is_killed_in_the_third(trainer, batches):
        if trainer.step == 2:
            raise KeyboardInterrupt
        return train_step(trainer, batches)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "train_step", is_killed_in_the_third)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert (tmp_path / "run/step_2").exists()
    train(config.replace(resume="auto"))
    assert (tmp_path / "run/step_8").exists()


@pytest.mark.slow
def test_a_signal_from_outside_while_data_are_read(base_model, pairs_file, tmp_path):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    command = [sys.executable, "-m", "rewardlab", "train", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        lines = iter(process.stdout.readline, "")
        assert any(line.startswith("prepared: ") for line in lines)
        process.send_signal(signal.SIGUSR1)
        said = process.stdout.read()
    assert process.returncode == 75, said
    assert "by SIGUSR1" in said


@pytest.mark.slow
def test_without_checkpoints_a_run_says_that_it_cannot_go_on(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "run", checkpoints=False)
    stop_after(monkeypatch, 3)
    with pytest.raises(
        RunInterrupted, match="step 3 of 8. It cannot be resumed from here, because of --no-checkpoints"
    ):
        train(config)
    monkeypatch.setattr(StopRequests, "reason", property(lambda stops: "--max-hours 1" if ticking(stops) > 12 else ""))
    with pytest.raises(RunInterrupted, match="because of --no-checkpoints") as ended:
        train(config.replace(overwrite=True))
    assert ended.value.exit_status == 1, "queued again, it would begin anew each time"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
@pytest.mark.parametrize(("word", "status"), [("--version", 0), ("trian", 2)])
def test_a_signal_while_python_ends_does_not_change_the_status_of_a_command(number, word, status):
    code = (
        "import atexit, os, sys; from rewardlab.cli import main; sys.argv[1:] = sys.argv[2:]; "
        f"atexit.register(lambda: os.kill(os.getpid(), {int(number)})); main()"
    )
    ended = subprocess.run([sys.executable, "-c", code, "-", word], capture_output=True, check=False)
    assert ended.returncode == status
