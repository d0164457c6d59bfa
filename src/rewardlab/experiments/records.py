"""How each run went: a file a run, written by the process that does it, read by everybody else."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from rewardlab.core.config import from_mapping, read_settings, to_mapping
from rewardlab.core.errors import DataError, RewardlabError
from rewardlab.core.files import read_summed_json, sha256_file, sha256_json, write_summed_json
from rewardlab.core.schema import Refusal, shown, typed
from rewardlab.core.spec import SPEC_FILE
from rewardlab.core.terminal import brief, listed
from rewardlab.data.config import USUAL_LENGTH
from rewardlab.experiments.data_files import changed_in
from rewardlab.experiments.lengths import limit_of_reward_model
from rewardlab.experiments.log import hashes_of, now, time_of
from rewardlab.experiments.plan import Run
from rewardlab.experiments.study import Study
from rewardlab.training.settings.config import RewardTrainerConfig

State = Literal["waiting", "running", "interrupted", "failed", "done", "outdated", "damaged"]
FORMAT: Final = 1
"""Version of the layout of the file."""
TEST_SCORES: Final = Path("evals/test.scores.jsonl")
"""Scores on test data that a run leaves in its folder."""
SELECTION_SCORES: Final = Path("evals/selection.scores.jsonl")
"""Scores that it leaves on the data by which its checkpoint was chosen."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What is known about a run."""

    state: State
    """`waiting`: never begun. `interrupted`: it goes on from its checkpoint. `outdated`: it was done with other
    settings or data than the plan now has. `damaged`: the file cannot be read, so what the run did is not known."""
    message: str = ""
    """Why it failed, or was interrupted."""
    attempts: int = 0
    host: str = ""
    process: int = 0
    started: str = ""
    ended: str = ""
    test_reads: tuple[Mapping[str, Any], ...] = ()
    """When test data were read, by which model: `time`, `scores` (SHA-256), `model` (SHA-256)."""
    slurm_job: str = ""
    """Number of its job in Slurm, such as `4711`, or `4711_3` of a task of an array; empty without Slurm."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The file, as it is written."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do for it."""
        return self.state == "done"


@dataclass(frozen=True, kw_only=True)
class _Read:
    """When the test data were read, in the file of a run."""

    time: str
    scores: str
    model: str | None


@dataclass(frozen=True, kw_only=True)
class _Waiting:
    """What is needed of the file of a run that is to begin anew, with its types."""

    state: State
    message: str
    test_reads: list[_Read]


@dataclass(frozen=True, kw_only=True)
class _Begun(_Waiting):
    """What is needed of the file of any other run."""

    settings: str
    attempts: int
    host: str
    process: int
    process_began: str
    started: str
    ended: str
    slurm_job: str
    data: dict[str, str] | None = None
    log: str | None = None


def record_of(study: Study, run: Run) -> RunRecord:
    """Return how a run went, as far as its file can be read."""
    path = _path(study, run)
    if not path.is_file():
        return RunRecord(state="waiting")
    try:
        values = read_summed_json(path)
        _require_sound(values, path)
        return _record(values, run, study)
    except DataError as error:
        return RunRecord(state="damaged", message=f"its record cannot be read: {error}")


def undone(study: Study, runs: Iterable[Run]) -> list[Run]:
    """Return the runs that are not done."""
    return [run for run in runs if not record_of(study, run).is_over]


def _require_sound(values: Mapping[str, Any], path: Path) -> None:
    """Raise DataError for a file of a run that lacks something, or holds something of another type, or no times."""
    refusal = Refusal(error=DataError, remedy="It was changed, or written by another version.")
    if typed(_Waiting, values, where=str(path), refusal=refusal, open_ended=True).state == "waiting":
        return
    written = typed(_Begun, values, where=str(path), refusal=refusal, open_ended=True)
    for name, text in (("started", written.started), ("ended", written.ended)):
        try:
            is_time = not text or datetime.fromisoformat(text).tzinfo is not None
        except ValueError:
            is_time = False
        if not is_time:
            raise refusal.of(f"{path}: {name}: expected a time such as {now()}, found {shown(text)}.")


def _record(values: dict[str, Any], run: Run, study: Study) -> RunRecord:
    state: State = values["state"]
    if state == "waiting":
        return RunRecord(
            state=state, message=str(values["message"]), test_reads=tuple(values["test_reads"]), values=values
        )
    message = str(values["message"])
    if state == "running" and _is_gone(values):
        state = "interrupted"
        message = "its process ended before it could say why (killed, out of memory, or stopped while it began)"
    if values["settings"] != settings_hash(run) and (other := _other_settings(study, run, str(values["settings"]))):
        state, message = "outdated", f"it was begun with other settings than the plan has now{other}"
    elif values.get("data") is not None and (changed := changed_in(run, values["data"], study.data)):
        state, message = "outdated", f"it was begun with another {changed} than the plan has now"
    return RunRecord(
        state=state,
        message=message,
        attempts=int(values["attempts"]),
        host=str(values["host"]),
        process=int(values["process"]),
        started=str(values["started"]),
        ended=str(values["ended"]),
        test_reads=tuple(values["test_reads"]),
        slurm_job=str(values["slurm_job"]),
        values=values,
    )


