"""What answers at an address, what a client needs, and what it says where that is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import stamina

from dialects_spoken import URL, client, during
from fake_engines import NOT_FOUND, Fake, FakeOwn, FakeSglang, FakeVllm, error_body
from rewardlab.client import (
    AsyncRewardClient,
    ClientConfig,
    EndpointError,
    RefusedError,
    RewardClient,
)
from rewardlab.core.errors import ArtifactError, ConfigError
from rewardlab.serve.verifying.endpoints import Wire
from served import expected, table, talks


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """Attempts follow each other at once, and are as many as the client says."""
    with stamina.set_testing(True, attempts=5, cap=True):
        yield


def test_a_model_is_chosen_by_its_name_and_a_wrong_name_is_told_with_the_right_ones() -> None:
    assert during(FakeOwn(table()), lambda c: c.spec(), model="other").model == "other"
    with pytest.raises(ConfigError, match="has no 'nobody'; it has default, other"):
        during(FakeOwn(table()), lambda c: c.spec(), model="nobody")
    several = FakeVllm(table(), names=("rm", "adapter"))
    with pytest.raises(ConfigError, match="several models; give one of rm, adapter"):
        during(several, lambda c: c.spec())
    with pytest.raises(ConfigError, match="has no 'nobody'; it has rm, adapter"):
        during(several, lambda c: c.spec(), model="nobody")
    during(several, lambda c: c.spec(), model="adapter")
    assert {body["model"] for path, body in several.asked if path == "/classify"} == {"adapter"}
    with pytest.raises(ConfigError, match="sglang takes no name at /classify"):
        during(FakeSglang(table()), lambda c: c.spec(), model="rm")


def test_a_server_without_a_raw_route_is_told_with_its_version_and_the_routes_it_has() -> None:
    fake = FakeVllm(table(), routes=("/score", "/rerank", "/version", "/tokenize"))
    with pytest.raises(
        EndpointError, match="/classify, /pooling.*vLLM 0.32.0 there has the routes .*/rerank.*--runner"
    ):
        during(fake, lambda c: c.connect())
    fake = FakeSglang(table(), routes=("/v1/classify", "/get_server_info"))
    with pytest.raises(EndpointError, match="SGLang 0.5.23 there has the routes .*/v1/classify.*--is-embedding"):
        during(fake, lambda c: c.connect())


def test_a_404_of_a_route_that_was_listed_names_the_version_and_the_routes() -> None:
    fake = FakeVllm(table(), first=[lambda path, body: NOT_FOUND])
    with pytest.raises(RefusedError, match="404 Not Found: Not Found. vLLM 0.32.0 there has the routes /classify"):
        during(fake, lambda c: c.connect())


def test_what_is_no_server_of_scores_is_told_with_its_routes() -> None:
    class Strange(Fake):
        def reply(self, path: str, body: Any) -> Any:
            return NOT_FOUND if path != "/openapi.json" else (200, {"paths": {"/items": {}}}, {})

    with pytest.raises(EndpointError, match="no server that this client knows.*the routes /items.*engine='vllm'"):
        during(Strange(table()), lambda c: c.connect())
    with pytest.raises(
        EndpointError, match="no /v1/spec, so this is not a server of rewardlab; it has the routes /items"
    ):
        during(Strange(table()), lambda c: c.connect(), engine="rewardlab")


def test_an_engine_that_hides_its_routes_is_believed_by_its_name() -> None:
    class Hidden(FakeVllm):
        def reply(self, path: str, body: Any) -> Any:
            return NOT_FOUND if path == "/openapi.json" else super().reply(path, body)

    assert during(Hidden(table()), lambda c: c.score(talks(2)), engine="vllm") == expected(talks(2))
    with pytest.raises(EndpointError, match="no list of its routes"):
        during(Hidden(table()), lambda c: c.connect())


@pytest.mark.parametrize("models", [True, 5, "rm", {"id": "rm"}, [None, 5, {"id": 5}]])
def test_a_list_of_models_that_is_none_names_no_model(models: Any) -> None:
    class Odd(FakeVllm):
        def reply(self, path: str, body: Any) -> Any:
            return (200, {"data": models}, {}) if path == "/v1/models" else super().reply(path, body)

    assert during(Odd(table()), lambda c: c.score(talks(2))) == expected(talks(2))


@pytest.mark.parametrize(
    ("loc", "place"), [(["body", "input", 0], "body.input.0"), ("body", "body"), (5, "5"), (None, "")]
)
def test_a_list_of_wrong_fields_is_told_by_places_and_messages_whatever_their_form(loc: Any, place: str) -> None:
    class Strict(FakeVllm):
        def reply(self, path: str, body: Any) -> Any:
            wrong = {"loc": loc, "msg": "too much", "input": "SECRET"}
            return (422, {"detail": [wrong, "odd"]}, {}) if path == "/classify" else super().reply(path, body)

    with pytest.raises(RefusedError, match=rf"422 \w+ \w+: {place}: too much\.") as refused:
        during(Strict(table()), lambda c: c.score(talks(1)))
    assert "SECRET" not in str(refused.value)


def test_the_token_is_sent_and_never_shown() -> None:
    fake = FakeOwn(table(), token="a secret")
    own = client(fake, token="a secret")
    assert asyncio.run(own.score(talks(1))) == expected(talks(1))
    assert "a secret" not in repr(own.config)
    with pytest.raises(RefusedError, match="401 Unauthorized: Unauthorized. Give token=") as refused:
        during(fake, lambda c: c.connect(), token="another secret")
    assert "another secret" not in str(refused.value)


def test_no_text_to_be_scored_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    secret = [{"role": "user", "content": "SECRET QUESTION"}, {"role": "assistant", "content": "SECRET REPLY"}]

    def echoing(path: str, body: Any) -> Any:
        return 500, error_body("engine_failed", 500, str(body)), {}

    fake = FakeOwn(table(), first=[lambda path, body: None, echoing, echoing])
    during(fake, lambda c: c.score([secret]))
    assert fake.paths.count("/v1/score") == 4
    assert caplog.records
    assert "SECRET" not in caplog.text


def test_a_client_belongs_to_the_loop_in_which_it_was_first_used() -> None:
    own = client(FakeOwn(table()))  # made outside of any
    assert asyncio.run(own.score(talks(2))) == expected(talks(2))
    with pytest.raises(ConfigError, match="first used in another event loop.*RewardClient"):
        asyncio.run(own.score(talks(2)))


def test_a_closed_client_says_so() -> None:
    async def closed() -> None:
        own = client(FakeOwn(table()))
        await own.aclose()
        await own.score(talks(1))

    with pytest.raises(ConfigError, match="the client is closed"):
        asyncio.run(closed())


@pytest.mark.parametrize("connected", [True, False])
def test_a_call_during_which_the_client_is_closed_says_so(connected: bool) -> None:
    async def closed() -> None:
        reached, go = asyncio.Event(), asyncio.Event()
        fake = FakeOwn(table())

        async def held(request: httpx2.Request) -> httpx2.Response:
            if not connected or request.url.path == "/v1/score":
                reached.set()
                await go.wait()
                if connected:
                    raise httpx2.ReadError("closed")  # what becomes of its connection
            return await fake(request)

        own = AsyncRewardClient(URL, check=False, httpx_options={"transport": httpx2.MockTransport(held)})
        call = asyncio.create_task(own.score(talks(1)))
        await reached.wait()
        await own.aclose()
        go.set()
        with pytest.raises(ConfigError, match="closed while it (was )?waited for"):
            await call

    asyncio.run(closed())


def test_the_proxy_of_the_environment_is_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.delenv("no_proxy", raising=False)

    def proxied(url: str, **options: Any) -> bool:
        async def made() -> bool:
            one = AsyncRewardClient(url, httpx_options=options)
            try:
                return bool(one._http._client._mounts)
            finally:
                await one.aclose()

        return asyncio.run(made())

    assert [proxied(f"http://{host}:80") for host in ("127.0.0.1", "localhost", "[::1]")] == [False] * 3
    assert proxied("http://scores.example")
    assert proxied("http://127.0.0.1:80", trust_env=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attempts": 0}, "attempts: expected a whole number above 0, got 0"),
        ({"max_concurrency": -1}, "max_concurrency: expected a whole number above 0, got -1"),
        ({"timeout_s": float("nan")}, "timeout_s: expected a finite number above 0, got nan"),
        ({"timeout_s": float("inf")}, "timeout_s: expected a finite number above 0, got inf"),
        ({"httpx_options": {"colour": "red"}}, "httpx_options.*: httpx2 cannot use them"),
        ({"httpx_options": {"proxy": "socks5://127.0.0.1:1"}}, "httpx_options.*: httpx2 cannot use them: .*socksio"),
        ({"httpx_options": {"headers": {"x-key": "secret\n"}}}, "httpx_options: .* the header 'x-key'"),
        ({"httpx_options": {"headers": {"Authorization: Bearer secret": ""}}}, "the name of a header of 28 char"),
        ({"httpx_options": {"headers": "x-key: secret"}}, "httpx_options: headers: expected a mapping"),
        ({"token": "sec\nret"}, "token: it has a character that a header cannot hold"),
        ({"token": "sécret"}, "token: it has a character that a header cannot hold"),
        ({"token": " "}, "token: it is empty"),
    ],
)
def test_a_setting_that_cannot_be_used_is_told(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        AsyncRewardClient(URL, **settings)
    assert "cret" not in str(refused.value)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "foo://127.0.0.1:1", "http://[x]:1"])
def test_a_proxy_of_the_environment_that_cannot_be_used_is_told(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigError, match="environment's proxies .*ALL_PROXY"):
        AsyncRewardClient("http://scores.example")
    with pytest.raises(ConfigError, match="environment's proxies .*ALL_PROXY"):
        Wire("http://scores.example")


def test_a_token_goes_without_the_end_of_line_of_its_file() -> None:
    fake = FakeOwn(table())
    during(fake, lambda c: c.spec(), token="secret\n")
    assert {headers["authorization"] for headers in fake.headers} == {"Bearer secret"}


@pytest.mark.parametrize("name", ["attempts", "max_batch", "max_concurrency"])
def test_half_an_attempt_is_none(name: str) -> None:
    config = ClientConfig()
    object.__setattr__(config, name, 1.5)  # the types of a call are checked in tests, and not for users
    with pytest.raises(ConfigError, match=f"{name}: expected a whole number above 0, got 1.5"):
        config.__post_init__()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://x",
        "ftp://x/?token=secret",
        "http://",
        "http://x/?a=1",
        "http://x/?token=secret",
        "http://x/#secret",
        "http://me:secret@x",
        "http://me:secret@x:port",
        "http://x:port/?token=secret",
        "",
        "http://x:port",
    ],
)
def test_an_address_that_cannot_be_used_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match="url: ") as refused:
        AsyncRewardClient(url)
    assert "secret" not in str(refused.value)


def test_a_folder_that_is_no_reward_model_is_told() -> None:
    with pytest.raises(ArtifactError, match="no such folder"):
        during(FakeVllm(table()), lambda c: c.connect(), artifact="nowhere")


def test_the_blocking_client_gives_the_same_and_works_inside_a_running_loop() -> None:
    fake = FakeOwn(table())
    with RewardClient(URL, httpx_options=fake.transport) as own:
        assert own.score(talks(5)) == expected(talks(5))
        assert own.digest == "a" * 64

        async def inside() -> list[float]:
            return own.score(talks(5))

        assert asyncio.run(inside()) == expected(talks(5))
    with pytest.raises(ConfigError, match="the client is closed"):
        own.score(talks(1))
    own.close()  # again does no harm


def test_settings_as_keywords_are_those_of_the_configuration() -> None:
    from typing import get_type_hints

    from rewardlab.client.config import ClientConfig, Settings

    assert get_type_hints(Settings) == get_type_hints(ClientConfig)


@pytest.mark.parametrize(
    ("param", "named"),
    [
        ("groups.1.replies.1", "reply 1 of group 1: POST"),
        ("groups.1.prompt", "^POST"),
        ("groups.7.replies.0", "^POST"),
        (None, "^POST"),
    ],
)
def test_the_row_that_our_server_refuses_is_named(param: str | None, named: str) -> None:
    error = {"error": {"message": "too much", "type": "too_long", "code": 413, "param": param}}
    fake = FakeOwn(table(), first=[lambda path, body: (413, error, {})] * 9)
    with pytest.raises(RefusedError, match=f"{named} .*413 .*: too much. Nothing is truncated") as refused:
        during(fake, lambda c: c.score_groups([("a", ["x"]), ("b", ["y", "z"])]), check=False)
    assert (refused.value.kind, refused.value.param) == ("too_long", param or "")
