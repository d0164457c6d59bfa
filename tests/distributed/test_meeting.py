"""Processes of a run that do not come, or are lost: what is said, and that nobody waits without a word."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rewardlab.console import is_first_process
from rewardlab.core.errors import ConfigError
from rewardlab.distributed import meeting
from rewardlab.distributed.meeting import _agreed_name, lost, meet
from rewardlab.distributed.sharding import TIMEOUT_S, joined_ranks

WAITS = """
import logging, signal, sys
from datetime import timedelta
from rewardlab.core.signals import ending_with_status, raised_at_once
from rewardlab.distributed import meeting

signal.signal(signal.SIGINT, signal.default_int_handler)
logging.basicConfig(stream=sys.stdout, format="%(message)s")
meeting.TELL_AFTER_S = 0.1
with {around}():
    meeting.meet("gloo", timeout=timedelta(minutes=5))
"""

ATTEMPTS = """
import os, threading
from rewardlab.core.errors import ConfigError
from rewardlab.distributed import others, sharding

others.LOOK_EVERY_S, others.GRACE_S = 0.01, 0.1
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
with sharding.joined_ranks() as ranks:
    looks = others.Others._exchange
    seen = threading.Event()
    others.Others._exchange = lambda *given: (looks(*given), seen.set())
    if attempt == "0" and rank == "1":
        raise ConfigError("not this time")
    ranks.wait()
    assert seen.wait(60)
    # In one piece: both write to one pipe, and a line and its end could be parted by the other's.
    os.write(1, f"attempt {attempt}: {sum(ranks.gather(1))} are there\\n".encode())
"""

NOT_ALL = """
import os, sys
from rewardlab.core.errors import ConfigError, RankError
from rewardlab.distributed import sharding

def fails():
    raise ConfigError("this process sees no GPU")

if os.environ["RANK"] == sys.argv[1]:
    sharding.device_of_rank = fails
try:
    with sharding.joined_ranks():
        pass
except (ConfigError, RankError) as error:
    print(error)
"""

AGAIN = """
import os, time
from datetime import timedelta
from rewardlab.distributed import sharding

sharding.MAX_WAIT = timedelta(seconds=60)
leave = sharding._leave
def late():
    if os.environ["RANK"] == "0":
        time.sleep(0.5)
    leave()
sharding._leave = late
for _ in range(3):
    with sharding.joined_ranks() as ranks:
        print(sum(ranks.gather(1)))
"""

FAILS = """
from contextlib import suppress
from rewardlab.distributed import meeting, others, sharding

others.LOOK_EVERY_S, others.GRACE_S = 0.01, 0.1
with suppress(Exception), sharding.joined_ranks() as ranks:
    if ranks.is_first:
        raise KeyError
    ranks.wait()
for store in meeting._served:
    print("another run has met:", store.check([meeting.MET]))
"""


@pytest.fixture
def place(monkeypatch):
    """Says in the environment that this is the first of two processes, and where they meet; returns the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    return port


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "number"), [("ending_with_status", signal.SIGINT), ("raised_at_once", signal.SIGTERM)]
)
def test_a_process_that_waits_for_others_says_so_and_a_signal_ends_it(around, number, place):
    program = [sys.executable, "-c", WAITS.format(around=around)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"process 0 of 2, counted from 0, waits at 127.0.0.1:{place} (MASTER_ADDR")
            assert "for the others, for at most 5 minutes; what one" in line
            process.send_signal(number)
            assert process.wait(60) == -number
        finally:
            process.kill()


@pytest.mark.slow
def test_an_address_that_is_taken_is_named(place):
    with socket.socket() as taken:
        taken.bind(("", place))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"did not meet the others at 127.0.0.1:{place} .*--master-port"):
            meet("gloo", timeout=timedelta(seconds=1))


