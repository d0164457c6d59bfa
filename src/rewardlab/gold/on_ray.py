"""Parts of long work on a Ray cluster: Ray Data hands them to a pool of actors, each with a model of its own.

The order of the results is this side's, by the numbers of the parts; Ray's does not matter. An item that fails has the
cause in place of a result. A worker whose process ends is started again and does its part once more. A part over which
it keeps ending is tried again item by item, until the items that are at fault are alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

from rewardlab.core.errors import EndpointError, RewardlabError
from rewardlab.core.optional import import_optional
from rewardlab.gold.engine import EngineConfig
from rewardlab.gold.pool import Finished, Source

logger = logging.getLogger("rewardlab")
RETRIES: Final = 3
"""How often a part is done again whose worker ended over it."""
PATIENCE_S: Final = 60.0
"""Seconds without a free place in the cluster after which a line says so."""
LOST: Final = f"the worker's process ended each of the {RETRIES + 1} times that it was at it (was it out of memory?)"
LOOPBACK: Final = "127.0.0.2"
"""Address on which a cluster of this machine alone listens. In place of 127.0.0.1 Ray takes the machine's address in
its network."""
Item = TypeVar("Item")
Result = TypeVar("Result")
Make = Callable[[], Sequence[Source[Any, Any]]]


class Worker:
    """A source in a worker, which is asked for parts. Ray Data makes one for each process."""

    def __init__(self, make: Make, identity: Mapping[str, Any] | None) -> None:
        """Load the model, and refuse it if something other than `identity` decides its results.

        Errors are noted in `refusal` and not raised, since Ray would try again for ever.
        """
        self._runner = asyncio.Runner()
        self.identity: dict[str, Any] = {}
        self.refusal = ""
        try:
            (self._source,) = make()
            self._runner.run(self._source.open())
            self.identity = dict(self._source.identity)
        except RewardlabError as error:
            self.refusal = str(error)
        except Exception as error:  # what a library raises is not known
            self.refusal = _told(error)
        else:
            if identity is not None and self.identity != identity:
                self.refusal = f"it has another model: {self.identity}, and another worker {dict(identity)}."
        if self.refusal:
            self.refusal = f"a worker on {socket.gethostname()} could not load it: {self.refusal}"

    def opened(self) -> tuple[dict[str, Any], str]:
        """Return what decides the results, and why the model is refused; empty if it is not."""
        return self.identity, self.refusal

    def __call__(self, table: Any) -> Any:
        """Return, for a table of parts, one with the number of each part and what became of it."""
        import pyarrow as pa

        found = [self.refusal or self.done(pickle.loads(items)) for items in table["items"].to_pylist()]
        return pa.table({"part": table["part"], "found": [pickle.dumps(one) for one in found]})

    def done(self, items: Sequence[Any]) -> list[tuple[int, list[Any] | str]]:
        """Return for each slice of the items how many they are, and their results or why there are none."""
        try:
            return [(len(items), list(self._runner.run(self._source.ask(items))))]
        except Exception as error:  # an item that fails costs no other, whatever a model raises over it
            if len(items) > 1:
                half = len(items) // 2
                return self.done(items[:half]) + self.done(items[half:])
            return [(1, str(error) if isinstance(error, RewardlabError) else _told(error))]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class RayTeam(Generic[Item, Result]):
    """Workers of a cluster that is connected."""

    def __init__(self, ray: Any, make: Make, config: EngineConfig) -> None:
        """Load the model in a first worker, to learn what decides its results. Raises EndpointError if it cannot."""
        self._ray = ray
        self._make = make
        self._workers = config.ray_workers
        resources = ray.cluster_resources()
        self._takes = {"num_cpus": 1, "num_gpus": int(resources.get("GPU", 0) >= 1)}
        what = "GPU" if self._takes["num_gpus"] else "CPU"
        if (room := int(resources.get(what, 0))) < self._workers:
            logger.warning("--ray-workers %d: the cluster has %d %ss; the others wait", self._workers, room, what)
        self.identity: Mapping[str, Any] = self._first()

    def _first(self) -> Mapping[str, Any]:
        actor = self._ray.remote(Worker).options(**self._takes).remote(self._make, None)
        try:
            asked = actor.opened.remote()
            while not self._ray.wait([asked], timeout=PATIENCE_S)[0]:
                logger.warning("Ray: no worker has its model yet; is a GPU or core of the cluster free?")
            identity, refusal = self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            raise EndpointError(f"Ray: a worker ended while it loaded its model: {error}") from error
        finally:
            self._ray.kill(actor)
        if refusal:
            raise EndpointError(f"Ray: {refusal}")
        return dict(identity)

    async def run(self, parts: Iterator[Sequence[Item]], keep: Callable[[Finished[Item, Result]], None]) -> None:
        """Do all parts. Raises EndpointError if a worker cannot load the model; what was finished is kept."""
        lost = await self._run([pickle.dumps(list(part)) for part in parts], keep)
        alone = [pickle.dumps([item]) for part in lost for item in pickle.loads(part)]
        if len(alone) > len(lost):
            logger.warning(
                "Ray: workers ended over %d parts; their %d items are done one by one", len(lost), len(alone)
            )
            lost = await self._run(alone, keep)
        if lost:
            keep([(pickle.loads(part), LOST) for part in lost])

    async def _run(self, parts: list[bytes], keep: Callable[[Finished[Item, Result]], None]) -> list[bytes]:
        """Do parts, and return those over which workers kept ending."""
        left = dict(enumerate(parts))
        if not left:
            return []
        for table in self._tables(parts):
            for number, found in zip(table["part"].to_pylist(), table["found"].to_pylist(), strict=True):
                if (part := left.pop(number, None)) is not None:
                    keep(_finished(pickle.loads(part), pickle.loads(found)))
            await asyncio.sleep(0)  # where Ctrl-C arrives
        return list(left.values())

    def _tables(self, parts: Sequence[bytes]) -> Iterator[Any]:
        """Yield what became of the parts, in whatever order they are finished."""
        data = import_optional("ray.data", "--engine ray", extra="ray")
        context = data.DataContext.get_current().copy()
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.max_errored_blocks = -1  # any number: lost parts are found by their numbers
        rows = [{"part": number, "items": items} for number, items in enumerate(parts)]
        names: list[str] = []

        def named() -> dict[str, str]:
            names.append(f"rewardlab-{uuid.uuid4().hex}")
            return {"name": names[-1]}

        with data.DataContext.current(context), warnings.catch_warnings():
            # Ray Data has no other way to say these; pyproject.toml excludes versions without it.
            warnings.filterwarnings("ignore", message="`ray_remote_args")
            found = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                Worker,
                fn_constructor_args=(self._make, self.identity),
                # A part that only waits at a worker when it ends would count as one over which it ended.
                compute=data.ActorPoolStrategy(size=min(self._workers, len(rows)), max_tasks_in_flight_per_actor=1),
                batch_size=1,
                batch_format="pyarrow",
                max_restarts=-1,
                max_task_retries=RETRIES,
                ray_remote_args_fn=named,
                **self._takes,
            )
            del rows
            try:
                yield from found.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
            finally:
                self._end(names)

    def _end(self, names: Sequence[str]) -> None:
        """End the workers that are still there.

        One that is being started again when Ray Data drops it would otherwise stay, with its GPU, until the connection
        ends.
        """
        for name in names:
            try:
                self._ray.kill(self._ray.get_actor(name))
            except ValueError:  # no actor has that name any more
                continue


def _finished(items: Sequence[Item], found: list[tuple[int, list[Result] | str]] | str) -> Finished[Item, Result]:
    """Return items with what became of them. Raises EndpointError if the worker has no model."""
    if isinstance(found, str):
        raise EndpointError(f"Ray: {found} What is finished is kept.")
    finished: Finished[Item, Result] = []
    start = 0
    for num, results in found:
        finished.append((items[start : start + num], results))
        start += num
    return finished


@contextmanager
def cluster(make: Make, config: EngineConfig) -> Iterator[RayTeam[Any, Any]]:
    """Connect to the cluster that settings name, or start one, for the block; one that was connected before stays so.

    Raises DataError if Ray is not installed, EndpointError if the cluster cannot be reached or no worker can load the
    model.
    """
    ray = import_optional("ray", "--engine ray", extra="ray")
    connects = not ray.is_initialized()
    if connects:
        _connect(ray, config.ray_address or os.environ.get("RAY_ADDRESS") or "local")
    try:
        yield RayTeam(ray, make, config)
    finally:
        if connects:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster; `local` starts one, on the loopback interface. Raises EndpointError if it cannot."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would report its use to its makers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what matters is raised; the rest would confuse
    import_optional("ray.data", "--engine ray", extra="ray")
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # after the import, which sets it
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    if own and sys.platform == "linux":
        own["_node_ip_address"] = LOOPBACK
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise EndpointError(f"--ray-address {address}: the cluster cannot be used: {error}") from error
    finally:
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # Ray has set its own
