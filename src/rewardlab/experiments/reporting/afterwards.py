"""Hypotheses that were changed, added or taken out after results had been seen: they no longer test what was expected.
So do those whose runs were changed: their seeds, their settings, or the files that they read.

They are found by the texts of the plan in `frozen/`, each of which must have the hash that the log names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import sha256_file
from rewardlab.experiments.claims import parse
from rewardlab.experiments.plan import Plan, Run
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.records import record_of, settings_hash
from rewardlab.experiments.resolving import runs_of
from rewardlab.experiments.study import Study
from rewardlab.experiments.sweeps import with_drawn

Change = Literal["", "changed", "added", "runs", "not known"]
WORDS: Final[Mapping[Change, str]] = {
    "": "",
    "changed": "changed after results had been seen",
    "added": "added after results had been seen",
    "runs": "its runs were changed after results had been seen",
    "not known": "perhaps changed after results had been seen",
}
"""What became of a claim, or of the runs that it is about -> in words."""


@dataclass(frozen=True, kw_only=True)
class Afterwards:
    """What became of the hypotheses of a plan after results had been seen."""

    changes: Mapping[str, Change] = field(default_factory=dict)
    """Hypothesis that holds now -> what became of it; those that are as they were are left out."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Hypothesis -> its claim before, where that was another one."""
    runs: Mapping[str, str] = field(default_factory=dict)
    """Hypothesis whose claim is as it was -> how its runs are not those that were planned then, in words."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Hypothesis that was taken out -> its claim; what only amendments in between had bears their version."""
    pooled: bool | None = None
    """`pooled` of the last plan that was made before results were seen; None where no later one can differ from it, or
    it is not known."""


def afterwards_of(study: Study) -> Afterwards:
    """Return how the claims that hold differ from those of the last plan that was made before results were seen."""
    seen = next((entry for entry in study.amendments if entry["seen"] == "results"), None)
    if seen is None:
        return Afterwards()
    now = {name: one.claim for name, one in study.plan.hypotheses.items()}
    plan = _plan(study, int(seen["version"]) - 1)
    if plan is None:
        return Afterwards(changes=dict.fromkeys(now, "not known"))
    old = {name: one.claim for name, one in plan.hypotheses.items()}
    changes: dict[str, Change] = {
        name: "changed" if name in old else "added" for name, claim in now.items() if not _same(claim, old.get(name))
    }
    before = {name: old[name] for name, change in changes.items() if change == "changed"}
    differ = _runs_changed(study, plan, int(seen["version"]))
    runs = _told(study.plan, differ or {}, pooled=plan.pooled)
    changes |= {name: "runs" for name in runs if name not in changes}
    between = {version: _plan(study, version) for version in range(int(seen["version"]), study.version)}
    tried = _tried(between, {*now.values(), *old.values()})
    return Afterwards(
        changes=dict.fromkeys(now, "not known") if None in between.values() or differ is None else changes,
        before=before,
        runs={name: text for name, text in runs.items() if changes[name] == "runs"},
        removed={name: claim for name, claim in old.items() if name not in now} | tried,
        pooled=plan.pooled,
    )


def _told(plan: Plan, differ: Mapping[str, str], *, pooled: bool) -> dict[str, str]:
    """Return the hypotheses about arms that differ (arm -> how), with how their arms do.

    Where noise is `pooled` over all arms, every hypothesis is about all of them.
    """
    found = {}
    for name, one in plan.hypotheses.items():
        arms = differ if pooled else dict.fromkeys(term.arm for term in parse(one.claim).terms)
        if told := [f"{arm} {differ[arm]}" for arm in arms if arm in differ]:
            found[name] = "; ".join(told)
    return found


def _runs_changed(study: Study, plan: Plan, seen: int) -> dict[str, str] | None:
    """Return each arm whose runs are not those of an earlier plan, and how they differ; None if that is not known.

    `seen` is the version of the first amendment after results had been seen.
    """
    try:
        before = _by_arm(runs_of(with_drawn(plan, study.entries), winner=study.winner))
    except RewardlabError:
        return None
    now, changed = _by_arm(study.runs), _changed_files(study, seen)
    found = {}
    for arm in {**before, **now}:
        old, new = before.get(arm, {}), now.get(arm, {})
        both = [seed for seed in new if seed in old]
        told = [
            *_seeds("without", [seed for seed in old if seed not in new]),
            *_seeds("with", [seed for seed in new if seed not in old]),
            *["with other settings"] * any(settings_hash(new[seed]) != settings_hash(old[seed]) for seed in both),
            *["with other files"] * (bool(changed) and any(changed & _files(study, run) for run in new.values())),
        ]
        if told:
            found[arm] = ", ".join(told)
    return found


def _changed_files(study: Study, seen: int) -> set[str]:
    """Return the files whose contents are not those that the log had before an amendment; those that were and are as
    they were, and those that it did not have then, are left out, as a version that noted no models had none."""
    entries = study.entries
    place = next(n for n, entry in enumerate(entries) if entry["kind"] == "amended" and int(entry["version"]) == seen)
    then: Mapping[str, str] = next(entry["data"] for entry in reversed(entries[:place]) if "data" in entry)
    folders = {Path(name).parent for name in then}
    come = {name for name in study.data.keys() - then.keys() if Path(name).parent in folders}
    return come | {name for name, digest in then.items() if study.data.get(name) != digest}


def _files(study: Study, run: Run) -> set[str]:
    """Return the files that a run has read by its record, wherever they are now, or would read."""
    values = record_of(study, run).values
    return set(values.get("data") or study.data_of(run))


def _by_arm(runs: Iterable[Run]) -> dict[str, dict[int, Run]]:
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run.arm, {})[run.seed] = run
    return found


def _seeds(how: str, seeds: Sequence[int]) -> list[str]:
    names = ", ".join(map(str, seeds))
    return [f"{how} the seed{'s' * (len(seeds) > 1)} {names}"] if seeds else []


def _tried(plans: Mapping[int, Plan | None], kept: Collection[str]) -> dict[str, str]:
    """Return the claims of amendments (version -> plan) that are none of those `kept`, each once.

    A plan is None where its text is not known.
    """
    known = {parse(claim).text for claim in kept}
    found: dict[str, str] = {}
    for version, plan in plans.items():
        for name, one in plan.hypotheses.items() if plan is not None else ():
            if (text := parse(one.claim).text) not in known:
                known.add(text)
                found[f"{name} (version {version})"] = one.claim
    return found


def _plan(study: Study, version: int) -> Plan | None:
    """Return a version of the plan; None if its text is not the one that the log knows."""
    first = study.frozen
    wanted = (first if version == 1 else study.amendments[version - 2])["sha256"]
    path = study.folder / "frozen" / f"plan.{version}{(study.folder / str(first['plan'])).suffix}"
    if not path.is_file() or sha256_file(path) != wanted:
        return None
    try:
        return read_plan(path, scale=first["scale"], probes=first["probes"], sets=first["sets"])
    except RewardlabError:
        return None


def _same(claim: str, other: str | None) -> bool:
    return other is not None and (claim == other or parse(claim).text == parse(other).text)
