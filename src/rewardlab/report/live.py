"""Serves the report of a running run as a page that reloads itself, for a browser on this machine.

The server listens only on 127.0.0.1, answers only two paths, and only requests whose Host is this machine: a website
that lets its own name point here gets nothing. The page is rendered again when the folder has changed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, RewardlabError
from rewardlab.report.build import REPORT_HTML, Told, installed_version, report_of, tell
from rewardlab.report.document import Document, Paragraph, Part, Section
from rewardlab.report.folder import read_folder
from rewardlab.report.mistakes import FindTexts
from rewardlab.report.page import html_page
from rewardlab.report.rereading import Known

HOST: Final = "127.0.0.1"
PATHS: Final = ("/", f"/{REPORT_HTML}")
POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page itself allows only its own style sheet, by its hash; a browser obeys both policies."""
HEADERS: Final = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LEAST_REFRESH_S: Final = 5
TIMEOUT_S: Final = 10.0
"""Seconds after which a client that sends nothing is disconnected."""

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(kw_only=True)
class LivePage:
    """The page of one folder, rendered again when the folder has changed."""

    folder: Path
    every_s: float
    find_texts: FindTexts | None
    _stamp: Stamp | None = None
    _page: bytes = b""
    _told: Told | None = None
    _known: Known = field(default_factory=Known)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def bytes(self) -> bytes:
        """Return the page as it is now."""
        with self._lock:
            stamp = _stamp_of(self.folder)
            if stamp != self._stamp:
                self._page = self._made().encode("utf-8", "replace")
                self._stamp = stamp
            return self._page

    def _made(self) -> str:
        refresh = max(LEAST_REFRESH_S, round(self.every_s))
        try:
            record = read_folder(self.folder, self._known)
        except (RewardlabError, OSError) as error:
            return html_page(_nothing(str(error)), refresh_s=refresh)
        # A run writes rows more often than it evaluates. Pass the earlier result on, so that an evaluation is judged
        # only once: judging takes processor time that the run could use.
        self._told = tell(record, find_texts=self.find_texts, earlier=self._told)
        return html_page(report_of([self._told]), refresh_s=None if record.finished else refresh)


def serve(folder: Path, *, port: int, every_s: float, find_texts: FindTexts | None, say: Callable[[str], None]) -> None:
    """Serve the report of a folder until Ctrl-C; `say` is called with the address.

    Raises ConfigError if there is no such folder or the port cannot be used.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: not found. Name the folder of a run that goes on, or start one first.")
    with server_of(LivePage(folder=folder, every_s=every_s, find_texts=find_texts), port=port) as server:
        say(f"{folder}: http://{HOST}:{server.server_port}/ (this machine only; Ctrl-C ends it)")
        server.serve_forever()


class Server(ThreadingHTTPServer):
    """A server that, when it ends, does not wait for open connections of browsers."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnected or stopped reading; report other errors as the standard library does."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def server_of(page: LivePage, *, port: int) -> ThreadingHTTPServer:
    """Return a server of a page, bound but not yet serving. Raises ConfigError if the port cannot be used."""

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S
        server_version = "rewardlab"
        sys_version = ""

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            if not _names_this_machine(self.headers.get("Host", "")):
                status, body = HTTPStatus.FORBIDDEN, b"This page is for this machine alone."
            elif self.path not in PATHS:
                status, body = HTTPStatus.NOT_FOUND, b"There is only /."
            else:
                status, body = HTTPStatus.OK, page.bytes()
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value if status is HTTPStatus.OK or name != "Content-Type" else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: who reads which page is nobody's business."""

    try:
        server = Server((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: cannot be had ({error.strerror}). Choose another, or 0 for a free one."
        ) from error
    return server


def _names_this_machine(host: str) -> bool:
    """Return whether the Host of a request names this machine. Other names that lead here are refused, since they
    belong to websites (DNS rebinding)."""
    return host.rsplit(":", 1)[0] in (HOST, "localhost")


def _stamp_of(folder: Path) -> Stamp:
    """Return name, size and time of the files that a report reads, which show a change."""
    found = []
    for path in sorted([*folder.glob("*"), *folder.glob("evals/*"), *folder.glob("best/reward_spec.json")]):
        try:
            stat = path.stat()
        except OSError:
            continue
        found.append((str(path), stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def _nothing(why: str) -> Document:
    section = Section(title="Nothing to report yet", blocks=(Paragraph(text=why, tone="warning"),))
    made_by = f"Report of rewardlab {installed_version()}."
    return Document(title="Reward model", made_by=made_by, parts=(Part(title="", sections=(section,)),))
