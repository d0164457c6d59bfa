"""How the first of several processes of one run tells the others what to train, or that there is nothing to do.

The first one locks the run, looks at its record and its data, and decides whether it begins or goes on. That takes a
while, and the others must do the same. They meet in a file of the study that names this start.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import RankError, RewardlabError
from rewardlab.core.files import read_json, write_json
from rewardlab.experiments.plan import Run
from rewardlab.experiments.study import Study

logger = logging.getLogger("rewardlab")
NAMING: Final = (
    *("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables of the environment that together name a start."""
POLL_S: Final = 0.2
SAY_AFTER_S: Final = 15.0
"""After how long the others say that they wait."""
WAIT_S: Final = 3600.0
"""How long the others wait for the first one, which may have to read terabytes to know that data are the same."""


def is_first() -> bool:
    """Return whether this process is the first, or the only one, of its run."""
    return int(os.environ.get("RANK") or "0") == 0


class Start:
    """What the first process tells the others."""

    def __init__(self, study: Study, run: Run) -> None:
        self._path = _path(study, run)
        self._has_told = int(os.environ.get("WORLD_SIZE", "1")) == 1

    def tell(self, arguments: Sequence[str] | None, *, refused: str = "") -> None:
        """Tell the others the arguments of training, or that there is nothing to do (None), or why nothing is done.

        Only the first call tells them anything.
        """
        if not self._has_told:
            self._has_told = True
            self._path.parent.mkdir(parents=True, exist_ok=True)
            values = {"start": _this_start(), "arguments": None if arguments is None else list(arguments)}
            write_json(self._path, values | {"refused": refused})


@contextmanager
def first_of(study: Study, run: Run) -> Iterator[Start]:
    """Yield the `Start` with which rank 0 sends its result to the other ranks.

    If the block ends with an error, the others are sent that error; if it sends nothing, that there was nothing to do.
    """
    start = Start(study, run)
    try:
        yield start
    except BaseException as error:
        start.tell(None, refused=str(error) or type(error).__name__)
        raise
    start.tell(None)


def arguments_of_first(study: Study, run: Run, *, wait_s: float = WAIT_S) -> list[str] | None:
    """Return the arguments that the first process trains with; None if there is nothing to do.

    Raises RankError if the first one refuses the run, or tells nothing within `wait_s` seconds.
    """
    path, begun, has_said = _path(study, run), time.monotonic(), False
    while time.monotonic() < begun + wait_s:
        told = _read(path)
        if told.get("start") == _this_start():
            if told["refused"]:
                raise RankError(f"{run.name}: the first process of this run ended: {told['refused']}")
            return None if told["arguments"] is None else list(told["arguments"])
        if not has_said and time.monotonic() > begun + SAY_AFTER_S:
            has_said = True
            logger.info("%s: waiting for the first process of this run to tell what to do (%s)", run.name, path)
        time.sleep(POLL_S)
    raise RankError(f"{run.name}: the first process of this run told nothing within {wait_s:g} s ({path}).")


def _path(study: Study, run: Run) -> Path:
    return study.folder / "settings" / f"{run.name}.start.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (RewardlabError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _this_start() -> str:
    names = [os.environ.get(name, "") for name in NAMING]
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    if one_machine and os.environ.get("TORCHELASTIC_RUN_ID") and not os.environ.get("SLURM_JOB_ID"):
        # Every torchrun may have the same name and port, but its processes have one parent. Those that were started
        # by hand need not have one.
        names.append(str(os.getppid()))
    return "|".join(names)
