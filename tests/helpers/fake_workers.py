"""`python -m fake_workers COUNT FOLDER DRAIN_TIMEOUT_S [BODY_TIMEOUT_S]`: workers around the made-up engine."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from fake_engine import FakeEngine
from rewardlab.console import log_on_stdout, say
from rewardlab.core.errors import ArtifactError, RewardlabError
from rewardlab.serve.http.config import HttpConfig, LimitsConfig
from rewardlab.serve.http.run import listen, url_of
from rewardlab.serve.http.worker import WorkerPlan
from rewardlab.serve.http.workers import Workers

ADMIN_TOKEN = "admin-0123456789"
SECONDS = "FAKE_ENGINE_SECONDS"


class Unequal(FakeEngine):
    """An engine that can swap to `odd` in one process only: the first to write its number there; `endless` loads for
    ever, and Python's own end waits for it; `gated` loads until it holds a file `go`."""

    def swap(self, name, folder):
        if folder.name == "gated":
            say("loading")
            while not (folder / "go").exists():
                time.sleep(0.01)
        if folder.name == "endless":
            atexit.register(threading.Event().wait)
            say("loading")
            threading.Event().wait()
        if folder.name == "odd":
            try:
                (folder / "first").open("x").close()
            except FileExistsError:
                raise ArtifactError("not here") from None
        return super().swap(name, folder)


def ids_of(workers: Workers) -> list[int]:
    """The process ids of the workers that accept."""
    return [worker.process.pid or 0 for worker in list(workers._workers.values()) if worker.serving]


def load(models: Mapping[str, Path]) -> FakeEngine:
    """An engine for the models; a folder called `broken` cannot be loaded, one called `deadly` ends the process, and
    one called `lasting` loads for ever; one called `told` says at the end of Python how the process left."""
    for folder in models.values():
        if folder.name == "lasting":
            say("loading")
            threading.Event().wait()
        if folder.name == "broken":
            raise ArtifactError(f"{folder}: is broken.")
        if folder.name == "deadly":
            os._exit(9)
        if folder.name == "told":
            atexit.register(lambda: say(f"left quickly: {gc.get_freeze_count() > 0}"))
    return Unequal(models, seconds=float(os.environ.get(SECONDS, "0")))


def main() -> None:
    count, folder, drain = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    limits = LimitsConfig(body_timeout=float(sys.argv[4]) if len(sys.argv) > 4 else 20.0)
    config = HttpConfig(
        admin_token=ADMIN_TOKEN.encode(),
        allow_swap_from=(folder.parent,),
        limits=limits,
        log_requests=len(sys.argv) > 4,
    )
    bound = listen("127.0.0.1", 0)
    name = "m" if len(sys.argv) > 4 else "tiny"
    plan = WorkerPlan(load=load, config=config, drain_timeout_s=drain)
    workers = Workers(plan, {name: folder}, bound, count=count, backoff_s=(0.0, 0.0))
    url = url_of(bound)
    with log_on_stdout():
        try:
            sys.exit(workers.run(lambda: say(" ".join([url, *map(str, ids_of(workers))]))))
        except RewardlabError as error:
            say(str(error))
            sys.exit(2)


if __name__ == "__main__":
    main()
