"""HTTP requests with limits on their number and time, and a rule for which failures are retried.

Failures that may be over a moment later are retried: no connection, a connection that broke, 408, 429 and 5xx but 501.
A request for scores or for a swap does no harm if it arrives twice. Every other failure would repeat itself and is
raised at once; the caller decides whether a refusal such as 409 (another swap goes on) is worth waiting for. The
backoff grows and is random (stamina). After a `Retry-After` the client waits that long and a random little longer, so
that not all clients come back at the same moment.

Answers that came after the server had been away are marked, since it may have come back with another model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any, Final

import httpx2
import stamina
from stamina.instrumentation import RetryDetails, get_on_retry_hooks, set_on_retry_hooks

from rewardlab.client.config import ClientConfig
from rewardlab.client.failures import BadAnswerError, RefusedError, UnavailableError
from rewardlab.client.reaching import LOOK, by_proxy, lasting, opened, proxy_of
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import encodable
from rewardlab.core.terminal import visible

AGAIN: Final = (408, 429)
"""Refusals that are retried. 408 says that the server did not get the whole request in time."""
AWAY: Final = (502, 503, 504)
"""Status codes of a server that starts or ends, or of a proxy in front of a server that is away."""
NEVER: Final = (501,)
"""Failures of a server that another attempt would not change."""
CONNECT_TIMEOUT_S: Final = 10.0
MAX_WAIT_S: Final = 30.0
"""Longest backoff, in seconds, unless the server asks for a longer one."""
SPREAD: Final = 0.25
"""The random extra wait after a `Retry-After` is at most this fraction of it."""
logger = logging.getLogger("rewardlab")
SUCH_AS: Final = "Give one such as http://127.0.0.1:8000."
CLOSED: Final = "the client was closed while it waited for scores. Make a new one."
BUSY: Final = "The server has more to do than it takes: send less at a time (max_concurrency, max_batch)."
TITLE: Final = re.compile(rb"<title>([^<]+)", re.IGNORECASE)
MOST_OF_A_PAGE: Final = 10_000
"""Bytes of a page in which its title is looked for."""
SHOWN: Final = 300
"""Most characters that a message quotes from a server's answer."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A 2xx answer."""

    values: Any
    """The parsed JSON."""
    headers: Mapping[str, str]
    interrupted: bool = False
    """Whether the server had been away before it answered: no connection, a broken one, or one of AWAY."""


class _AgainError(Exception):
    """A failure that is retried. Its text is logged with every retry, so it quotes nothing from a server."""

    def __init__(
        self,
        what: str,
        *,
        where: str,
        retry_after_s: float | None = None,
        said: str = "",
        away: bool = False,
        remedy: str = LOOK,
    ) -> None:
        super().__init__(what)
        self.where = where
        self.retry_after_s = retry_after_s
        self.said = said
        self.away = away
        self.remedy = remedy


def _log_attempts() -> None:
    """Make stamina log this client's retries in our form: request, cause, wait. It logs others as before."""
    others = get_on_retry_hooks()
    if _told in others:
        return

    def told(details: RetryDetails) -> None:
        if not isinstance(details.caused_by, _AgainError):
            for hook in others:
                hook(details)

    set_on_retry_hooks([_told, told])


def _told(details: RetryDetails) -> None:
    """Log a retry of this client."""
    error = details.caused_by
    if isinstance(error, _AgainError):
        logger.warning("%s: %s. Asked again in %.1f s.", error.where, error, details.wait_for)


