"""A server on a loopback socket: slow, vanishing, half-closed and too many clients, and a drained end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fake_engine import FakeEngine, expected
from rewardlab.client.protocol import ErrorResponse, ScoreRequest
from rewardlab.core.errors import ConfigError
from rewardlab.serve.http import run
from rewardlab.serve.http.config import HttpConfig, LimitsConfig
from rewardlab.serve.http.run import listen, url_of

pytest_plugins = ["served_apps"]

BODY = {"prompt": "x", "replies": ["y", "z"]}


def request_bytes(body: bytes, *, length: int | None = None, path: str = "/v1/score") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def read_all(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    client.settimeout(30)
    told = b""
    try:
        while part := client.recv(65536):
            told += part
    except ConnectionResetError:
        pass
    return told


def status_and_error(told: bytes) -> tuple[int, ErrorResponse]:
    head, _, body = told.partition(b"\r\n\r\n")
    return int(head.split()[1]), ErrorResponse.model_validate_json(body)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll, without a limit of its own: the suite's timeout ends what never comes true."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.005)


def post(host: str, port: int, body: object = BODY) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request("POST", "/v1/score", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def get(host: str, port: int, path: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@pytest.mark.slow
def test_many_clients_at_a_time_each_get_their_own_scores(serve, engine: FakeEngine):
    host, port, _, _ = serve()

    def ask(number: int) -> bool:
        body = {"groups": [{"prompt": f"p{number}", "replies": [f"r{number}", "s"]}]}
        status, answer = post(host, port, body)
        wanted = expected(engine.digests["tiny"], ScoreRequest.model_validate(body))
        return status == 200 and [group["scores"] for group in answer["groups"]] == wanted

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(ask, range(100)))


@pytest.mark.parametrize("ending", ["gone", "half-closed"])
def test_a_client_that_goes_away_takes_its_request_out_of_the_queue(serve, engine: FakeEngine, ending):
    host, port, server, _ = serve()
    engine.gate.clear()
    with socket.create_connection((host, port)) as client:
        client.sendall(request_bytes(json.dumps(BODY).encode()))
        wait_until(lambda: engine.waiting > 0)
        if ending == "half-closed":
            client.shutdown(socket.SHUT_WR)
            assert read_all(client) == b"", "one that closes its side is taken to be gone"
    # The server sees by itself that the first is gone, before another one takes its place in the count.
    wait_until(lambda: server._served.scoring.in_flight == 0)
    other = threading.Thread(target=post, args=(host, port))
    other.start()
    wait_until(lambda: engine._queue.qsize() > 0 and server._served.scoring.in_flight == 1)
    engine.gate.set()
    other.join()
    wait_until(lambda: engine.cancelled + engine.done == 2)
    assert (engine.cancelled, engine.done) == (1, 1)


def test_what_a_gone_client_left_is_counted_until_no_thread_has_it_and_never_begun_later(serve, engine, monkeypatch):
    go_on, begun, prepare = threading.Event(), [], engine.prepare

    def slow(request):
        begun.append(request)
        assert go_on.wait(60)
        return prepare(request)

    monkeypatch.setattr(engine, "prepare", slow)
    host, port, server, _ = serve()
    scoring, told = server._served.scoring, request_bytes(json.dumps(BODY).encode())
    threads = scoring._threads._max_workers
    clients = [socket.create_connection((host, port)) for _ in range(threads + 3)]
    for client in clients:
        client.sendall(told)
    wait_until(lambda: scoring.in_flight == threads + 3 and len(begun) == threads)
    for client in clients:
        client.close()
    wait_until(lambda: scoring.in_flight == threads)
    assert scoring.held.bytes == threads * len(json.dumps(BODY))
    go_on.set()
    wait_until(lambda: scoring.in_flight == scoring.held.bytes == 0)
    assert len(begun) == threads
    assert post(host, port)[0] == 200


def test_a_client_that_does_not_read_loses_its_connection(serve):
    host, port, server, _ = serve(limits=LimitsConfig(write_timeout=0.05, keep_alive=0.05))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, port))
        wait_until(lambda: len(server.server_state.connections) == 1)
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 300)
        wait_until(lambda: len(server.server_state.connections) == 0)


def test_at_the_end_a_client_that_does_not_read_loses_its_connection_too(serve, monkeypatch):
    monkeypatch.setattr(run, "LAST_WORDS_S", 0.05)
    host, port, server, end = serve(drain_timeout_s=0.05)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, port))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 300)
        wait_until(lambda: any(one.transport.get_write_buffer_size() for one in [*server.server_state.connections]))
        end()
        assert not server.server_state.connections


def test_a_body_that_does_not_arrive_gets_408(serve):
    host, port, _, _ = serve(limits=LimitsConfig(body_timeout=0.05))
    with socket.create_connection((host, port)) as client:
        client.sendall(request_bytes(b"{", length=100))
        status, error = status_and_error(read_all(client))
    assert (status, error.error.type) == (408, "timeout")


def test_a_head_that_does_not_arrive_gets_408(serve):
    host, port, _, _ = serve(limits=LimitsConfig(header_timeout=0.05))
    with socket.create_connection((host, port)) as client:
        client.sendall(b"POST /v1/score HT")
        assert status_and_error(read_all(client))[0] == 408


def test_a_connection_that_says_nothing_is_closed(serve):
    host, port, _, _ = serve(limits=LimitsConfig(keep_alive=0.05))
    with socket.create_connection((host, port)) as client:
        assert read_all(client) == b""


@pytest.mark.parametrize("told", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET /" + b"x" * 100_000])
def test_what_is_not_http_gets_400(serve, told):
    host, port, _, _ = serve()
    with socket.create_connection((host, port)) as client:
        client.sendall(told)
        answer = read_all(client)
    assert answer == b"" or status_and_error(answer)[0] == 400


def test_a_request_for_a_whole_address_is_answered_by_its_path_and_its_host_counts(serve):
    """As clients send it that take the server for a proxy."""
    asked = b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n"
    host, port, _, _ = serve(HttpConfig(hosts=("127.0.0.1",)))
    for target, named, status in (
        (b"http://127.0.0.1:8000/v1/models?x=1", b"127.0.0.1", 200),
        (b"HTTP://127.0.0.1/v1/%6dodels", b"evil.example", 200),
        (b"http://evil.example/v1/models", b"127.0.0.1", 421),
        (b"http://127.0.0.1", b"127.0.0.1", 404),
        (b"ftp://127.0.0.1/v1/models", b"127.0.0.1", 404),
    ):
        with socket.create_connection((host, port)) as client:
            client.sendall(asked % (target, named))
            assert int(read_all(client).split()[1]) == status, target
    assert 'rewardlab_requests_total{code="200",route="/v1/models"} 2.0' in get(host, port, "/metrics")


def test_a_refused_body_that_never_ends_does_not_keep_the_connection(serve):
    host, port, _, _ = serve(limits=LimitsConfig(header_timeout=0.1))
    with socket.create_connection((host, port)) as client:
        client.sendall(request_bytes(b"[", length=10_000, path="/nothing"))
        client.settimeout(30)
        assert client.recv(12) == b"HTTP/1.1 404"
        client.sendall(b"1")
        assert read_all(client).endswith(b"}")


def test_a_large_body_hears_why_it_is_refused(serve):
    host, port, _, _ = serve(limits=LimitsConfig(max_body_kib=16))
    large = json.dumps({"prompt": "x", "replies": ["y" * 100_000]})
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("POST", "/v1/score", large, {"content-type": "application/json"})
    assert connection.getresponse().status == 413
    connection.close()


def test_more_connections_than_may_be_are_told_so(serve):
    host, port, server, _ = serve(limits=LimitsConfig(max_connections=2))
    with socket.create_connection((host, port)), socket.create_connection((host, port)):
        wait_until(lambda: len(server.server_state.connections) == 2)
        status, answer = post(host, port)
        assert (status, answer["error"]["type"]) == (503, "too_many_connections")
    wait_until(lambda: len(server.server_state.connections) == 0)
    assert post(host, port)[0] == 200


def test_pipelined_requests_are_answered_in_order(serve, engine: FakeEngine):
    host, port, _, _ = serve()
    bodies = [{"prompt": f"p{number}", "replies": ["r"]} for number in range(5)]
    with socket.create_connection((host, port)) as client:
        last = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        client.sendall(b"".join(request_bytes(json.dumps(body).encode()) for body in bodies) + last)
        told = read_all(client).decode()
    found = [float(score) for score in re.findall(r'"scores":\[([-\d.e]+)\]', told)]
    digest = engine.digests["tiny"]
    assert found == [expected(digest, ScoreRequest.model_validate(body))[0][0] for body in bodies]


def test_the_end_answers_what_was_taken_and_takes_no_more(serve, engine: FakeEngine):
    host, port, server, end = serve()
    engine.gate.clear()
    with ThreadPoolExecutor(9) as threads:
        taken = [threads.submit(post, host, port, {"prompt": str(n), "replies": ["r"]}) for n in range(8)]
        wait_until(lambda: engine._queue.qsize() == 7 and engine.waiting > 0)
        ended = threads.submit(end)
        wait_until(lambda: server.ending and not server.servers[0].is_serving())
        with pytest.raises(OSError):
            socket.create_connection((host, port), timeout=5)
        engine.gate.set()
        for number, answer in enumerate(taken):
            status, told = answer.result()
            wanted = expected(engine.digests["tiny"], ScoreRequest(prompt=str(number), replies=["r"]))
            assert (status, told["groups"][0]["scores"]) == (200, wanted[0])
        ended.result()


def test_what_cannot_be_answered_in_time_hears_503(serve, engine: FakeEngine):
    host, port, _, end = serve(drain_timeout_s=0.05)
    engine.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        taken = threads.submit(post, host, port)
        wait_until(lambda: engine.waiting > 0)
        end()
        status, answer = taken.result()
    assert (status, answer["error"]["type"]) == (503, "unavailable")


def test_a_body_that_still_arrives_when_the_drain_time_ends_hears_503(serve, engine: FakeEngine):
    host, port, _, end = serve(HttpConfig(admin_token=b"a" * 16), drain_timeout_s=0.05)
    with socket.create_connection((host, port)) as scoring, socket.create_connection((host, port)) as swapping:
        scoring.sendall(request_bytes(b"{", length=100))
        swap = request_bytes(b"{", length=100, path="/admin/swap")
        swapping.sendall(swap.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer " + b"a" * 16 + b"\r\n\r\n"))
        wait_until(lambda: "rewardlab_in_flight 3.0" in get(host, port, "/metrics"))
        end()
        for told in (read_all(scoring), read_all(swapping)):
            status, error = status_and_error(told)
            assert (status, error.error.type, b"retry-after: 1" in told) == (503, "unavailable", True)


SERVER = """
import sys
import time
from fake_engine import FakeEngine
from rewardlab.serve.http.app import make_app
from rewardlab.serve.http.config import HttpConfig, LimitsConfig
from rewardlab.serve.http.run import listen, serve_until_ended, url_of

