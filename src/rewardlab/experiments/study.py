"""A study: the folder in which a frozen plan, its runs and their report are.

plan.yaml             the plan as it holds; it may be edited only to amend it
frozen/plan.1.yaml    the plan as it was frozen, and each amendment after it
frozen/programs/      copies of the files of arms that are other programs
log.jsonl             when it was frozen, amended, and what else was decided (`log`)
settings/             the settings of every run, as `rewardlab train --config` reads them
runs/ARM/seed_S/      run folders
records/ARM/seed_S.json   how each run went (`records`)
logs/                 what runs printed
report/               `rewardlab plan report`
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from rewardlab.core.errors import ConfigError, DataError
from rewardlab.core.files import provenance, read_summed_json, sha256_file, write_text
from rewardlab.core.folders import require_writable_folder
from rewardlab.core.lock import only_process
from rewardlab.core.run_folder import EVALUATED, holds_run, manifest_keys
from rewardlab.core.terminal import quoted
from rewardlab.experiments.config import Seen
from rewardlab.experiments.data_files import data_of, distinct, model_files, test_files_used
from rewardlab.experiments.log import LOG, append_log, read_log, time_of
from rewardlab.experiments.plan import Plan, Run
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.programs import copy_of, keep_programs, program_files
from rewardlab.experiments.resolving import runs_of
from rewardlab.experiments.sweeps import DRAWN, PRUNED, with_drawn, with_stand_ins

SEEN: Final[Mapping[str, str]] = {
    "nothing-run": "no run had begun",
    "no-results": "runs had begun, none had been judged",
    "results-not-opened": "runs had been judged, and nobody had looked at the results",
    "results": "results had been seen",
}
"""What had been seen when a plan was amended -> in words."""
REPORTED: Final = "reported"
"""Kind of the entries of the log that say when results were looked at."""
SELECTED: Final = "selected"
"""Kind of the entries that say what a search chose."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study whose plan is as it was frozen, or amended."""

    folder: Path
    plan: Plan
    entries: Sequence[Mapping[str, Any]]
    """Entries of the log."""

    @property
    def word(self) -> str:
        """The folder as a word of a command."""
        return quoted(str(self.folder))

    @property
    def frozen(self) -> Mapping[str, Any]:
        """The entry of the log by which the plan was frozen."""
        return self.entries[0]

    @property
    def plan_folder(self) -> Path:
        """Where the plan was when it was frozen: `{plan_folder}` in the words of programs."""
        return Path(str(self.frozen["plan_folder"]))

    @property
    def amendments(self) -> list[Mapping[str, Any]]:
        """The entries by which it was amended, oldest first."""
        return [entry for entry in self.entries if entry["kind"] == "amended"]

    @property
    def version(self) -> int:
        """1 for the plan as it was frozen, and one more for each amendment."""
        return 1 + len(self.amendments)

    @cached_property
    def data(self) -> Mapping[str, str]:
        """File of data, of a model or of a program -> its SHA-256, as frozen or amended."""
        found: Mapping[str, str] = next(entry["data"] for entry in reversed(self.entries) if "data" in entry)
        return found

    def data_of(self, run: Run) -> dict[str, str]:
        """Return the part of `data` that a run reads."""
        found = (*data_of(run), *model_files(run), *program_files(run, self.plan_folder))
        names = {str(path) for path in found}
        return {name: digest for name, digest in self.data.items() if name in names}

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """All runs that are known: those of a search's winner only after the search."""
        return runs_of(self.plan, winner=self.winner)

    @property
    def winner(self) -> Mapping[str, Any] | None:
        """What a search chose: its `arm` and `settings`; None before that."""
        return next((entry for entry in reversed(self.entries) if entry["kind"] == SELECTED), None)

    @property
    def not_drawn(self) -> int:
        """Trials of searches by Optuna whose arms are not known yet."""
        sweeps = {phase.name: phase.search.optuna for phase in self.plan.phases if phase.search is not None}
        drawn = Counter(entry["phase"] for entry in self.entries if entry["kind"] == DRAWN)
        return sum(max(0, sweep.trials - drawn[name]) for name, sweep in sweeps.items() if sweep is not None)

    def run_named(self, name: str) -> Run:
        """Return a run by its name, such as `full/seed_0`. Raises ConfigError if there is none."""
        found = next((run for run in self.runs if run.name == name), None)
        if found is None:
            near = difflib.get_close_matches(name, [run.name for run in self.runs], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{self.folder}: it has no run {name!r}.{hint}")
        return found

    def run_folder(self, run: Run) -> Path:
        """Return where a run writes."""
        return self.folder / "runs" / run.name

    def note(self, kind: str, **values: Any) -> None:
        """Append an entry to the log. Raises ConfigError if the log was changed."""
        with only_process(self.folder, "STUDY", wait_s=60.0):
            append_log(self.folder, kind, values)


# --- freezing ------------------------------------------------------------------------------------------------------


def freeze(
    path: Path, folder: Path, *, scale: str | None = None, probes: bool = False, sets: Mapping[str, Any] | None = None
) -> Study:
    """Freeze a plan into a folder, which becomes its study.

    The plan must pass `check` before; the caller sees to that. Raises ConfigError if the folder already is a study or
    a run, or the plan cannot be used, DataError if data that it names are not there.
    """
    plan = read_plan(path, scale=scale, probes=probes, sets=sets)
    runs = _all_runs(plan)
    if (folder / LOG).exists() and read_log(folder):
        raise ConfigError(
            f"{folder}: a plan is frozen there. Name another folder with --output-dir, or change it with `rewardlab "
            f"plan amend`."
        )
    if holds_run(folder) or manifest_keys(folder) >= EVALUATED:
        raise ConfigError(f"--output-dir {folder}: holds a run or an evaluation. Choose another folder.")
    require_writable_folder(folder, "--output-dir")
    with only_process(folder, "--output-dir"):
        kept = folder / f"plan{path.suffix.lower()}"
        plan_folder = path.absolute().parent
        digests = data_digests(runs, plan_folder)
        keep_programs(runs, plan_folder, digests, folder)
        text = path.read_text(encoding="utf-8")
        write_text(_version(folder, kept, 1), text)
        write_text(kept, text)
        append_log(
            folder,
            "frozen",
            {
                "plan": kept.name,
                "title": plan.title,
                "plan_folder": str(plan_folder),
                "sha256": sha256_file(kept),
                "scale": scale,
                "probes": probes,
                "sets": dict(sets or {}),
                "data": digests,
                "provenance": provenance(),
            },
        )
    return open_study(folder)


def _all_runs(plan: Plan) -> tuple[Run, ...]:
    """Return the runs of a plan, with stand-ins for those that are known only later."""
    return runs_of(with_stand_ins(plan), winner={"arm": "", "settings": {}})


def open_study(folder: Path) -> Study:
    """Return a study. Raises ConfigError if there is none, or its plan or log was changed after it was frozen."""
    entries = _entries(folder)
    first, plan_file = entries[0], folder / str(entries[0]["plan"])
    version = 1 + sum(entry["kind"] == "amended" for entry in entries)
    holds = _version(folder, plan_file, version)
    wanted = next(entry["sha256"] for entry in reversed(entries) if "sha256" in entry)
    for kept in (holds, plan_file):
        if not kept.is_file() or sha256_file(kept) != wanted:
            change = _changes(holds, plan_file) if kept == plan_file and kept.is_file() else ""
            raise ConfigError(
                f"{kept}: is not the plan that was frozen.{change} Restore it from {holds}, or make the change an "
                f"amendment: rewardlab plan amend {quoted(str(folder))} --reason WHY --seen WHAT."
            )
    plan = read_plan(plan_file, scale=first["scale"], probes=first["probes"], sets=first["sets"])
    if plan.title == plan_file.stem:
        # Without a title a plan is named after its file, but in a study every plan has the same file name.
        plan = replace(plan, title=str(first.get("title", plan.title)))
    return Study(folder=folder, plan=with_drawn(plan, entries), entries=tuple(entries))


def amend(folder: Path, *, reason: str, seen: Seen, begun: bool, judged: bool) -> Study:
    """Make the edited plan.yaml of a study the one that holds, and return the study.

    `begun` and `judged` say whether any run has begun, or was judged; `seen` may not deny it. Raises ConfigError for an
    amendment without a reason, one that changes nothing, or a plan that cannot be used.
    """
    if not reason.strip():
        raise ConfigError("--reason: say why the plan is changed. The report shows it.")
    if (seen == "nothing-run" and begun) or (seen == "no-results" and judged):
        what = "runs have been judged" if judged else "runs have begun"
        left = [name for name in SEEN if name != "nothing-run" and not (judged and name == "no-results")]
        raise ConfigError(f"--seen {seen}: {what}. Say what had been seen: {' or '.join(left)}.")
    with only_process(folder, "STUDY", wait_s=60.0):
        entries = _entries(folder)
        looked = next((entry["time"] for entry in entries if entry["kind"] == REPORTED), None)
        if seen != "results" and looked is not None:
            raise ConfigError(f"--seen {seen}: results were looked at, at {looked}. Say `--seen results`.")
        first, plan_file = entries[0], folder / str(entries[0]["plan"])
        version = 1 + sum(entry["kind"] == "amended" for entry in entries)
        before = _version(folder, plan_file, version)
        plan = read_plan(plan_file, scale=first["scale"], probes=first["probes"], sets=first["sets"])
        known = next(entry["data"] for entry in reversed(entries) if "data" in entry)
        runs, plan_folder = _all_runs(plan), Path(str(first["plan_folder"]))
        digests = data_digests(runs, plan_folder)
        for name in _come_since(before, first, known, plan_folder) if begun else ():
            digests.pop(name, None)
        changed = sorted(name for name in {*known, *digests} if known.get(name) != digests.get(name))
        if sha256_file(plan_file) == sha256_file(before) and not changed:
            raise ConfigError(f"{plan_file}: is as it was, and so are the files that it names. Edit first, then amend.")
        keep_programs(runs, plan_folder, digests, folder)
        # The texts are written before the log, since an entry whose text is missing could not be opened again. Both
        # files are written, so that line ends of another system do not make them differ.
        text = plan_file.read_text(encoding="utf-8")
        for path in (_version(folder, plan_file, version + 1), plan_file):
            write_text(path, text)
        append_log(
            folder,
            "amended",
            {
                "sha256": sha256_file(plan_file),
                "version": version + 1,
                "reason": " ".join(reason.split()),
                "seen": seen,
                "changes": _diff(before, plan_file),
                "data": digests,
                "data_changed": changed,
            },
        )
    return open_study(folder)


def _come_since(plan_file: Path, first: Mapping[str, Any], known: Mapping[str, str], plan_folder: Path) -> set[str]:
    """Return files that programs of a plan name and that were not there at its freezing: its runs may write them."""
    try:
        plan = read_plan(plan_file, scale=first["scale"], probes=first["probes"], sets=first["sets"])
        runs = _all_runs(plan)
    except ConfigError:
        return set()  # A plan that this version cannot use any more may be amended all the same.
    return {str(path) for run in runs for path in program_files(run, plan_folder)} - known.keys()


def edited_plan(folder: Path) -> Plan:
    """Return the plan in the folder of a study as it is now, amended or not.

    Raises ConfigError if it cannot be used.
    """
    first = _entries(folder)[0]
    return read_plan(folder / str(first["plan"]), scale=first["scale"], probes=first["probes"], sets=first["sets"])


def _entries(folder: Path) -> list[dict[str, Any]]:
    """Return the entries of the log of a study. Raises ConfigError if there is none."""
    if (folder / LOG).is_file() and (entries := read_log(folder)):
        return entries
    what = "is a plan that is not frozen" if folder.is_file() else "holds no study"
    raise ConfigError(f"{folder}: {what}. Freeze a plan first: rewardlab plan freeze PLAN --output-dir STUDY.")


def begun_and_judged(folder: Path) -> tuple[bool, bool]:
    """Return whether any run of a study has begun, and whether any was judged: on test data, or on validation data by
    the choice of a search. What a run that is done again had come to counts too."""
    records, entries = list((folder / "records").rglob("*.json")), _entries(folder)
    judged = (
        any(entry["kind"] in (SELECTED, PRUNED) for entry in entries)
        or any((folder / "runs").glob("*/*/evals/test.scores.jsonl"))
        or any(told.get("test_reads") for told in (*entries, *map(_readable, records)))
    )
    return bool(records) or judged, judged


def _readable(record: Path) -> Mapping[str, Any]:
    """Return the record of a run; nothing of one that is damaged, which `status` tells."""
    try:
        return read_summed_json(record)
    except DataError:
        return {}


def require_same_data(study: Study) -> None:
    """Raise DataError if a file of data, a model or a program is not that of the frozen or amended plan, or is gone.

    New files of data raise too. New files that a program names do not: they may be what it writes. Nor do those of
    models, which plans of earlier versions were frozen without.
    """
    told, now = study.data, data_digests(study.runs, study.plan_folder, known=study.data)
    # These are the files of runs that are not known yet, such as those of a search's winner.
    now |= {name: sha256_file(Path(name)) for name in told if name not in now and Path(name).is_file()}
    for name in sorted({*told, *now}):
        if name not in now:
            raise _gone(name)
        if told.get(name) != now[name]:
            raise _another(study, name, told.get(name, now[name]))


def require_data_here(study: Study) -> None:
    """Raise DataError if a file of the frozen or amended plan is not there, seen from the present folder, or was
    written since and is another one.

    Of the others it is not asked whether they are the same: that takes reading them, which each run does where it
    begins.
    """
    since = next(str(entry["time"]) for entry in reversed(study.entries) if "data" in entry)
    for name, digest in study.data.items():
        if not (path := Path(name)).is_file():
            raise _gone(name)
        if time_of(path) >= since and sha256_file(path) != digest:
            raise _another(study, name, digest)


def _another(study: Study, name: str, digest: str) -> DataError:
    kept = copy_of(study.folder, name, digest)
    where = f", from its copy {kept}" if kept.is_file() else ""
    return DataError(
        f"{name}: is not the file that the plan was frozen with. Restore it{where}; if another file is meant, "
        f"amend the plan."
    )


def _gone(name: str) -> DataError:
    return DataError(
        f"{name}: is not there, and the plan was frozen with it. A path that does not begin with / is one from the "
        f"folder in which the plan was frozen: work there, or restore the file."
    )


def data_digests(runs: Sequence[Run], plan_folder: Path, *, known: Collection[str] | None = None) -> dict[str, str]:
    """Return local file of data, of a model or of a program -> its SHA-256, for all files that runs name.

    With `known`, of models and programs only these files are included. Raises DataError for a test file that is also
    trained on or chosen by.
    """
    for told in test_files_used(runs):
        raise DataError(told)
    files = {path for run in distinct(runs) for path in data_of(run)}
    named = {path for run in runs for path in program_files(run, plan_folder)}
    named |= {path for run in distinct(runs) for path in model_files(run)}
    files |= {path for path in named if known is None or str(path) in known}
    return {str(path): sha256_file(path) for path in sorted(files, key=str)}


def read_by(runs: Sequence[Run]) -> tuple[Path, ...]:
    """Return the folders, absolute, in which data and models of runs are: as they are named, and where links lead."""
    found: dict[Path, None] = {}
    for run in runs:
        model = Path(str(run.settings["model"]))
        files = set(data_of(run))
        for path in [*sorted({file.parent for file in files}), *([model] if model.is_dir() else [])]:
            found |= dict.fromkeys([Path(os.path.normpath(path.absolute())), path.resolve()])
        found |= dict.fromkeys(path.resolve().parent for path in sorted(files))
    return tuple(found)


def _version(folder: Path, plan_file: Path, version: int) -> Path:
    (folder / "frozen").mkdir(parents=True, exist_ok=True)
    return folder / "frozen" / f"plan.{version}{plan_file.suffix}"


def _diff(before: Path, after: Path) -> list[str]:
    """Return the lines that were removed (−) and added (+)."""
    lines = difflib.unified_diff(
        before.read_text(encoding="utf-8").splitlines(),
        after.read_text(encoding="utf-8").splitlines(),
        n=0,
        lineterm="",
    )
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def _changes(before: Path, after: Path) -> str:
    lines = _diff(before, after) if before.is_file() else []
    return f" Its changes begin with `{lines[0][:100]}`." if lines else ""
