"""Notices in threads of its own that another rank has failed, is lost, or hangs, and ends this process then.

The ranks tell each other what they do through the TCPStore by which they met: every one where it is, every few seconds,
and the first that fails why. So a rank that is stopped, or whose machine hangs, is named soon. A rank that is alive and
only takes long, for a checkpoint or an evaluation, is never ended.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch.distributed as dist

from rewardlab.core.errors import LostRankError, RankError, words_of
from rewardlab.core.signals import tell_of_end
from rewardlab.core.terminal import plural, visible, visible_message
from rewardlab.distributed.meeting import lost
from rewardlab.distributed.ranks import Ranks

logger = logging.getLogger("rewardlab")
FAILED: Final = "failed"
"""Key in the TCPStore, after the name of the meeting, under which the first rank that fails says why."""
SIGN: Final = "sign"
"""Keys with this and the number of a rank hold the last sign of its life."""
# How often, in seconds, a rank looks whether another one has failed.
LOOK_EVERY_S: Final = 1.0
SIGN_EVERY: Final = 5
"""Looks from one sign of life to the next."""
GRACE_S: Final = 10.0
"""Seconds that a rank has to end by itself once another one has failed; after that its process is ended."""
TELL_AFTER_S: Final = 60.0
"""Seconds without a sign of life after which that is told. Python may be held up for some in one call of a library."""
PACKAGE: Final = Path(__file__).parents[1]
GO_ON: Final = "--resume auto goes on from the last checkpoint, if there is one."


class Silence:
    """Counts how long ranks have given no new sign, in looks of this process: while it is stopped too, none passes."""

    def __init__(self) -> None:
        self.signs: dict[int, Any] = {}
        """Rank -> its last sign of life; None before the first."""
        self.seconds: dict[int, float] = {}
        """Rank -> seconds since this sign was new."""

    def hear(self, signs: Mapping[int, Any], passed: float) -> None:
        """Take the signs that stand, `passed` seconds after the call before."""
        for rank, sign in signs.items():
            is_new = rank not in self.signs or self.signs[rank] != sign
            self.seconds[rank] = 0.0 if is_new else self.seconds[rank] + passed
            self.signs[rank] = sign

    def longer_than(self, seconds: float) -> list[int]:
        """Return the ranks that have been silent for so long."""
        return [rank for rank, silent in sorted(self.seconds.items()) if silent >= seconds]


class Others:
    """The other ranks, watched by threads from the making of it until `end`."""

    def __init__(self, ranks: Ranks, *, meeting: str, timeout_s: float) -> None:
        """After `timeout_s` seconds without a sign of life of one rank, all others end. `meeting` is from `meet`.

        It must be made before anything can fail: afterwards the first rank, which serves the store, may be gone.
        """
        self._ranks, self._meeting, self._timeout_s = ranks, meeting, timeout_s
        # Two of them are enough, and spare the store that all others ask too. On two machines, if there are two.
        self._watches = ranks.rank in (0, ranks.size - 1)
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        self._looks = 0
        self._silence = Silence()
        self._told: dict[int, float] = {}
        self._waited = (0, 0.0)
        self._store = _store(meeting)
        self._give_sign(self._store)
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._look, self._guard)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()
        for thread in self._threads:
            # A store whose process hangs never answers the thread that asks it.
            thread.join(GRACE_S)

    def cause(self, error: BaseException) -> RankError | LostRankError | None:
        """Tell the other ranks of an error; return the error that says more, if another rank is the cause of this one.

        The first rank to fail keeps its own error, which says most, and so do those that fail for the same reason; the
        others name it as theirs.
        """
        rank, gone = self._ranks.rank, lost(error)
        own = words_of(error) if isinstance(error, OSError) else str(gone or error) or type(error).__name__
        told = _tell(self._store, f"rank {rank} failed: {own}")
        if told is not None and told.partition(" failed: ")[2] != own:
            return RankError(f"this process ended, because {told}")
        return gone

    def _look(self) -> None:
        """End this process soon after another rank has failed, whatever it is waiting for."""
        try:
            store = _store(self._meeting)
            while not self._ended.wait(LOOK_EVERY_S):
                if store.check([FAILED]):
                    reason = store.get(FAILED).decode()
                    break
                if self._looks % SIGN_EVERY == 0:
                    self._exchange(store)
                self._looks += 1
            else:
                return
        except dist.DistError:
            reason = f"{_server()}, by which the ranks meet, is gone. {GO_ON}"
        if not self._ended.wait(GRACE_S):
            self._exit(reason)

    def _guard(self) -> None:
        """End this process where the store answers no more though it is still there, as when its process is stopped."""
        looks, silent, told, by = -1, 0.0, False, _server()
        place = visible(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
        while not self._ended.wait(LOOK_EVERY_S):
            silent = silent + LOOK_EVERY_S if looks == self._looks else 0.0
            looks, said = self._looks, f"{by}, by which the ranks meet at {place}, has not answered for {silent:.0f} s"
            if silent >= self._timeout_s:
                self._exit(f"{said} (--rank-timeout-s): it is stopped, or its machine hangs. {GO_ON}")
            if self._watches and silent >= TELL_AFTER_S and not told:
                _say(f"{said}, after step {self._ranks.signs.step}; {self._limit()}")
            told = silent >= TELL_AFTER_S

    def _exchange(self, store: Any) -> None:
        """Give a sign of life. If this rank watches, look at those of the others."""
        self._give_sign(store)
        if not self._watches:
            return
        signs, passed = self._ranks.signs, SIGN_EVERY * LOOK_EVERY_S
        self._silence.hear({rank: _sign_of(store, rank) for rank in range(self._ranks.size)}, passed)
        self._judge_silence(store)
        before, waited = self._waited
        self._waited = (signs.calls, waited + passed if signs.waits and before == signs.calls else 0.0)
        self._tell_of_long_wait()

    def _give_sign(self, store: Any) -> None:
        signs = self._ranks.signs
        own = {
            "look": self._looks,
            "calls": signs.calls,
            "waits": signs.waits,
            "step": signs.step,
            "at": _place_of(self._thread),
            "who": f"process {os.getpid()} on {socket.gethostname()}",
        }
        store.set(f"{SIGN}/{self._ranks.rank}", json.dumps(own))

    def _judge_silence(self, store: Any) -> None:
        silent = self._silence.longer_than(TELL_AFTER_S)
        for rank in silent:
            if rank not in self._told and not (self._ranks.rank and 0 not in silent):
                self._told[rank] = self._silence.seconds[rank]
                _say(
                    f"{self._said(rank)}. The others wait for it, after step {self._ranks.signs.step}; {self._limit()}"
                )
        for rank in self._told.keys() - set(silent):
            del self._told[rank]
            _say(f"rank {rank} gives signs of life again")
        if ended := self._silence.longer_than(self._timeout_s):
            _tell(
                store,
                f"{self._said(ended[0])} (--rank-timeout-s): it is stopped, its machine hangs, or it reads from a disk "
                f"that is not there. {GO_ON}",
            )

    def _tell_of_long_wait(self) -> None:
        """Say whom this rank has waited for so long: once after the limit, and each time that it has doubled."""
        (calls, waited), passed = self._waited, SIGN_EVERY * LOOK_EVERY_S
        if not any(waited - passed < self._timeout_s * 2**n <= waited for n in range(20)):
            return
        # A rank that is silent is told of elsewhere.
        signs = {rank: sign for rank, sign in self._silence.signs.items() if self._silence.seconds[rank] <= 2 * passed}
        behind = [
            rank
            for rank, sign in signs.items()
            if sign is not None and (sign["calls"] < calls or (sign["calls"] == calls and not sign["waits"]))
        ]
        # One of those that wait says so: the first rank, unless it is waited for.
        if behind and (self._ranks.is_first or 0 in behind):
            shown = "; ".join(f"{_who(rank, signs[rank])}, {_where(signs[rank])}" for rank in behind[:4])
            more = f"; and {len(behind) - 4} more" if len(behind) > 4 else ""
            verb = plural(len(behind), "which is alive", "which are alive")
            _say(f"rank {self._ranks.rank} has waited for {waited:.0f} s for others, {verb}: {shown}{more}")

    def _said(self, rank: int) -> str:
        sign, silent = self._silence.signs[rank], self._silence.seconds[rank]
        if sign is None:
            return f"rank {rank} has given no sign of life for {silent:.0f} s, since the ranks met"
        return f"{_who(rank, sign)} has given no sign of life for {silent:.0f} s, the last {_where(sign)}"

    def _limit(self) -> str:
        return f"the run ends after {self._timeout_s:g} s without one (--rank-timeout-s)"

    def _exit(self, reason: str) -> None:
        error = LostRankError(f"rank {self._ranks.rank} ended, because {visible_message(reason)}")
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        tell_of_end(error)
        # The main thread may be stuck in a collective that never returns, so neither an exception nor sys.exit would
        # end it.
        os._exit(1)


def _say(line: str) -> None:
    # The log of all ranks but the first shows errors alone.
    logger.log(max(logging.WARNING, logger.level), "%s", visible_message(line))


def _who(rank: int, sign: Mapping[str, Any]) -> str:
    return f"rank {rank} ({sign['who']})"


def _where(sign: Mapping[str, Any]) -> str:
    return f"after step {sign['step']}, in {sign['at']}"


def _sign_of(store: Any, rank: int) -> Any:
    key = f"{SIGN}/{rank}"
    return json.loads(store.get(key).decode()) if store.check([key]) else None


def _place_of(thread: int) -> str:
    """Return the innermost line of this package, outside of this room, at which a thread is."""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path.parent != Path(__file__).parent:
            return f"{path.relative_to(PACKAGE).as_posix()}, line {frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "code outside of rewardlab"


def _store(meeting: str) -> Any:
    """Return a new connection to the TCPStore by which the ranks met, with keys of this meeting alone.

    A connection of its own is needed because a connection serves one call at a time: a call that waits would hold up
    all others.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Typed as Any because torch.distributed does not declare that it exports TCPStore.
    namespace: Any = dist
    store = namespace.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    return namespace.PrefixStore(meeting, store)


def _server() -> str:
    """Return whose process serves the store."""
    return "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"


def _tell(store: Any, text: str) -> str | None:
    """Record `text` as the reason for the failure unless another rank was first; return the reason that stands, or None
    if the first rank is gone, which serves the store.
    """
    with suppress(dist.DistError):
        # compare_set is atomic, so of several ranks that fail at the same time exactly one is recorded.
        return str(store.compare_set(FAILED, "", text).decode())
    return None
