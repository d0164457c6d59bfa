"""What a request may cost, and how it is told so."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fake_engine import FakeEngine, error_of, expected
from rewardlab.client.protocol import ScoreRequest
from rewardlab.core.errors import ConfigError
from rewardlab.serve.http.body import Held, body_of, parse
from rewardlab.serve.http.compat_forms import GetRewardRequest, PoolingRequest, SlimeRequest
from rewardlab.serve.http.config import HttpConfig, LimitsConfig
from rewardlab.serve.http.refusals import (
    ClientGone,
    InvalidError,
    MalformedError,
    SlowBodyError,
    TooBusyError,
    TooLargeError,
)
from rewardlab.serve.http.scoring import validated

pytest_plugins = ["served_apps"]

JSON = {"content-type": "application/json"}
GOOD = {"prompt": "x", "replies": ["y"]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1' + b"0" * 5000 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b'"\xff"',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": "\x01"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 40 + b"]" * 40,
        b"{} {}",
    ],
)
def test_what_is_not_json_with_one_meaning_is_malformed(client, body):
    error = error_of(client.post("/v1/score", content=body, headers=JSON)).error
    assert (error.code, error.type) == (400, "malformed")


@pytest.mark.slow
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**20), 10**20)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_json_writes_is_read_back(value):
    assert parse(json.dumps(value).encode(), max_depth=64) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_malformed(body):
    with suppress(MalformedError):
        parse(body, max_depth=16)


MANY = 1000
BOMBS = [
    (PoolingRequest, {"input": [{}] * MANY}, "input"),
    (PoolingRequest, {"input": [[{}] * MANY] * MANY}, "input"),
    (PoolingRequest, {"input": [[1], *[["x"] * MANY] * MANY]}, "input.1.0"),
    (PoolingRequest, {"messages": [{}] * MANY}, "messages.0.role"),
    (GetRewardRequest, {"query": [{}] * MANY}, "query"),
    (GetRewardRequest, {"query": [[{}] * MANY] * MANY}, "query.0.0.role"),
    (SlimeRequest, {"prompt": [{}] * MANY, "response": "x"}, "prompt.0.role"),
    (SlimeRequest, {"prompt": {}, "response": "x"}, "prompt"),
    (ScoreRequest, {"token_ids": [[]] * MANY}, "token_ids.0"),
    (ScoreRequest, {"conversations": [[{}] * MANY] * MANY}, "conversations.0.0.role"),
    (ScoreRequest, {"groups": [{"prompt": [1] * MANY, "replies": [1] * MANY}] * MANY}, "groups.0.prompt.0"),
    (ScoreRequest, {"prompt": "x", "replies": [None] * MANY}, "replies.0"),
]


@pytest.mark.parametrize(("kind", "body", "place"), BOMBS)
def test_many_faults_are_not_all_described_and_the_place_told_is_one_of_the_body(kind, body, place):
    with pytest.raises(ValidationError) as told:
        kind.model_validate(body, strict=True)
    assert told.value.error_count() < 10
    with pytest.raises(InvalidError) as refused:
        validated(kind, body)
    assert refused.value.param == place


@pytest.mark.parametrize(
    ("route", "body"),
    [("/classify", {"input": ["x"] * 5}), ("/pooling", {"input": ["x"] * 5}), ("/get_reward", {"query": ["x"] * 5})],
)
def test_too_many_rendered_texts_are_refused_before_any_is_split(
    client_of, engine: FakeEngine, monkeypatch, route, body
):
    client = client_of(HttpConfig(limits=LimitsConfig(max_conversations=4), accept_rendered=True))
    monkeypatch.setattr(engine, "tokenise", lambda *given: 1 / 0)
    error = error_of(client.post(route, json=body)).error
    assert (error.code, error.type) == (413, "too_large")


@pytest.mark.parametrize(
    ("route", "body", "place"),
    [
        ("/classify", {"input": ""}, "input"),
        ("/classify", {"input": ["x", ""]}, "input.1"),
        ("/get_reward", {"query": ["x", ""]}, "query.1"),
        ("/slime", {"prompt": "", "response": ""}, "prompt"),
    ],
)
def test_an_empty_text_is_told_by_its_place_in_the_body(client_of, route, body, place):
    client = client_of(HttpConfig(accept_rendered=True))
    error = error_of(client.post(route, json=body)).error
    assert (error.code, error.param, error.message) == (422, place, "The text is empty.")


def test_an_object_with_very_many_keys_is_malformed(client):
    response = client.post("/v1/score", json={f"key {number}": 1 for number in range(300)})
    assert error_of(response).error.type == "malformed"


def test_the_depth_is_the_most_that_is_taken():
    assert parse(b"[" * 16 + b"]" * 16, max_depth=16) is not None
    with pytest.raises(MalformedError, match="16 levels"):
        parse(b"[" * 17 + b"]" * 17, max_depth=16)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json; Charset=ISO-8859-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "multipart/form-data"},
        {"content-type": ""},
    ],
)
def test_other_media_types_are_refused(client, headers):
    error = error_of(client.post("/v1/score", content=json.dumps(GOOD), headers=headers)).error
    assert (error.code, error.type) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "more", ["", "; charset=utf-8", '; charset="UTF-8"; v=1', "; v=1; charset=utf8", ";CHARSET=Utf-8"]
)
def test_json_with_parameters_of_its_media_type_is_taken(client, more):
    headers = {"content-type": f"application/json{more}"}
    assert client.post("/v1/score", content=json.dumps(GOOD), headers=headers).status_code == 200


def test_a_body_above_the_limit_is_refused_whether_it_says_its_length_or_not(client_of):
    client = client_of(HttpConfig(limits=LimitsConfig(max_body_kib=1)))
    large = json.dumps({"prompt": "x", "replies": ["y" * 2000]}).encode()
    assert error_of(client.post("/v1/score", content=large, headers=JSON)).error.type == "too_large"
    assert error_of(client.post("/v1/score", content=iter([large[:900], large[900:]]), headers=JSON)).error.code == 413
    huge = {**JSON, "content-length": str(10**12)}
    assert error_of(client.post("/v1/score", content=b"{}", headers=huge)).error.code == 413
    assert client.post("/v1/score", json=GOOD).status_code == 200


def receiver(*chunks: bytes, then: str = "end"):
    """A `receive` that hands out chunks, and then ends, disconnects or hangs; and what it handed out."""
    waiting, given = list(chunks), []

    async def receive():
        if waiting:
            given.append(waiting.pop(0))
            return {"type": "http.request", "body": given[-1], "more_body": bool(waiting) or then != "end"}
        if then == "hang":
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return receive, given


def read(receive, limits: LimitsConfig, held: Held, headers=JSON) -> bytes:
    async def run() -> bytes:
        async with body_of(receive, headers, limits, held) as body:
            assert held.bytes == len(body)
            return body

    return asyncio.run(run())


def test_a_body_is_counted_while_it_arrives_and_not_kept_once_it_is_too_large():
    limits, held = LimitsConfig(max_body_kib=1), Held(10**6)
    receive, given = receiver(*[b"x" * 512] * 1000)
    with pytest.raises(TooLargeError):
        read(receive, limits, held)
    assert len(given) == 8 * 2 + 1, "read on to eight times the limit, so that the client hears why, and no further"
    assert held.bytes == 0


def test_bodies_of_all_requests_together_are_limited():
    held = Held(1000)
    held.take(900)
    with pytest.raises(TooBusyError):
        read(receiver(b"x" * 200)[0], LimitsConfig(), held)
    assert held.bytes == 900


def test_a_body_that_stops_arriving_times_out_and_one_whose_sender_goes_away_ends():
    held = Held(10**6)
    with pytest.raises(SlowBodyError):
        read(receiver(b"{", then="hang")[0], LimitsConfig(body_timeout=0.01), held)
    with pytest.raises(ClientGone):
        read(receiver(b"{", then="gone")[0], LimitsConfig(), held)
    assert held.bytes == 0


def test_conversations_and_tokens_of_a_request_are_limited(client_of):
    client = client_of(HttpConfig(limits=LimitsConfig(max_conversations=3, max_request_tokens=100)))
    groups = {"groups": [{"prompt": "a", "replies": ["b", "c"]}, {"prompt": "a", "replies": ["b", "c"]}]}
    assert error_of(client.post("/v1/score", json=groups)).error.type == "too_large"
    assert error_of(client.post("/v1/score", json={"token_ids": [[1] * 101]})).error.type == "too_long"
    assert client.post("/v1/score", json={"token_ids": [[1] * 100]}).status_code == 200
    assert client.post("/classify", json={"input": [[1]] * 4}).status_code == 413


def test_a_full_queue_says_when_to_come_again(client, engine: FakeEngine):
    engine.max_waiting = 10
    response = client.post("/v1/score", json={"token_ids": [[1] * 11]})
    assert error_of(response).error.type == "queue_full"
    assert (response.status_code, response.headers["retry-after"]) == (429, "3"), "as the engine says"
    assert client.post("/v1/score", json={"token_ids": [[1] * 10]}).status_code == 200


def test_more_requests_at_a_time_than_may_be_are_told_to_wait(client_of):
    client = client_of(HttpConfig(limits=LimitsConfig(max_in_flight=1)))
    assert client.post("/v1/score", json=GOOD).status_code == 200
    assert client.post("/v1/score", json=GOOD).status_code == 200, "the first is over"


def test_nothing_is_cut_to_fit(client, engine: FakeEngine):
    body = {"prompt": "x" * 4000, "replies": ["y" * 50, "z"]}
    answer = client.post("/v1/score", json=body).json()
    assert [group["scores"] for group in answer["groups"]] == expected(
        engine.digests["tiny"], ScoreRequest.model_validate(body)
    )
    assert client.post("/v1/score", json={"prompt": "x" * 4200, "replies": ["y"]}).status_code == 413


def test_limits_that_cannot_be_are_settings_errors():
    with pytest.raises(ConfigError, match="holds not even one body"):
        LimitsConfig(max_body_kib=2048, max_held_mib=1)
