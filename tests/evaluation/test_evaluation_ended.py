"""Commands that judge, ended while they write: the same command begins anew, and earlier results stay whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common import write_base_model, write_pairs
from killing import KILLED_AT_WRITES, EndedError, ended_at_write, run_program
from reward_models import save_tiny
from rewardlab.cli import main
from rewardlab.core import placing
from rewardlab.core.errors import ArtifactError
from rewardlab.core.placing import MOVING
from rewardlab.evaluation import evaluate, models

DATA = ("--dataset", "pairs.jsonl", "--output-dir", "out")
COMMANDS = {
    "eval": ("eval", "m1", *DATA),
    "models": ("eval", "m1", "m2", *DATA, "--no-precision-card"),
    "ensemble": ("eval", "--ensemble", "m1", "m2", *DATA, "--no-precision-card"),
    "calibrate": ("calibrate", "m1", *DATA),
    "probe": ("probe", "--model", "base", *DATA, "--layers", "last", "--test-dataset", "pairs.jsonl"),
    "compare": ("compare", "scores1", "scores2", "--output-dir", "out"),
}
SLOW = {"eval", "ensemble", "calibrate", "probe"}
PLACES = 3
"""At how many of its writes a command is ended."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_base_model(folder / "base")
    write_pairs(folder / "pairs.jsonl", 140)
    for number in (1, 2):
        save_tiny(folder / f"m{number}", seed=number, scale=(0.0, 1.0))
        scores = ("eval", f"m{number}", "--dataset", "pairs.jsonl", "--output-dir", f"scores{number}")
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            main([*scores, "--no-precision-card"])
    return folder


