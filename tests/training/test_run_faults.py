"""Runs that cannot be: refused before any work, or ended without harm to what was there before."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

import rewardlab.training.run as run_module
import runs
from rewardlab.artifact import save as save_module
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.core.errors import ArtifactError, ConfigError, DataError, DiskFullError, ModelError
from rewardlab.core.files import read_json
from rewardlab.core.run_folder import ENDED
from rewardlab.report.folder import read_folder
from rewardlab.training.loop.trainer import Trainer
from rewardlab.training.run import train
from runs import rows_of

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, steps=6, log_every=2, eval_every=3, save_dtype="float32")


def test_unknown_target_modules_are_named(base_model, pairs_file, tmp_path):
    with pytest.raises(ModelError, match=r"--lora-target-modules nosuch: .*Layers of this model: .*q_proj"):
        train(config_for(base_model, pairs_file, tmp_path / "run", lora=True, lora_target_modules=("nosuch",)))


@pytest.mark.slow
def test_an_earlier_run_is_kept_unless_overwriting_is_asked_for(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=1)
    train(config)
    (tmp_path / "run/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already holds a run. Go on with it by --resume auto, choose another"):
        train(config)
    train(config.replace(overwrite=True, steps=2))
    assert (tmp_path / "run/notes.txt").exists()
    assert not (tmp_path / "run/step_1").exists()


@pytest.mark.slow
def test_a_folder_belongs_to_one_process_until_it_ends(base_model, pairs_file, tmp_path, holder, monkeypatch):
    monkeypatch.setattr("rewardlab.training.start.LOCK_WAIT_S", 0.1)
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=1)
    other = holder(tmp_path / "run")
    for asked in (config, config.replace(resume="auto"), config.replace(overwrite=True)):
        with pytest.raises(ConfigError, match=rf"run is being written by process {other.pid} on .*--output-dir"):
            train(asked)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    other.kill()
    other.wait()
    train(config)
    assert rows_of(tmp_path / "run")


def test_an_earlier_run_outlives_bad_input_to_the_run_that_would_replace_it(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=1)
    train(config)
    with pytest.raises(DataError):
        train(config.replace(overwrite=True, dataset=("nosuch.jsonl",)))
    assert load(tmp_path / "run/step_1")
    assert json.loads((tmp_path / "run/config.json").read_text())["overwrite"] is False


@pytest.mark.slow
def test_what_ends_a_run_is_kept_in_its_folder_until_it_goes_on(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=1)
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    assert read_json(tmp_path / "run" / ENDED) == {
        "error": "ZeroDivisionError", "text": "ZeroDivisionError: division by zero",
    }  # fmt: skip
    (tmp_path / "run" / ENDED).write_text('{"text": 3')
    assert any(f"{ENDED} cannot be read" in said for said in read_folder(tmp_path / "run").problems)
    train(config.replace(overwrite=True))
    assert not (tmp_path / "run" / ENDED).exists()


@pytest.mark.slow
def test_a_run_cannot_replace_the_model_it_starts_from(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=1)
    result = train(config)
    with pytest.raises(ConfigError, match="lies in the run that --output-dir .* would replace"):
        train(config.replace(model=str(result.last), overwrite=True))
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        train(config)
    assert load(result.last)


def test_a_split_of_a_lone_file_is_refused(base_model, pairs_file, tmp_path):
    for kind in ("eval", "test"):
        with pytest.raises(ConfigError, match=f"--{kind}-split: .*pairs.jsonl is one file .*--{kind}-dataset"):
            train(config_for(base_model, pairs_file, tmp_path / "run", **{f"{kind}_split": "test"}))


def test_a_limit_above_the_models_positions_is_refused(base_model, pairs_file, tmp_path):
    for length in (513, 1024):
        said = rf"--max-seq-len {length} is above the 512 positions of this model\. Use at most 512\.$"
        with pytest.raises(ConfigError, match=said):
            train(config_for(base_model, pairs_file, tmp_path / "run", max_seq_len=length))


def test_a_limit_that_trl_set_is_refused_with_where_it_is_from(base_model, pairs_file, tmp_path, capsys):
    command = ["train", "--model", str(base_model), "--dataset", str(pairs_file), "--compat", "trl"]
    is_default = "Where no length is given, --compat trl takes TRL's default of 1024."
    for flags, end in (([], f"Use at most 512. {is_default}"), (["--max-seq-len", "1023"], "Use at most 512.")):
        with pytest.raises(SystemExit):
            main([*command, "--output-dir", str(tmp_path / "run"), *flags])
        assert " ".join(capsys.readouterr().err.split()).endswith(f"is above the 512 positions of this model. {end}")


@pytest.mark.slow
def test_a_damaged_adapter_is_noticed(base_model, pairs_file, tmp_path):
    result = train(config_for(base_model, pairs_file, tmp_path / "run", steps=1, lora=True))
    with (result.last / "adapter/adapter_model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ArtifactError, match="adapter/adapter_model.safetensors was changed"):
        load(result.last)


@pytest.mark.slow
def test_a_full_disk_during_a_save_loses_nothing_of_the_previous_checkpoint(
    base_model, pairs_file, tmp_path, monkeypatch
):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=4, save_every=2)
    real = save_module.write_weights

    def full_on_the_second_step(path, *arguments, **more):
        if "step_4" in str(path):
            path.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        return real(path, *arguments, **more)

    def full_for_copies_too(source, target):
        if "step_4" in str(target):
            target.write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        return copy(source, target)

    copy = shutil.copy
    monkeypatch.setattr(save_module, "write_weights", full_on_the_second_step)
    monkeypatch.setattr(shutil, "copy", full_for_copies_too)
    with pytest.raises(DiskFullError) as full:
        train(config)
    folder = tmp_path / "run"
    assert str(full.value) == (
        f"{folder}: No space left on device while writing {folder / 'step_4'}. Make room there, or move the folder to "
        f"another disk; then --resume auto goes on from step 4. What was saved before is still there."
    )
    assert read_json(folder / ENDED) == {"error": "DiskFullError", "text": str(full.value)}
    assert isinstance(full.value, OSError), "as what the system refuses is everywhere else"
    assert not (folder / "step_4").exists()
    assert [path.name for path in folder.glob(".*")] == [".lock"]
    assert load(folder / "step_2")
    assert rows_of(folder)
    monkeypatch.undo()
    assert train(config.replace(resume="auto")).last_step == 4


@pytest.mark.slow
def test_replacing_best_keeps_the_old_one_until_the_new_one_is_whole(base_model, pairs_file, tmp_path, monkeypatch):
    result = train(config_for(base_model, pairs_file, tmp_path / "run", steps=1))
    scorer = load(result.last)
    digest = (result.last / "model.safetensors").read_bytes()
    monkeypatch.setattr(save_module, "make_canaries", lambda *_given: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        save_module.save_reward_model(
            result.last, scorer.model, scorer.renderer, beta=1.0, save_dtype=torch.float32, provenance={}
        )
    assert (result.last / "model.safetensors").read_bytes() == digest
    assert load(result.last)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": ("nosuch.jsonl",)}, DataError, "nosuch.jsonl"),
        ({"model": "nosuch/folder/anywhere"}, ModelError, "no model at 'nosuch/folder/anywhere'"),
        ({"max_seq_len": 20}, DataError, "cannot be used with --max-seq-len 20 .*Raise --max-seq-len"),
        ({"micro_token_budget": 16}, ConfigError, "above --micro-token-budget 16. Raise the budget to at least"),
        ({"eval_dataset": ("missing.jsonl",)}, DataError, "missing.jsonl"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(
    base_model, pairs_file, tmp_path, monkeypatch, changes, error, message
):
    monkeypatch.setattr(run_module, "load_reward_model", lambda *a, **k: pytest.fail("the model was loaded"))
    with pytest.raises(error, match=message):
        train(config_for(base_model, pairs_file, tmp_path / "run", **changes))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; the next test covers the message")
def test_a_folder_without_write_permission_is_refused(base_model, pairs_file, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="cannot write to .*--output-dir"):
        train(config_for(base_model, pairs_file, tmp_path / "locked/run"))


def test_an_output_folder_that_is_a_file_is_refused(base_model, pairs_file, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to .*Choose another place with --output-dir"):
        train(config_for(base_model, pairs_file, tmp_path / "file/run"))


@pytest.mark.slow
def test_a_reward_model_without_its_head_cannot_be_continued(base_model, pairs_file, tmp_path):
    from safetensors.torch import save_file

    result = train(config_for(base_model, pairs_file, tmp_path / "a", steps=1))
    weights = load_file(result.last / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, result.last / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"hold no score.weight, so its rewards are lost"):
        train(config_for(result.last, pairs_file, tmp_path / "b", steps=1))
    with pytest.raises(ArtifactError, match="the head, and so every reward, is lost"):
        load(result.last)
