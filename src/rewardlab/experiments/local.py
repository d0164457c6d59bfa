"""Do the runs of a study on this machine: several at a time, each a process of its own, failures kept apart."""

from __future__ import annotations

import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final

from rewardlab.core.errors import NO_ROOM, ConfigError, DiskFullError, RewardlabError, words_of
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.lock import LOCK, only_process
from rewardlab.core.signals import RESUME_LATER, Terminated, raised_at_once
from rewardlab.experiments.log import LOG
from rewardlab.experiments.plan import Run
from rewardlab.experiments.records import RunRecord, end_record, record_of
from rewardlab.experiments.study import Study, open_study

POLL_S: Final = 0.5
LAST_LINES: Final = 5
"""Last lines of the log that are shown of a run that failed, and looked at for a full disk."""
Say = Callable[[str], None]


def run_all(study: Study, runs: Sequence[Run], *, jobs: int, gpus: Sequence[str] = (), say: Say) -> list[Run]:
    """Do runs, `jobs` at a time, and return those that are not done afterwards.

    With `gpus` each slot has one of them. A run that fails ends no other. A signal to this process ends all runs with a
    checkpoint, and is raised again. Raises DiskFullError if a run failed for want of room, and what keeps a run from
    being begun, such as ConfigError, once those under way have ended: no other is begun then.
    """
    slots: queue.Queue[str | None] = queue.Queue()
    for number in range(jobs):
        slots.put(gpus[number % len(gpus)] if gpus else None)
    work = _Work(study, slots, jobs, say)
    pool = ThreadPoolExecutor(max_workers=jobs)
    try:
        with raised_at_once():
            futures = [pool.submit(work.do, run) for run in runs]
            try:
                for future in as_completed(futures):
                    future.result()
            except Exception as error:  # of any class: whatever it is, those under way are not to be left alone
                if work.goes_on:
                    why = words_of(error) if isinstance(error, OSError) else error
                    say(f"no further run is begun, and those under way are waited for: {why}")
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    except (Terminated, KeyboardInterrupt):
        work.end()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if work.wants_room:
        raise DiskFullError(
            f"{work.wants_room} found its disk full, which others would too: no further run is begun. Make room there; "
            f"then the same command goes on from what is finished."
        )
    return [run for run in runs if not work.record(run).is_over]


