"""Several processes on one socket: one dies, all swap, all are counted, all end."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from fake_engine import digest_of, fake_score
from fake_fleet import Fleet, model
from fake_workers import ADMIN_TOKEN
from rewardlab.core.errors import ArtifactError
from rewardlab.serve.engine.api import EngineFailedError, UnknownModelError
from rewardlab.serve.http import metrics, worker, workers
from rewardlab.serve.http.config import HttpConfig
from rewardlab.serve.http.refusals import NotSwappedError
from rewardlab.serve.http.worker import Line, WorkerPlan, outcome_of, value_or_refusal

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two", "odd"):
        model(folder / name, name)
    (folder / "broken").mkdir()
    return folder


@pytest.fixture(scope="module")
def fleet(models) -> Iterator[Fleet]:
    fleet = Fleet(2, models / "one")
    yield fleet
    fleet.process.kill()
    fleet.process.wait()
    assert fleet.process.stdout is not None
    fleet.process.stdout.close()


@pytest.mark.slow
def test_the_life_of_two_workers(fleet: Fleet, models: Path):
    # One process start is dear, so one test follows the fleet through its life.
    assert len(set(fleet.pids)) == 2
    digest = digest_of(models / "one")
    for _ in range(20):
        answer = fleet.score()
        assert (answer["digest"], answer["groups"][0]["scores"]) == (digest, [fake_score(digest, [1, 2])])
    assert fleet.metric('rewardlab_requests_total{code="200",route="/v1/score"}') == 20, "of both together"
    assert fleet.metric("rewardlab_ready") == 2

    swap = {"model": "tiny", "folder": str(models / "two")}
    status, told = fleet.ask("/admin/swap", swap, ADMIN_TOKEN)
    assert (status, json.loads(told)) == (200, {"model": "tiny", "digest": digest_of(models / "two")})
    assert {fleet.score()["digest"] for _ in range(20)} == {digest_of(models / "two")}
    assert fleet.metric("rewardlab_swaps_total") == 2

    status, told = fleet.ask("/admin/swap", swap | {"folder": str(models / "broken")}, ADMIN_TOKEN)
    assert (status, json.loads(told)["error"]["type"]) == (422, "not_swapped")
    assert fleet.ask("/admin/swap", swap | {"model": "none"}, ADMIN_TOKEN)[0] == 404

    # Counts are looked at every other second, and outlive the worker that made them.
    before = fleet.metric('rewardlab_requests_total{code="200",route="/v1/score"}')
    os.kill(fleet.pids[0], signal.SIGKILL)
    fleet.wait_for_line("starts again")
    assert {fleet.score()["digest"] for _ in range(5)} == {digest_of(models / "two")}
    while fleet.metric("rewardlab_ready") < 2:
        pass
    assert {fleet.score()["digest"] for _ in range(20)} == {digest_of(models / "two")}, "the new one has it too"
    assert fleet.metric('rewardlab_requests_total{code="200",route="/v1/score"}') == before + 25

    # The second worker cannot swap to this one: it is taken out, and comes back with it.
    status, told = fleet.ask("/admin/swap", swap | {"folder": str(models / "odd")}, ADMIN_TOKEN)
    assert (status, json.loads(told)["digest"]) == (200, digest_of(models / "odd"))
    assert {fleet.score()["digest"] for _ in range(20)} == {digest_of(models / "odd")}
    fleet.wait_for_line("could not swap")
    while fleet.metric("rewardlab_ready") < 2:
        pass
    assert fleet.metric("rewardlab_model{") == 2
    assert {fleet.score()["digest"] for _ in range(20)} == {digest_of(models / "odd")}

    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.process.wait(60) == 0
    with pytest.raises(OSError):
        fleet.ask("/health")


@pytest.mark.slow
def test_workers_that_cannot_load_end_the_parent_with_words_and_an_error(models):
    fleet = Fleet(1, models / "broken")
    assert fleet.process.stdout is not None
    fleet.lines += fleet.process.stdout.read().splitlines()
    assert fleet.process.wait(60) != 0
    fleet.process.stdout.close()
    assert any("is broken" in line for line in fleet.lines)


@pytest.mark.slow
def test_all_threads_that_wait_for_a_process_learn_its_end():
    context = multiprocessing.get_context("spawn")

    def ask(one: workers.Worker) -> tuple[bool, int | None]:
        return one.has_ended(), one.process.exitcode

    for _ in range(5):
        here, there = context.Pipe()
        one = workers.Worker(0, context.Process(target=time.sleep, args=(0,)), Line(here))
        one.process.start()
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, [one] * 8)) == [(True, 0)] * 8
        one.kill()
        here.close()
        there.close()


class Process(BaseProcess):
    """A process that is not there."""

    exitcode = -9
    killed = False

    def __init__(self) -> None:
        """Start nothing."""

    def kill(self) -> None:
        self.killed = True


class Answers(Line):
    """A line on which a worker swaps to `digest` and answers looks with `health`; an error is raised."""

    def __init__(self, digest: object = "A", health: object = True) -> None:
        self.digest, self.health, self.sent, self.asked = digest, health, [], []

    def ask(self, what: str, *arguments: Any, timeout_s: float | None) -> Any:
        self.asked.append(what)
        told = self.digest if what == "swap" else self.health
        if isinstance(told, Exception):
            raise told
        return True, {"digest": told} if what == "swap" else (len(self.asked), families(1, 1), told)

    def send(self, *message: Any) -> None:
        self.sent.append(message)


class Parent(workers.Workers):
    """A parent whose workers are not there; notes which were started again, and after how long."""

    def __init__(self, count: int, monkeypatch) -> None:
        plan = WorkerPlan(load=dict, config=HttpConfig(), drain_timeout_s=1)
        with socket.socket() as bound:
            super().__init__(plan, {"m": Path("/m")}, bound, count=count)
        self.started: list[int] = []
        self.waits: list[float] = []
        monkeypatch.setattr(workers.time, "sleep", self.waits.append)

    def worker(self, number: int, line: Answers, *, serving: bool = True) -> workers.Worker:
        one = self._workers[number] = workers.Worker(number, Process(), line)
        one.loaded, one.serving = True, serving
        return one

    def _start(self, number: int) -> None:
        self.started.append(number)


def test_a_worker_that_cannot_load_does_not_end_those_that_serve(monkeypatch):
    parent = Parent(2, monkeypatch)
    parent._ready = True
    parent.worker(0, Answers())
    dead = parent.worker(1, Answers(), serving=False)
    dead.process.exitcode, dead.failed = worker.CANNOT_LOAD, "the folder is gone"
    for _ in range(8):
        parent._after_death(dead)
    assert (parent.started, parent._ending) == ([1] * 8, False)
    assert parent.waits == [*workers.BACKOFF_S, *[workers.RETRY_S] * 3]
    parent._workers[0].serving = False
    parent._after_death(dead)
    assert (parent._ending, parent._status) == (True, workers.GIVEN_UP), "with nobody left it ends"


def test_a_worker_that_dies_again_and_again_at_the_start_is_given_up(monkeypatch):
    parent = Parent(2, monkeypatch)
    parent.worker(0, Answers())
    dead = parent.worker(1, Answers(), serving=False)
    for _ in range(len(workers.BACKOFF_S) + 1):
        parent._after_death(dead)
    assert "died 6 times in a row" in parent._error


@pytest.mark.parametrize(
    ("loaded", "swapped", "serves", "why"),
    [
        ("A", None, True, "it has what is served"),
        ("B", "A", True, "it loaded before a swap"),
        ("B", "B", False, "the folder was written over"),
        ("B", TimeoutError(), False, "it hangs"),
        ("B", OSError(), False, "it died"),
    ],
)
def test_a_worker_serves_only_the_digest_that_the_others_serve(monkeypatch, caplog, loaded, swapped, serves, why):
    parent = Parent(2, monkeypatch)
    parent._ready = True
    parent._let_serve(parent.worker(0, Answers(), serving=False), {"m": "A"})
    other = parent.worker(1, Answers(swapped), serving=False)
    parent._let_serve(other, {"m": loaded})
    assert (other.serving, not other.process.killed, other.line.sent == [("go",)]) == (serves,) * 3, why
    assert ("kept out" in caplog.text) == (swapped == "B")
    assert not parent._swapping.locked()
    if swapped == "B":
        parent._workers[0].serving = False
        again = parent.worker(1, Answers("B"), serving=False)
        parent._let_serve(again, {"m": "B"})
        assert again.serving, "nobody else has the other one any more"


def test_workers_that_find_different_models_at_the_start_end_with_words(monkeypatch):
    parent = Parent(2, monkeypatch)
    parent._let_serve(parent.worker(0, Answers(), serving=False), {"m": "A"})
    parent._let_serve(parent.worker(1, Answers("B"), serving=False), {"m": "B"})
    assert "Start again when nobody writes the folder" in parent._error


def test_a_worker_that_does_not_answer_or_does_not_swap_is_ended(monkeypatch):
    parent = Parent(3, monkeypatch)
    silent, dead, stuck = (
        parent.worker(0, Answers(health=TimeoutError())),
        parent.worker(1, Answers(health=False)),
        parent.worker(2, Answers(TimeoutError())),
    )
    for look in range(workers.SILENT_LOOKS):
        assert not silent.process.killed, look
        parent.look_at(silent)
    parent.look_at(dead)
    assert not parent._swap(stuck, "m", "/n")[0]
    assert [one.process.killed and not one.serving for one in (silent, dead, stuck)] == [True] * 3
    assert not parent._swapping.locked()


def test_a_busy_worker_that_answers_now_and_then_stays(monkeypatch):
    parent = Parent(1, monkeypatch)
    line = Answers()
    busy = parent.worker(0, line)
    for look in range(3 * workers.SILENT_LOOKS):
        line.health = TimeoutError() if look % 3 else True
        parent.look_at(busy)
    assert not busy.process.killed


def test_counts_of_the_departed_stay_but_not_those_of_models_that_nobody_serves(monkeypatch):
    parent = Parent(2, monkeypatch)
    parent._let_serve(parent.worker(0, Answers(), serving=False), {"m": "A"})
    scores = [("s_bucket", {"digest": digest, "le": "1"}, 1.0) for digest in "AB"]
    parent._departed = [families(4, 40), [("s", "histogram", "S", scores)]]
    for _ in range(2):
        told = parent.counts()
        assert value_of(told, "a_total") == 5
        assert [value_of(told, "s_bucket", {"digest": digest}) for digest in "AB"] == [1, 0]
    ended = parent._workers[0]
    parent._end(ended, "is ended")
    told = parent.counts()
    assert (value_of(told, "a_total"), value_of(told, "b")) == (5, 40), "until it has departed"


class Overtaken(Line):
    """A line whose first answer arrives after the second; the worker counts on from one to the other."""

    def __init__(self) -> None:
        self.num_asked, self.asked, self.second_is_there = 0, threading.Event(), threading.Event()

    def ask(self, what: str, *arguments: Any, timeout_s: float | None) -> Any:
        self.num_asked = number = self.num_asked + 1
        self.asked.set()
        if number == 1:
            assert self.second_is_there.wait(60)
        return True, (number, families(number, 1), True)


def test_an_older_answer_that_comes_last_does_not_take_counts_back(monkeypatch):
    parent, line = Parent(1, monkeypatch), Overtaken()
    one = parent.worker(0, line)
    look = threading.Thread(target=parent.look_at, args=(one,))
    look.start()
    assert line.asked.wait(60)
    assert value_of(parent.counts(), "a_total") == 2
    line.second_is_there.set()
    look.join(60)
    assert value_of(one.counts, "a_total") == 2


def value_of(families: metrics.Families, sample: str, labels: Mapping[str, str] | None = None) -> float:
    """Return the sum of a sample over all labels that include those given; 0 if there is none."""
    wanted = (labels or {}).items()
    return sum(
        value
        for _, _, _, samples in families
        for name, found, value in samples
        if name == sample and wanted <= found.items()
    )


def families(value: float, gauge: float) -> metrics.Families:
    return [
        ("a", "counter", "A", [("a_total", {"x": "1"}, value), ("a_created", {"x": "1"}, 5.0)]),
        ("b", "gauge", "B", [("b", {}, gauge)]),
    ]


def test_counts_add_up_and_gauges_of_the_dead_do_not_count():
    told = metrics.add_up([families(1, 10), families(2, 20), metrics.lasting(families(4, 40))])
    assert value_of(told, "a_total", {"x": "1"}) == 7
    assert value_of(told, "b") == 30
    assert value_of(told, "a_created") == 0
    text = metrics.exposition(told).decode()
    assert 'a_total{x="1"} 7.0' in text
    assert "# TYPE b gauge" in text


def test_refusals_keep_their_kind_from_one_process_to_another():
    def fail(error: Exception) -> Callable[[], None]:
        def work() -> None:
            raise error

        return work

    assert value_or_refusal(outcome_of(lambda: 5)) == 5
    for error, kind, words in (
        (UnknownModelError("none such"), UnknownModelError, "none such"),
        (ArtifactError("bad folder"), NotSwappedError, "bad folder"),
        (RuntimeError("out of memory"), NotSwappedError, "RuntimeError: out of memory"),
        (ZeroDivisionError("a text"), EngineFailedError, "ZeroDivisionError"),
    ):
        with pytest.raises(kind, match=words) as told:
            value_or_refusal(outcome_of(fail(error)))
        assert "a text" not in str(told.value)


def test_starts_are_spaced_out_more_and_more():
    assert list(workers.BACKOFF_S) == sorted(workers.BACKOFF_S)
