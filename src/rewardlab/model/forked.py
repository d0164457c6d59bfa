"""Processes that were forked from one that had computed: in them a computation with several threads never ends.

The threads of OpenMP do not come along into a forked process, and it waits for them. `multiprocessing` forks by default
on Linux before Python 3.14. Processes that are started anew (`spawn`) compute with all threads.
"""

from __future__ import annotations

import logging
import os
import threading

import torch

logger = logging.getLogger("rewardlab")


class _Computing:
    """Where this process, or the one that it was forked from, has computed."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._threads: set[int] = set()
        self._limited = False
        """Whether this process was given one thread when it was forked, and nobody was told."""

    def begin(self) -> None:
        """Take note that this thread computes; with one thread of OpenMP if the process was forked from one that has,
        which is told."""
        pid = os.getpid()
        if self._pid is None and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        if self._pid not in (None, pid) and (self._limited or torch.get_num_threads() > 1):
            torch.set_num_threads(1)
            logger.warning(
                "this process was forked from one that has computed with several threads, and would wait for them for "
                "ever: it computes with one. To compute with all, start it by multiprocessing's `spawn`"
            )
        self._limited = False
        self._pid = pid
        self._threads.add(threading.get_ident())

    def _forked(self) -> None:
        """Give a forked process one thread, if the thread that forked it had computed, for whatever it computes.

        Each thread has threads of OpenMP of its own, so what was forked by another one has nothing to wait for.
        """
        if threading.get_ident() in self._threads and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
            self._limited = True


computing = _Computing()
"""Of the process, as its threads are."""
