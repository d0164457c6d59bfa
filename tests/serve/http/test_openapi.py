"""What the app says of itself is true: random requests made from it get no answer that it does not name, and no 5xx."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fake_engine import FakeEngine
from reward_models import save_tiny
from rewardlab.client.protocol import WireMessage
from rewardlab.serve.http.app import make_app
from rewardlab.serve.http.config import HttpConfig, LimitsConfig
from telling import tell

ADMIN_TOKEN = "admin-0123456789"
schemathesis.checks.load_all_checks()
CHECKS = [
    schemathesis.checks.not_a_server_error,
    *(
        schemathesis.checks.CHECKS.get_by_names(
            [
                "status_code_conformance",
                "content_type_conformance",
                "response_schema_conformance",
                "response_headers_conformance",
                "negative_data_rejection",
            ]
        )
    ),
]
SHORT, LONG = 12, 1000
"""Most requests to each route; hypothesis sends fewer where there are fewer."""
PATIENCE_S = 600
"""How long an answer is waited for: schemathesis gives up after ten seconds, which a busy machine may take."""


@pytest.fixture(scope="module")
def schema(tmp_path_factory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("swaps")
    engine = FakeEngine()
    config = HttpConfig(
        admin_token=ADMIN_TOKEN.encode(), allow_swap_from=(folder,), limits=LimitsConfig(max_conversations=50)
    )
    served = make_app(engine, config)
    yield schemathesis.openapi.from_asgi("/openapi.json", served.app)
    served.scoring.close()
    engine.close()


def try_all(schema: Any, kinds: list[Any], *, count: int) -> int:
    """Send `count` requests of each kind to each route; return how many were sent."""
    sent = [0]
    for result in schema.get_all_operations():
        operation = result.ok()
        cases = st.one_of(*(operation.as_strategy(generation_mode=kind) for kind in kinds))

        @seed(0)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def send(case: Any) -> None:
            sent[0] += 1
            headers = {"authorization": f"Bearer {ADMIN_TOKEN}"} if case.path.startswith("/admin") else {}
            response = case.call(headers=headers, timeout=PATIENCE_S)
            case.validate_response(response, checks=CHECKS)

        send()
    return sent[0]


MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.mark.slow
def test_random_requests_get_no_answer_that_is_not_described(schema):
    assert try_all(schema, MODES, count=SHORT) > 50


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_very_many_random_requests_get_no_answer_that_is_not_described(schema, capsys):
    tell(capsys, f"{try_all(schema, MODES, count=LONG)} requests to the app")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_very_many_random_requests_to_a_running_server_get_no_answer_that_is_not_described(tmp_path, capsys):
    """The command itself, with the real engine and a tiny model, over a socket of the loopback address."""
    folder = save_tiny(tmp_path / "rm")
    command = [sys.executable, "-m", "rewardlab", "serve", str(folder), "--port", "0", "--device", "cpu"]
    more = ["--admin-token-env", "ADMIN", "--allow-swap-from", str(tmp_path), "--max-conversations", "50"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "ADMIN": ADMIN_TOKEN}
    with subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = next(line.split()[-1] for line in server.stdout if "serving" in line)
            sent = try_all(schemathesis.openapi.from_url(f"{url}/openapi.json"), MODES, count=LONG)
            tell(capsys, f"{sent} requests to a running server")
        finally:
            server.terminate()
    assert server.returncode == 0


def test_other_fields_of_a_message_are_described_as_they_are_taken(schema):
    described = schema.raw_schema["components"]["schemas"]["WireMessage"]
    assert described["additionalProperties"] == {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}
    turn = {"role": "user", "content": "a"}
    for empty in (None, []):
        assert WireMessage.model_validate(turn | {"tool_calls": empty}, strict=True).content == "a"
    for other in ("", 0, {}, [1], False):
        with pytest.raises(ValidationError):
            WireMessage.model_validate(turn | {"tool_calls": other}, strict=True)


def test_every_route_is_described_and_every_reference_leads_somewhere(schema):
    described = schema.raw_schema
    assert {"/v1/score", "/classify", "/pooling", "/get_reward", "/slime", "/admin/swap", "/metrics"} <= set(
        described["paths"]
    )
    names = set(described["components"]["schemas"])
    waiting: list[Any] = [described]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("$ref"), str):
                assert one["$ref"].removeprefix("#/components/schemas/") in names
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
