"""Processes that were forked from one that had computed: in them a computation with several threads never ends.

The threads of OpenMP do not come along into a forked process, and it waits for them. `multiprocessing` forks by default
on Linux before Python 3.14. Processes that are started anew (`spawn`) compute with all threads.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger("rewardlab")


class _Computing:
    """Where this process, or the one that it was forked from, has computed."""

    def __init__(self) -> None:
        self._pid: int | None = None

    def begin(self) -> None:
        """Take note that this process computes; with one thread if it was forked from one that has, which is told."""
        pid = os.getpid()
        if self._pid not in (None, pid) and torch.get_num_threads() > 1:
            torch.set_num_threads(1)
            logger.warning(
                "this process was forked from one that has computed with several threads, and would wait for them for "
                "ever: it computes with one. To compute with all, start it by multiprocessing's `spawn`"
            )
        self._pid = pid


computing = _Computing()
"""Of the process, as its threads are."""