@pytest.fixture
def here(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return prepared(inputs, tmp_path, monkeypatch)


def prepared(inputs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir(exist_ok=True)
    for path in inputs.iterdir():
        (folder / path.name).symlink_to(path)
    monkeypatch.chdir(folder)
    return folder


def content(out: Path, *, bare: bool = True) -> dict[str, Any]:
    """Every file, by default without what says when and how it was written."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_dir() or path.name == ".lock":
            continue
        found[name] = path.read_bytes()
        if bare and name.startswith("best/"):
            found[name] = None  # its spec says when it was saved
        elif bare and path.suffix == ".json":
            values = json.loads(found[name])
            found[name] = {
                key: value for key, value in values.items() if key not in ("provenance", "data", "seconds", "settings")
            }
        elif bare and path.name in ("report.html", "report.md", "heads.npz"):
            found[name] = None
    return found


def writes_of(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command and return how often it writes."""
    count, fsync = 0, os.fsync

    def counted(handle: int) -> None:
        nonlocal count
        count += 1
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", counted)
        main([*words])
    return count


def refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*words])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMMANDS]
)
def test_what_was_ended_while_it_wrote_is_begun_anew_by_the_same_command(inputs, here, command, monkeypatch, capsys):
    words = COMMANDS[command]
    main([*words])
    number = writes_of((*words, "--overwrite"), monkeypatch)  # scores were kept by the first time
    wanted = content(here / "out")
    assert len(wanted) > 1
    kept = content(here / "out", bare=False)
    assert "already holds" in refused(words, capsys), "what is finished stays"
    for place in sorted({1 + k * (number - 1) // (PLACES - 1) for k in range(PLACES)}):
        assert ended_at_write(place, partial(main, [*words, "--overwrite"]))
        assert content(here / "out", bare=False) == kept, place
        folder = prepared(inputs, here / str(place), monkeypatch)
        assert ended_at_write(place, partial(main, [*words]))
        assert content(folder / "out") == {}, place
        main([*words])
        assert content(folder / "out") == wanted, place
        monkeypatch.chdir(here)
    (here / "out/notes.txt").write_text("mine")
    main([*words, "--overwrite"])
    assert content(here / "out") == wanted | {"notes.txt": b"mine"}


@pytest.mark.parametrize(("more", "said"), [((), "Their scores are kept"), (("--no-reuse",), "scored again")])
def test_a_fault_of_ours_at_the_second_of_two_models_leaves_nothing_of_the_first(here, monkeypatch, log, more, said):
    words, judged, judge = (*COMMANDS["models"], *more), 0, evaluate.write_evaluation

    def failing(*given: Any) -> None:
        nonlocal judged
        judged += 1
        if judged == 2:
            raise EndedError
        judge(*given)

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "write_evaluation", failing)
        with pytest.raises(EndedError):
            main([*words])
    assert content(here / "out") == {}
    assert "nothing is written of m1: results of several models appear together" in log.text
    assert said in log.text
    log.clear()
    main([*words])
    assert ("kept scores: m1 has scored" in log.text) == (not more)
    assert set(json.loads((here / "out/models.json").read_text())) == {"m1", "m2"}


@pytest.mark.parametrize(
    ("error", "status"), [(ArtifactError("m2: damaged"), SystemExit), (RuntimeError("one of torch"), RuntimeError)]
)
def test_an_error_at_a_model_leaves_the_results_of_those_before_it(here, monkeypatch, capsys, log, error, status):
    words, judge = COMMANDS["models"], models.evaluate_into

    def failing(place: Path, config: Any, *given: Any) -> Any:
        if config.run.model == "m2":
            (place / "half").write_text("written")
            raise error
        return judge(place, config, *given)

    with monkeypatch.context() as patched:
        patched.setattr(models, "evaluate_into", failing)
        with pytest.raises(status):
            main([*words])
        assert "out: has the results of m1 alone. With --overwrite the same command judges all of them" in log.text
        found = content(here / "out")
        assert set(json.loads((here / "out/models.json").read_text())) == {"m1"}
        assert json.loads((here / "out/manifest.json").read_text())["config"]["models"] == ["m1"]
        assert {name.partition("/")[0] for name in found if "/" in name} == {"m1"}
        assert {"m1/eval.scores.jsonl", "m1/manifest.json", "report.html"} <= set(found)
        with pytest.raises(status):  # earlier results stay, which may be of all models
            main([*words, "--overwrite"])
        assert content(here / "out") == found
    main(["compare", "out/m1", "scores2"])
    assert "already holds an evaluation" in refused(words, capsys)
    main([*words, "--overwrite"])
    assert set(json.loads((here / "out/models.json").read_text())) == {"m1", "m2"}


def test_an_error_at_a_member_of_an_ensemble_leaves_nothing(here, monkeypatch):
    (here / "m2").unlink()
    shutil.copytree((here / "m1").resolve(), here / "m2")
    (here / "m2/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SystemExit):
        main([*COMMANDS["ensemble"]])
    assert content(here / "out") == {}


@pytest.mark.slow
def test_a_calibration_that_was_ended_while_it_was_stored_is_begun_anew(here, inputs, monkeypatch):
    (here / "m1").unlink()
    save_tiny(here / "m1", seed=1)
    words = (*COMMANDS["calibrate"], "--store")

    def ending(*_: object, **__: object) -> None:
        raise EndedError

    with monkeypatch.context() as patched:
        patched.setattr("rewardlab.evaluation.calibrate.store_calibration", ending)
        with pytest.raises(EndedError):
            main([*words])
    assert content(here / "out") == {}
    main([*words])
    assert "calibration.json" in content(here / "out")
    assert json.loads((here / "m1/reward_spec.json").read_text())["calibration"]


@pytest.mark.parametrize("command", ["models", "calibrate"])
def test_a_report_names_the_folder_in_which_it_stands(here, command, monkeypatch, capsys):
    main([*COMMANDS[command]])
    told = {name: text for name, text in content(here / "out", bare=False).items() if b".results" in text}
    assert not told
    assert ".results" not in capsys.readouterr().out
    if command == "models":
        assert "m1" in (here / "out/report.md").read_text()


class KilledError(BaseException):
    pass


def killed_at_move(at: int, words: tuple[str, ...]) -> None:
    """Run a command that is killed at so manieth a move: the folder, and then files."""
    rename, moved = os.rename, 0

    def ending(*given: Any, **more: Any) -> None:
        nonlocal moved
        moved += 1
        if moved == at:
            raise KilledError
        rename(*given, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "rename", ending)
        with pytest.raises(KilledError):
            main([*words])


def test_what_a_kill_left_half_moved_is_put_back_before_a_folder_is_claimed(here):
    """A kill that comes while files are moved is met by whichever command writes there next."""
    words = COMMANDS["compare"]
    killed_at_move(3, words)
    assert (here / "out" / MOVING).is_dir()
    main([*words])
    assert sorted(content(here / "out")) == ["compare.json", "disagreements.jsonl"]
    assert not (here / "out" / MOVING).exists()


READERS = {
    "report": ("report", "out", "--output-dir", "page"),
    "compare": ("compare", "out"),
    "report of one": ("report", "out/m1", "--output-dir", "page"),
    "compare of both": ("compare", "out/m1", "out/m2/eval.scores.jsonl"),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_a_kill_left_half_moved_is_put_back_before_it_is_read(here, reader, capsys, holder, monkeypatch):
    monkeypatch.setattr(placing, "MOVES_FOR_S", 0.1)
    words = COMMANDS["models"]
    main([*words])
    kept = content(here / "out", bare=False)
    killed_at_move(5, (*words, "--overwrite"))
    assert (here / "out" / MOVING).is_dir()
    holds = holder(here / "out")
    said = refused(READERS[reader], capsys)
    assert "out: a command that replaces the results there has moved only some of them so far, or was killed" in said
    assert "is being written by process" in said
    holds.kill()
    holds.wait()
    main([*READERS[reader]])
    assert content(here / "out", bare=False) == kept


@pytest.mark.soak
@pytest.mark.parametrize("command", ["models", "calibrate", "probe", "compare"])
def test_killed_at_writes_each_begins_anew(inputs, tmp_path, command, monkeypatch) -> None:
    words = COMMANDS[command]
    prepared(inputs, tmp_path / "whole", monkeypatch)
    main([*words])
    number = writes_of((*words, "--overwrite"), monkeypatch)
    wanted = content(tmp_path / "whole/out")
    places = sorted({1 + k * (number - 1) // 7 for k in range(8)})
    for place in places:
        prepared(inputs, tmp_path / str(place), monkeypatch)
    told = run_program(KILLED_AT_WRITES, [str(tmp_path), ",".join(map(str, places)), *words])
    statuses = dict(line.split() for line in told.stdout.splitlines() if re.fullmatch(r"\d+ -?\d+", line))
    assert statuses == {str(place): str(-signal.SIGKILL) for place in places}, told.stdout + told.stderr
    for place in places:
        monkeypatch.chdir(tmp_path / str(place))
        main([*words])
        assert content(tmp_path / str(place) / "out") == wanted, place
