"""Which rows go into one request, how long a client waits, and what reaches httpx2."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialects_spoken import URL
from fake_engines import FakeOwn
from rewardlab.client import AsyncRewardClient
from rewardlab.client.dialects import SGLANG_CLASSIFY, VLLM_CLASSIFY, VLLM_POOLING, choose, engine_of, wrong_in
from rewardlab.client.http import SPREAD, seconds_of, wait_of
from rewardlab.client.rows import Row, requests_of, rows_of_conversations, rows_of_tokens
from rewardlab.core.errors import ConfigError, RenderError
from served import table

DRAWN = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c" * 30]), st.sampled_from(["x", "y" * 40]), st.sampled_from([0, 0, 0, 1, 2])
    ),
    max_size=30,
)


def rows_of(drawn: list[tuple[str, str, int]]) -> list[Row]:
    """Rows of text, and of a token where one is drawn."""
    return [
        Row(name="row", token_ids=(token,)) if token else Row(name="row", prompt=prompt, reply=reply)
        for prompt, reply, token in drawn
    ]


@pytest.mark.slow
@given(drawn=DRAWN, max_batch=st.integers(1, 8), whole=st.booleans())
def test_every_row_goes_into_exactly_one_request_of_bounded_size(drawn: Any, max_batch: int, whole: bool) -> None:
    rows = rows_of(drawn)
    requests = list(requests_of(rows, max_batch=max_batch, whole=whole, max_characters=100))
    assert sorted(number for request in requests for number in request) == list(range(len(rows)))
    for request in requests:
        keys = {rows[number].key for number in request}
        if len(keys) > 1 or not whole:
            assert len(request) <= max_batch
            sizes = [rows[number].size for number in request]
            prompts = [rows[number].prompt_size for number in request]
            assert len(request) == 1 or sum(sizes) + (0 if whole else sum(prompts)) <= 100


@given(drawn=DRAWN, max_batch=st.integers(1, 8))
def test_replies_to_one_prompt_are_in_one_request_and_in_their_order(drawn: Any, max_batch: int) -> None:
    rows = rows_of(drawn)
    requests = list(requests_of(rows, max_batch=max_batch, whole=True, max_characters=100))
    place = {number: n for n, request in enumerate(requests) for number in request}
    for first, row in enumerate(rows):
        for second in range(first + 1, len(rows)):
            if rows[second].key == row.key:
                assert place[first] == place[second]
                request = requests[place[first]]
                assert request.index(first) < request.index(second)


@given(seconds=st.integers(0, 10**6))
def test_a_retry_after_is_read_as_seconds_or_as_a_date(seconds: int) -> None:
    assert seconds_of(str(seconds)) == seconds
    then = datetime.now(UTC) + timedelta(seconds=seconds)
    read = seconds_of(format_datetime(then, usegmt=True))
    assert read is not None
    assert seconds - 60 <= read <= seconds


ENDLESS = f"Mon, 05 Jan 2026 00:00:00 +{'9' * 20}"
"""A date in a time zone that no clock has."""


@pytest.mark.parametrize("header", [None, "", "soon", "-5", "1.5", "²", "١٢", "Fri, 99 Foo 2026 00:00:00 GMT", ENDLESS])
def test_a_retry_after_that_is_neither_is_as_if_it_were_not_there(header: str | None) -> None:
    assert seconds_of(header) is None
    assert wait_of(None, 300.0) is True


def test_a_date_in_the_past_is_now() -> None:
    assert seconds_of("Fri, 31 Dec 1999 23:59:59 GMT") == 0.0


@given(seconds=st.floats(0, 1e6), most=st.floats(0.1, 1e6))
def test_a_client_comes_back_a_little_later_than_it_is_asked_to_but_never_earlier(seconds: float, most: float) -> None:
    waited = wait_of(seconds, most)
    if seconds >= most:
        assert waited is False
    else:
        assert waited is not True
        assert seconds <= waited <= seconds * (1 + SPREAD) + 1e-6


def test_options_for_httpx_reach_it() -> None:
    seen: list[httpx2.Request] = []
    fake = FakeOwn(table())

    async def noting(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return await fake(request)

    options: dict[str, Any] = {
        "transport": httpx2.MockTransport(noting),
        "headers": {"x-team": "rewards"},
        "timeout": httpx2.Timeout(7.0),
        "auth": ("me", "secret"),
    }

    async def work() -> None:
        async with AsyncRewardClient(f"{URL}/behind/", check=False, httpx_options=options):
            pass

    asyncio.run(work())
    (request,) = seen
    assert request.url == f"{URL}/behind/v1/spec"
    assert request.headers["x-team"] == "rewards"
    assert request.headers["authorization"].startswith("Basic ")
    assert request.extensions["timeout"]["read"] == 7.0


def test_engines_are_told_apart_by_routes_that_they_alone_have() -> None:
    vllm = {"/classify", "/pooling", "/score", "/version"}
    sglang = {"/classify", "/v1/classify", "/get_model_info", "/v1/embeddings", "/v1/score"}
    assert (engine_of(vllm), engine_of(sglang), engine_of({"/classify"})) == ("vllm", "sglang", None)
    assert choose("vllm", vllm) is VLLM_CLASSIFY
    assert choose("vllm", vllm - {"/classify"}) is VLLM_POOLING
    assert choose("vllm", {"/score", "/v1/classify"}) is None
    assert choose("sglang", sglang) is SGLANG_CLASSIFY
    assert choose("sglang", {"/v1/classify"}) is None


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), None, True, "1", [1.0], pytest.param(10**400, id="large")]
)
def test_what_is_no_finite_number_is_no_score(value: Any) -> None:
    cause = wrong_in(value)
    assert cause is not None
    assert ("float16" in cause) == (value is None or isinstance(value, float)), "other values no precision mends"
    assert wrong_in(0.5) is None
    assert wrong_in(-3) is None


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_port_that_cannot_be_is_refused_with_the_address(port: int) -> None:
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}' has port {port}; wanted 1 to 65535"):
        AsyncRewardClient(f"http://127.0.0.1:{port}")


def test_the_reply_of_a_long_conversation_is_its_last_turn_and_the_prompt_all_before_it() -> None:
    said = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    turns = [{"role": role, "content": content} for role, content in said]
    (row,) = rows_of_conversations([turns])
    assert isinstance(row.prompt, tuple)
    assert [(turn.role, turn.content) for turn in row.prompt] == said[:-1]
    assert row.reply == "d"


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({"x-key: s3cret": "1"}, "cannot carry the name of a header of 13 characters, which is not shown"),
        ({"": "s3cret"}, "cannot carry the name of a header of 0 characters"),
        ({"x-key": "s3cret\r\nx-other: 1"}, "cannot carry the value of the header 'x-key'"),
        ({"x-key": "s3cret "}, "cannot carry the value of the header 'x-key'"),
    ],
)
def test_headers_that_http_cannot_carry_are_refused_without_what_may_be_secret(
    headers: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        AsyncRewardClient(URL, httpx_options={"headers": headers})
    assert "s3cret" not in str(told.value)


@pytest.mark.parametrize("values", [[], "12", [3, -1], [-1, 3], [3, True], [3, 1.0], ["3", 4], [None, 4]])
def test_tokens_are_whole_numbers_from_0_up_in_every_place(values: Any) -> None:
    with pytest.raises(RenderError, match=r"tokens 1: expected a list of one token id or more"):
        rows_of_tokens([[3, 0], values])
    assert rows_of_tokens([[3, 0]])[0].token_ids == (3, 0)
