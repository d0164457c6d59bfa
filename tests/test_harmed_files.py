"""Whatever happens to a file that is read, its reader gives what it holds or one plain error, and harms nothing else.

Data files, settings, checkpoints, probe states and saved models have tests of their own (docs/design/hardening.md).
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harming import HARMS
from made_files import make_files
from rewardlab.core.errors import RewardlabError
from rewardlab.core.files import sha256_json, write_json, write_jsonl, write_summed_json
from rewardlab.core.terminal import visible_message
from rewardlab.data.suites.reading import read_suite
from rewardlab.evaluation.score_files import read_scores
from rewardlab.experiments.plan_file import read_plan
from rewardlab.experiments.reporting.summary import summarise
from rewardlab.experiments.slurm.queue import Queue
from rewardlab.experiments.status import status_of
from rewardlab.experiments.study import open_study
from rewardlab.gold.checking.config import CheckConfig
from rewardlab.gold.checking.run import check
from rewardlab.gold.files.rows import read_gold_rows
from rewardlab.gold.kept_results import Kept
from rewardlab.gold.pipeline import plan as gold_plan
from rewardlab.gold.stage import Place, changed_file, read_manifest
from rewardlab.rl.audit.heldout import read_heldout
from rewardlab.rl.rollout_log import RolloutLog, read_rollouts
from rewardlab.rl.samples import read_samples
from scored import evaluation, rows_of
from suite_folders import WRITERS
from telling import tell

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 10**400, 1e308, "", "\ud800\x1b[2J", [], {}, [None], {"a": {}}, [[1]], "x" * 5000, 0.5),
    *("NaN", "2001-99-99", {"$ref": 1}, [{"role": "user"}], "../../etc", 2**63),
)


def open_whole(folder: Path) -> object:
    study = open_study(folder / "study")
    return status_of(study, Queue(runs={}, others={})), summarise(study)


def read_stage(folder: Path) -> object:
    place = Place.of(folder / "gold/labels.jsonl")
    manifest = read_manifest(place)
    return manifest and changed_file(place, manifest)


def go_on(folder: Path) -> None:
    log = RolloutLog(folder / "rl")
    log.resume_at(6)
    log.close()


def keep_on(folder: Path) -> None:
    kept = Kept(folder / "kept")
    list(kept.each([f"{number}" for number in range(9)]))
    kept.add([("9", {"score": 9})])


READERS: dict[str, tuple[tuple[str, ...], Callable[[Path], object]]] = {
    "own scores": (("eval/eval.*.json*",), lambda folder: read_scores(folder / "eval", name="m")),
    "scores of reward-bench": (("a.jsonl",), lambda folder: read_scores(folder / "a.jsonl", name="m")),
    "scores in columns": (("scores.json",), lambda folder: read_scores(folder / "scores.json", name="m")),
    "scores as a table": (("scores.csv",), lambda folder: read_scores(folder / "scores.csv", name="m")),
    "plan": (("plan.yaml",), lambda folder: read_plan(folder / "plan.yaml")),
    "study": (("study/*.*", "study/runs/plain/seed_0/*.*"), open_whole),
    "plan of gold data": (("gold.yaml",), lambda folder: gold_plan.read_plan(folder / "gold.yaml")),
    "gold rows": (("gold/labels.jsonl",), lambda folder: list(read_gold_rows(folder / "gold/labels.jsonl"))),
    "stages": (("gold/*.json*",), lambda folder: check(CheckConfig(folder=folder / "gold"))),
    "manifest of a stage": (("gold/labels.jsonl.manifest.json",), read_stage),
    "kept work": (("kept/kept.jsonl",), keep_on),
    "rollouts": (("rl/rollouts.jsonl",), lambda folder: list(read_rollouts(folder / "rl"))),
    "rollouts of a run that goes on": (("rl/rollouts.jsonl",), go_on),
    "samples": (("samples.jsonl",), lambda folder: list(read_samples(folder / "samples.jsonl"))),
    "held-out suites": (("heldout.jsonl",), lambda folder: read_heldout(folder / "heldout.jsonl")),
    **{name: ((f"{name}/**/*.*",), lambda folder, name=name: read_suite(name, folder / name)) for name in WRITERS},
}
REWRITES = ("kept work", "rollouts of a run that goes on")
"""Readers that write on: they may change the file itself, and make the one that a link leads to."""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = make_files(tmp_path_factory.mktemp("whole"))
    evaluation(folder / "eval", rows_of([(number * 0.1, 0.55) for number in range(12)]))
    columns = {"id": list(range(12)), "scores_chosen": [0.1] * 12, "scores_rejected": [[0.2]] * 12, "model": "m"}
    (folder / "scores.json").write_text(json.dumps(columns))
    (folder / "scores.csv").write_text("id,chosen_score,rejected_score\n" + "p1,0.5,0.1\n" * 12)
    (folder / "gold/labels.json").write_text("[[1.0, 2.0]]")
    decided = {"asked": {}, "decided": {}, "counts": {}, "rows_sha256": "0", "twin_sha256": "0"}
    write_summed_json(folder / "gold/labels.jsonl.manifest.json", decided)
    kept = Kept(folder / "kept")
    kept.add([(str(number), {"score": number}) for number in range(9)])
    write_jsonl(folder / "samples.jsonl", [{"prompt": "a?", "replies": ["b", "c"], "gold": [1, 2]}] * 4)
    write_jsonl(folder / "heldout.jsonl", [{"step": s, "item": f"{n}", "value": n} for s in (0, 9) for n in range(4)])
    for name, write in WRITERS.items():
        write(folder / name, 4)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """The files of a folder by path, with their hashes."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a JSON value, itself included."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A JSON value with another one at a place."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def edits(path: Path) -> Iterator[Callable[[], object]]:
    """Each value in a JSON file, or in the second line of a file of lines, replaced by each of `VALUES`.

    A checksum of the file itself is made again, so that the value is seen.
    """
    text = path.read_text(encoding="utf-8")
    lines = path.suffix == ".jsonl"
    try:
        whole = json.loads(text.splitlines()[1] if lines else text)
    except (ValueError, IndexError):
        return
    for place in places(whole):
        for value in VALUES:
            changed = replaced(whole, place, value)
            if lines:
                all_lines = text.splitlines(keepends=True)
                new = "".join([all_lines[0], json.dumps(changed) + "\n", *all_lines[2:]])
                yield lambda new=new: path.write_text(new)
            elif isinstance(changed, dict) and isinstance(changed.get("sha256"), str):
                own = {name: one for name, one in changed.items() if name != "sha256"}
                yield lambda own=own, value=value: write_json(path, {**own, "sha256": sha256_json(own)})
            else:
                yield lambda changed=changed: path.write_text(json.dumps(changed))