@pytest.mark.slow
def test_processes_that_torchrun_starts_again_meet_anew(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ATTEMPTS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = ["--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(port), str(program)]
    begun = [sys.executable, "-m", "torch.distributed.run", *asked]
    answer = subprocess.run(begun, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.splitlines() == ["attempt 1: 2 are there"] * 2


def both(program: str, *words: str) -> list[str]:
    """What two processes print that run a program as the ranks of one run, which no torchrun has started."""
    path = os.pathsep.join(filter(None, sys.path))
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", program, *words],
            env={**os.environ, "RANK": str(rank), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        return [process.communicate(timeout=300)[0] for process in begun]
    finally:
        for process in begun:
            process.kill()


@pytest.mark.slow
def test_a_rank_that_is_ready_for_the_next_run_before_the_first_one_is_meets_it(place):
    """It joined the store of the run before, which ended then, and the first rank missed it."""
    assert both(AGAIN) == ["2\n2\n2\n"] * 2


@pytest.mark.slow
def test_the_store_of_a_run_that_failed_takes_the_next_one(place):
    """The process that keeps it may live on, and train again beside processes that were started anew."""
    assert "another run has met: False" in both(FAILS)[0]


def test_the_store_of_a_run_that_is_over_takes_the_next_one(place, monkeypatch):
    timeout = timedelta(seconds=60)
    served = TCPStore("127.0.0.1", place, is_master=True, wait_for_workers=False)
    stores = [served, TCPStore("127.0.0.1", place, is_master=False, timeout=timeout)]
    monkeypatch.setattr(meeting, "_served", [served])
    for _ in range(2):
        monkeypatch.setattr(meeting, "TOOK_PART", set())  # the second time, the other rank is a new process
        with ThreadPoolExecutor(2) as threads:
            outcomes = threads.map(lambda rank: _agreed_name(stores[rank], rank, 2, timeout, "gloo")[1], range(2))
            assert set(outcomes) == {""}
        meeting.end_meeting()


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_processes_that_wait_are_told_why_one_of_them_does_not_come(failing, place):
    said = both(NOT_ALL, str(failing))
    why = "this process sees no GPU\n"
    assert said[failing] == why
    assert said[1 - failing] == f"this process ended, because rank {failing} failed before the ranks met: {why}"


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_all_that_meet_hear_of_one_that_fails_and_the_next_attempt_hears_nothing_of_it(failing):
    """In one store, as torchrun keeps it over several attempts."""
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agreed(rank: int, why: str) -> tuple[str, str]:
        store = TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=60))
        return _agreed_name(store, rank, 3, timedelta(seconds=60), failure=why)

    names = set()
    for why in ("no such file", ""):
        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(agreed, range(3), [why if rank == failing else "" for rank in range(3)]))
        assert {outcome for _, outcome in found} == {why}
        names |= {name for name, _ in found}
    assert len(names) == 2


def test_a_process_that_comes_to_the_store_of_another_run_is_told_at_once(place, monkeypatch):
    timeout = timedelta(seconds=60)
    served = TCPStore("127.0.0.1", place, is_master=True, wait_for_workers=False)
    stores = [served, TCPStore("127.0.0.1", place, is_master=False, timeout=timeout)]
    for _ in range(2):  # a process may train twice
        with ThreadPoolExecutor(2) as threads:
            outcomes = threads.map(lambda rank: _agreed_name(stores[rank], rank, 2, timeout, "gloo")[1], range(2))
            assert set(outcomes) == {""}
    monkeypatch.setattr(meeting, "TOOK_PART", set())
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        ConfigError, match=r"another run has met there already, and goes on\. Start all .* --master-port"
    ):
        meet("gloo", timeout=timeout)
    meeting.tell_of_failure("no such file")


@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize(("all_but", "one"), [("gloo", "cpu:gloo,cuda:nccl"), ("cpu:gloo,cuda:nccl", "gloo")])
def test_processes_with_and_without_a_gpu_do_not_wait_for_each_other(all_but, one, other):
    served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def agreed(rank: int) -> str:
        store = TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=60))
        return _agreed_name(store, rank, 3, timedelta(seconds=60), one if rank == other else all_but)[1]

    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(agreed, range(3)))
    (told,) = found
    # Of two that differ from the first one, either may come first.
    pairs = [(0, number) if "cuda" in (one if other == 0 else all_but) else (number, 0) for number in (other or 1, 2)]
    said = [f"rank {has} computes on a GPU, and rank {lacks} sees none that works. Compare " for has, lacks in pairs]
    assert told.startswith(said[0]) or (other == 0 and told.startswith(said[1]))


