"""Keeps in a run's folder why it ended before its last step, for the report and for whoever comes back to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import write_json
from rewardlab.core.run_folder import ENDED


@contextmanager
def kept_end(run: Path, *, writes: bool) -> Iterator[None]:
    """Write what ends a run early into its folder, and raise it on; what an earlier attempt left there is removed.

    `writes` is True for one process of the run.
    """
    if writes:
        (run / ENDED).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        # A fault of the program, or Ctrl-C twice, has a name that says more than its text.
        kind = type(error).__name__
        said = str(error) if isinstance(error, RewardlabError) else f"{kind}: {error}".removesuffix(": ")
        if writes:
            with suppress(OSError):  # such as on a full disk, of which the error itself tells
                write_json(run / ENDED, {"error": kind, "text": said})
        raise
