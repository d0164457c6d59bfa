"""Keeps in a run's folder why it ended before its last step, for the report and for whoever comes back to it."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from rewardlab.core.errors import LostRankError, RankError, RewardlabError, RunInterrupted
from rewardlab.core.files import write_json
from rewardlab.core.run_folder import ENDED
from rewardlab.core.signals import hears_of_end


class KeptEnd:
    """Writes what ends a run early into its folder, from `begin` to `finish`.

    It surrounds all that says an error in other words, such as for a full disk, so that it keeps what is printed.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._begun = self._is_first = False
        self._signals = ExitStack()

    def begin(self, *, is_first: bool) -> None:
        """Say that the folder is this run's. The first process of the run removes what an earlier attempt left."""
        if is_first:
            (self._run / ENDED).unlink(missing_ok=True)
        self._begun, self._is_first = True, is_first

    def finish(self) -> None:
        """Say that the run came to its end."""
        self._begun = False

    def __enter__(self) -> KeptEnd:
        self._signals.enter_context(hears_of_end(self._keep))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signals.close()
        if error is not None:
            self._keep(error)

    def _keep(self, error: BaseException) -> None:
        # A request to stop ends all processes alike. After an error the one that failed first has its own, and others
        # a RankError; the first process may not even hear of it before it is ended.
        if not self._begun or isinstance(error, RankError):
            return
        if isinstance(error, RunInterrupted) and not self._is_first:
            return
        # That one may have written why it ended, and known more.
        if isinstance(error, LostRankError) and (self._run / ENDED).exists():
            return
        # A fault of the program, or Ctrl-C twice, has a name that says more than its text.
        name = type(error).__name__
        said = str(error) if isinstance(error, RewardlabError) else f"{name}: {error}".removesuffix(": ")
        with suppress(OSError):  # such as on a full disk, of which the error itself tells
            write_json(self._run / ENDED, {"error": name, "text": said})
