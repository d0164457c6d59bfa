"""What a command prints, what happens when nobody reads it, and how its process ends."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys

import pytest

from rewardlab import cli
from rewardlab.console import NOISY, log_on_stdout


@pytest.mark.slow
def test_a_run_whose_reader_has_left_goes_on_in_silence(tmp_path):
    """As under `| head`: the lines are lost, neither the run nor its exit status is."""
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-m", "rewardlab", "train", "--compat", "trl", "--model", "m", "--output-dir", "run"]
    try:
        answer = subprocess.run(
            [*program, "--dataset", "missing.jsonl"],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writing)
    assert answer.returncode == 2
    assert answer.stderr.startswith("error: ")
    assert "missing.jsonl" in answer.stderr
    assert "BrokenPipe" not in answer.stderr


def test_a_warning_of_bitsandbytes_about_what_few_use_is_left_out():
    noisy = logging.getLogger(NOISY)
    before = noisy.level
    with log_on_stdout():
        assert not noisy.isEnabledFor(logging.WARNING)
        assert noisy.isEnabledFor(logging.ERROR)
    assert noisy.level == before


LEFT = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 0))
from rewardlab.cli import main
sys.argv = ["rewardlab", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(("command", "status"), [("--version", 0), ("nonsense", 2)])
def test_a_process_whose_command_has_ended_leaves_quickly(command, status):
    program = [sys.executable, "-c", LEFT, command]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "True")


LATER = """
import sys
sys.stdin.read()
from rewardlab.cli import main
sys.argv = ["rewardlab", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(("command", "status"), [("--version", 141), ("nonsense", 2)])
def test_a_command_whose_terminal_was_closed_ends_with_its_own_status(command, status):
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", LATER, command], stdin=subprocess.PIPE, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        os.close(master)
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == status


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_of_a_disk_is_told_while_the_output_is_read(number, monkeypatch, capfd):
    def write(arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cli, "_run", write)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith(f"error: {os.strerror(number)}.")
