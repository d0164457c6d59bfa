"""Serving an app on a socket until a signal; then requests that were taken are answered, and no new ones accepted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator
from typing import Final, NoReturn

import uvicorn

from rewardlab.core.errors import ConfigError
from rewardlab.core.signals import HANGUP, listened_to
from rewardlab.serve.http.app import Served
from rewardlab.serve.http.config import LimitsConfig
from rewardlab.serve.http.connection import MOST_HEAD, connection_class

logger = logging.getLogger(__name__)

BACKLOG: Final = 2048
"""How many connections the operating system keeps waiting until they are accepted."""
LAST_WORDS_S: Final = 2.0
"""Seconds after the drain timeout in which clients whose requests could not be scored get their 503."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host.strip("[]"), port))
        bound.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: cannot be had ({why}). Choose another address.") from error
    bound.setblocking(False)
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the URL under which a socket is reached."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


END_S: Final = 3.0
"""Seconds after those in which a process ends by itself, or is ended though a thread still computes."""


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process with the signal's status."""

    def __init__(
        self, served: Served, limits: LimitsConfig, *, drain_timeout_s: float, ends_process: bool = False
    ) -> None:
        """`drain_timeout_s`: seconds after `begin_end` in which requests that were taken are answered.

        `ends_process` says that the process has nothing else to do, and so is not to outlive its requests.
        """
        super().__init__(
            uvicorn.Config(
                served.app,
                http=connection_class(limits),
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                # uvicorn declares whole seconds, but hands these two on to asyncio, which takes fractions.
                timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]
                timeout_graceful_shutdown=drain_timeout_s + LAST_WORDS_S,  # type: ignore[arg-type]
                h11_max_incomplete_event_size=MOST_HEAD,
            )
        )
        self._served = served
        self._drain_timeout_s = drain_timeout_s
        self._ends_process = ends_process
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ending = False
        self.gave_up = False
        """Whether requests were left unanswered: threads may go on with them."""
        self.ended = threading.Event()
        """Set once nothing computes any more."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def begin_end(self) -> None:
        """Stop accepting connections, and end once all requests that were taken are answered.

        Any thread may call it, any number of times.
        """
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._begin_end)

    def _begin_end(self) -> None:
        if self.ending:
            return
        self.ending = True
        self._served.scoring.draining = True
        if self._served.swaps is not None:
            self._served.swaps.draining = True
        self.should_exit = True
        logger.info("ending: %d requests are answered first", self._served.scoring.in_flight)
        assert self._loop is not None
        self._loop.call_later(self._drain_timeout_s, self._close_engine)
        if self._ends_process:
            most_s = self._drain_timeout_s + LAST_WORDS_S + END_S
            threading.Thread(target=_end_after, args=(most_s, self.ended), name="rewardlab-end", daemon=True).start()

    async def cut_connections(self) -> None:
        """Cut the connections whose clients have not read their answers in time; the loop would leave them open."""
        for connection in [*self.server_state.connections]:
            if (transport := getattr(connection, "transport", None)) is not None:
                transport.abort()
        await asyncio.sleep(0)  # in which the loop closes them

    def _close_engine(self) -> None:
        if left := self._served.scoring.in_flight:
            logger.warning("%d requests could not be answered within --drain-timeout; they get 503", left)
            self._served.scoring.give_up()
            self.gave_up = True
        if (swaps := self._served.swaps) is not None:
            if swaps.busy:
                logger.warning("a swap was not finished within --drain-timeout; its client gets 503")
            swaps.give_up()
        threading.Thread(target=self._served.engine.close, daemon=True).start()


def serve_until_ended(
    served: Served,
    bound: socket.socket,
    limits: LimitsConfig,
    *,
    drain_timeout_s: float,
    signals: bool = True,
    on_start: Callable[[Server], None] = lambda _server: None,
) -> None:
    """Serve on a listening socket until a signal or `Server.begin_end`, then close engine and app.

    With `signals`, SIGTERM, SIGINT and SIGHUP end the server, and a second signal ends the process at once. Without,
    those of a terminal, SIGINT and SIGHUP, are left as they are. In the main thread the server is all that its process
    does: a batch that takes longer than `drain_timeout_s` and some seconds is ended with the process. `on_start` is
    called once the server accepts connections.
    """
    # uvicorn logs errors with their messages, which may quote conversations; `Door` has logged them without.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    alone = threading.current_thread() is threading.main_thread()
    server = Server(served, limits, drain_timeout_s=drain_timeout_s, ends_process=alone)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        if alone:
            _end_on_signals(loop, server, of_terminal=signals)
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        on_start(server)
        await serving
        await server.cut_connections()

    try:
        asyncio.run(run())
    finally:
        served.scoring.close()
        served.engine.close()
        if not server.gave_up:
            server.ended.set()


def end_at_once() -> NoReturn:
    """End the process with status 0, though a thread still loads a model.

    Python's own end would not stop that thread, which then meets an interpreter that is gone, and aborts.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_after(seconds: float, ended: threading.Event) -> None:
    """End the process after so many seconds, unless all that it computed has ended by then.

    Neither the thread that computes a batch nor those that render can be stopped, and Python's end waits for them.
    """
    if ended.wait(seconds):
        return
    logger.warning("ended though a batch, or the rendering of a request, was not finished: it took too long")
    end_at_once()


def _end_on_signals(loop: asyncio.AbstractEventLoop, server: Server, *, of_terminal: bool) -> None:
    signalled = False

    def end(number: int) -> None:
        # Only a second signal is impatience: a parent may have begun the end, and whoever signals it often signals
        # all of its processes.
        nonlocal signalled
        if signalled:
            logger.warning("ended at once by a second signal")
            os._exit(128 + number)
        signalled = True
        server.begin_end()

    for number in listened_to(("SIGTERM", "SIGINT", HANGUP) if of_terminal else ("SIGTERM",)):
        loop.add_signal_handler(number, end, number)
