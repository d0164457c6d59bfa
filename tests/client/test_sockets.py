"""The client over real sockets of this machine: servers that are slow, that break off, that are not there."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any

import pytest
import stamina

from fake_engines import FakeOwn, number_of
from rewardlab.client import AsyncRewardClient, RewardClient, UnavailableError
from rewardlab.core.errors import ConfigError
from served import table

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    with stamina.set_testing(True, attempts=5, cap=True):
        yield


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the machine are not asked for this one."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@asynccontextmanager
async def serving(handler: Handler) -> Any:
    """The address of a server that hands the body of each request to `handler`."""

    open_ones: set[asyncio.Task[None] | None] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        open_ones.add(own)
        try:
            while not reader.at_eof():
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                await handler(body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            # Waited for, since a connection that its loop leaves behind fails whichever test collects it.
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            open_ones.discard(own)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        left = [task for task in open_ones if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def written(values: Any, status: str = "200 OK") -> bytes:
    content = json.dumps(values).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def scores(body: bytes) -> bytes:
    """The answer of our server to token ids or to what it tells of itself."""
    fake = FakeOwn(table())
    path = "/v1/score" if body else "/v1/spec"
    return written(fake.reply(path, json.loads(body) if body else None)[1])


def test_a_connection_that_breaks_in_the_middle_of_an_answer_is_asked_again() -> None:
    asked = 0

    async def breaking(body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if body and asked in (2, 3):
            writer.write(scores(body)[: -10 if asked == 2 else 0])  # half an answer, and none
            writer.close()
            return
        writer.write(scores(body))

    async def work() -> list[float]:
        async with serving(breaking) as url, AsyncRewardClient(url, check=False) as own:
            return await own.score_token_ids([[5, 6]])

    assert asyncio.run(work()) == [number_of([5, 6])]
    assert asked == 4


def test_a_server_that_does_not_answer_is_given_up_after_the_whole_time() -> None:
    async def silent(body: bytes, writer: asyncio.StreamWriter) -> None:
        if not body:
            writer.write(scores(body))

    async def work() -> None:
        async with serving(silent) as url, AsyncRewardClient(url, check=False, timeout_s=0.2) as own:
            await own.score_token_ids([[5, 6]])

    with pytest.raises(UnavailableError, match="/v1/score: no answer within 0.2 s.* Raise timeout_s"):
        asyncio.run(work())


def test_a_slow_answer_is_waited_for() -> None:
    async def slow(body: bytes, writer: asyncio.StreamWriter) -> None:
        answer = scores(body)
        for start in range(0, len(answer), 50):
            writer.write(answer[start : start + 50])
            await asyncio.sleep(0)
            await writer.drain()

    async def work() -> list[float]:
        async with serving(slow) as url, AsyncRewardClient(url, check=False) as own:
            return await own.score_token_ids([[5, 6]])

    assert asyncio.run(work()) == [number_of([5, 6])]


def test_nobody_at_the_address_is_told_with_what_to_look_at() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(UnavailableError, match="no answer .ConnectError.*up to 2 times.*See that the server is up"):
            RewardClient(url, attempts=2).connect()


def test_a_cancelled_call_ends_its_requests_and_leaves_the_client_usable() -> None:
    async def work() -> list[float]:
        waiting, ended = asyncio.Event(), asyncio.Event()
        held = True

        async def holding(body: bytes, writer: asyncio.StreamWriter) -> None:
            if body and held:
                waiting.set()
                while not writer.is_closing():
                    await asyncio.sleep(0)
                    if writer.transport.get_extra_info("socket").fileno() < 0:
                        break
                ended.set()
            else:
                writer.write(scores(body))

        async with serving(holding) as url, AsyncRewardClient(url, check=False, max_concurrency=1) as own:
            call = asyncio.create_task(own.score_token_ids([[5, 6]]))
            await waiting.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            held = False
            return await own.score_token_ids([[7]])

    assert asyncio.run(work()) == [number_of([7])]


def test_one_of_a_crowd_can_be_cancelled_while_all_connect() -> None:
    async def work() -> list[list[float]]:
        asked, go = asyncio.Event(), asyncio.Event()

        async def late(body: bytes, writer: asyncio.StreamWriter) -> None:
            if not body:
                asked.set()
                await go.wait()
            writer.write(scores(body))

        async with serving(late) as url:
            own = AsyncRewardClient(url, check=False)
            calls = [asyncio.create_task(own.score_token_ids([[n]])) for n in range(4)]
            await asked.wait()
            calls[0].cancel()
            go.set()
            results = await asyncio.gather(*calls[1:])
            await own.aclose()
            return results

    assert asyncio.run(work()) == [[number_of([n])] for n in range(1, 4)]


class Threaded:
    """A server in a thread, for clients that block."""

    def __enter__(self) -> str:
        started = threading.Event()
        self.loop = asyncio.new_event_loop()

        async def answering(body: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(scores(body))

        async def run() -> None:
            self.end = asyncio.Event()
            async with serving(answering) as self.url:
                started.set()
                await self.end.wait()

        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(run()))
        self.thread.start()
        started.wait()
        return self.url

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.end.set)
        self.thread.join()
        self.loop.close()


def test_the_blocking_client_may_be_used_from_many_threads() -> None:
    got: dict[int, list[float]] = {}
    with Threaded() as url, RewardClient(url, check=False, max_concurrency=3) as own:

        def ask(number: int) -> None:
            got[number] = own.score_token_ids([[number, k] for k in range(5)])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {number: [number_of([number, k]) for k in range(5)] for number in range(20)}


def test_a_blocking_client_that_nobody_has_any_more_leaves_no_thread() -> None:
    with Threaded() as url:
        own = RewardClient(url, check=False)
        assert own.score_token_ids([[5]]) == [number_of([5])]
        thread = own._thread._thread
        del own
        thread.join()
    assert not thread.is_alive()


def test_a_client_of_the_process_that_forked_says_so() -> None:
    with Threaded() as url, RewardClient(url, check=False) as own:
        assert own.score_token_ids([[5]]) == [number_of([5])]
        own._thread._process = os.getpid() + 1
        with pytest.raises(ConfigError, match="made in another process"):
            own.score_token_ids([[5]])


@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize("kind", [RewardClient, AsyncRewardClient])
def test_a_client_reaches_another_process_as_address_and_settings(kind: type[Any], again: Callable[[Any], Any]) -> None:
    with Threaded() as url:
        own = kind(url, check=False, token="secret", max_batch=3)
        other = again(own)
        assert (type(other), other.url, other.config) == (kind, own.url, own.config)
        scores = [_scored(own), _scored(other)]  # the second after the first is closed
    assert scores == [[number_of([5])]] * 2


class Named(RewardClient):
    """A client with an argument and an attribute of its own."""

    def __init__(self, url: str, name: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.name = name


class AsyncNamed(AsyncRewardClient):
    """The same for asynchronous programs."""

    def __init__(self, url: str, name: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.name = name


@pytest.mark.parametrize("kind", [Named, AsyncNamed])
def test_what_a_subclass_of_a_client_has_added_reaches_another_process(kind: type[Any]) -> None:
    with Threaded() as url:
        own = kind(url, "mine", check=False)
        if isinstance(own, RewardClient):
            assert own.score_token_ids([[5]]) == [number_of([5])]
            own.close()
        other = pickle.loads(pickle.dumps(own))
        assert (type(other), other.name, other.config.check) == (kind, "mine", False)
        assert _scored(other) == [number_of([5])]


class Counting(Named):
    """A client with an attribute that stays in its process."""

    def __init__(self, url: str, name: str, **settings: Any) -> None:
        super().__init__(url, name, **settings)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


def test_a_subclass_leaves_out_what_cannot_travel() -> None:
    other = pickle.loads(pickle.dumps(Counting("http://127.0.0.1:1", "mine", check=False)))
    assert (other.name, other.config.check, hasattr(other, "lock")) == ("mine", False, False)


def test_settings_that_cannot_be_changed_reach_another_process() -> None:
    inner = MappingProxyType({"x-team": "rewards"})
    own = AsyncRewardClient("http://127.0.0.1:1", httpx_options=MappingProxyType({"headers": inner}))
    assert pickle.loads(pickle.dumps(own)).config.httpx_options == {"headers": {"x-team": "rewards"}}


def _scored(client: Any) -> list[float]:
    if isinstance(client, RewardClient):
        with client:
            return client.score_token_ids([[5]])

    async def scored() -> list[float]:
        async with client:
            return await client.score_token_ids([[5]])

    return asyncio.run(scored())


IMPORTS = """
import sys
from rewardlab.client import AsyncRewardClient, RewardClient
from rewardlab.core.errors import ConfigError
client = RewardClient("http://127.0.0.1:1", check=False)
try:
    RewardClient("http://127.0.0.1:1", engine="tei", max_concurrency="8")
