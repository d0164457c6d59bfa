"""How the processes of a run meet, and what is said when some do not come, write elsewhere, or one is lost."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from rewardlab.core.errors import ConfigError, LostRankError, RankError
from rewardlab.core.signals import signals_as_ever
from rewardlab.core.terminal import visible, visible_message
from rewardlab.distributed.ranks import Ranks

logger = logging.getLogger("rewardlab")
_namespace: Final[Any] = dist
"""Typed as Any because torch.distributed does not declare all that it exports."""
NUMBERS: Final = ("RANK", "WORLD_SIZE", "MASTER_PORT")
MAX_PORT: Final = 65535
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
BACKEND: Final = "backend"
"""Keys with this, after the name of the meeting, and the number of a rank hold by what it communicates."""
HEARD: Final = "heard"
"""Keys with this, after the name of the meeting, and the number of a rank hold why it fails; empty if it does not."""
OUTCOME: Final = "outcome"
"""Key, after the name of the meeting, that holds why it does not take place; empty if it does."""
MET: Final = "rewardlab/met"
"""Key that holds the name of the newest meeting, where the store is that of one run alone."""
TOOK_PART: Final[set[str]] = set()
"""Names of the meetings of this process, which may train several times, each time by the same store.

Of the process, as its place among the others is.
"""
_served: Final[list[Any]] = []
"""On the first rank, the store of its newest meeting, kept until its process ends or it meets by another.

