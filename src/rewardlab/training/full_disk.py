"""Says what to do when the disk takes no more of what a run writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rewardlab.core.errors import NO_ROOM, DiskFullError
from rewardlab.core.run_folder import CHECKPOINTS, saved_steps
from rewardlab.core.terminal import visible


@contextmanager
def told_when_full(run: Path) -> Iterator[None]:
    """Raise DiskFullError for the error of a full disk while a run writes: its folder, the file, and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise DiskFullError(_message(run, error)) from error


def _message(run: Path, error: OSError) -> str:
    what = "" if error.filename is None else f" while writing {visible(str(error.filename))}"
    room = f"{visible(str(run))}: {error.strerror}{what}. Make room there, or move the folder to another disk; then "
    checkpoints = run / CHECKPOINTS
    steps = [step for step, _ in saved_steps(checkpoints)] if checkpoints.is_dir() else []
    how = (
        f"--resume auto goes on from step {steps[-1]}"
        if steps
        else "start again with --overwrite, since there is no checkpoint"
    )
    return f"{room}{how}. What was saved before is still there."