class _Work:
    wants_room = ""
    """The first run that failed because a disk was full. None is begun after it."""

    def __init__(self, study: Study, slots: queue.Queue[str | None], jobs: int, say: Say) -> None:
        self._study, self._slots, self._jobs, self._say = study, slots, jobs, say
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ending = False
        self._failed = False
        self._log_size = log_size(study)

    def record(self, run: Run) -> RunRecord:
        """Return how a run went, by the plan as it holds now: it may be amended while its runs go on."""
        with self._lock:
            if (size := log_size(self._study)) != self._log_size:
                # Between an edit of the plan and its amendment there is none to go by but the one before.
                with suppress(RewardlabError):
                    self._study, self._log_size = open_study(self._study.folder), size
            study = self._study
        return record_of(study, next((one for one in study.runs if one.name == run.name), run))

    @property
    def goes_on(self) -> bool:
        """Whether runs are under way."""
        with self._lock:
            return bool(self._processes)

    @property
    def _stops(self) -> bool:
        """Whether no further run is begun: this process is ending, a disk is full, or a run could not be begun."""
        return self._ending or bool(self.wants_room) or self._failed

    def do(self, run: Run) -> None:
        """Do one run in a process of its own, and say how it went."""
        slot = self._slots.get()
        try:
            with ExitStack() as held:
                if self._is_taken(run, held) and self._is_free(run) and not self._stops:
                    self._run(run, slot)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._slots.put(slot)

    def _run(self, run: Run, slot: str | None) -> None:
        log = self._study.folder / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._say(f"{run.name}: begins; its output is in {log}")
        with log.open("ab") as out:
            begin = out.tell()
            process = self._begin(run, out, slot)
            if process is None:
                return
            process.wait()
        with self._lock:
            self._processes.discard(process)
        why = self._tell(run, process.returncode)
        if not why:
            return
        last = _last_lines(log, begin)
        if why.startswith("exit status"):  # which says nothing: what another program wrote at its end may
            for line in last:
                self._say(f"    {line}")
        if _tells_of_full_disk([why, *last]) or _is_full(log.parent):
            self.wants_room = self.wants_room or run.name

    def _is_taken(self, run: Run, held: ExitStack) -> bool:
        """Return whether a run is now kept from every other `plan run`, as long as `held` is open, after waiting for
        one that is at it. False if no further run is begun.

        The record and the lock of the run come from the process that does it, seconds after that was begun; two that
        begin it in between would both start one. Raises ConfigError if the lock belongs to another user.
        """
        folder = taken_folder(self._study, run)
        folder.mkdir(parents=True, exist_ok=True)
        told = False
        while not self._stops:
            try:
                held.enter_context(only_process(folder, "STUDY"))
            except ConfigError:
                if not os.access(folder / LOCK, os.W_OK):
                    raise
                if not told:
                    self._say(f"{run.name}: another `plan run` is at it; waiting for its end")
                told = True
                time.sleep(POLL_S)
            else:
                return True
        return False

    def _is_free(self, run: Run) -> bool:
        """Return whether a run is left to do, after waiting for another process of this machine that is at it."""
        record = self.record(run)
        if record.state == "running" and record.host == platform.node():
            self._say(f"{run.name}: process {record.process} is at it; waiting for its end")
            while record.state == "running" and not self._stops:
                time.sleep(POLL_S)
                record = self.record(run)
        if record.is_over:
            self._say(f"{run.name}: done")
        return not record.is_over

    def end(self) -> None:
        """Ask all runs to end with a checkpoint."""
        with self._lock:
            self._ending = True
            for process in self._processes:
                # The signal goes to the whole session of the run, so that programs which it began get it too.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def _begin(self, run: Run, out: IO[bytes], slot: str | None) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._ending:
                return None
            process = subprocess.Popen(
                command_of(self._study, run),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(slot, self._jobs),
                # A Ctrl-C in the terminal reaches this process alone, which ends the runs in order.
                start_new_session=True,
            )
            self._processes.add(process)
            return process

    def _tell(self, run: Run, status: int) -> str:
        """Say how a run went, and return why it is not done; empty if it is."""
        record = self.record(run)
        if status == RESUME_LATER and record.values.get("state") == "running":
            # The run was asked to end before it could write that down.
            end_record(self._study, run, "interrupted", "stopped while it began, or between two steps")
            record = self.record(run)
        if record.is_over:
            self._say(f"{run.name}: done")
            return ""
        why = record.message or f"exit status {status}"
        self._say(f"{run.name}: {record.state}: {why}")
        return why


def _last_lines(log: Path, begin: int) -> list[str]:
    """Return the last lines of a log, of those that stand after byte `begin`."""
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]


def _tells_of_full_disk(texts: Sequence[str]) -> bool:
    """Return whether a run that failed, here or in another program, gave a full disk as the reason."""
    return any(os.strerror(number) in text for number in NO_ROOM for text in texts)


def _is_full(folder: Path) -> bool:
    """Return whether the disk takes no file at all: then it took neither the record of a run nor its output."""
    try:
        require_writable_folder(folder, "--output-dir")
    except RewardlabError as error:
        return isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM
    return False


def log_size(study: Study) -> int:
    """Return the size of the log of a study, which grows by each amendment."""
    return (study.folder / LOG).stat().st_size


def taken_folder(study: Study, run: Run) -> Path:
    """Return the folder that a `plan run` keeps others out of, from before it begins a run until that has ended."""
    return study.folder / "records" / run.arm / f".{run.seed}" / "plan_run"


def command_of(study: Study, run: Run) -> list[str]:
    """Return the command that does one run.

    -P keeps the current folder off the import path, where a file such as `random.py` would shadow a module.
    """
    return [sys.executable, "-P", "-m", "rewardlab", "plan", "task", str(study.folder), "--run", run.name]


def environment(gpu: str | None, jobs: int, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a run: its GPU, and its share of the processor where several run at a time."""
    made = dict(given)
    if gpu is not None:
        made["CUDA_VISIBLE_DEVICES"] = gpu
    if jobs > 1 and "OMP_NUM_THREADS" not in made:
        made["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    return made
