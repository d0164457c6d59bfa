"""A server on the loopback address that hands requests on to another and spoils some of the answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["busy", "drop", "nan", "null", "short"]


@dataclass
class Faults:
    """What becomes of the next requests for scores: one entry each, None for none; without entries, nothing."""

    coming: list[Fault | float | None] = field(default_factory=list)
    """A number is so many seconds of silence before the answer."""
    met: list[Fault | float | None] = field(default_factory=list)

    def next(self) -> Fault | float | None:
        """Take the fault of a request."""
        found = self.coming.pop(0) if self.coming else None
        self.met.append(found)
        return found


@contextmanager
def spoiling(url: str, faults: Faults) -> Iterator[str]:
    """The address of a proxy of `url`. Requests other than POST are handed on as they are."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            fault = faults.next() if self.command == "POST" else None
            if isinstance(fault, float):
                time.sleep(fault)
            if fault == "busy":
                return self._say(503, b"{}")
            if fault == "drop":
                self.close_connection = True
                return None
            there = HTTPConnection(str(host), port, timeout=60)
            try:
                there.request(self.command, self.path, body, {"content-type": "application/json"})
                answer = there.getresponse()
                content = answer.read()
            finally:
                there.close()
            self._say(answer.status, _spoiled(content, fault) if fault in ("nan", "null", "short") else content)
            return None

        do_POST = do_GET

        def _say(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]  # whoever asked may be gone
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spoiled(content: bytes, fault: object) -> bytes:
    """An answer of /v1/score whose last score is wrong, or missing."""
    values = json.loads(content)
    scores = values["groups"][-1]["scores"]
    if fault == "short":
        scores.pop()
    else:
        scores[-1] = float("nan") if fault == "nan" else None
    return json.dumps(values).encode()