def test_a_process_that_fails_can_tell_whoever_comes_as_late_as_a_rank_may_be_silent():
    assert meeting.TELLS_FOR_S >= TIMEOUT_S


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_fails_waits_for_others_only_so_long(rank, place, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(meeting, "TELLS_FOR_S", 0.5)
    meeting.tell_of_failure("no such file: \udcff" + "x" * 10_000)


@pytest.mark.parametrize(
    "environment",
    [{"WORLD_SIZE": "1"}, {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, {"RANK": "x"}, {"RANK": None}],
    ids=["the only process", "all of one torchrun", "no number", "no rank"],
)
def test_where_nobody_has_to_be_told_a_failure_waits_for_nobody(environment, place, monkeypatch):
    for name, value in environment.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.rendezvous", lambda *_, **__: pytest.fail("it waits"))
    meeting.tell_of_failure("no such file")


def test_machines_that_cannot_connect_are_told_what_to_name(place, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:152] timed out connecting")

    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("torch.distributed.init_process_group", fail)
    with pytest.raises(ConfigError, match=r"did not meet the others .* timed out connecting .*GLOO_SOCKET_IFNAME"):
        meet("gloo", timeout=timedelta(seconds=5))


def test_a_process_waits_only_so_long_for_the_answer_of_another_program_at_the_port(place, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(meeting, "OWN_LIMIT_S", 0.5)
    monkeypatch.setattr(meeting, "TELLS_FOR_S", 0.5)
    with socket.create_server(("127.0.0.1", place)):
        with pytest.raises(ConfigError, match=r"did not meet .* answers nothing, so it is another program\. Start all"):
            meet("gloo", timeout=timedelta(seconds=0.5))
        meeting.tell_of_failure("no such file")


def test_the_first_process_names_those_that_do_not_come(place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    served = TCPStore("127.0.0.1", place, is_master=True, wait_for_workers=False)
    served.set("rewardlab/asks/1", "of an attempt before")
    with pytest.raises(ConfigError, match=r"process 1, 2 did not come within 0.2 s\. Start all"):
        meet("gloo", timeout=timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MASTER_ADDR", None, "MASTER_ADDR is not set"),
        ("MASTER_PORT", "x", "MASTER_PORT is 'x'"),
        ("RANK", "-1", "RANK is '-1'"),
    ],
)
def test_an_environment_that_is_not_whole_is_refused_in_words(name, value, said, place, monkeypatch):
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{said} in the environment, .* Start it by torchrun"), joined_ranks():
        pass


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_at_which_nobody_can_be_reached_is_refused_before_anybody_waits(port, place, monkeypatch):
    """As torchrun hands on --master-port 0."""
    monkeypatch.setenv("MASTER_PORT", port)
    monkeypatch.setattr("torch.distributed.rendezvous", lambda *_, **__: pytest.fail("it waits"))
    with pytest.raises(ConfigError, match=rf"MASTER_PORT is {port}: .*`torchrun --standalone` finds"), joined_ranks():
        pass


def test_one_of_several_processes_without_a_number_does_not_train_by_itself(place, monkeypatch):
    monkeypatch.delenv("RANK")
    said = r"one of 2 processes, and RANK, .* is not set: each would train by itself"
    with pytest.raises(ConfigError, match=said), joined_ranks():
        pass
    monkeypatch.setenv("WORLD_SIZE", "1")
    with joined_ranks() as ranks:
        assert ranks.size == 1
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "1")
    said = r"RANK, which is '1', .* WORLD_SIZE, how many they are, is not set: .* or unset RANK\."
    with pytest.raises(ConfigError, match=said), joined_ranks():
        pass


def test_an_empty_rank_is_none(place, monkeypatch):
    monkeypatch.setenv("RANK", "")
    with pytest.raises(ConfigError, match="one of 2 processes, and RANK, .* is not set"), joined_ranks():
        pass
    monkeypatch.delenv("WORLD_SIZE")
    with joined_ranks() as ranks:
        assert ranks.size == 1
    assert is_first_process(), "it prints the report, and publishes"


def test_only_a_connection_that_broke_is_a_lost_process():
    broken = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert "--resume auto goes on from the last checkpoint" in str(lost(broken))
    assert lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert lost(ConfigError("gloo/transport/")) is None
