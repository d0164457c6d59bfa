"""Asking a run to end: signals and a limit in hours."""

from __future__ import annotations

import signal

import pytest

import rewardlab.training.run as run_module
import runs
from resuming import config_for, stop_after
from rewardlab.cli import main
from rewardlab.core.errors import RunInterrupted
from rewardlab.training.interrupt import StopRequests
from rewardlab.training.run import train
from rewardlab.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("verified_here")


def ticking(stops: StopRequests) -> int:
    """How often it was asked."""
    vars(stops)["asked"] = vars(stops).get("asked", 0) + 1
    return vars(stops)["asked"]


def test_a_limit_in_hours_ends_a_run_with_a_status_of_its_own(base_model, pairs_file, tmp_path, monkeypatch, capsys):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--max-hours", "0.0000001"])
    assert ended.value.code == 1, "queued again, it would never end"
    assert "stopped by --max-hours 1e-07 after step 0 of 8. Not one step fitted" in capsys.readouterr().err
    monkeypatch.setattr(StopRequests, "reason", property(lambda stops: "--max-hours 1" if ticking(stops) > 12 else ""))
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--overwrite"])
    assert ended.value.code == 75


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
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
    main(["train", *words, "--resume", "auto"])
    assert (tmp_path / "run/step_8").exists()


def test_a_second_signal_ends_the_process_as_ever():
    with StopRequests() as stops:
        assert stops.reason == ""
        signal.raise_signal(signal.SIGTERM)
        assert stops.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "where", ["load_reward_model", "evaluate_groups", "verify_in_clean_process", "write_run_start"]
)
def test_a_signal_outside_of_training_ends_the_run_where_it_stands(
    where, base_model, pairs_file, tmp_path, monkeypatch, capsys
):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patched:
        patched.setattr(run_module, where, lambda *_, **__: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
    assert ended.value.code == 75
    assert "stopped at once by SIGUSR1. Start the same command again with --resume auto" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) is before
    main(["train", *words, "--resume", "auto"])
    assert (tmp_path / "run/report.txt").exists()


def test_a_second_signal_ends_the_step_too(base_model, pairs_file, tmp_path, monkeypatch):
    train_step = Trainer.train_step

    def computes(trainer, batches):
        if trainer.step == 4:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return train_step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", computes)
    with pytest.raises(RunInterrupted, match="stopped at once by SIGTERM") as ended:
        train(config_for(base_model, pairs_file, tmp_path / "run"))
    assert ended.value.exit_status == 75
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_2", "step_4"]


def test_without_checkpoints_a_run_says_that_it_cannot_go_on(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "run", checkpoints=False)
    stop_after(monkeypatch, 3)
    with pytest.raises(RunInterrupted, match="after step 3 of 8. It cannot go on from here: --no-checkpoints"):
        train(config)
