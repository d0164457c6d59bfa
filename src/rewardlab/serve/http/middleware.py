"""The outermost layer of the app, for every request: its id, access, a log line, counts, and errors without texts."""

from __future__ import annotations

import hmac
import logging
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import unquote

from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders

from rewardlab.serve.engine.api import Refused
from rewardlab.serve.http.answers import GONE, plain_error, refusal
from rewardlab.serve.http.config import HttpConfig
from rewardlab.serve.http.metrics import Metrics
from rewardlab.serve.http.refusals import ClientGone, MisdirectedError, UnauthorizedError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

OPEN: Final = ("/health", "/ready")
"""Routes that say nothing about models, for probes that have no token."""
ADMIN: Final = "/admin/"
REQUEST_ID: Final = "x-request-id"
GIVEN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
ABSOLUTE: Final = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
"""The target of a request that names a whole address, its host and its path (RFC 9112, section 3.2.2)."""


class Door:
    """The outermost layer of the app (pure ASGI)."""

    def __init__(self, app: App, *, config: HttpConfig, metrics: Metrics, routes: frozenset[str]) -> None:
        """`routes` are the paths that metrics name; others count together."""
        self._app = app
        self._config = config
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        to_origin_form(scope)
        headers, started, status = Headers(scope=scope), time.perf_counter(), [0]
        given = headers.get(REQUEST_ID, "")
        request_id = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        scope["rewardlab"] = noted = {"id": request_id}

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
                MutableHeaders(scope=message).append(REQUEST_ID, request_id)
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._answer(scope, headers, receive, send_marked, status)
        finally:
            self._metrics.in_flight.dec()
            self._count(scope, status[0] or GONE, time.perf_counter() - started, noted)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send, status: list[int]) -> None:
        response: Response | None = None
        try:
            self._let_in(scope["path"], headers)
            await self._app(scope, receive, send)
        except Refused as refused:
            response = refusal(refused)
        except ClientGone:
            return
        except Exception as error:
            # Neither the answer nor the log quotes the error's message, which may hold a text that was to be scored.
            frames = "".join(traceback.format_tb(error.__traceback__))
            logger.error("%s at %s:\n%s", type(error).__name__, scope["rewardlab"]["id"], frames)
            response = plain_error(500)
        if response is not None and not status[0]:
            await response(scope, receive, send)

    def _let_in(self, path: str, headers: Headers) -> None:
        config = self._config
        if path in OPEN:
            return
        if config.hosts and host_of(headers.get("host", "")) not in config.hosts:
            raise MisdirectedError(
                "This server has no token and answers under the names of this machine alone. Call it as 127.0.0.1, "
                "have a proxy before it send that name (nginx: proxy_set_header Host 127.0.0.1), or start it with a "
                "token."
            )
        wanted = config.admin_token if path.startswith(ADMIN) else config.token
        if wanted is not None and not is_bearer(headers.get("authorization", ""), wanted):
            raise UnauthorizedError("The header authorization: Bearer TOKEN is missing, or its token is another.")

    def _count(self, scope: Scope, status: int, seconds: float, noted: MutableMapping[str, Any]) -> None:
        route = scope["path"] if scope["path"] in self._routes else "other"
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if self._config.log_requests:
            told = " ".join(f"{name}={value}" for name, value in noted.items())
            logger.info("%s %s %d %.1f ms %s", scope["method"], route, status, 1000 * seconds, told)


def to_origin_form(scope: Scope) -> None:
    """Give a request for a whole address, `http://host/path`, the path and the host of that address.

    Clients and proxies that take the server for a proxy send such requests, and servers have to take them. The host
    counts in place of the header (RFC 9112, section 3.2.2).
    """
    if (found := ABSOLUTE.fullmatch(scope.get("raw_path") or b"")) is None:
        return
    host, raw_path = found[1], found[2] or b"/"
    scope["raw_path"], scope["path"] = raw_path, unquote(raw_path.decode("latin-1"))
    scope["headers"] = [(b"host", host), *(one for one in scope["headers"] if one[0] != b"host")]


def host_of(header: str) -> str:
    """Return the name in a Host header, without the port."""
    return re.sub(r":\d+$", "", header.strip().lower())


def is_bearer(header: str, token: bytes) -> bool:
    """Return whether a header has this token. The time of the comparison does not depend on where they differ."""
    kind, _, given = header.partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token)
