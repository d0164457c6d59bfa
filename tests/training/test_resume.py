"""An interrupted run goes on as if nothing had happened (law 9), or says why it cannot."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import runs
from conftest import make_model, write_base_model, write_pairs
from rewardlab.artifact.load import load
from rewardlab.cli import main, parse_train
from rewardlab.core.errors import ArtifactError, ConfigError, DataError, RunInterrupted
from rewardlab.training import resume
from rewardlab.training.checkpoint import newest_checkpoint
from rewardlab.training.config import OptimizerConfig, RewardTrainerConfig
from rewardlab.training.interrupt import StopRequests
from rewardlab.training.optimizer import (
    build_optimizer,
    create_state,
    optimizer_numbers,
    restore_numbers,
    training_tensors,
)
from rewardlab.training.run import train
from rewardlab.training.run_folder import saved_step
from rewardlab.training.schedule import build_schedule, seek
from rewardlab.training.trainer import Trainer
from runs import history_of, rows_of

pytestmark = pytest.mark.usefixtures("verified_here")
config_for = partial(runs.config_for, steps=8, log_every=3, eval_every=2, save_every=4, checkpoint_every=2)
KINDS = {
    "full": {},
    "lora": {"lora": True, "lora_rank": 2},
    "lora with dropout": {"lora": True, "lora_rank": 2, "lora_dropout": 0.3},
    "padded": {"attention": "padded"},
    "dora and norms": {"lora": True, "lora_rank": 2, "dora": True, "lora_modules_to_save": ("norm",)},
    "adafactor": {"optimizer": "adafactor", "lr": 1e-2},
    "two rates": {"differential_lr": True},
    "a rate far too high": {"lr": 3.0, "max_grad_norm": 100.0, "log_every": 1},
}


def stop_after(monkeypatch, step, *, how=signal.SIGUSR1):
    """Let a signal arrive while the step that ends as `step` is computed."""
    train_step = Trainer.train_step

    def computes(trainer, batches):
        if trainer.step + 1 == step:
            signal.raise_signal(how)
        return train_step(trainer, batches)

    monkeypatch.setattr(Trainer, "train_step", computes)
    return train_step


def run_in_parts(config, stops, monkeypatch, **changes):
    """The run of `config`, interrupted after each of these steps and resumed."""
    for step in stops:
        with monkeypatch.context() as patched:
            stop_after(patched, step)
            with pytest.raises(RunInterrupted, match=f"stopped by SIGUSR1 after step {step} of 8. .*--resume auto"):
                train(config)
        config = replace(config, resume="auto", **changes)
    return train(config)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def require_same_runs(first: Path, second: Path) -> None:
    """Everything that a run leaves, but for what depends on the clock."""
    assert history_of(first) == history_of(second)
    for name in ("reward_distributions.json", "samples.txt", "warnings.jsonl"):
        assert (first / name).read_text() == (second / name).read_text()
    evaluations = {path.name for path in (first / "evals").iterdir()}
    assert evaluations == {path.name for path in (second / "evals").iterdir()}
    for name in evaluations:
        assert (first / "evals" / name).read_text() == (second / "evals" / name).read_text()
    folders = {path.name for path in first.iterdir() if path.is_dir()}
    assert folders == {path.name for path in second.iterdir() if path.is_dir()}
    for name in folders - {"evals", "checkpoints"}:
        ours, theirs = weights_of(first / name), weights_of(second / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name
        steps = {
            json.loads((run / name / "reward_spec.json").read_text())["provenance"]["step"] for run in (first, second)
        }
        assert len(steps) == 1, name
    assert [path.name for path in (second / "checkpoints").iterdir()] == ["step_8"], "one of a finished run"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_parts_is_the_run_in_one_piece(kind, base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "whole", train_eval_limit=4, **KINDS[kind])
    train(config)
    run_in_parts(replace(config, output_dir=tmp_path / "parts"), [1, 3, 4], monkeypatch)
    require_same_runs(tmp_path / "whole", tmp_path / "parts")
    manifest = json.loads((tmp_path / "parts/manifest.json").read_text())
    assert [entry["step"] for entry in manifest["resumed"]] == [1, 3, 4]


def test_dropout_would_tell_a_run_that_draws_anew(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "whole", **KINDS["lora with dropout"])
    train(config)
    draws = iter(range(1000))
    monkeypatch.setattr("rewardlab.training.trainer.seed_of_step", lambda *_: next(draws))
    train(replace(config, output_dir=tmp_path / "other"))
    assert history_of(tmp_path / "whole") != history_of(tmp_path / "other")


def test_a_process_that_is_killed_anywhere_loses_nothing(base_model, pairs_file, tmp_path):
    """Processes kill themselves at random points, many while they write; the next one always goes on."""
    config = config_for(base_model, pairs_file, tmp_path / "whole", steps=12, checkpoint_every=1)
    lora = replace(config, lora=True, lora_rank=2, output_dir=tmp_path / "whole-lora", max_grad_norm=0.5)
    soak = Path(__file__).with_name("soak.py")
    for whole in (config, lora):
        train(whole)
        folder = tmp_path / f"parts-{whole.lora}"
        settings = tmp_path / "settings.json"
        settings.write_text(json.dumps(runs.settings_of(replace(whole, output_dir=folder, resume="auto"))))
        answer = subprocess.run(
            [sys.executable, str(soak), str(settings), "40", str(int(whole.lora))],
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        found = json.loads(answer.stdout.splitlines()[-1])
        assert found["kills"] >= 10
        assert found["while saving"] >= 3
        assert history_of(whole.output_dir) == history_of(folder)
        for name in ("best", "step_12", "step_4"):
            ours, theirs = weights_of(whole.output_dir / name), weights_of(folder / name)
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert not [path for path in folder.rglob("*") if ".tmp-" in path.name or ".old-" in path.name]


def interrupted(base_model, pairs_file, folder, monkeypatch, *, step=5, **changes) -> RewardTrainerConfig:
    """A run stopped after a step, and the configuration that goes on with it."""
    config = config_for(base_model, pairs_file, folder, **changes)
    with monkeypatch.context() as patched:
        stop_after(patched, step)
        with pytest.raises(RunInterrupted):
            train(config)
    return replace(config, resume="auto")


def test_a_damaged_checkpoint_is_told_and_the_one_before_it_taken(base_model, pairs_file, tmp_path, monkeypatch, log):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_4", "step_5"]
    (file,) = (tmp_path / "run/checkpoints/step_5/tensors").glob("__0_*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    train(config)
    assert "step_5 is damaged (tensors/__0_0.distcp is not what was written)" in log.text
    assert "checkpoints/step_4, after step 4" in log.text
    whole = replace(config, resume=None, output_dir=tmp_path / "whole")
    train(whole)
    assert history_of(tmp_path / "run") == history_of(tmp_path / "whole")


def test_nothing_but_damaged_checkpoints_is_an_error(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    for folder in (tmp_path / "run/checkpoints").iterdir():
        (folder / "state.json").write_text("{}")
    with pytest.raises(ArtifactError, match="every checkpoint of .* is damaged. Restore .* or start again"):
        train(config)


@pytest.mark.parametrize("missing", ["best", "step_4", "metrics.csv", "reward_distributions.json"])
def test_what_was_still_to_be_written_after_the_checkpoint_is_written(
    missing, base_model, pairs_file, tmp_path, monkeypatch
):
    """As after a kill between a checkpoint and what follows it."""
    config = config_for(base_model, pairs_file, tmp_path / "whole", lr=1e-3)
    result = train(config)
    assert result.best_step is not None
    parts = replace(config, output_dir=tmp_path / "parts")
    with monkeypatch.context() as patched:
        stop_after(patched, 4 if missing == "step_4" else result.best_step)
        with pytest.raises(RunInterrupted):
            train(parts)
    path = tmp_path / "parts" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    train(replace(parts, resume="auto"))
    if missing == "reward_distributions.json":  # what came before is gone; what comes after is there
        assert "8" in json.loads(path.read_text())
    else:
        require_same_runs(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_is_judged_again_and_stays_as_it_was(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=4)
    train(config)
    before = history_of(tmp_path / "run"), weights_of(tmp_path / "run/step_4")
    train(replace(config, resume="auto"))
    after = history_of(tmp_path / "run"), weights_of(tmp_path / "run/step_4")
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])


def test_a_run_that_stopped_early_stays_stopped(base_model, pairs_file, tmp_path, log):
    config = config_for(base_model, pairs_file, tmp_path / "run", lr=1e-9, early_stopping_patience=1, eval_every=1)
    train(config)
    stopped = len(rows_of(tmp_path / "run"))
    assert stopped < 9
    log.clear()
    train(replace(config, resume="auto"))
    assert len(rows_of(tmp_path / "run")) == stopped
    assert "STOP" in log.text


def test_auto_begins_where_there_is_nothing_yet(base_model, pairs_file, tmp_path, log):
    train(config_for(base_model, pairs_file, tmp_path / "run", steps=2, resume="auto"))
    assert "no run in" in log.text
    assert (tmp_path / "run/step_2").exists()


def test_auto_begins_again_a_run_that_was_killed_before_its_first_checkpoint(
    base_model, pairs_file, tmp_path, monkeypatch, log
):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, step=1, save_every=None, eval_every=8)
    shutil.rmtree(tmp_path / "run/checkpoints")
    train(config)
    assert "had not come to a checkpoint; it begins again" in log.text


def test_auto_does_not_replace_a_run_that_has_models_but_no_checkpoints(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=2, checkpoints=False)
    train(config)
    assert not (tmp_path / "run/checkpoints").exists()
    with pytest.raises(ConfigError, match="a run without checkpoints, so it cannot be resumed"):
        train(replace(config, resume="auto"))
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        train(replace(config, resume="auto"))
    assert load(tmp_path / "run/step_2")


REFUSED = {
    "lr": ({"lr": 1e-3}, r"--lr 0.001, it was 0.003. Give the settings that the run began with"),
    "batch size": ({"batch_size": 4}, r"--batch-size 4, it was 8"),
    "seed": ({"seed": 1}, r"--seed 1, it was 0"),
    "length": ({"steps": 10}, r"--steps 10, it was 8. The learning rate of every step .* step 5 on with --reschedule"),
    "schedule": ({"lr_scheduler": "linear"}, r"--lr-scheduler linear, it was cosine"),
    "several": ({"beta": 2.0, "weight_decay": 0.0}, r"--beta 2.0, it was 1.0; --weight-decay 0.0, it was 0.01"),
    "metric": ({"early_stopping_metric": "eval_loss"}, r"--early-stopping-metric eval_loss, it was eval_accuracy"),
    "behind": ({"steps": 4, "reschedule": True}, r"--steps 4 is behind the checkpoint, which is at step 5"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_would_be_another_run_is_refused_by_name(change, base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    changes, message = REFUSED[change]
    with pytest.raises(ConfigError, match=message):
        train(replace(config, **changes))
    assert newest_checkpoint(tmp_path / "run").step == 5


def test_what_moves_no_weight_may_change_and_is_told(base_model, pairs_file, tmp_path, monkeypatch, log):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    log.clear()
    train(replace(config, log_every=1, micro_token_budget=300, early_stopping_patience=50, checkpoint_limit=1))
    assert "--log-every 1, it was 3" in log.text
    assert "--micro-token-budget 300, it was 256 (equal up to rounding from here on)" in log.text
    assert "--early-stopping-patience 50, it was None (which model is chosen may change)" in log.text
    assert json.loads((tmp_path / "run/config.json").read_text())["micro_token_budget"] == 300


def test_a_longer_run_takes_a_new_course_when_asked(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    train(replace(config, steps=12, reschedule=True))
    rates = {int(row["step"]): float(row["lr"]) for row in rows_of(tmp_path / "run") if row["lr"]}
    train(replace(config, steps=12, resume=None, output_dir=tmp_path / "long", warmup_steps=0))
    wanted = {int(row["step"]): float(row["lr"]) for row in rows_of(tmp_path / "long") if row["lr"]}
    assert {step: rates[step] for step in rates if step > 5} == {step: wanted[step] for step in wanted if step > 5}


def test_a_level_rate_needs_no_new_course(base_model, pairs_file, tmp_path, monkeypatch):
    level = {"lr_scheduler": "constant", "eval_every": 4}
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, **level)
    train(replace(config, steps=12))
    train(replace(config, steps=12, resume=None, output_dir=tmp_path / "long"))
    ours, theirs = weights_of(tmp_path / "run/step_12"), weights_of(tmp_path / "long/step_12")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_other_data_are_another_run(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    moved = tmp_path / "moved" / pairs_file.name
    moved.parent.mkdir()
    shutil.copy(pairs_file, moved)
    lines = pairs_file.read_text().splitlines(keepends=True)
    pairs_file.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(DataError, match="the training data are not what the run began with"):
        train(config)
    train(replace(config, dataset=(str(moved),)))


def test_another_base_model_under_the_same_name_is_noticed(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, **KINDS["lora"])
    path = base_model / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.mlp.up_proj.weight"].view(-1)[0] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match="the frozen weights of --model are not those that the run began with"):
        train(config)


def test_a_model_of_another_size_does_not_fit(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    other = write_base_model(tmp_path / "other", family="qwen2")
    with pytest.raises((ArtifactError, DataError), match=r"step_5 |not what the run began with"):
        train(replace(config, model=str(other)))


# --- asking for it, and asking a run to end ------------------------------------------------------------------


def ticking(stops: StopRequests) -> int:
    """How often it was asked."""
    vars(stops)["asked"] = vars(stops).get("asked", 0) + 1
    return vars(stops)["asked"]


def test_a_limit_in_hours_ends_a_run_with_a_status_of_its_own(base_model, pairs_file, tmp_path, monkeypatch, capsys):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--max-hours", "0.0000001"])
    assert ended.value.code == 1, "queued again, it would never end"
    assert "stopped by --max-hours 1e-07 after step 0 of 8. Not one step fitted" in capsys.readouterr().err
    monkeypatch.setattr(StopRequests, "reason", property(lambda stops: "--max-hours 1" if ticking(stops) > 12 else ""))
    with pytest.raises(SystemExit) as ended:
        main(["train", *words, "--overwrite"])
    assert ended.value.code == 75


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_signals_end_a_run_between_two_steps(how, status, base_model, pairs_file, tmp_path, monkeypatch, capsys):
    words = runs.words_of(config_for(base_model, pairs_file, tmp_path / "run"))
    before = signal.getsignal(how)
    with monkeypatch.context() as patched:
        stop_after(patched, 3, how=how)
        with pytest.raises(SystemExit) as ended:
            main(["train", *words])
    assert ended.value.code == status
    assert "after step 3 of 8. Start the same command again with --resume auto" in capsys.readouterr().err
    assert signal.getsignal(how) is before
    main(["train", *words, "--resume", "auto"])
    assert (tmp_path / "run/step_8").exists()


def test_a_second_signal_ends_the_process_as_ever(monkeypatch):
    monkeypatch.setattr(signal, "SIGUSR1", signal.SIGUSR1)
    with StopRequests() as stops:
        assert stops.reason == ""
        signal.raise_signal(signal.SIGTERM)
        assert stops.reason == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_checkpoints_a_run_says_that_it_cannot_go_on(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "run", checkpoints=False)
    stop_after(monkeypatch, 3)
    with pytest.raises(RunInterrupted, match="after step 3 of 8. It cannot go on from here: --no-checkpoints"):
        train(config)


@pytest.mark.parametrize("where", ["run", "run/checkpoints/step_4"])
def test_a_named_run_brings_its_settings(where, base_model, pairs_file, tmp_path, monkeypatch):
    interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    config = parse_train(["--resume", str(tmp_path / where), "--log-every", "1"])
    assert (config.batch_size, config.log_every, config.output_dir) == (8, 1, tmp_path / "run")
    train(config)
    assert (tmp_path / "run/step_8").exists()


def test_an_earlier_checkpoint_can_be_gone_back_to(base_model, pairs_file, tmp_path, monkeypatch, log):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    with monkeypatch.context() as patched:
        stop_after(patched, 5)
        with pytest.raises(RunInterrupted):
            train(replace(config, resume=str(tmp_path / "run/checkpoints/step_4")))
    assert "checkpoints/step_4, after step 4" in log.text
    assert newest_checkpoint(tmp_path / "run").step == 5
    train(config)
    train(replace(config, resume=None, output_dir=tmp_path / "whole"))
    assert history_of(tmp_path / "run") == history_of(tmp_path / "whole")


def test_a_course_that_is_given_up_leaves_no_checkpoint_and_no_best(base_model, pairs_file, tmp_path, log):
    config = config_for(base_model, pairs_file, tmp_path / "run", lr=1e-3, checkpoint_limit=9, eval_every=1)
    best = train(config).best_step
    assert best > 2
    checkpoints = tmp_path / "run/checkpoints"
    (last,) = checkpoints.iterdir()
    assert last.name == "step_8"
    short = replace(config, output_dir=tmp_path / "short", checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, 2)
        with pytest.raises(RunInterrupted):
            train(short)
    shutil.copytree(tmp_path / "short/checkpoints/step_2", checkpoints / "step_2")
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, 3)
        with pytest.raises(RunInterrupted):
            train(replace(config, resume=str(checkpoints / "step_2")))
    assert f"best/ is of step {best}, which lies ahead; it is removed" in log.text
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_2", "step_3"]
    assert not (tmp_path / "run/step_8").exists()
    train(replace(config, resume="auto"))
    assert saved_step(tmp_path / "run/best") == best


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": "auto", "overwrite": True}, "--resume goes on with a run and --overwrite replaces it"),
        ({"reschedule": True}, "--reschedule is about a run that goes on"),
        ({"resume": ""}, "--resume: the name is empty"),
        ({"max_hours": 0}, "--max-hours 0.0: must be above 0"),
        ({"checkpoint_limit": 0}, "--checkpoint-limit 0: must be at least 1"),
    ],
)
def test_settings_that_make_no_sense(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        RewardTrainerConfig(model="m", dataset=("d",), **changes)


def test_a_name_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="there is no run. Give the folder of a run"):
        parse_train(["--resume", str(tmp_path)])


def test_a_run_goes_on_in_its_own_folder(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    with pytest.raises(ConfigError, match="a run goes on in its own folder, .*run, not in --output-dir"):
        train(replace(config, resume=str(tmp_path / "run"), output_dir=tmp_path / "elsewhere"))


# --- the parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr"])
def test_a_rate_is_a_function_of_the_step(name):
    config = RewardTrainerConfig(model="m", dataset=("d",), lr_scheduler=name)

    def fresh():
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(parameters)])
        return optimizer, build_schedule(optimizer, config, 20)

    optimizer, schedule = fresh()
    for step in range(20):
        other, sought = fresh()
        seek(sought, step)
        assert sought.get_last_lr() == schedule.get_last_lr()
        assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        schedule.step()
        other.step()
        sought.step()
        assert sought.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("adamw", {"step", "exp_avg", "exp_avg_sq"}),
        ("adafactor", {"step", "row_var", "col_var", "variance"}),
        ("sgd", set()),
    ],
)
def test_making_state_moves_no_weight(name, kept):
    model = make_model()
    config = OptimizerConfig(optimizer=name, lr=0.1, weight_decay=0.1)
    optimizer = build_optimizer(model, config, lr=0.1, head=["head.weight"], decay_exempt=frozenset())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    held = [f"optimizer.{name}.step" for name in trainable if name != "head.weight"]
    create_state(optimizer, model, held)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any("head.weight" in name for name in training_tensors(model, optimizer) if "optimizer" in name)
    wanted = {f"model.{name}" for name in trainable}
    tensors = training_tensors(model, optimizer)
    assert wanted <= set(tensors)
    assert {name.rpartition(".")[2] for name in set(tensors) - wanted} == kept


def test_what_an_optimiser_keeps_as_plain_numbers_is_kept():
    model = make_model()
    optimizer = build_optimizer(model, OptimizerConfig(), lr=0.1, head=["head.weight"], decay_exempt=frozenset())
    create_state(optimizer, model, ["optimizer.head.weight.step"])
    optimizer.state[model.head.weight]["count"] = 7  # as bitsandbytes counts its steps
    numbers = optimizer_numbers(model, optimizer)
    assert numbers == {"head.weight.count": 7}
    optimizer.state[model.head.weight]["count"] = 0
    restore_numbers(model, optimizer, json.loads(json.dumps(numbers)))
    assert optimizer.state[model.head.weight]["count"] == 7


def test_every_setting_is_of_one_kind():
    """A new setting is refused on resuming until somebody decides otherwise; one in two lists would be a riddle."""
    lists = (resume.PERMISSIONS, resume.BY_CONTENT, resume.FREE, resume.CADENCE, resume.ROUNDING, resume.LENGTH)
    names = [name for names in lists for name in names]
    assert len(names) == len(set(names))
    assert set(names) | set(resume.PROBED) <= set(RewardTrainerConfig.__dataclass_fields__)


def test_frozen_weights_are_known_by_every_bit():
    model = make_model(dtype=torch.float32)
    model.requires_grad_(False)
    before = resume.frozen_fingerprint(model)
    assert resume.frozen_fingerprint(model) == before
    with torch.no_grad():
        model.head.weight.view(-1)[0] = torch.nextafter(model.head.weight.view(-1)[0], torch.tensor(9.0))
    assert resume.frozen_fingerprint(model) != before


def test_no_warning_goes_unseen(base_model, pairs_file, tmp_path, monkeypatch, caplog):
    config = interrupted(base_model, write_pairs(tmp_path / "other.jsonl", 40), tmp_path / "run", monkeypatch)
    caplog.set_level(logging.WARNING, "rewardlab")
    caplog.clear()
    train(config)
    assert [record.message for record in caplog.records if "RESUME" in record.message] == []