def reads_of(study: Study, run: Run) -> list[dict[str, Any]]:
    """Return when the test data were read for a run: what its record says, and the reading that lies in its folder.

    A run that was killed before it could write its record has read them too.
    """
    known = [dict(one) for one in record_of(study, run).test_reads]
    path = study.run_folder(run) / TEST_SCORES
    if not run.reads_test or not path.is_file():
        return known
    spec = study.run_folder(run) / "best" / SPEC_FILE
    read = {
        "time": time_of(path),
        "scores": sha256_file(path),
        "model": sha256_file(spec) if spec.is_file() else None,
    }
    # The last reading counts, so one that gives again what an earlier one gave is told once more.
    if known and all(known[-1][name] == read[name] for name in ("scores", "model")):
        return known
    return [*known, read]


def begin_record(study: Study, run: Run, *, test_reads: Sequence[Mapping[str, Any]] | None = None) -> RunRecord:
    """Write down that this process begins, or goes on with, a run.

    `test_reads` are those known so far, by default what `reads_of` finds.
    """
    before = record_of(study, run)
    values = {
        "format": FORMAT,
        "run": run.name,
        "state": "running",
        "message": "",
        "settings": settings_hash(run),
        "data": study.data_of(run),
        "plan_version": study.version,
        "log": hashes_of(study.entries)[-1],
        "attempts": before.attempts + 1,
        "host": platform.node(),
        "process": os.getpid(),
        "process_began": _began(os.getpid()),
        "started": before.started if before.state == "interrupted" else now(),
        "ended": "",
        "test_reads": reads_of(study, run) if test_reads is None else list(test_reads),
        "slurm_job": _slurm_job(),
        "restarts": int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
    }
    _write(study, run, values)
    return record_of(study, run)


def _slurm_job() -> str:
    """Return the number of this process's job as squeue writes it: tasks of an array have one of their own too."""
    array = [os.environ.get(name, "") for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")]
    return "_".join(array) if all(array) else os.environ.get("SLURM_JOB_ID", "")


def end_record(study: Study, run: Run, state: State, message: str = "", **more: Any) -> None:
    """Write down how a run ended."""
    before = record_of(study, run)
    _write(study, run, {**before.values, "state": state, "message": message, "ended": now(), **more})


def settings_hash(run: Run) -> str:
    """Return a hash of everything that decides a run."""
    return sha256_json({"settings": dict(run.settings), "program": list(run.program)})


def settings_path(study: Study, run: Run) -> Path:
    """Return the file of the settings that a run is started with."""
    return study.folder / "settings" / f"{run.name}.json"


def _other_settings(study: Study, run: Run, begun_with: str) -> str:
    """Return what a run began with, whose hash is given, that it has not by the defaults of this version, as the end of
    a sentence; empty if there is no difference.

    Other versions may have more or fewer settings. Those that the run began with are in its file of settings.
    """
    unknown = ". Which, cannot be read from its file of settings"
    try:
        before = read_settings(settings_path(study, run))
        before.pop("output_dir", None)
        if settings_hash(replace(run, settings=before)) != begun_with:
            # The program of a run is in no file of settings.
            return ": another program" if before == dict(run.settings) else unknown
        known = {name: value for name, value in before.items() if name in run.settings}
        then = to_mapping(from_mapping(RewardTrainerConfig, known, where=run.name))
        left = _left_to_the_run(run.settings, before)
    except (RewardlabError, OSError):
        return unknown
    changed = [
        f"{name} {brief(then[name])}, now {brief(value)}"
        for name, value in run.settings.items()
        if name not in left and then[name] != value
    ]
    return f": {listed(changed, 4)}" if changed else ""


def _left_to_the_run(settings: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the settings that a run is to decide, and of which an earlier version, whose default was a number, wrote
    that out: the run keeps it."""
    left = ["micro_token_budget"] if settings.get("micro_token_budget") is None else []
    if settings.get("max_seq_len") == "auto" and before.get("max_seq_len") == USUAL_LENGTH:
        # A reward model that is trained further has a limit of its own.
        is_own = limit_of_reward_model(str(settings.get("model"))) in (None, USUAL_LENGTH)
        left += ["max_seq_len"] if is_own else []
    return left


def _path(study: Study, run: Run) -> Path:
    return study.folder / "records" / f"{run.name}.json"


def _write(study: Study, run: Run, values: Mapping[str, Any]) -> None:
    path = _path(study, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_summed_json(path, {key: value for key, value in values.items() if key != "sha256"})


def _is_gone(values: Mapping[str, Any]) -> bool:
    """Return whether the process of a run is known to have ended: it was on this machine, and is not there any more."""
    if values["host"] != platform.node():
        return False
    try:
        os.kill(int(values["process"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    # Another process may have its number by now.
    return bool(values["process_began"]) and _began(int(values["process"])) != values["process_began"]


def _began(process: int) -> str:
    """Return when a process began, in ticks, so that another one with its number is told apart; empty if unknown."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
