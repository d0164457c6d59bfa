"""Do one run of a study, in this process: the same for a run here, in a Slurm array, and on many ranks."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError, DiskFullError, RunInterrupted
from rewardlab.core.files import sha256_file, write_json
from rewardlab.core.lock import only_process
from rewardlab.core.run_folder import MANIFEST, claim_folder, clear_folder, holds_run, only_writer
from rewardlab.core.signals import RESUME_LATER, StopRequests
from rewardlab.core.terminal import visible
from rewardlab.experiments.gates import require_gates_passed
from rewardlab.experiments.many_ranks import Start, arguments_of_first, first_of, is_first
from rewardlab.experiments.outcomes import Outcome
from rewardlab.experiments.plan import Run
from rewardlab.experiments.records import (
    SELECTION_SCORES,
    TEST_SCORES,
    RunRecord,
    State,
    begin_record,
    end_record,
    reads_of,
    record_of,
    settings_path,
)
from rewardlab.experiments.study import Study, read_by, require_same_data
from rewardlab.report.folder import read_folder

logger = logging.getLogger("rewardlab")
OF_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables by which a process knows that it is one of several."""
Train = Callable[[Sequence[str]], None]
"""`rewardlab train` with its arguments."""


def redo(study: Study, run: Run) -> None:
    """Forget what a run did, so that it is done from the start. The log of the study says that it was done before.

    Raises ConfigError if another process is at it.
    """
    with only_process(_lock_folder(study, run), "--redo"):
        _forget(study, run)


def _forget(study: Study, run: Run) -> None:
    before = record_of(study, run)
    if before.state != "waiting":
        reads = reads_of(study, run)
        study.note("redone", run=run.name, state=before.state, test_reads=reads)
        end_record(study, run, "waiting", "is done again", test_reads=reads)


def do(study: Study, run: Run, train: Train, *, again: bool = False) -> None:
    """Do a run, or go on with one that was interrupted; a run that is done is left alone unless `again`.

    Its record says how it went, also if this raises. Raises ConfigError for a run that was done with other settings,
    whose record is damaged, or that stands behind a gate that is not passed; DataError if data have changed; and what
    the run raises.
    """
    if not is_first():
        # Records are written by the first rank; the others only train.
        if run.program:
            # The first rank does all of it, however long that takes, also after a signal that reaches all ranks: srun
            # ends the rest a minute after the first process that is gone.
            with StopRequests():
                arguments_of_first(study, run, wait_s=math.inf)
            return
        if (arguments := arguments_of_first(study, run)) is not None:
            train(arguments)
        return
    (study.folder / "runs").mkdir(exist_ok=True)
    with first_of(study, run) as start, only_process(_lock_folder(study, run), "--run"):
        before = record_of(study, run)
        if again:
            _forget(study, run)
        elif before.is_over:
            logger.info("%s: is done", run.name)
            return
        _require_usable(run, before, again=again)
        require_gates_passed(study, run)
        require_same_data(study)
        settings_path(study, run).parent.mkdir(parents=True, exist_ok=True)
        write_json(settings_path(study, run), {**run.settings, "output_dir": str(study.run_folder(run))})
        # A program that failed begins anew, and may have left scores; training goes on from its checkpoints.
        fresh = again or before.state in ("waiting", "outdated") or (bool(run.program) and before.state == "failed")
        reads = reads_of(study, run)
        if fresh:
            # Before the record says that the run has begun: what goes on with it must not find the run before.
            _clear(study, run)
        begin_record(study, run, test_reads=reads)
        _recorded(study, run, lambda: _work(study, run, train, start, fresh=fresh))


def _require_usable(run: Run, before: RunRecord, *, again: bool) -> None:
    """Raise ConfigError if what a run did before forbids going on with it."""
    if again:
        return
    if before.state == "outdated":
        raise ConfigError(f"{run.name}: {before.message}. Do it again with --redo; the report says so.")
    if before.state == "damaged":
        raise ConfigError(f"{run.name}: {before.message} Restore the file, or do the run again with --redo.")


def _lock_folder(study: Study, run: Run) -> Path:
    """Return the folder that the process of a run keeps others out of."""
    lock = study.folder / "records" / run.arm / f".{run.seed}"
    lock.mkdir(parents=True, exist_ok=True)
    return lock


def _recorded(study: Study, run: Run, work: Callable[[], None]) -> None:
    """Do the work and write down how it ended."""
    try:
        work()
        end_record(study, run, "done", **_left(study, run))
    except RunInterrupted as error:
        end_record(study, run, "interrupted", str(error))
        raise
    except KeyboardInterrupt:
        end_record(study, run, "interrupted", "Ctrl-C")
        raise
    except SystemExit as error:
        state: State = "interrupted" if error.code == RESUME_LATER else "failed"
        end_record(study, run, state, f"exit status {error.code}")
        raise
    except BaseException as error:
        # A disk that is full takes no record either, and its error would stand in place of the one that says more. A
        # record that says that the run goes on is one of a process that is gone.
        with suppress(OSError):
            end_record(study, run, "failed", f"{type(error).__name__}: {error}"[:2000])
        raise


