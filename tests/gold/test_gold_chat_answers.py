"""Whatever a chat API answers is one reply with numbers that can be written, or an error that passes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewardlab.core.errors import RewardlabError
from rewardlab.gold.chat_api import ChatApi, _completion
from rewardlab.gold.kept_results import key_of
from rewardlab.gold.pool import PassingError

ANSWER: dict[str, Any] = {
    "choices": [
        {
            "message": {"role": "assistant", "content": "Water."},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "Water", "logprob": -0.5}, {"token": ".", "logprob": -0.1}]},
        }
    ],
    "usage": {"completion_tokens": 2, "prompt_tokens": 5},
}
MODELS: dict[str, Any] = {"data": [{"id": "tiny", "root": "tiny", "max_model_len": 64, "meta": {"size": 1}}]}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just(-1e308)
VALUES = st.recursive(
    SCALARS | st.text(alphabet=st.characters(), max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def with_values(whole: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An answer in which some values are others."""

    def changed(changes: list[tuple[tuple[Any, ...], Any]]) -> dict[str, Any]:
        copy = json.loads(json.dumps(whole))
        for path, value in changes:
            inner = copy
            try:
                for key in path[:-1]:
                    inner = inner[key]
                inner[path[-1]] = value
            except (TypeError, KeyError, IndexError):
                pass  # an outer value was replaced before
        return copy

    change = st.tuples(st.sampled_from(sorted(places(whole), key=str)), VALUES)
    return st.lists(change, min_size=1, max_size=3).map(changed)


@settings(max_examples=200)
@given(values=with_values(ANSWER))
@example(values={"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 10**400}})
@example(values={"choices": [{"message": {"content": "a"}, "logprobs": {"content": [{"logprob": -1e308}] * 9}}]})
def test_an_answer_is_one_reply_or_an_error_that_passes(values: dict[str, Any]) -> None:
    try:
        found = _completion(values, "POST /v1/chat/completions")
    except PassingError:
        return
    json.dumps(asdict(found), allow_nan=False)
    assert all(one is None or math.isfinite(float(one)) for one in (found.tokens, found.prompt_tokens, found.logprob))


@settings(max_examples=100)
@given(values=with_values(MODELS))
@example(values={"data": [{"id": "tiny", "meta": {"loss": [math.nan]}}]})
def test_what_a_server_says_of_its_model_decides_or_is_refused(values: dict[str, Any]) -> None:
    pytest.importorskip("httpx2")

    class Said:
        async def get(self, path: str) -> Any:
            return type("Answer", (), {"values": values})

    api = ChatApi("http://127.0.0.1:9", model=None, token=None, concurrency=1, timeout_s=1.0, attempts=1)
    said = ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "_http", Said())  # it asks nobody
        try:
            asyncio.run(api.open())
        except RewardlabError as error:
            said = str(error)
    asyncio.run(api._http.close())
    assert len(said) < 1500
    assert said or key_of(decides=api.identity) == key_of(decides=json.loads(json.dumps(api.identity)))
