"""Variants in processes of their own, of which one works at a time.

Each has its own allocator, threads and peak memory, and its CPU seconds are its own; while it is not its turn it waits
in a read. A trainer with a loop of its own (TRL's) is stopped between two steps by its callback, so it runs unchanged.

Several trainers at once would not fit into the memory of a small machine. So between its turns, off the clock, a
variant gives back what the allocator keeps and its optimiser's moments; it gets zeros for them when its turn comes.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from harness.machine import memory
from harness.timing import Sample
from rewardlab.core.libc import give_back_freed_memory

Target = Callable[["Session", Any], None]


class Session:
    """A variant's side: build, then `while session.wait(): …; session.done(facts)`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ready = False
        self._started = (0.0, 0.0)
        self.keeps_memory = False
        """Whether freed memory stays with the process between turns, as it does from step to step of a run."""
        self.optimizer: Any = None
        """Whose moments are given back between turns, unless memory is kept."""

    def wait(self) -> bool:
        """Wait for the turn and start the clocks; False when there is no other turn."""
        if not self._ready:
            self._ready = True
            give_back_freed_memory()
            self._connection.send(("ready", memory()))
        go: bool = self._connection.recv()
        if go and not self.keeps_memory:
            restore_moments(self.optimizer)
        self.start()
        return go

    def start(self) -> None:
        """Start the clocks, perhaps again."""
        self._started = (time.perf_counter(), time.process_time())

    def done(self, facts: Mapping[str, float]) -> None:
        """Stop the clocks and hand the sample over."""
        wall, cpu = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        if not self.keeps_memory:
            release_moments(self.optimizer)
            give_back_freed_memory()
        self._connection.send(("sample", Sample(wall=wall, cpu=cpu, facts=dict(facts))))


class Worker:
    """The other side: `ready()`, then `step()` as often as wanted, then `close()`."""

    def __init__(self, name: str, target: Target, job: Any, *, processes: bool = True) -> None:
        """Without `processes` it is a thread of this one: quicker to start, and without a memory of its own."""
        self.name = name
        self.processes = processes
        here, there = multiprocessing.Pipe()
        self._connection = here
        self._worker: Any
        if processes:
            self._worker = multiprocessing.get_context("spawn").Process(
                target=_serve, args=(there, target, job), name=name, daemon=True
            )
        else:
            self._worker = threading.Thread(target=_serve, args=(there, target, job), name=name, daemon=True)
        self._worker.start()
        if processes:
            there.close()  # so that the end of the child is the end of the pipe

    def ready(self) -> Mapping[str, float]:
        """Wait until it is built; its memory by then."""
        found: Mapping[str, float] = self._receive("ready")
        return found

    def step(self) -> Sample:
        """One timed unit of work."""
        self._connection.send(True)
        sample: Sample = self._receive("sample")
        return sample

    def close(self) -> Mapping[str, float]:
        """End it; its memory at its peak."""
        self._connection.send(False)
        found: Mapping[str, float] = self._receive("end")
        self._worker.join(60)
        return found if self.processes else {}

    def _receive(self, wanted: str) -> Any:
        try:
            kind, value = self._connection.recv()
        except EOFError:
            kind, value = "error", "the process ended without a word; was it out of memory?"
        if kind != wanted:
            raise SystemExit(f"{self.name}: {value}")
        return value


def release_moments(optimizer: Any) -> None:
    """Forget the values of an optimiser's moments, not their shapes."""
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                state[name] = value.to("meta")


def restore_moments(optimizer: Any) -> None:
    """Zeros for what was forgotten, in memory that has been touched."""
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                state[name] = torch.zeros_like(value, device="cpu").fill_(0)


def _serve(connection: Connection, target: Target, job: Any) -> None:
    try:
        target(Session(connection), job)
        connection.send(("end", memory()))
    except EOFError:
        return  # the parent is gone
    except BaseException:  # the parent stops with it
        connection.send(("error", traceback.format_exc()))