class Http:
    """Requests to one server. It belongs to the event loop in which it is first used."""

    def __init__(self, url: str, config: ClientConfig) -> None:
        """Raises ConfigError if the address or an option for httpx2 is unusable."""
        self.url = base_of(url)
        self._config = config
        _log_attempts()
        self.absences = 0
        """How often the server was found away."""
        self._turns = asyncio.Semaphore(config.max_concurrency)
        given = dict(config.httpx_options)
        try:
            headers = dict(given.pop("headers", None) or {})
        except (TypeError, ValueError):  # whose words may quote a part of them
            raise ConfigError("httpx_options: headers: expected a mapping of names to values.") from None
        if config.token is not None:
            headers["authorization"] = f"Bearer {config.token}"
        # Only connecting is limited here; `_ask` limits the time of an answer, over all attempts together.
        given.setdefault("timeout", httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S))
        given.setdefault(
            "limits",
            httpx2.Limits(max_connections=config.max_concurrency, max_keepalive_connections=config.max_concurrency),
        )
        self._client = opened(httpx2.AsyncClient, self.url, headers=headers, **given)
        self._by_proxy = by_proxy(proxy_of(self.url, given))

    async def get(self, path: str) -> Answer:
        """Return the answer to `GET path`. Raises as `post` does."""
        return await self._ask("GET", path, None, {})

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
        """Return the answer to a request, with retries where they may help.

        Raises UnavailableError, RefusedError for a status of 4xx (RefusedError.status), or BadAnswerError if the answer
        is not JSON.
        """
        content = encodable(json.dumps(body, ensure_ascii=False, allow_nan=False)).encode()
        return await self._ask("POST", path, content, headers or {})

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        where = f"{method} {self.url}{path}"
        last: list[_AgainError] = []
        away = False

        def backoff(error: BaseException) -> bool | float:
            if not isinstance(error, _AgainError):
                return False
            last[:] = [error]
            nonlocal away
            away |= error.away
            return wait_of(error.retry_after_s, self._config.timeout_s)

        async with self._turns:
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    async for attempt in stamina.retry_context(
                        on=backoff, attempts=self._config.attempts, timeout=None, wait_initial=0.2, wait_max=MAX_WAIT_S
                    ):
                        with attempt:
                            answer = await self._once(method, path, body, headers)
                            return replace(answer, interrupted=away)
            except _AgainError as error:
                after = (
                    f" It asks to be left alone for {error.retry_after_s:.0f} s."
                    if error.retry_after_s is not None
                    else ""
                )
                raise UnavailableError(
                    f"{where}: {error}{error.said}.{after} It was asked up to {self._config.attempts} times "
                    f"(attempts). {error.remedy}{self._by_proxy}"
                ) from error.__cause__
            except TimeoutError:
                before = f"; the last attempt: {last[0]}" if last else ""
                raise UnavailableError(
                    f"{where}: no answer within {self._config.timeout_s:g} s (timeout_s){before}. Raise timeout_s, "
                    f"send less at a time (max_concurrency, max_batch), or see what the server does."
                ) from None
        raise AssertionError("a retry ends in an answer or an error")

    async def _once(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Answer:
        """Send a request once. Raises _AgainError for a failure that is retried."""
        where = f"{method} {self.url}{path}"
        headers = {"accept": "application/json", **headers}
        if body is not None:
            headers["content-type"] = "application/json"
        try:
            response = await self._client.request(method, self.url + path, content=body, headers=headers)
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
            raise ConfigError(f"{self.url}: {error}.") from error
        except (httpx2.TransportError, RuntimeError) as error:
            if self._client.is_closed:
                raise ConfigError(CLOSED) from error
            if not isinstance(error, httpx2.TransportError):
                raise
            self.absences += 1
            said = f": {error}" if str(error) else ""
            if remedy := lasting(error):
                what = f"no answer ({type(error).__name__}){said}"
                raise UnavailableError(f"{where}: {what.rstrip('.')}. {remedy}{self._by_proxy}") from error
            raise _AgainError(f"no answer ({type(error).__name__})", where=where, said=said, away=True) from error
        except httpx2.HTTPError as error:
            raise BadAnswerError(f"{where}: {type(error).__name__}: {error}.") from error
        status = response.status_code
        if status in AGAIN or (status >= 500 and status not in NEVER):
            wait_s = seconds_of(response.headers.get("retry-after"))
            self.absences += status in AWAY
            raise _AgainError(
                _status(status),
                where=where,
                retry_after_s=wait_s,
                said=_said(response),
                away=status in AWAY,
                remedy=BUSY if status == HTTPStatus.TOO_MANY_REQUESTS else LOOK,
            )
        # An answer in the form of an error of ours or of an engine is the server's own, and no proxy's.
        if response.is_success:
            return _parsed(response, where, self._by_proxy)
        raise _refused(response, where, path, "" if _error_of(response) else self._by_proxy)


def _parsed(response: httpx2.Response, where: str, by_proxy: str) -> Answer:
    """Return an answer. Raises BadAnswerError if it is not JSON."""
    try:
        # json.loads accepts NaN and Infinity, which some servers write; each score is checked later.
        return Answer(values=json.loads(response.content), headers=response.headers)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(
            f"{where}: {_status(response.status_code)}, but the {len(response.content)} bytes of the answer are not "
            f"JSON{_said(response)}. Is this the address of the server, and not of a page or a proxy?{by_proxy}"
        ) from error


def _refused(response: httpx2.Response, where: str, path: str, by_proxy: str) -> RefusedError:
    """Return the error for an answer that a retry would not change."""
    status = response.status_code
    if response.is_redirect:
        return RefusedError(f"{where}: {_status(status)}{_sent_to(response, path)}{by_proxy}", status=status)
    return RefusedError(
        f"{where}: {_status(status)}{_said(response)}.{_remedy(status)}{_of_a_proxy(response)}{by_proxy}",
        status=status,
        kind=_word(response, "type"),
        param=_word(response, "param"),
        retry_after_s=seconds_of(response.headers.get("retry-after")),
    )


def _sent_to(response: httpx2.Response, path: str) -> str:
    """Return where a redirect of the route `path` leads, and what to do about it."""
    if not (location := response.headers.get("location")):
        return ": the server sends to another address and does not say which. Give the server's own address as url."
    try:
        to = str(response.url.join(location))
    except httpx2.InvalidURL:
        to = location
    shown, base = visible(to)[:SHOWN], to.removesuffix(path)
    # An address is asked for the same route again: what leads elsewhere is not an address of a server.
    if base != to and "?" not in base and base != str(response.url).removesuffix(path):
        return f": the server sends to {visible(base)[:SHOWN]}. Give that address as url."
    return (
        f": the server sends to {shown}, which is not the route {path} of another server. Is this the address of the "
        f"server, and not of a page or a proxy, such as one that asks to log in?"
    )


def wait_of(retry_after_s: float | None, most_s: float) -> bool | float:
    """Return the seconds until the next attempt, True for stamina's own backoff, False for no further attempt.

    If a server asks for a longer wait than a request may take, there is no further attempt.
    """
    if retry_after_s is None:
        return True
    if retry_after_s >= most_s:
        return False
    return retry_after_s * (1 + random.uniform(0, SPREAD))


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header, which holds seconds or a date (RFC 9110, 10.2.3); None if neither.

    Dates in the past are 0.
    """
    if retry_after is None:
        return None
    if (seconds := retry_after.strip()).isascii() and seconds.isdigit():
        return float(seconds)
    try:
        when = parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):  # no date, or a time zone that no clock has
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def base_of(url: str, *, instead: str = "token=…, or httpx_options={'auth': (user, password)}") -> str:
    """Return the address without a slash at its end.

    `instead` names the setting to use in place of a user in the address. Raises ConfigError unless it is an address of
    http; the message leaves out parts that may hold a secret.
    """
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, TypeError) as error:
        said = "" if "@" in str(url) or "?" in str(url) else f"{url!r:.80} "
        raise ConfigError(f"url: {said}is not an address: {error}. {SUCH_AS}") from error
    if parsed.userinfo:
        raise ConfigError(f"url: it holds a user or a password, which would be shown in every message. Give {instead}.")
    shown = str(parsed.copy_with(query=None, fragment=None))
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"url: {shown!r} is not an address of http. {SUCH_AS}")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise ConfigError(f"url: {shown!r} has port {parsed.port}; wanted 1 to 65535.")
    if parsed.query or parsed.fragment:
        raise ConfigError(f"url: {shown!r} is followed by more than a host and a path. {SUCH_AS}")
    return shown.rstrip("/")


def _status(status: int) -> str:
    """Return `404 Not Found`."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _remedy(status: int) -> str:
    return {
        401: " Give token=….",
        403: " See whether the token may do this.",
        413: " Nothing is truncated unasked: send shorter conversations, or fewer at a time (max_batch). The replies "
        "to one prompt go together to a rewardlab server: score fewer of them in a call.",
    }.get(status, "")


def _of_a_proxy(response: httpx2.Response) -> str:
    """Return what a body that is too large for something before the server needs; empty for any other answer."""
    if response.status_code != HTTPStatus.REQUEST_ENTITY_TOO_LARGE or _error_of(response):
        return ""
    return " The limit is that of something before the server, such as nginx (client_max_body_size)."


def _error_of(response: httpx2.Response) -> Any:
    """Return the error in the body of an answer, in the form of OpenAI's API, FastAPI or older vLLM; None if none."""
    try:
        values = json.loads(response.content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict):
        return None
    return values.get("error") or values.get("detail") or values.get("message")


def _said(response: httpx2.Response) -> str:
    """Return `: ` and the server's own message in one line; an empty text if there is none."""
    error = _error_of(response)
    message = error.get("message") if isinstance(error, dict) else error
    # FastAPI answers a list of wrong fields with their values, which may be texts: quote only places and messages.
    if isinstance(error, list):
        message = "; ".join(
            f"{_place(item.get('loc'))}: {item.get('msg', '')}" for item in error if isinstance(item, dict)
        )
    if error is None:
        message = _title(response)
    if not isinstance(message, str) or not message:
        return ""
    text = visible(message).rstrip(".")
    return f": {text[:SHOWN]}{' …' if len(text) > SHOWN else ''}"


def _title(response: httpx2.Response) -> str:
    """Return the title of a page, as proxies answer; empty for none, and for one that only repeats the status."""
    title = TITLE.search(response.content[:MOST_OF_A_PAGE])
    words = " ".join(title[1].decode("utf-8", "replace").split()) if title else ""
    words = words.removeprefix(str(response.status_code)).strip()
    return "" if words in _status(response.status_code) else words


def _place(loc: Any) -> str:
    """Return the place of a wrong field: its names and numbers, joined."""
    return ".".join(map(str, loc)) if isinstance(loc, list) else str(loc or "")


def _word(response: httpx2.Response, field: str) -> str:
    """Return a field of the error in an answer; an empty text if it has none."""
    error = _error_of(response)
    word = error.get(field) if isinstance(error, dict) else None
    return word if isinstance(word, str) else ""
