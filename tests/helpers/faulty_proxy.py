"""A server on the loopback address that hands requests on to another and spoils some of the answers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Literal
from urllib.parse import urlsplit

from loopback import Answering, listening

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

    class Handler(Answering):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.body()
            fault = faults.next() if self.command == "POST" else None
            if isinstance(fault, float):
                time.sleep(fault)
            if fault == "busy":
                self.answer(503, b"{}")
            elif fault == "drop":
                self.close_connection = True
            else:
                status, content = self.of_the_other(body)
                self.answer(status, _spoiled(content, fault) if fault in ("nan", "null", "short") else content)

        do_POST = do_GET

        def of_the_other(self, body: bytes) -> tuple[int, bytes]:
            with closing(HTTPConnection(str(host), port, timeout=60)) as there:
                there.request(self.command, self.path, body, {"content-type": "application/json"})
                answer = there.getresponse()
                return answer.status, answer.read()

    with listening(Handler) as address:
        yield address


def _spoiled(content: bytes, fault: object) -> bytes:
    """An answer of /v1/score whose last score is wrong, or missing."""
    values = json.loads(content)
    scores = values["groups"][-1]["scores"]
    if fault == "short":
        scores.pop()
    else:
        scores[-1] = float("nan") if fault == "nan" else None
    return json.dumps(values).encode()
