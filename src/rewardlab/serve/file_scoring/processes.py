"""Several processes that score parts of a file, each with its own model: on the CPU, or each on its own GPU."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.data.token_report import tell_typed
from rewardlab.data.workers import ENVIRONMENT, RefusedError, Worker, WorkerDiedError, available_cores
from rewardlab.serve.file_scoring.backends import Answer, LocalModel, LocalScorer
from rewardlab.serve.file_scoring.rows import Asked

logger = logging.getLogger("rewardlab")
TRIES: Final = 2
"""How many processes may die while scoring the same rows before the run ends."""
FEWER: Final = "Use fewer --processes; 1 scores in this process."


class Job:
    """The job of a worker: load the model when it is first called, and score rows.

    It is pickled and sent to the worker before the model is loaded.
    """

    def __init__(self, model: LocalModel, decided: Mapping[str, Any]) -> None:
        self.model = model
        self.decided = dict(decided)
        self._scorer: LocalScorer | None = None

    def __call__(self, rows: Sequence[Asked] | None) -> Answer | dict[str, Any]:
        """Return the scores of rows; for None, what was decided when the model was loaded."""
        self._scorer = self._scorer or LocalScorer(self.model, self.decided)
        return self._scorer.decided if rows is None else self._scorer.score(rows)


class ProcessBackend:
    """Worker processes. If one dies, its rows are scored by another one."""

    def __init__(self, model: LocalModel, num_processes: int) -> None:
        """Raises ArtifactError if the folder has no spec that can be read."""
        self.model = model
        self.spec = model.spec()
        self.identity = model.identity()
        self.bare = self.spec.renderer.joins_texts
        self.num_parts = num_processes
        self.workers: list[Worker] = []
        """The workers that are alive."""
        self._jobs: dict[Worker, bytes] = {}
        self._loaded: set[Worker] = set()
        self._idle: asyncio.Queue[Worker] = asyncio.Queue()
        self._threads: ThreadPoolExecutor | None = None

    async def start(self, decided: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start the processes; the first one decides how all of them compute.

        Raises ArtifactError, ConfigError; WorkerDiedError if the first one ends while it loads its model.
        """
        environments = environments_of(self.num_parts)
        self._threads = ThreadPoolExecutor(self.num_parts)
        self.workers = [Worker(environment, fewer=FEWER) for environment in environments]
        first = self.workers[0]
        self._jobs[first] = pickle.dumps(Job(self.model, decided))
        try:
            decided = await self._run(first, None)
        except WorkerDiedError as error:
            raise WorkerDiedError(f"while it loaded its model, {error}") from error
        self._loaded.add(first)
        for worker in self.workers:
            self._jobs.setdefault(worker, pickle.dumps(Job(self.model, decided)))
            self._idle.put_nowait(worker)
        return decided

    async def score_rows(self, rows: Sequence[Asked]) -> Answer:
        """Return the scores of rows, computed together by one process, by another one if that ends.

        Raises WorkerDiedError if `TRIES` processes died while scoring these rows, or none is left. A process that dies
        while it loads its model does not count, since the rows cannot be the cause.
        """
        left = TRIES
        while True:
            worker = await self._idle.get()
            has_loaded = worker in self._loaded
            try:
                if not has_loaded:
                    await self._run(worker, None)
                    self._loaded.add(worker)
                    has_loaded = True
                answer: Answer = await self._run(worker, rows)
            except WorkerDiedError as error:
                self.workers.remove(worker)
                worker.end()
                left -= has_loaded
                said = str(error) if has_loaded else f"while it loaded its model, {error}"
                if not left or not self.workers:
                    why = "No process is left." if left else f"{TRIES} ended over these rows."
                    raise WorkerDiedError(f"{said} {why}") from error
                logger.warning("%s Its rows are scored again by another one of %d", said, len(self.workers))
            else:
                self._idle.put_nowait(worker)
                return answer

    async def _run(self, worker: Worker, rows: Sequence[Asked] | None) -> Any:
        """Return the answer of a process, waiting for it in a thread. Raises what it raises."""
        assert self._threads is not None, "start it first"
        asking = asyncio.get_running_loop().run_in_executor(self._threads, worker.run, self._jobs[worker], rows)
        try:
            return await asking
        except RefusedError as error:
            raise RewardlabError(f"a process could not load what it is to do ({error}).") from error

    def tell(self, num_typed: int, num_replies: int, name: str) -> None:
        """Warn if control tokens are typed in texts."""
        tell_typed(num_typed, num_replies, self.spec.renderer, name)

    async def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self.workers:
            worker.end()
        self.workers = []
        if self._threads is not None:
            self._threads.shutdown()


def environments_of(num_processes: int) -> list[dict[str, str]]:
    """Return what is added to the environment of each process: its GPU, or its share of the cores.

    Raises ConfigError for more processes than GPUs, where there are any.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus and num_processes > num_gpus:
        raise ConfigError(f"--processes {num_processes}: each takes a GPU of its own, and there are {num_gpus}.")
    if num_gpus:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given else [str(number) for number in range(num_gpus)]
        return [{**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": name} for name in names[:num_processes]]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(available_cores() // num_processes, 1))
    return [{**ENVIRONMENT, "OMP_NUM_THREADS": threads}] * num_processes
