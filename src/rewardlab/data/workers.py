"""Worker processes: items in, results out, in order and a bounded number at a time.

Each is a fresh interpreter on a pipe, neither forked nor spawned: forking is unsafe once torch or a tokenizer has used
threads, and spawning imports the caller's script again, which a script without a `__main__` guard does not survive.
A worker ends with its pipe, so none is left behind when this process is killed.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from rewardlab.core.errors import RewardlabError

logger = logging.getLogger("rewardlab")
Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 2
"""Items waiting or in work for each worker."""
MAIN = "import sys; sys.path[:] = {path!r}; from rewardlab.data.workers import serve; serve()"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""One thread a worker: there is one worker a core."""


class _RefusedError(Exception):
    """A worker could not load the job, and says why."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Workers, started when there is enough to do for them and kept until the end of the block."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._all: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.end()

    def map(self, run: Callable[[Item], Result], items: Iterable[Item], *, alone: int) -> Iterator[Result]:
        """`run(item)` for every item, in order; the first `alone` of them in this process.

        What `run` raises, or the reading of the items, comes after the results before it.
        """
        remaining = iter(items)
        yield from map(run, remaining if self.num_workers <= 1 else islice(remaining, alone))
        if (following := next(remaining, None)) is None:
            return
        try:
            job = pickle.dumps(run)
        except Exception as error:  # tokenizers from a model's own code may hold anything
            logger.warning("no worker processes: the tokenizer cannot be sent to them (%s)", error)
            yield from map(run, chain([following], remaining))
            return
        while len(self._all) < self.num_workers:
            self._all.append(_Worker())
            self._idle.put(self._all[-1])
        yield from self._map(run, job, following, remaining)
        yield from map(run, remaining)  # nothing, unless the workers refused the job

    def _map(self, run: Callable[[Any], Any], job: bytes, first: Any, remaining: Iterator[Any]) -> Iterator[Any]:
        waiting: deque[tuple[Any, Future[Any]]] = deque()
        broken: BaseException | None = None
        refused = False
        with ThreadPoolExecutor(self.num_workers) as threads:
            try:
                waiting.append((first, threads.submit(self._run, job, first)))
                while waiting:
                    while broken is None and not refused and len(waiting) < AHEAD * self.num_workers:
                        try:
                            item = next(remaining)
                            waiting.append((item, threads.submit(self._run, job, item)))
                        except StopIteration:
                            break
                        except Exception as error:  # raised below, once everything before it was used
                            broken = error
                    item, answer = waiting.popleft()
                    try:
                        result = answer.result()
                    except _RefusedError as refusal:
                        if not refused:
                            logger.warning("no worker processes: the tokenizer cannot be loaded in them (%s)", refusal)
                        refused, result = True, run(item)
                    yield result
                if broken is not None:
                    raise broken
            finally:
                threads.shutdown(cancel_futures=True)

    def _run(self, job: bytes, item: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.run(job, item)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, and the job that it knows."""

    def __init__(self) -> None:
        path = [entry or str(Path.cwd()) for entry in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN.format(path=path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
        )
        self._job: bytes | None = None

    def run(self, job: bytes, item: Any) -> Any:
        """The result of the job on an item; raises what the job raised, _RefusedError if it cannot be loaded there."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            if job is not self._job:
                pickle.dump(("job", job), stdin)
                self._job = job
            pickle.dump(("item", item), stdin)
            stdin.flush()
            kind, value = pickle.load(stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            raise RewardlabError(
                f"a worker process ended with exit code {code}; if it was killed, memory may be short. "
                f"Use fewer with --num-workers, or 1 for none."
            ) from error
        if kind == "refused":
            raise _RefusedError(value)
        if kind == "error":
            raise value
        return value

    def end(self) -> None:
        """Close its pipe and wait; what it is doing is dropped."""
        self._process.terminate()
        self._process.communicate()


def serve() -> None:
    """What a worker does until its pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to stderr and not between the answers
    run: Callable[[Any], Any] | None = None
    refusal = ""
    while True:
        try:
            kind, value = pickle.load(requests)
        except EOFError:
            return
        if kind == "job":
            try:
                run = pickle.loads(value)
            except Exception as error:  # a class of the caller's script, or of code that only its process has found
                run, refusal = None, f"{type(error).__name__}: {error}"
            continue
        answers.write(_answer(run, value) if run is not None else pickle.dumps(("refused", refusal)))
        answers.flush()


def _answer(run: Callable[[Any], Any], item: Any) -> bytes:
    try:
        return pickle.dumps(("value", run(item)), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # everything is the caller's to judge
        return _pickle_error(error)


def _pickle_error(error: Exception) -> bytes:
    """An answer that raises the error, or its words where it cannot be sent."""
    try:
        answer = pickle.dumps(("error", error))
        pickle.loads(answer)
    except Exception:  # whatever an error may hold
        return pickle.dumps(("error", RuntimeError(f"{type(error).__name__} in a worker process: {error}")))
    return answer
