"""Fixtures: apps around the made-up engine, with and without a socket (a plugin, since a conftest.py beside the tests
would hide the one of all tests)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from fake_engine import FakeEngine
from rewardlab.serve.http.app import Served, make_app
from rewardlab.serve.http.config import HttpConfig, LimitsConfig
from rewardlab.serve.http.run import Server
from served_in_thread import in_thread


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.gate.set()
    engine.close()


@pytest.fixture
def client_of(engine: FakeEngine) -> Iterator[Callable[..., TestClient]]:
    """Makes a client of an app, without a socket; takes the fields of HttpConfig and `swap` and so on."""
    apps: list[Served] = []

    def make(config: HttpConfig | None = None, **more: Any) -> TestClient:
        served = make_app(engine, config or HttpConfig(), **more)
        apps.append(served)
        return TestClient(served.app, raise_server_exceptions=False)

    yield make
    for served in apps:
        served.scoring.close()


@pytest.fixture
def client(client_of: Callable[..., TestClient]) -> TestClient:
    return client_of()


@pytest.fixture
def serve(engine: FakeEngine) -> Iterator[Callable[..., tuple[str, int, Server, Callable[[], None]]]]:
    """Serves an app on a loopback socket; returns (host, port, server, end)."""
    ends: list[Callable[[], None]] = []

    def start(
        config: HttpConfig | None = None, *, limits: LimitsConfig | None = None, drain_timeout_s: float = 5.0
    ) -> tuple[str, int, Server, Callable[[], None]]:
        limits = limits or LimitsConfig()
        served = make_app(engine, config or HttpConfig(limits=limits))
        url, end, server = in_thread(served, limits, drain_timeout_s=drain_timeout_s)
        ends.append(end)
        host, _, port = url.removeprefix("http://").rpartition(":")
        return host, int(port), server, end

    yield start
    engine.gate.set()
    for end in ends:
        end()
