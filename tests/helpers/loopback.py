"""Small servers on the loopback address, which answer as a handler of their own says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Answering(BaseHTTPRequestHandler):
    """A handler that reads whole requests, answers with JSON, and writes no log."""

    disable_nagle_algorithm = True  # else an answer waits 40 ms behind its headers, for them to be acknowledged

    def body(self) -> bytes:
        """What was sent."""
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def answer(self, status: int, content: bytes) -> None:
        """Answer with JSON."""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class Forgiving(ThreadingHTTPServer):
    """A server that says nothing of whoever asked and is gone."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, unless the connection is gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def listening(handler: type[Answering]) -> Iterator[str]:
    """The address of a server with this handler."""
    server = Forgiving(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