A process may train several times, and a rank that is ready for the next run before the first one has left the last
would else join a store that ends, and be missed at the one that follows it.
"""
READ: Final = "read"
"""Keys with this, after the name of the meeting, and the number of a rank: it knows that it does not take place."""
TELLS_FOR_S: Final = 600.0
"""Seconds for which a process that has failed waits for others that it can tell. They may come as much later as reading
a library from a slow disk takes; one that comes when nobody is left to tell it waits as long as for any other."""
TELL_OF_FAILURE_AFTER_S: Final = 2.0
OWN_LIMIT_S: Final = 5.0
"""Seconds after the timeout in which torch says itself that it has passed."""
MOST_TOLD: Final = 2000
"""Most characters of a failure that others are told."""
BY_GLOO: Final = "gloo/transport/"
"""What stands in every error of gloo about a connection: the source file that raised it."""


def meet(backend: str, *, timeout: timedelta) -> str:
    """Join the processes whose number, place and address the environment says; return the name of this meeting.

    The store by which they meet may be torchrun's, and then it holds what an attempt before this one (--max-restarts)
    left there. So whatever belongs to a meeting stands there under its name, which no other meeting has.

    Tells what is waited for if that takes long. Raises ConfigError if the environment is not complete, or the processes
    do not meet before the timeout, and RankError if one of them comes by `tell_of_failure`, or with another backend.
    """
    _require_environment()
    who, place = _who_and_where()
    try:
        # Meeting the other ranks waits in native code, where Python's handlers are not called; with the default ones a
        # signal still ends the process.
        limit = f"for at most {timeout / timedelta(minutes=1):g} minutes; what one that has ended printed says why"
        waits = f"{who} waits at {place} (MASTER_ADDR, MASTER_PORT) for the others, {limit}"
        with _telling(waits, TELL_AFTER_S), signals_as_ever():
            store, rank, size = _joined(timeout)
            store.set_timeout(timeout)
            name, failure = _agreed_name(store, rank, size, timeout, backend)
            if failure:
                raise RankError(f"this process ended, because {failure}")
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
            f"{who} did not meet the others at {place} (MASTER_ADDR, MASTER_PORT): {said} {how}"
        ) from error
    return name


def tell_of_failure(why: str) -> None:
    """Tell the processes that wait in `meet`, or will, why this one, which is one of them, ends before it gets there.

    Waits for them for some time, and does nothing where nobody would hear of it, or has to.
    """
    size, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    # A torchrun that has started all of them ends them as soon as one has failed.
    if size == "1" or not os.environ.get("RANK") or (size == here and "TORCHELASTIC_RUN_ID" in os.environ):
        return
    timeout, why = timedelta(seconds=TELLS_FOR_S), visible_message(why)[:MOST_TOLD]
    # Of any class: whatever keeps the others from coming or hearing, the failure itself says more.
    with suppress(Exception), signals_as_ever():
        _require_environment()
        who, place = _who_and_where()
        waits = (
            f"{who} has failed, and waits at {place} for the others for {TELLS_FOR_S:g} s, to tell them (Ctrl-C ends "
            f"that): {why}"
        )
        with _telling(waits, TELL_OF_FAILURE_AFTER_S):
            store, rank, count = _joined(timeout)
            store.set_timeout(timeout)
            _agreed_name(store, rank, count, timeout, failure=f"rank {rank} failed before the ranks met: {why}")


def _joined(timeout: timedelta) -> tuple[Any, int, int]:
    """Return (the store by which processes meet, this one's number, how many they are).

    In a thread, since torch waits without a limit for the answer of what listens at the port, and that may be another
    program. Raises DistNetworkError after the timeout, and as torch does.
    """
    joining: Future[tuple[Any, int, int]] = Future()

    def join() -> None:
        try:
            joining.set_result(next(iter(_namespace.rendezvous("env://", timeout=timeout))))
        except BaseException as error:
            joining.set_exception(error)

    threading.Thread(target=join, name="rewardlab-join", daemon=True).start()
    wait([joining], timeout.total_seconds() + OWN_LIMIT_S)
    if not joining.done():
        raise dist.DistNetworkError("what listens there answers nothing, so it is another program.")
    store, rank, size = joining.result()
    if not rank:
        _served[:] = [store]
    return store, rank, size


def end_meeting() -> None:
    """Say that the meeting is over, on the first rank, which may go on: whoever comes to its store now is not late."""
    for store in _served:
        with suppress(dist.DistError):  # torchrun may end first, and what was to be done together is done
            store.delete_key(MET)


def _who_and_where() -> tuple[str, str]:
    place = visible(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    return f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, counted from 0,", place


def _agreed_name(
    store: Any, rank: int, size: int, timeout: timedelta, backend: str = "", *, failure: str = ""
) -> tuple[str, str]:
    """Return a name that the first rank has drawn, and why the ranks do not meet, on all of them; empty if they do.

    Every rank asks under a name of its own, so that it cannot take the answer to a process of an earlier attempt for
    its own, and says that it has heard. Raises DistStoreError if that takes longer than the timeout, and at once if
    another run has met by this store: nobody would answer, and the first rank of this one cannot have the port.
    """
    own = secrets.token_hex(8)
    if not rank:
        name = f"rewardlab/{own}"
        why_not = _answer_all(store, name, size, timeout.total_seconds(), backend, failure)
        # By torchrun's store, processes of later attempts meet too.
        if not why_not and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            TOOK_PART.add(name)
            store.set(MET, name)
        return name, why_not
    if store.check([MET]) and store.get(MET).decode() not in TOOK_PART:
        raise dist.DistStoreError("another run has met there already, and goes on.")
    store.set(f"{ASKS}/{rank}", own)
    name = store.get(f"{ANSWER}/{own}").decode()
    store.set(f"{name}/{BACKEND}/{rank}", backend)
    store.set(f"{name}/{HEARD}/{rank}", failure)
    outcome: str = store.get(f"{name}/{OUTCOME}").decode()
    if outcome:
        store.set(f"{name}/{READ}/{rank}", "")
    else:
        TOOK_PART.add(name)
    return name, outcome


def _answer_all(store: Any, name: str, size: int, timeout_s: float, backend: str, failure: str) -> str:
    """Tell all ranks the name of the meeting, and the first reason of one not to meet if there is any; return that.

    Where there is one, the store may end with this process, so it waits until the others have read it, as long as a
    process that fails does.
    """
    others, end = list(range(1, size)), time.monotonic() + timeout_s
    if failure:
        store.set(f"{name}/{OUTCOME}", failure)
    missing = others
    while missing:
        # Asked again and again, since what stands there may be what a process of an earlier attempt has asked.
        for one in missing:
            if store.check([f"{ASKS}/{one}"]):
                store.set(f"{ANSWER}/{store.get(f'{ASKS}/{one}').decode()}", name)
        came = [one for one in missing if store.check([f"{name}/{READ if failure else HEARD}/{one}"])]
        missing = [one for one in missing if one not in came]
        said = [] if failure else [_why_not(store, name, one, backend) for one in came]
        if any(said):
            failure, missing = next(filter(None, said)), others
            end = min(end, time.monotonic() + TELLS_FOR_S)
            store.set(f"{name}/{OUTCOME}", failure)
        elif missing and time.monotonic() >= end:
            if failure:
                break
            shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
            raise dist.DistStoreError(f"process {shown} did not come within {timeout_s:g} s.")
        if missing:
            time.sleep(ASK_EVERY_S)
    if not failure:
        store.set(f"{name}/{OUTCOME}", "")
    return failure


def _why_not(store: Any, name: str, rank: int, backend: str) -> str:
    """Return why a rank that has come does not meet the first one, with its `backend`; empty if it does."""
    failure: str = store.get(f"{name}/{HEARD}/{rank}").decode()
    own: str = store.get(f"{name}/{BACKEND}/{rank}").decode()
    if failure or own == backend:
        return failure
    # They would wait for each other: the one for NCCL on GPUs, the other for gloo.
    has, lacks = (0, rank) if "cuda" in backend else (rank, 0)
    return (
        f"rank {has} computes on a GPU, and rank {lacks} sees none that works. Compare what `nvidia-smi` and "
        f"`{sys.executable} -c 'import torch; print(torch.cuda.is_available())'` say on their machines."
    )


def _require_environment() -> None:
    for name in (*NUMBERS, "MASTER_ADDR"):
        value = os.environ.get(name, "")
        if not value or (name in NUMBERS and not value.isdecimal()):
            found = f"is {visible(value)!r}" if value else "is not set"
            raise ConfigError(
                f"{name} {found} in the environment, where RANK and WORLD_SIZE say that this is one of several "
                f"processes. Start it by torchrun, or unset both."
            )
    port = os.environ["MASTER_PORT"]
    if not 1 <= int(port) <= MAX_PORT:
        raise ConfigError(
            f"MASTER_PORT is {visible(port)}: no process can be reached there. Name a free port from 1 to {MAX_PORT}, "
            f"of torchrun by --master-port; on a single machine, `torchrun --standalone` finds one."
        )


def require_alone() -> None:
    """Raise ConfigError if one of RANK and WORLD_SIZE says that this process is one of several, and the other is not
    set: each would train by itself. An empty variable is one that is not set."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not rank and size.isdecimal() and int(size) > 1:
        says = f"WORLD_SIZE says that this is one of {size} processes"
        lacks, instead = "RANK, which of them it is", "WORLD_SIZE"
    elif rank and not size:
        says = f"RANK, which is {visible(rank)!r}, says that this is one of several processes"
        lacks, instead = "WORLD_SIZE, how many they are", "RANK"
    else:
        return
    raise ConfigError(
        f"{says}, and {lacks}, is not set: each would train by itself. Start them by torchrun, or set both for each "
        f"process; or unset {instead}."
    )


@contextmanager
def _telling(line: str, after_s: float) -> Iterator[None]:
    """Log a line if the block takes so long. In a thread, since this one waits in native code."""
    teller = threading.Timer(after_s, logger.warning, ("%s", line))
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
