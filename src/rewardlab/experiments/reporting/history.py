"""How a study went: how far it is, when its plan was frozen, and everything that departs from that plan."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import read_json
from rewardlab.core.run_folder import MANIFEST
from rewardlab.core.terminal import number_of
from rewardlab.experiments.plan import WINNER, Run
from rewardlab.experiments.records import RunRecord, record_of
from rewardlab.experiments.study import REPORTED, SEEN, Study

NUMBER: Final = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")
"""A number, by which reasons of the same kind may differ."""
STATES: Final[Mapping[str, str]] = {
    "waiting": "not begun",
    "running": "running",
    "interrupted": "interrupted",
    "failed": "failed",
    "outdated": "done with other settings or data than the plan has now",
    "damaged": "damaged",
}
"""State of a run that is not done -> in words."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A run that is not done."""

    run: str
    state: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the runs are."""

    total: int
    done: int
    unfinished: tuple[Unfinished, ...]
    unknown: str = ""
    """What cannot be counted yet; empty if nothing."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.done == self.total and not self.unknown


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Something that departs from the plan as it was frozen."""

    kind: str
    text: str
    lines: tuple[str, ...] = ()
    """Lines of the plan that were removed (-) and added (+)."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """When and how the plan was frozen: its time, hash, scale and replaced settings."""

    time: str
    sha256: str
    scale: str
    probes: bool
    sets: Mapping[str, str]
    code: str
    """Version and commit of the code."""
    text: str
    """The plan as it was frozen."""
    text_now: str
    """The plan as it holds now; empty if nothing was amended."""
    version: int


def states_of(study: Study) -> dict[str, RunRecord]:
    """Return run -> its record."""
    return {run.name: record_of(study, run) for run in study.runs}


def progress_of(study: Study, states: Mapping[str, RunRecord]) -> Progress:
    """Return how far the runs of a study are."""
    left = [
        Unfinished(run=run, state=record.state, message=record.message)
        for run, record in states.items()
        if not record.is_over
    ]
    return Progress(total=len(states), done=len(states) - len(left), unfinished=tuple(left), unknown=_unknown(study))


def _unknown(study: Study) -> str:
    if study.not_drawn:
        return f"{study.not_drawn} trials of a search by Optuna are not drawn yet"
    waits = any(WINNER in phase.arms for phase in study.plan.phases) and study.winner is None
    return "the runs of the winner are known only after the search" if waits else ""


def frozen_of(study: Study) -> Frozen:
    """Return the plan as it was frozen."""
    entry = study.frozen
    plan_file = study.folder / str(entry["plan"])
    first = study.folder / "frozen" / f"plan.1{plan_file.suffix}"
    return Frozen(
        time=str(entry["time"]),
        sha256=str(entry["sha256"]),
        scale=str(entry["scale"] or ""),
        probes=bool(entry["probes"]),
        sets={str(name): str(value) for name, value in (entry["sets"] or {}).items()},
        code=_code(entry.get("provenance")),
        text=first.read_text(encoding="utf-8"),
        text_now=plan_file.read_text(encoding="utf-8") if study.amendments else "",
        version=study.version,
    )


def _code(provenance: Any) -> str:
    """Return version and commit of the code."""
    told = provenance if isinstance(provenance, Mapping) else {}
    version, commit = (told.get("packages") or {}).get("rewardlab") or "unknown version", told.get("git_commit")
    changed = ", with uncommitted changes" if told.get("git_dirty") else ""
    return f"rewardlab {version}" + (f", commit {str(commit)[:12]}{changed}" if commit else "")


def deviations_of(study: Study, states: Mapping[str, RunRecord], progress: Progress) -> tuple[Deviation, ...]:
    """Return everything that departs from the plan, amendments first."""
    return (
        *map(_amendment, study.amendments),
        *_by_hand(study.entries),
        *_redone(study.entries),
        *_read_again(states),
        *_other_code(study, states),
        *_looked(study.entries),
        *_not_done(progress),
    )


def _amendment(entry: Mapping[str, Any]) -> Deviation:
    seen = SEEN.get(str(entry["seen"]), str(entry["seen"]))
    data = ", ".join(entry.get("data_changed") or ())
    others = f" Files were changed with it: {data}." if data else ""
    return Deviation(
        kind="amendment",
        text=f"Amended to version {entry['version']} at {entry['time']}, when {seen}: {entry['reason']}{others}",
        lines=tuple(map(str, entry["changes"])),
    )


def _by_hand(entries: Sequence[Mapping[str, Any]]) -> Iterator[Deviation]:
    for entry in entries:
        if entry["kind"] == "gate passed":
            text = f"The gate of {entry['phase']} was {entry['state']} and was passed by hand at {entry['time']}"
            yield Deviation(kind="gate passed by hand", text=f"{text}: {entry['reason']}")


def _redone(entries: Sequence[Mapping[str, Any]]) -> Iterator[Deviation]:
    for entry in entries:
        if entry["kind"] == "redone":
            reads = len(entry.get("test_reads") or ())
            read = f" Its test data had been read {_times(reads)} before." if reads else ""
            yield Deviation(
                kind="run done again",
                text=f"{entry['run']}: done again at {entry['time']}; it was {entry['state']}.{read}",
            )


def _read_again(states: Mapping[str, RunRecord]) -> Iterator[Deviation]:
    for run, record in states.items():
        if len(record.test_reads) < 2:
            continue
        models = len({read["model"] for read in record.test_reads})
        who = "one model" if models == 1 else f"{models} models"
        text = f"{run}: its test data were read {_times(len(record.test_reads))}, by {who}; the last reading counts."
        yield Deviation(kind="test data read again", text=text)


def _other_code(study: Study, states: Mapping[str, RunRecord]) -> Iterator[Deviation]:
    """Yield which code made the runs, if it is not only that by which the plan was frozen."""
    frozen = _code(study.frozen.get("provenance"))
    found: dict[str, list[str]] = {}
    for run in study.runs:
        path = study.run_folder(run) / MANIFEST
        if not states[run.name].is_over or run.program or not path.is_file():
            continue
        try:
            told = read_json(path)
        except RewardlabError:
            continue
        if isinstance(told, Mapping) and told.get("provenance"):
            found.setdefault(_code(told["provenance"]), []).append(run.name)
    if set(found) - {frozen}:
        said = "; ".join(f"{code} ({number_of(len(runs), 'run')})" for code, runs in found.items())
        yield Deviation(kind="other code", text=f"The plan was frozen with {frozen}; runs were made by {said}.")


def _looked(entries: Sequence[Mapping[str, Any]]) -> Iterator[Deviation]:
    """Yield when results were looked at before all runs were done."""
    for entry in entries:
        if entry["kind"] == REPORTED and entry["done"] < entry["total"]:
            text = (
                f"Results were looked at on the way: at {entry['time']}, with {entry['done']} of {entry['total']} runs"
            )
            yield Deviation(kind="look on the way", text=f"{text} done.")


def note_look(study: Study, progress: Progress) -> None:
    """Write into the log that the results of a study were looked at, unless it says so already.

    Nothing is written for a study without results, or into a folder that is read-only.
    """
    last = next((entry for entry in reversed(study.entries) if entry["kind"] == REPORTED), None)
    known = None if last is None else (last["done"], last["total"])
    if progress.done and known != (progress.done, progress.total) and os.access(study.folder, os.W_OK):
        study.note(REPORTED, done=progress.done, total=progress.total)


def _not_done(progress: Progress) -> Iterator[Deviation]:
    """Yield the runs that are not done, those of one state and reason together."""
    groups: dict[tuple[str, str], list[Unfinished]] = {}
    for one in progress.unfinished:
        groups.setdefault((one.state, NUMBER.sub("#", one.message)), []).append(one)
    for (state, _), runs in groups.items():
        text = f"{len(runs)} of {progress.total} runs {STATES[state]}: {'; '.join(by_arm([one.run for one in runs]))}."
        messages = dict.fromkeys(one.message for one in runs)
        if why := next(iter(messages)).rstrip("."):
            others = f" (so {runs[0].run}; the others differ in numbers alone)" if len(messages) > 1 else ""
            text = f"{text} {why}{others}."
        yield Deviation(kind=f"{state} runs", text=text)


def by_arm(runs: Sequence[str]) -> list[str]:
    """Return runs, such as `full/seed_0`, arm by arm: `full (seeds 0, 1)`."""
    found: dict[str, list[str]] = {}
    for run in runs:
        arm, _, seed = run.rpartition("/seed_")
        found.setdefault(arm, []).append(seed)
    return [f"{arm} (seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)})" for arm, seeds in found.items()]


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def arms_judged(runs: Sequence[Run]) -> list[str]:
    """Return arms that are judged on test data, in the order of the plan."""
    return list(dict.fromkeys(run.arm for run in runs if run.reads_test))
