"""Commands that judge replace their own files, all of them, and nobody else's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import rewardlab
from common import make_model, make_tokenizer, write_pairs
from rewardlab.analysis.ensembles import COMBINATIONS
from rewardlab.artifact import calibrated as calibrated_module
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.run_folder import COMBINED, EVALUATION_FILES, claim_folder
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation.models import names_of
from rewardlab.serve.verifying.folder import verify


@pytest.fixture(autouse=True)
def _verified_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after storing, made in this process, where it is quick."""
    monkeypatch.setattr(calibrated_module, "verify_in_clean_process", rewardlab.verify)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models."""
    folder = tmp_path_factory.mktemp("models")
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    for number, name in enumerate(("a", "b")):
        model = make_model()
        torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(number))
        save_reward_model(folder / name, model, renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return [str(folder / name) for name in ("a", "b")]


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many pairs as a calibration needs."""
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl", 140)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    assert left.value.code == 2
    return capsys.readouterr().err


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()} - {".lock"}


def test_the_combinations_of_an_ensemble_are_among_the_names_that_are_claimed():
    assert tuple(COMBINATIONS) == COMBINED
    assert {f"ensemble.{how}.scores.jsonl" for how in COMBINATIONS} <= set(EVALUATION_FILES)


@pytest.mark.slow
def test_a_file_that_begins_with_ensemble_stays_where_several_models_are_judged(models, pairs_file, tmp_path):
    for name in ("ensemble.notes.txt", "ensembles.json"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "ensemble.old").mkdir()
    line = ["eval", *models, "--dataset", str(pairs_file), "--output-dir", str(tmp_path)]
    main(line)
    main([*line, "--overwrite"])
    assert (tmp_path / "ensemble.notes.txt").read_text() == (tmp_path / "ensembles.json").read_text() == "mine"
    assert (tmp_path / "ensemble.old").is_dir()


@pytest.mark.parametrize("name", ["fitted.scores.jsonl", "judged.metrics.json", "ensemble.mean.scores.jsonl"])
@pytest.mark.parametrize("command", ["eval", "calibrate"])
def test_a_file_of_a_name_that_is_written_is_refused_also_with_overwrite(
    models, pairs_file, tmp_path, capsys, command, name
):
    (tmp_path / name).write_text("mine")
    line = [command, models[0], "--dataset", pairs_file, "--output-dir", tmp_path, "--overwrite"]
    assert f"holds {name}, which `rewardlab eval` did not write" in refused(capsys, *line)
    assert (tmp_path / name).read_text() == "mine"


def test_a_folder_of_a_name_that_is_written_is_refused(models, pairs_file, tmp_path, capsys):
    (tmp_path / "models.json").mkdir()
    line = ["eval", models[0], "--dataset", pairs_file, "--output-dir", tmp_path]
    assert "models.json is a folder, and has the name of a file" in refused(capsys, *line)


@pytest.mark.slow
def test_nothing_of_what_was_judged_before_stays_beside_what_replaces_it(models, pairs_file, tmp_path):
    data = ["--dataset", str(pairs_file), "--output-dir", str(tmp_path / "out"), "--overwrite"]
    alone = ["--dataset", str(pairs_file), "--output-dir"]
    main(["eval", models[0], *alone, str(tmp_path / "one")])
    main(["eval", *models, *alone, str(tmp_path / "two")])
    main(["calibrate", models[0], *alone, str(tmp_path / "fit")])
    one, two, fit = (files(tmp_path / name) for name in ("one", "two", "fit"))
    assert "models.json" in two
    assert "models.json" not in one
    assert "eval.scores.jsonl" in one
    assert "eval.scores.jsonl" not in two | fit
    for command, wanted in (
        (["eval", *models], two),
        (["eval", models[0]], one),
        (["calibrate", models[0]], fit),
        (["eval", *models], two),
        (["calibrate", models[0]], fit),
        (["eval", models[0]], one),
    ):
        main([*command, *data])
        assert files(tmp_path / "out") == wanted


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/x/a_b-3", "/x/a b", "/x/a_b"], ["a_b-3", "a_b", "a_b-2"]),
        (["/x/a b", "/x/a_b-2", "/x/a_b"], ["a_b", "a_b-2", "a_b-3"]),
        (["/x/models.json", "/x/b"], ["models.json-2", "b"]),
    ],
)
def test_no_model_loses_its_name_to_another(folders, names):
    assert names_of(folders) == dict(zip(names, folders, strict=True))


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, another process holds the folder, as one that trains there does."""
    script = (
        "import sys, time; from pathlib import Path; from rewardlab.core.lock import only_process\n"
        "with only_process(Path(sys.argv[1]), '--output-dir'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate("")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("begun", [True, False])
def test_a_model_of_a_run_that_goes_on_is_not_replaced_by_a_calibrated_one(models, pairs_file, tmp_path, capsys, begun):
    run = tmp_path / "run"
    shutil.copytree(models[0], run / "best")
    if begun:
        (run / "manifest.json").write_text(json.dumps({"config_hash": "x", "provenance": {}}))
    before = (run / "best/reward_spec.json").read_bytes()
    line = ["calibrate", run / "best", "--dataset", pairs_file, "--output-dir", tmp_path / "out", "--overwrite"]
    for place in (run, run / "best"):
        with held(place):
            assert f"{place} is being written by process" in refused(capsys, *line, "--store")
            main(list(map(str, line)))  # which stores nothing
    assert (run / "best/reward_spec.json").read_bytes() == before
    main([*map(str, line), "--store"])
    assert (run / "best/reward_spec.json").read_bytes() != before
    verify(run / "best")


def test_the_lock_of_a_model_does_not_keep_a_new_run_out(models, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(models[0], run / "best")
    (run / "manifest.json").write_text(json.dumps({"config_hash": "x", "provenance": {}}))
    with held(run / "best"):
        pass
    claim_folder(run, (), overwrite=True)
