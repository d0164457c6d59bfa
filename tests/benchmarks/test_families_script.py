"""The script that tries every causal family: what it finds, and what it writes of it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import families
from harness import family_sizes
from rewardlab.core.errors import ModelError


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_families_train_and_what_has_no_tiny_model_is_told(tmp_path: Path, capsys):
    names = ["llama", "granite", "bert-generation", "clip"]
    status = families.main(["--families", *names, "--jobs", "2", "--results", str(tmp_path)])
    (record,) = tmp_path.glob("families.tiny.*.json")
    outcomes = {one["family"]: one for one in json.loads(record.read_text())["outcomes"]}
    assert status == 0
    assert list(outcomes) == names
    assert [outcomes[name]["kind"] for name in ("llama", "granite")] == ["transformers", "made"]
    assert all(outcomes[name][kind] == "ok" for name in ("llama", "granite") for kind in ("full", "lora"))
    assert outcomes["llama"]["layout"] == "shared"
    assert outcomes["bert-generation"]["full"].startswith("refused: ")
    assert outcomes["clip"]["not_built"]
    page = capsys.readouterr().out
    assert "2 families of 4 train" in page
    assert "`bert-generation`" in page.split("## Refused")[1]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("dies", "its process ended with status -9"),
        ("takes too long", "it took more than 1 s"),
        ("takes too much memory", "MemoryError"),
        ("is well", ""),
    ],
)
def test_a_family_that_brings_its_process_down_is_a_row(tmp_path: Path, how: str, said: str):
    def find(family: str, folder: Path) -> families.Outcome:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "takes too long":
            time.sleep(60)
        try:
            taken = bytearray(1 << 40) if how == "takes too much memory" else b""
        except MemoryError as error:
            return families.Outcome(family=family, full=f"crash: {type(error).__name__}: {folder.name}")
        return families.Outcome(family=family, full="ok" if not taken else "crash: no limit")

    outcome = families.apart(find, "llama", tmp_path, seconds=1.0 if how == "takes too long" else 60.0)
    assert outcome.family == "llama"
    assert said in outcome.full
    assert families.is_wrong(outcome, 1e-4) == (how != "is well")


def test_models_that_read_images_too_are_among_those_that_are_tried():
    config = family_sizes.config_of("mistral3")
    assert families.generating_class(config)._model_mapping[type(config)].__name__ == "Mistral3ForConditionalGeneration"
    assert config.text_config.hidden_size == config.vision_config.hidden_size == 32


def test_an_error_that_is_not_meant_for_users_fails_the_script(tmp_path: Path, monkeypatch):
    outcome = families.Outcome(family="llama")

    def broken(config: object) -> None:
        raise errors.pop(0)

    errors: list[Exception] = [ModelError("not this one"), KeyError("gate")]
    monkeypatch.setattr(families, "train", broken)
    outcome.full = families.tried(outcome, tmp_path, lora=False)
    assert outcome.full == "refused: not this one"
    assert not families.is_wrong(outcome, 1e-4)
    outcome.lora = families.tried(outcome, tmp_path, lora=True)
    assert outcome.lora == "crash: KeyError: 'gate'"
    assert families.is_wrong(outcome, 1e-4)


def test_scores_too_far_off_fail_the_script():
    assert families.is_wrong(families.Outcome(family="llama", full="ok", lora="ok", distance=2e-4), 1e-4)
    assert not families.is_wrong(families.Outcome(family="llama", full="ok", lora="ok", distance=1e-6), 1e-4)
