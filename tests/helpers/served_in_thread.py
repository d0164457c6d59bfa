"""An app on a socket of this machine, served by a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rewardlab.serve.http.app import Served
from rewardlab.serve.http.config import LimitsConfig
from rewardlab.serve.http.run import Server, listen, serve_until_ended, url_of


def in_thread(
    served: Served, limits: LimitsConfig, *, drain_timeout_s: float = 5.0
) -> tuple[str, Callable[[], None], Server]:
    """Serve on a free port of this machine in a thread; return (URL, what ends it and waits, the server).

    Raises RuntimeError if the server does not begin to accept connections.
    """
    bound = listen("127.0.0.1", 0)
    url, begun, servers = url_of(bound), threading.Event(), list[Server]()

    def started(server: Server) -> None:
        servers.append(server)
        begun.set()

    thread = threading.Thread(
        target=serve_until_ended,
        args=(served, bound, limits),
        kwargs={"drain_timeout_s": drain_timeout_s, "on_start": started},
        daemon=True,
    )
    thread.start()
    if not begun.wait(30):
        raise RuntimeError("the server did not begin to accept")

    def end() -> None:
        servers[0].begin_end()
        thread.join()

    return url, end, servers[0]
