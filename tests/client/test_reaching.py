"""Servers behind certificates and proxies: what is asked, and what is said where they are in the way."""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpcore2
import httpx2
import pytest

from dialects_spoken import URL
from rewardlab.client import AsyncRewardClient, BadAnswerError, RefusedError, RewardClient, UnavailableError
from rewardlab.client.reaching import LOOK, is_local, opened, proxy_of
from rewardlab.core.errors import ConfigError, EndpointError
from rewardlab.serve.verifying.endpoints import Wire, spec_of
from test_sockets import serving

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
PAGE = "<html><head><title>%s</title></head><body>gone</body></html>"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


def failing(asked: list[str], error: Callable[[], BaseException]) -> dict[str, Any]:
    """Options with which every request fails, as httpx2 fails: with an error of its own, raised from another."""

    def fail(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.path)
        raise httpx2.ConnectError("no handshake") from error()

    return {"transport": httpx2.MockTransport(fail)}


def untrusted(code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code = code
    return error


@pytest.mark.parametrize(
    ("code", "said"), [(18, "SSL_CERT_FILE"), (62, "a name for which its certificate"), (10, "a new certificate")]
)
def test_a_certificate_that_is_not_trusted_is_told_at_once_with_what_to_do(code: int, said: str) -> None:
    asked: list[str] = []
    with pytest.raises(UnavailableError, match=said) as told:
        RewardClient(URL, httpx_options=failing(asked, lambda: untrusted(code))).connect()
    assert asked == ["/v1/spec"]
    assert LOOK not in str(told.value)


@pytest.mark.parametrize("verify", [False, ssl.create_default_context()])
def test_certificates_of_the_environment_are_not_read_where_others_are_given(
    verify: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/there/is/none.pem")
    monkeypatch.setattr("httpcore2.default_ssl_context", inspect.unwrap(httpcore2.default_ssl_context))
    opened(httpx2.AsyncClient, "https://localhost:1", verify=verify)
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        opened(httpx2.AsyncClient, "https://localhost:1")


def test_a_connection_that_breaks_within_tls_is_asked_for_again() -> None:
    asked: list[str] = []
    with pytest.raises(UnavailableError, match=LOOK):
        RewardClient(URL, attempts=2, httpx_options=failing(asked, ssl.SSLEOFError)).connect()
    assert len(asked) == 2


def test_an_address_of_https_at_which_nothing_speaks_tls_is_told() -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(answering, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, AsyncRewardClient(url):
            pass

    with pytest.raises(UnavailableError, match="does not speak TLS: give an address with http://"):
        asyncio.run(work())


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "https://rewards.internal"])
def test_certificates_of_the_environment_count_for_this_machine_too(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.pem").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    # The tests make certificates once (`thrift.py`), whatever the environment says by then.
    makes_anew = inspect.unwrap(httpcore2.default_ssl_context)
    monkeypatch.setattr("httpcore2.default_ssl_context", makes_anew)
    with pytest.raises(ConfigError, match="the environment's proxies or certificates.*SSL_CERT_FILE"):
        RewardClient(url)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://localhost:8000", True),
        ("http://127.1.2.3", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://[::]:8000", True),
        ("http://10.0.0.1", False),
        ("http://127.example.org", False),
    ],
)
def test_what_is_this_machine(url: str, local: bool) -> None:
    assert is_local(url) is local


@pytest.mark.parametrize(
    ("url", "options", "proxy"),
    [
        ("http://rm.internal:8000", {}, "HTTP_PROXY"),
        ("https://rm.internal:8000", {}, "ALL_PROXY"),
        ("http://127.0.0.1:8000", {}, ""),
        ("http://direct.internal", {}, ""),
        ("http://rm.internal", {"trust_env": False}, ""),
        ("http://rm.internal", {"proxy": "http://other:1"}, ""),
    ],
)
def test_the_proxy_that_is_asked_is_known_by_its_variable(
    url: str, options: dict[str, Any], proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://me:secret@127.0.0.1:3128")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:3128")
    monkeypatch.setenv("no_proxy", "direct.internal")
    assert proxy_of(url, options) == proxy


@pytest.mark.parametrize(
    ("status", "kind"),
    [("503 Service Unavailable", UnavailableError), ("403 Forbidden", RefusedError), ("200 OK", BadAnswerError)],
)
def test_an_answer_of_a_proxy_names_the_proxys_variable_and_its_title(
    status: str, kind: type[EndpointError], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (PAGE % "Access denied by the gateway").encode()

    async def proxy(_body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)

    async def work() -> None:
        async with serving(proxy) as url:
            monkeypatch.setenv("http_proxy", url.replace("//", "//me:secret@"))
            async with AsyncRewardClient("http://rm.internal:8000", attempts=1):
                pass

    with pytest.raises(kind, match=r"Access denied by the gateway.*HTTP_PROXY.*NO_PROXY") as told:
        asyncio.run(work())
    assert "secret" not in str(told.value)


def test_verify_names_the_proxy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Wire("http://rm.internal:8000") as wire, pytest.raises(EndpointError, match="HTTP_PROXY"):
        spec_of(wire)


def answered(status: int, content: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, text=content, headers=headers)

    return {"transport": httpx2.MockTransport(answer)}


@pytest.mark.parametrize(
    ("status", "content", "said"),
    [
        (400, PAGE % "400 The plain HTTP request was sent to HTTPS port", r"400 Bad Request: The plain HTTP request"),
        (200, PAGE % "Log in", r"are not JSON.*\. Is this the address of the server, and not of a page or a proxy\?"),
        (404, PAGE % "404 Not Found", "no server that this client knows"),
        (413, PAGE % "413 Request Entity Too Large", r"Too Large\. Nothing is truncated.*client_max_body_size"),
        (413, '{"error": {"message": "above 512 tokens"}}', r"above 512 tokens\. Nothing is truncated.* in a call\.$"),
        (429, "", r"send less at a time \(max_concurrency, max_batch\)"),
    ],
)
def test_what_stands_before_a_server_is_told_from_it(status: int, content: str, said: str) -> None:
    with pytest.raises(EndpointError, match=said):
        RewardClient(URL, attempts=1, httpx_options=answered(status, content)).connect()


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("https://rm.internal/behind/v1/spec", r"sends to https://rm\.internal/behind\. Give that address as url\."),
        ("/behind/v1/spec", r"sends to http://scores\.example/behind\. Give that address as url\."),
        (
            "/login?next=/v1/spec",
            r"sends to http://scores\.example/login\?next=/v1/spec, which is not the route /v1/spec",
        ),
        (None, r"sends to another address and does not say which\. Give the server's own address as url\."),
        ("", r"sends to another address and does not say which\. Give the server's own address as url\."),
        ("/v1/spec/", r"sends to http://scores\.example/v1/spec/, which is not the route /v1/spec of"),
    ],
)
def test_a_redirect_names_the_address_without_the_route(location: str | None, said: str) -> None:
    headers = {} if location is None else {"location": location}
    with pytest.raises(RefusedError, match=said) as refused:
        RewardClient(URL, httpx_options=answered(308, "", headers)).connect()
    assert "scores" not in str(refused.value).replace("scores.example", ""), "servers of chats are asked so too"