def attempts(folder: Path, patterns: tuple[str, ...]) -> list[tuple[str, Path, Callable[[], object]]]:
    """All that can happen to the files of a reader: (what, the file, does it)."""
    found = []
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        found += [(how, path, lambda harm=harm, path=path: harm(path)) for how, harm in HARMS.items()]
        found += [(f"edit {number}", path, edit) for number, edit in enumerate(edits(path))]
    return found


def try_to_read(name: str, whole: Path, folder: Path, share: int) -> tuple[int, int, float]:
    """Harm the files of a reader, one at a time; one in `share` of the ways. Returns (read, refused, slowest)."""
    patterns, read = READERS[name]
    shutil.copytree(whole, folder)
    ways = attempts(folder, patterns)
    assert ways
    random.Random(name).shuffle(ways)
    counts, slowest = [0, 0], 0.0
    for how, path, harm in ways[::share]:
        content = path.read_bytes()
        before = digests(folder)
        harm()
        started = time.perf_counter()
        try:
            with ended_after(20, f"{path.name}, {how}"):
                read(folder)
            counts[0] += 1
        except (RewardlabError, OSError) as error:
            message = visible_message(str(error))  # an OSError is put into words by the command
            assert len(message) < 1500, (how, path, message)
            counts[1] += 1
        slowest = max(slowest, time.perf_counter() - started)
        after, own = digests(folder), str(path.relative_to(folder))
        for files in (before, after):
            for changed in (own, f"{own}.moved", *([str(Path(own).with_name("nowhere"))] if name in REWRITES else [])):
                files.pop(changed, None)
        assert after == before, (how, own)
        restore(path, content)
    shutil.rmtree(folder)
    return counts[0], counts[1], slowest


@contextmanager
def ended_after(seconds: int, what: str) -> Iterator[None]:
    """End what hangs, with the name of what did."""

    def end(*_: object) -> None:
        pytest.fail(f"it hangs: {what}")

    before = signal.signal(signal.SIGALRM, end)
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # the time limit of the whole test
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, others)
        signal.signal(signal.SIGALRM, before)


def restore(path: Path, content: bytes) -> None:
    """The file as it was before it was harmed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.with_name(path.name + ".moved").unlink(missing_ok=True)
    path.write_bytes(content)


@pytest.mark.quick_cases(6)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "study" else ()) for name in READERS]
)
def test_a_harmed_file_is_read_or_refused_and_no_other_is_touched(name, files, tmp_path):
    """A sample of `test_a_file_that_is_harmed_in_every_way`."""
    ways = len(attempts(files, READERS[name][0]))
    try_to_read(name, files, tmp_path / "copy", max(1, ways // 12))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_harmed_in_every_way(name, files, tmp_path, capsys):
    taken, refused, slowest = try_to_read(name, files, tmp_path / "copy", 1)
    assert slowest < 20
    tell(capsys, f"{name}: {taken} files read, {refused} refused, slowest {slowest:.1f} s")
