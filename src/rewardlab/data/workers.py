"""Worker processes: items in, results out, in order and a bounded number at a time.

Each worker is a new interpreter connected by pipes, and not made by multiprocessing. Forking is unsafe once torch or a
tokenizer has used threads, and spawning imports the caller's script again, which starts everything a second time if the
script has no `__main__` guard. A worker ends when its pipe closes, so none is left behind when this process is killed.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, TypeVar

from rewardlab.core.errors import RewardlabError

logger = logging.getLogger("rewardlab")
Item = TypeVar("Item")
Result = TypeVar("Result")
AHEAD = 2
"""Items in flight for each worker, so that none waits for the next item and memory stays bounded."""
MAIN = "import sys; sys.path[:] = {path!r}; from rewardlab.data.workers import serve; serve()"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""One thread for each worker, since there is one worker for each core."""
FEWER: Final = "Use fewer with --num-workers, or 1 for none."
"""What to do if memory is short for the workers that prepare data."""


class WorkerDiedError(RewardlabError):
    """A worker process ended in the middle of its work."""


class RefusedError(Exception):
    """A worker could not load the job. The message says why."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Crew:
    """Worker processes. They are started when there is enough work, and end with the `with` block."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._all: list[Worker] = []
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._all:
            worker.end()

    def map(self, run: Callable[[Item], Result], items: Iterable[Item], *, alone: int) -> Iterator[Result]:
        """Yield `run(item)` for every item, in order. The first `alone` items are handled in this process.

        An error of `run`, or of reading the items, is raised after the results before it have been yielded.

        Raises RewardlabError if a worker process dies.
        """
        remaining = iter(items)
        yield from map(run, remaining if self.num_workers <= 1 else islice(remaining, alone))
        if (following := next(remaining, None)) is None:
            return
        try:
            job = pickle.dumps(run)
        except Exception as error:
            # A tokenizer from a model's own code may hold anything, also what cannot be pickled.
            logger.warning("no worker processes: the tokenizer cannot be sent to them (%s)", error)
            yield from map(run, chain([following], remaining))
            return
        while len(self._all) < self.num_workers:
            self._all.append(Worker())
            self._idle.put(self._all[-1])
        yield from self._map(run, job, following, remaining)
        # Nothing remains here unless the workers could not load the job.
        yield from map(run, remaining)

    def _map(self, run: Callable[[Any], Any], job: bytes, first: Any, remaining: Iterator[Any]) -> Iterator[Any]:
        """Yield the results of the workers, in order; stop early, without an error, if they cannot load the job."""
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
                        except Exception as error:
                            # Raised below, after the results of all items before it.
                            broken = error
                    item, answer = waiting.popleft()
                    try:
                        result = answer.result()
                    except RefusedError as refusal:
                        if not refused:
                            logger.warning("no worker processes: the tokenizer cannot be loaded in them (%s)", refusal)
                        refused, result = True, run(item)
                    yield result
                if broken is not None:
                    raise broken
            finally:
                threads.shutdown(cancel_futures=True)

    def _run(self, job: bytes, item: Any) -> Any:
        """Run the job on an item in a worker that is idle. Each thread of the pool waits for one worker at a time."""
        worker = self._idle.get()
        try:
            return worker.run(job, item)
        finally:
            self._idle.put(worker)


class Worker:
    """One process, and the job that it has loaded."""

    def __init__(self, environment: Mapping[str, str] = ENVIRONMENT, *, fewer: str = FEWER) -> None:
        """`environment` is added to that of this process; `fewer` says what to do if memory is short."""
        self._fewer = fewer
        # An empty entry means the current directory. It is written out, so that the worker imports from the same one.
        path = [entry or str(Path.cwd()) for entry in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN.format(path=path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | dict(environment),
        )
        self._job: bytes | None = None

    def run(self, job: bytes, item: Any) -> Any:
        """Return the result of the job on an item.

        Raises what the job raises, RefusedError if the worker cannot load the job, WorkerDiedError if the worker died.
        """
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
            raise WorkerDiedError(
                f"a worker process ended with exit code {code}; if it was killed, memory may be short. {self._fewer}"
            ) from error
        if kind == "refused":
            raise RefusedError(value)
        if kind == "error":
            raise value
        return value

    def end(self) -> None:
        """End the process and wait for it. Unfinished work is discarded."""
        self._process.terminate()
        self._process.communicate()


def serve() -> None:
    """Answer requests until the pipe closes: the main loop of a worker."""
    # Ctrl-C and SIGHUP reach all processes of a terminal, what Slurm sends before the time limit all of a task.
    # The parent handles them and ends its workers.
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    # Anything that a library prints to stdout goes to stderr, since it would corrupt the stream of answers.
    os.dup2(2, 1)
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
            except Exception as error:
                # The job may use a class of the caller's script, or a module that only that process can import.
                run, refusal = None, f"{type(error).__name__}: {error}"
            continue
        answers.write(_answer(run, value) if run is not None else pickle.dumps(("refused", refusal)))
        answers.flush()


def _answer(run: Callable[[Any], Any], item: Any) -> bytes:
    """Return the pickled answer to an item: its result, or the error."""
    try:
        return pickle.dumps(("value", run(item)), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        # Every error goes to the parent, which raises it.
        return _pickle_error(error)


def _pickle_error(error: Exception) -> bytes:
    """Return an answer that makes the parent raise the error, or a RuntimeError with its message if it cannot be
    sent."""
    try:
        answer = pickle.dumps(("error", error))
        pickle.loads(answer)
    except Exception:
        # An error may hold objects that cannot be pickled.
        return pickle.dumps(("error", RuntimeError(f"{type(error).__name__} in a worker process: {error}")))
    return answer
