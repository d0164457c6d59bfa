"""How the processes of a run meet, and what is said when some do not come, write elsewhere, or one is lost."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from rewardlab.core.errors import ConfigError, LostRankError
from rewardlab.core.signals import signals_as_ever
from rewardlab.core.terminal import visible, visible_message
from rewardlab.distributed.ranks import Ranks

logger = logging.getLogger("rewardlab")
_namespace: Final[Any] = dist
"""Typed as Any because torch.distributed does not declare all that it exports."""
NUMBERS: Final = ("RANK", "WORLD_SIZE", "MASTER_PORT")
TELL_AFTER_S: Final = 30.0
"""Seconds of waiting for the other processes after which that is told."""
SEEN_WITHIN_S: Final = 60.0
"""Seconds after which a machine sees a new file of another one in a folder that both share. Network file systems keep
the names in a folder for up to a minute."""
LOOK_EVERY_S: Final = 0.5
ASK_EVERY_S: Final = 0.02
ASKS: Final = "rewardlab/asks"
"""Keys in the store with this and the number of a rank hold a name that its process has drawn."""
ANSWER: Final = "rewardlab/answer"
"""Keys with this and such a name hold that of the meeting."""
HEARD: Final = "heard"
BY_GLOO: Final = "gloo/transport/"
"""What stands in every error of gloo about a connection: the source file that raised it."""


def meet(backend: str, *, timeout: timedelta) -> str:
    """Join the processes whose number, place and address the environment says; return the name of this meeting.

    The store by which they meet may be torchrun's, and then it holds what an attempt before this one (--max-restarts)
    left there. So whatever belongs to a meeting stands there under its name, which no other meeting has.

    Tells what is waited for if that takes long. Raises ConfigError if the environment is not complete, or the processes
    do not meet before the timeout.
    """
    _require_environment()
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    who = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, counted from 0,"
    try:
        # Meeting the other ranks waits in native code, where Python's handlers are not called; with the default ones a
        # signal still ends the process.
        with _telling(f"{who} waits at {visible(place)} (MASTER_ADDR, MASTER_PORT) for the others"), signals_as_ever():
            store, rank, size = next(iter(_namespace.rendezvous("env://", timeout=timeout)))
            store.set_timeout(timeout)
            name = _agreed_name(store, rank, size, timeout)
            own = _namespace.PrefixStore(name, store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        by_gloo = BY_GLOO in str(error)
        if not (by_gloo or isinstance(error, dist.DistError)):
            raise
        said = visible_message(str(error).strip().partition("\n")[0])
        how = (
            "They connect to each other by the address that each machine has for its own name; GLOO_SOCKET_IFNAME "
            "names the network interface to take instead."
            if by_gloo
            else "Start all of them with the same address, and a port that nothing else uses: of torchrun by "
            "--master-port."
        )
        raise ConfigError(
            f"{who} did not meet the others at {visible(place)} (MASTER_ADDR, MASTER_PORT): {said} {how}"
        ) from error
    return name


def _agreed_name(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that the first rank has drawn, on all ranks.

    Every rank asks under a name of its own, so that it cannot take the answer to a process of an earlier attempt for
    its own, and says that it has heard. Raises DistStoreError if that takes longer than the timeout.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"{ASKS}/{rank}", own)
        name: str = store.get(f"{ANSWER}/{own}").decode()
        store.set(f"{name}/{HEARD}/{rank}", "")
        return name
    name = f"rewardlab/{own}"
    missing, end = list(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing := [one for one in missing if not store.check([f"{name}/{HEARD}/{one}"])]:
        if time.monotonic() >= end:
            shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            raise dist.DistStoreError(f"process {shown} did not come within {timeout.total_seconds():g} s.")
        # Asked again and again, since what stands there may be what a process of an earlier attempt has asked.
        for one in missing:
            if store.check([f"{ASKS}/{one}"]):
                store.set(f"{ANSWER}/{store.get(f'{ASKS}/{one}').decode()}", name)
        time.sleep(ASK_EVERY_S)
    return name


def _require_environment() -> None:
    for name in (*NUMBERS, "MASTER_ADDR"):
        value = os.environ.get(name, "")
        if not value or (name in NUMBERS and not value.isdecimal()):
            found = f"is {visible(value)!r}" if value else "is not set"
            raise ConfigError(
                f"{name} {found} in the environment, where RANK and WORLD_SIZE say that this is one of several "
                f"processes. Start it by torchrun, or unset both."
            )


@contextmanager
def _telling(line: str) -> Iterator[None]:
    """Log a line if the block takes long. In a thread, since this one waits in native code."""
    teller = threading.Timer(TELL_AFTER_S, logger.warning, ("%s", line))
    teller.daemon = True
    teller.start()
    try:
        yield
    finally:
        teller.cancel()


def require_same_folder(folder: Path, ranks: Ranks, *, all_write: bool = True) -> None:
    """Raise ConfigError on every rank unless `folder`, which the first one has made, is the same for all of them and,
    if `all_write`, as they do at the first checkpoint, each can write there."""
    if ranks.size == 1:
        return
    # A name that no machine has asked for yet; what a killed process leaves is swept with other temporary files.
    proof = folder / ranks.from_first(f".shared.tmp-{secrets.randbelow(10**12)}")
    ranks.by_first(proof.touch)
    end = time.monotonic() + SEEN_WITHIN_S
    while not (sees := proof.exists()) and time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
    blind = [str(rank) for rank, seen in enumerate(ranks.gather(sees)) if not seen]
    if ranks.is_first:
        proof.unlink(missing_ok=True)
    if blind:
        raise ConfigError(
            f"--output-dir {visible(str(folder))}: process {', '.join(blind)} of the run, counted from 0, does not see "
            f"there what the first one writes. All need the same folder: name it by its whole path, on a file system "
            f"that all their machines share."
        )
    refusals = ranks.gather(_refusal(proof, ranks.rank) if all_write else "")
    for rank, why in ((rank, why) for rank, why in enumerate(refusals) if why):
        raise ConfigError(
            f"--output-dir {visible(str(folder))}: process {rank} of the run, counted from 0, cannot write there: "
            f"{why}. Every process writes its part of a checkpoint there."
        )


def _refusal(proof: Path, rank: int) -> str:
    """Return why this process cannot write beside `proof`; empty if it can."""
    own = proof.with_name(f".{rank}{proof.name}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def lost(error: BaseException) -> LostRankError | None:
    """Return what to say in place of an error that means that another process is gone; None for all other errors."""
    if not (isinstance(error, RuntimeError) and BY_GLOO in str(error)):
        return None
    return LostRankError(
        "another process of the run is gone, or answers no more, and did not say why: it was killed, such as for want "
        "of memory, or its machine is lost. What it printed last, and what started the processes, may tell. --resume "
        "auto goes on from the last checkpoint, if there is one."
    )
