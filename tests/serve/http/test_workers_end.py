"""Several processes on one socket end: by signals to some of them or to all, while they load, swap or answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fake_engine import digest_of
from fake_fleet import COMMAND, Fleet, environment, model
from fake_workers import ADMIN_TOKEN, SECONDS
from rewardlab.serve.http import worker


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model(folder / "one", "one")
    return folder


@pytest.mark.slow
def test_workers_end_at_once_while_a_model_is_loaded(models):
    model(models / "endless", "endless")
    fleet = Fleet(2, models / "one", drain_timeout_s=0.1)
    assert fleet.process.stdout is not None
    with ThreadPoolExecutor(1) as threads:
        swap = {"model": "tiny", "folder": str(models / "endless")}
        waiting = threads.submit(fleet.ask, "/admin/swap", swap, ADMIN_TOKEN)
        fleet.wait_for_line("loading")
        fleet.process.send_signal(signal.SIGTERM)
        assert waiting.result()[0] == 503
    with fleet.process.stdout as lines:
        left = lines.read()
    assert (fleet.process.wait(60), "did not end in time" in left) == (0, False), left


@pytest.mark.slow
def test_a_swap_that_is_loaded_in_time_is_answered_though_the_end_has_begun(models):
    model(models / "gated", "gated")
    fleet = Fleet(2, models / "one")
    with ThreadPoolExecutor(1) as threads:
        swap = {"model": "tiny", "folder": str(models / "gated")}
        waiting = threads.submit(fleet.ask, "/admin/swap", swap, ADMIN_TOKEN)
        fleet.wait_for_line("loading")
        fleet.process.send_signal(signal.SIGTERM)
        fleet.wait_for_line("ending: ")
        (models / "gated" / "go").touch()
        status, told = waiting.result()
    assert (status, json.loads(told)) == (200, {"model": "tiny", "digest": digest_of(models / "gated")})
    assert fleet.process.stdout is not None
    with fleet.process.stdout as lines:
        left = lines.read()
    assert (fleet.process.wait(60), "not finished" in left, "starts anew" in left) == (0, False, False), left


@pytest.mark.slow
def test_a_worker_that_has_ended_leaves_quickly(models):
    fleet = Fleet(1, model(models / "told", "told"))
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.process.stdout is not None
    with fleet.process.stdout as lines:
        assert "left quickly: True" in lines.read()
    assert fleet.process.wait(60) == 0


@pytest.mark.slow
def test_a_signal_to_all_processes_after_the_end_has_begun_loses_no_request(models, monkeypatch):
    monkeypatch.setenv(SECONDS, "2")
    fleet = Fleet(1, models / "one")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(fleet.score)
        while fleet.metric("rewardlab_waiting_tokens ") + fleet.metric("rewardlab_in_flight ") < 2:
            pass  # the question for the metrics is in flight too
        fleet.process.send_signal(signal.SIGTERM)
        fleet.wait_for_line("ending: ")
        os.kill(fleet.pids[0], signal.SIGTERM)
        assert waiting.result()["digest"] == digest_of(models / "one")
    assert fleet.process.stdout is not None
    fleet.process.stdout.close()
    assert fleet.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_of_the_terminal_while_the_workers_load_ends_them_without_a_word(models, how):
    command = [*COMMAND, "1", str(model(models / "lasting", "lasting")), "30"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as lines:
        assert lines.readline() == "loading\n"
        os.killpg(process.pid, how)  # as a terminal does
        assert lines.read() == ""
    assert process.wait(60) == 0


def test_processes_hear_of_ctrl_c_and_hangup_only_once_they_are_ready_to_ignore_it():
    ask = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with worker.deaf_to_terminal():
        told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert {str(signal.SIGINT.value), str(signal.SIGHUP.value)} <= set(told.stdout.split())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