except ConfigError as error:
    print(error)
client.close()
print(sorted({"torch", "transformers", "peft"} & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_a_client_is_imported_and_made_without_torch_and_transformers() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["engine: expected one of auto, rewardlab, vllm, sglang, got 'tei'.", "[]"]


RENDERING = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
from pathlib import Path
from rewardlab.client.rendering import Artifact
from rewardlab.data.chat import to_messages

folder = Artifact(Path(sys.argv[1]), truncate=False)
known = folder.spec.canaries
rendered = folder.render_all([to_messages(canary.messages) for canary in known])
same = [one.item == canary.token_ids for one, canary in zip(rendered, known, strict=True)]
print(len(same), all(same), "torch" in sys.modules)
"""


@pytest.mark.slow
def test_where_torch_is_not_installed_a_folder_renders_the_same_tokens() -> None:
    from served import folder, spec

    ran = subprocess.run([sys.executable, "-c", RENDERING, str(folder())], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(len(spec().canaries)), "True", "False"]


TOGETHER = """
import sys, threading
from pathlib import Path
from rewardlab.client.rendering import Artifact

sys.setswitchinterval(1e-6)  # so that threads meet within the first import
start, opened = threading.Barrier(8), []

def open_folder():
    start.wait()
    opened.append(Artifact(Path(sys.argv[1]), truncate=False))

threads = [threading.Thread(target=open_folder) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(opened))
"""


@pytest.mark.slow
def test_clients_of_several_threads_open_a_folder_at_the_same_time() -> None:
    from served import folder

    ran = subprocess.run([sys.executable, "-c", TOGETHER, str(folder())], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["8"], ran.stderr[-2000:]


MISSING = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
from rewardlab.core.errors import ConfigError
try:
    from rewardlab.client import RewardClient
except ConfigError as error:
    print(error)
import rewardlab.client.protocol
"""


@pytest.mark.slow
def test_a_missing_package_is_told_with_what_installs_it() -> None:
    ran = subprocess.run([sys.executable, "-c", MISSING, "httpx2"], capture_output=True, text=True, check=True)
    assert ran.stdout == (
        'rewardlab.client.RewardClient needs the package httpx2. Install it with: pip install "rewardlab[client]"\n'
    )
