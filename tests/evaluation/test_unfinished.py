"""What a command began to write and did not finish is replaced by the same command, and by no other."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common import make_model, make_tokenizer, write_pairs
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import main
from rewardlab.core.run_folder import clear_folder
from rewardlab.core.unfinished import MARK, are_unfinished, begin_results, end_results
from rewardlab.data.config import RenderingConfig
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation import calibrate, evaluate


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


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """As many pairs as a calibration needs."""
    return write_pairs(tmp_path / "pairs.jsonl", 140)


def full_from(times: int) -> Callable[..., None]:
    """What writes texts to a disk that is full at this call, counted from 1."""
    calls: list[Path] = []

    def write(folder: Path, *given: object, **more: object) -> None:
        calls.append(folder)
        if len(calls) >= times:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    return write


def ended(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    with pytest.raises(SystemExit):
        main(list(line))
    return capsys.readouterr().err


@pytest.mark.parametrize("several", [False, True])
def test_an_evaluation_that_a_full_disk_ended_is_begun_anew_by_the_same_command(
    several: bool, models: list[str], pairs_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    line = ["eval", *models[: 1 + several], "--dataset", str(pairs_file), "--no-precision-card"]
    line += ["--output-dir", str(out)]
    with monkeypatch.context() as full:
        full.setattr(evaluate, "write_mistakes", full_from(1 + several))
        assert "No space left on device. Make room there" in ended(capsys, *line)
    first = out / "a" if several else out
    assert (first / "manifest.json").is_file()
    assert "already holds an evaluation" in ended(capsys, *line, "--seed", "7")
    main(line)
    assert json.loads((first / "eval.metrics.json").read_text(encoding="utf-8"))
    assert not list(out.rglob(MARK))
    assert "already holds an evaluation" in ended(capsys, *line), "it is whole now"


def test_a_calibration_that_a_full_disk_ended_is_begun_anew_by_the_same_command(
    models: list[str], pairs_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "out"
    line = ["calibrate", models[0], "--dataset", str(pairs_file), "--output-dir", str(out)]
    with monkeypatch.context() as full:
        full.setattr(calibrate, "write_evaluation", full_from(1))
        ended(capsys, *line)
    other = ["eval", models[0], "--dataset", str(pairs_file), "--output-dir", str(out)]
    assert "already holds an evaluation" in ended(capsys, *other)
    main(line)
    assert "already holds an evaluation" in ended(capsys, *line), "it is whole now"


def test_a_mark_is_of_settings_whatever_they_say_of_overwriting(tmp_path: Path) -> None:
    assert not are_unfinished(tmp_path, {"dataset": "a"})
    begin_results(tmp_path, {"dataset": "a", "overwrite": True})
    assert are_unfinished(tmp_path, {"dataset": "a", "overwrite": False})
    assert not are_unfinished(tmp_path, {"dataset": "b", "overwrite": True})
    (tmp_path / MARK).write_text("{", encoding="utf-8")
    assert not are_unfinished(tmp_path, {"dataset": "a"})
    end_results(tmp_path)
    assert not (tmp_path / MARK).exists()


def test_a_run_that_takes_a_folder_over_takes_the_mark_away(tmp_path: Path) -> None:
    begin_results(tmp_path, {})
    (tmp_path / "manifest.json").write_text('{"config_hash": "", "provenance": {}, "data": {}}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model": "", "dataset": "", "output_dir": ""}', encoding="utf-8")
    clear_folder(tmp_path)
    assert not (tmp_path / MARK).exists()