def _work(study: Study, run: Run, train: Train, start: Start, *, fresh: bool) -> None:
    folder = study.run_folder(run)
    if not run.program:
        arguments = _arguments(study, run, fresh=fresh and (folder / MANIFEST).exists())
        start.tell(arguments)
        with _told_when_full(folder):
            train(arguments)
        return
    folder.mkdir(parents=True, exist_ok=True)
    _run_program(program_words(study, run))


@contextmanager
def _told_when_full(folder: Path) -> Iterator[None]:
    """Say for a full disk how a run of a plan goes on; `rewardlab train` names its own flags, which a plan has not."""
    try:
        yield
    except DiskFullError as full:
        cause = full.__cause__ if isinstance(full.__cause__, OSError) else full
        what = "" if cause.filename is None else f" while writing {visible(str(cause.filename))}"
        raise DiskFullError(
            f"{visible(str(folder))}: {cause.strerror or 'the disk is full'}{what}. Make room there; then the same "
            f"command goes on, from the newest checkpoint if there is one. What was saved before is still there."
        ) from full


def _clear(study: Study, run: Run) -> None:
    """Take away what an earlier run left in the folder of a run that begins anew.

    Otherwise a run that ends before it has written anything would be gone on with from the checkpoints of the earlier
    one, or a program that writes no scores judged by those of the earlier one. Raises ConfigError if something in the
    folder is not the run's.
    """
    folder = study.run_folder(run)
    if run.program:
        for scores in (TEST_SCORES, SELECTION_SCORES):
            (folder / scores).unlink(missing_ok=True)
    elif folder.is_dir() and holds_run(folder):
        with only_writer(folder):
            claim_folder(folder, map(str, read_by([run])), overwrite=True)
            clear_folder(folder)


def _run_program(words: Sequence[str]) -> None:
    """Run a program to its end. A signal that asks for an end reaches it too; its end is waited for, as a shell does.

    Raises RunInterrupted if it ended by such a signal, SystemExit if it failed.
    """
    # It is one process: as a rank of several it would wait for the others, which do not run it.
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    with StopRequests() as asked, subprocess.Popen(words, env=environment) as program:
        status = program.wait()
    if status and asked.signalled and status != RESUME_LATER:
        raise RunInterrupted(f"{asked.reason}: the program ended with {status}", exit_status=asked.exit_status)
    if status:
        # As a shell reports it: 128 plus the number of the signal, which Popen gives as a negative status.
        raise SystemExit(status if status > 0 else 128 - status)


def program_words(study: Study, run: Run) -> list[str]:
    """Return the words of another program, filled in.

    Raises ConfigError for a name in braces that stands for nothing.
    """
    filled = {
        "settings": str(settings_path(study, run)),
        "output_dir": str(study.run_folder(run)),
        "seed": str(run.seed),
        "python": sys.executable,
        "plan_folder": str(study.plan_folder),
    }
    try:
        return [word.format(**filled) for word in run.program]
    except (KeyError, IndexError, ValueError) as error:
        known = ", ".join(f"{{{name}}}" for name in filled)
        raise ConfigError(f"arm {run.arm}: program: {error} stands for nothing; there are {known}.") from None


def _arguments(study: Study, run: Run, *, fresh: bool = False) -> list[str]:
    how = ["--overwrite"] if fresh else ["--resume", "auto"]
    return ["--config", str(settings_path(study, run)), *how]


def _left(study: Study, run: Run) -> dict[str, Any]:
    """Return the entries of the record about what a run left.

    Raises DataError if it left no scores to judge it by, or another program left some that cannot be judged.
    """
    folder = study.run_folder(run)
    wanted = TEST_SCORES if run.reads_test else SELECTION_SCORES
    if not (folder / wanted).is_file():
        raise DataError(f"{folder}: the run left no {wanted}, by which it would be judged.")
    if run.program:
        _require_judgeable(Outcome.of(run, read_folder(folder, distributions=False)), folder / wanted)
    if not run.reads_test:
        return {"selection": sha256_file(folder / SELECTION_SCORES)}
    return {"test_reads": reads_of(study, run)}


def _require_judgeable(outcome: Outcome, scores: Path) -> None:
    """Raise DataError, which says what to do, if the scores that a program left hold no comparison to judge it by."""
    on = "test" if outcome.run.reads_test else "validation"
    what = f"The program has to write a row for each reply of the {on} data, with the comparisons of that reply."
    if not outcome.rows(on):
        raise DataError(f"{scores}: holds no rows, so there is nothing to judge. {what}")
    try:
        comparisons = len(outcome.table(on).pairs.label)
    except DataError as error:
        raise DataError(f"{scores}: {error}") from error
    if not comparisons:
        raise DataError(f"{scores}: no row has a comparison, so there is nothing to judge. {what}")
