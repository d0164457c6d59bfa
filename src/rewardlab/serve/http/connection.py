"""Connections: limits on their number, on slow request heads and on slow readers, with errors in the usual form."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from rewardlab.serve.http.answers import error_body
from rewardlab.serve.http.config import LimitsConfig

MOST_HEAD: Final = 32_768
"""Most bytes of a request's head."""
ABORTED: Final = 2
"""Connections beyond this many times the limit are closed without an answer, since answering costs as well."""


class Connection(H11Protocol):
    """uvicorn's connection, with limits (a class attribute, since uvicorn makes the connections)."""

    limits: ClassVar[LimitsConfig]
    head_timer: asyncio.TimerHandle | None = None
    write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream, since it is a server on TCP"
        super().connection_made(transport)
        if len(self.connections) > ABORTED * self.limits.max_connections:
            transport.abort()
            return
        if len(self.connections) > self.limits.max_connections:
            # Answer only once the request is there: a client would take an earlier close for a broken connection.
            self.app = _refuse
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        # The timer starts with the first byte of a head, and also with bytes of a body that nobody reads any more.
        if self.head_timer is None and not self.is_answering():
            self.head_timer = self.loop.call_later(self.limits.header_timeout, self.head_too_slow)
        super().data_received(data)
        if self.is_answering():
            self.stop_timer()

    def is_answering(self) -> bool:
        """Return whether a request is being answered on this connection."""
        return self.cycle is not None and not self.cycle.response_complete

    def stop_timer(self) -> None:
        """Cancel the timer of the request head."""
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.time_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.stop_write_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.time_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.time_reader()

    def time_reader(self) -> None:
        """Break the connection off unless the client reads in time: even a closed one stays open until all is sent."""
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def stop_write_timer(self) -> None:
        """Cancel the timer of the client's reading."""
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        self.stop_write_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def head_too_slow(self) -> None:
        """Close a connection whose request does not arrive."""
        self.head_timer = None
        if not self.transport.is_closing() and not self.is_answering():
            words = f"The head of the request did not arrive within {self.limits.header_timeout:g} s."
            self.say_and_close(408, "timeout", words, silent=self.cycle is not None)

    def send_400_response(self, msg: str) -> None:
        started = self.is_answering() and self.cycle.response_started
        if self.is_answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.say_and_close(400, "malformed", "This is not a valid HTTP request.", silent=started)

    def say_and_close(self, status: int, kind: str, message: str, *, silent: bool) -> None:
        """Answer with an error, unless an answer has begun, and close the connection."""
        if not silent:
            self.transport.write(_whole_answer(status, kind, message))
        self.transport.close()
        self.time_reader()


def connection_class(limits: LimitsConfig) -> type[Connection]:
    """Return the class of connections with these limits."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


def _whole_answer(status: int, kind: str, message: str) -> bytes:
    body = error_body(status, kind, message).model_dump_json().encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _refuse(_scope: Any, _receive: Any, send: Any) -> None:
    body = error_body(503, "too_many_connections", "Too many connections are open. Try again, or reuse connections.")
    told = body.model_dump_json().encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(told)).encode()),
        (b"connection", b"close"),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": told})
