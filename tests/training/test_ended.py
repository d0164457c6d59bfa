"""What ended a run is kept once, by the process that knows."""

from __future__ import annotations

import signal

import pytest

from rewardlab.core import signals
from rewardlab.core.errors import LostRankError, RankError, RewardlabError, RunInterrupted
from rewardlab.core.files import read_json
from rewardlab.core.run_folder import ENDED
from rewardlab.training.ended import KeptEnd


def kept(folder, error, *, is_first, begun=True, finished=False):
    """What is in the folder after a process of the run met an error there."""

    def run():
        with KeptEnd(folder) as end:
            if begun:
                end.begin(is_first=is_first)
            if finished:
                end.finish()
            raise error

    with pytest.raises(type(error)):
        run()
    path = folder / ENDED
    return read_json(path)["text"] if path.exists() else None


def test_the_process_that_failed_first_keeps_its_error_and_the_others_nothing(tmp_path):
    assert kept(tmp_path, RankError("rank 0 ended, because rank 1 failed: a bad row"), is_first=True) is None
    assert kept(tmp_path, RewardlabError("a bad row"), is_first=False) == "a bad row"


def test_that_a_process_was_lost_is_kept_unless_that_one_said_why(tmp_path):
    assert kept(tmp_path, LostRankError("another one is gone"), is_first=False) == "another one is gone"
    (tmp_path / ENDED).write_text('{"text": "a bad row"}')
    assert kept(tmp_path, LostRankError("another one is gone"), is_first=False) == "a bad row"


def test_a_request_to_stop_that_all_processes_heed_is_kept_by_the_first(tmp_path):
    stopped = RunInterrupted("stopped by SIGTERM after step 3 of 8", exit_status=143)
    assert kept(tmp_path, stopped, is_first=False) is None
    assert kept(tmp_path, stopped, is_first=True) == str(stopped)


def test_nothing_is_kept_before_the_folder_is_the_runs_or_after_the_run_came_to_its_end(tmp_path):
    (tmp_path / ENDED).write_text('{"text": "of an earlier attempt"}')
    error = RewardlabError("a bad row")
    assert kept(tmp_path, error, is_first=True, begun=False) == "of an earlier attempt"
    assert kept(tmp_path, error, is_first=False, finished=True) == "of an earlier attempt"
    assert kept(tmp_path, error, is_first=True, finished=True) is None


@pytest.mark.parametrize("is_first", [True, False])
def test_a_signal_that_ends_the_process_at_once_is_kept_by_the_first(tmp_path, monkeypatch, capfd, is_first):
    monkeypatch.setattr(signals.os, "_exit", lambda status: None)
    with signals.ending_with_status(), KeptEnd(tmp_path) as end:
        end.begin(is_first=is_first)
        signal.raise_signal(signal.SIGUSR1)
        end.finish()
    path = tmp_path / ENDED
    said = read_json(path)["text"] if path.exists() else ""
    assert said.startswith("stopped at once by SIGUSR1.") == is_first
    assert capfd.readouterr().err.startswith("error: stopped at once by SIGUSR1.")
    path.unlink(missing_ok=True)
    with signals.ending_with_status():
        signal.raise_signal(signal.SIGUSR1)
    assert not path.exists(), "the run is over"