how, drain_timeout_s = sys.argv[1], float(sys.argv[2])
bound, engine = listen("127.0.0.1", 0), FakeEngine(seconds=3600 if how == "computing" else 0)
if how == "stuck":
    engine.gate.clear()
if how == "rendering":
    engine.prepare = lambda request: time.sleep(3600)
served = make_app(engine, HttpConfig())
serve_until_ended(
    served, bound, LimitsConfig(), drain_timeout_s=drain_timeout_s, on_start=lambda _: print(url_of(bound), flush=True)
)
"""


def started(how: str, drain_timeout_s: float) -> tuple[subprocess.Popen[str], str, int]:
    """A process of SERVER, and where it listens."""
    helpers = str(Path(__file__).parents[2] / "helpers")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([helpers, *sys.path])}
    command = [sys.executable, "-c", SERVER, how, str(drain_timeout_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert process.stdout is not None
    host, _, port = process.stdout.readline().strip().removeprefix("http://").partition(":")
    return process, host, int(port)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["computing", "rendering"])
def test_the_end_waits_for_no_thread_that_goes_on_beyond_the_drain_timeout(how):
    process, host, port = started(how, 0.2)
    try:
        with ThreadPoolExecutor(2) as threads:
            taken = [threads.submit(post, host, port) for _ in range(2)]
            wait_until(lambda: "rewardlab_in_flight 3.0" in get(host, port, "/metrics"))
            process.send_signal(signal.SIGTERM)
            for answer in taken:
                status, told = answer.result()
                assert (status, told["error"]["type"]) == (503, "unavailable")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("how", "number", "times", "status"),
    [
        ("free", signal.SIGTERM, 1, 0),
        ("free", signal.SIGHUP, 1, 0),
        ("stuck", signal.SIGTERM, 2, 128 + signal.SIGTERM),
    ],
)
def test_a_signal_drains_and_a_second_one_ends_at_once(how, number, times, status):
    process, host, port = started(how, 60)
    client = socket.socket()
    try:
        if how == "free":
            assert post(host, port)[0] == 200
        else:
            client.connect((host, port))
            client.sendall(request_bytes(json.dumps(BODY).encode()))
            wait_until(lambda: "rewardlab_waiting_tokens 0.0" not in get(host, port, "/metrics"))
        for time in range(times):
            process.send_signal(number)
            if time == 0 and times == 2:
                # The first signal has been seen once nobody can connect any more.
                wait_until(lambda: not can_connect(host, port))
        assert process.wait(60) == status
    finally:
        client.close()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_an_address_that_cannot_be_had_is_a_settings_error():
    with listen("127.0.0.1", 0) as bound:
        port = int(url_of(bound).rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"--port {port}"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot be had"):
        listen("203.0.113.7", 0)
