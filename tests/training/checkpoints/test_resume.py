"""An interrupted run goes on as if nothing had happened (law 9)."""

from __future__ import annotations

import itertools
import json
import logging
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import rewardlab.evaluation.evaluate as evaluate_module
import runs
from common import make_model, write_base_model, write_pairs
from harming import flip
from resuming import KINDS, config_for, interrupted, stop_after, weights_of
from rewardlab.artifact.load import load
from rewardlab.commands.training import parse_train
from rewardlab.core.errors import ArtifactError, ConfigError, RunInterrupted
from rewardlab.core.files import write_text
from rewardlab.core.run_folder import run_of
from rewardlab.core.spec import SPEC_FILE
from rewardlab.model.dropout import Draws
from rewardlab.training.checkpoints.checkpoint import newest_checkpoint
from rewardlab.training.loop import loss_scale
from rewardlab.training.loop import optimizer as optimizers
from rewardlab.training.loop.optimizer import (
    build_optimizer,
    create_state,
    optimizer_numbers,
    restore_numbers,
    training_tensors,
)
from rewardlab.training.loop.schedule import build_schedule, seek
from rewardlab.training.run import train
from rewardlab.training.settings.config import OptimizerConfig, RewardTrainerConfig
from runs import history_of, rows_of

pytestmark = pytest.mark.usefixtures("verified_here")


def run_in_parts(config, stops, monkeypatch, **changes):
    """The run of `config`, interrupted after each of these steps and resumed."""
    for step in stops:
        with monkeypatch.context() as patched:
            stop_after(patched, step)
            with pytest.raises(RunInterrupted, match=f"stopped by SIGUSR1 after step {step} of 8. .*--resume auto"):
                train(config)
        config = config.replace(resume="auto", **changes)
    return train(config)


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


QUICK = {"bf16", "lora with dropout"}
"""The states of all weights and of half precision, of adapters and of random numbers."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_a_run_in_parts_is_the_run_in_one_piece(kind, base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "whole", train_eval_limit=4, **KINDS[kind])
    train(config)
    stops = {"full": [1, 3, 4], "lora with dropout": [1, 4], "two rates": [3, 4]}.get(kind, [3])
    run_in_parts(config.replace(output_dir=tmp_path / "parts"), stops, monkeypatch)
    require_same_runs(tmp_path / "whole", tmp_path / "parts")
    manifest = json.loads((tmp_path / "parts/manifest.json").read_text())
    assert [entry["step"] for entry in manifest["resumed"]] == stops


@pytest.mark.slow
def test_the_loss_scale_of_float16_is_taken_up(base_model, pairs_file, tmp_path, monkeypatch, log):
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**30)  # too much, so that it moves
    config = config_for(base_model, pairs_file, tmp_path / "whole", **KINDS["fp16"])
    train(config)
    told = log.text.count("LOSS SCALE")
    assert told >= 2
    run_in_parts(config.replace(output_dir=tmp_path / "parts"), [1, 3], monkeypatch)
    assert log.text.count("LOSS SCALE") == 2 * told, "the same steps were computed again"
    require_same_runs(tmp_path / "whole", tmp_path / "parts")
    whole, parts = (newest_checkpoint(tmp_path / name).state["loss_scale"] for name in ("whole", "parts"))
    assert whole == parts != [2.0**30, 2.0**30, 0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("broken", [pytest.param({0}, marks=pytest.mark.slow), {0, 2}], ids=str)
def test_evaluations_that_are_no_numbers_are_taken_up(broken, base_model, pairs_file, tmp_path, monkeypatch):
    """The untrained model's too: then nothing has set the bar yet when the run is interrupted."""
    score, calls = evaluate_module.score_groups, iter(())

    def scores(*arguments, **options):
        found = score(*arguments, **options)
        return [one * math.nan for one in found] if next(calls, None) in broken else found

    monkeypatch.setattr(evaluate_module, "score_groups", scores)
    config = config_for(base_model, pairs_file, tmp_path / "whole", early_stopping_patience=9)
    calls = itertools.count(0, 2)
    train(config)
    calls = itertools.count(0, 2)
    run_in_parts(config.replace(output_dir=tmp_path / "parts"), [1, 3], monkeypatch)
    require_same_runs(tmp_path / "whole", tmp_path / "parts")
    evaluated = {int(row["step"]): row["eval_accuracy"] for row in rows_of(tmp_path / "parts") if row["eval_pairs"]}
    assert {step for step, accuracy in evaluated.items() if not accuracy} == broken


@pytest.mark.slow
def test_dropout_would_tell_a_run_that_draws_anew(base_model, pairs_file, tmp_path, monkeypatch):
    config = config_for(base_model, pairs_file, tmp_path / "whole", **KINDS["lora with dropout"])
    train(config)
    draws, begin = iter(range(1000)), Draws.begin
    monkeypatch.setattr(Draws, "begin", lambda self, batch, _, **how: begin(self, batch, (next(draws),), **how))
    train(config.replace(output_dir=tmp_path / "other"))
    assert history_of(tmp_path / "whole") != history_of(tmp_path / "other")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps", "kills"),
    [
        pytest.param("lora", 5, 4, id="short"),
        pytest.param("full", 20, 20, id="full", marks=pytest.mark.soak),
        pytest.param("lora", 20, 20, id="lora", marks=pytest.mark.soak),
    ],
)
def test_a_process_that_is_killed_anywhere_loses_nothing(kind, steps, kills, base_model, pairs_file, tmp_path):
    """Processes kill themselves at random points, many while they write; the next one always goes on."""
    whole = config_for(base_model, pairs_file, tmp_path / "whole", steps=steps, checkpoint_every=1, **KINDS[kind])
    whole = whole.replace(max_grad_norm=0.5)
    train(whole)
    folder, settings = tmp_path / "parts", tmp_path / "settings.json"
    settings.write_text(json.dumps(runs.settings_of(whole.replace(output_dir=folder, resume="auto"))))
    soak = Path(runs.__file__).with_name("soak.py")
    answer = subprocess.run(
        [sys.executable, str(soak), str(settings), str(int(kind == "lora"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["at a step"] >= kills // 5
    assert found["while writing"] >= kills * 2 // 5
    assert sum(found.values()) >= kills
    resumed = [entry["step"] for entry in json.loads((folder / "manifest.json").read_text())["resumed"]]
    assert resumed == sorted(resumed)
    assert len(set(resumed)) >= kills * 2 // 5, "all along the run"
    assert history_of(whole.run.output_dir) == history_of(folder)
    for name in ("best", f"step_{steps}", "step_4"):
        ours, theirs = weights_of(whole.run.output_dir / name), weights_of(folder / name)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert not [path for path in folder.rglob("*") if ".tmp-" in path.name or ".old-" in path.name]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_told_and_the_one_before_it_taken(base_model, pairs_file, tmp_path, monkeypatch, log):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_4", "step_5"]
    flip(tmp_path / "run/checkpoints/step_5/tensors/rank_0.safetensors")
    train(config)
    assert "step_5 is damaged (tensors/rank_0.safetensors does not match its checksum)" in log.text
    assert "checkpoints/step_4, after step 4" in log.text
    whole = config.replace(resume=None, output_dir=tmp_path / "whole")
    train(whole)
    assert history_of(tmp_path / "run") == history_of(tmp_path / "whole")


@pytest.mark.slow
def test_nothing_but_damaged_checkpoints_is_an_error(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    for folder in (tmp_path / "run/checkpoints").iterdir():
        (folder / "state.json").write_text("{}")
    with pytest.raises(ArtifactError, match="every checkpoint of .* is damaged. Restore .* or start again"):
        train(config)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> tuple[RewardTrainerConfig, int]:
    """(settings, best step) of a run that nothing interrupted, for tests that only read it."""
    folder = tmp_path_factory.mktemp("whole")
    base, pairs = write_base_model(folder / "base"), write_pairs(folder / "pairs.jsonl", 40)
    config = config_for(base, pairs, folder / "whole", lr=1e-3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rewardlab.training.run.verify_in_clean_process", lambda _: None)
        best_step = train(config).best_step
    assert best_step is not None
    return config, best_step


@pytest.fixture(scope="module")
def stopped_run(whole_run, tmp_path_factory) -> Callable[[int], RewardTrainerConfig]:
    """The settings of that run in a folder in which it was stopped after a step, as it was then."""
    config, _ = whole_run
    place = tmp_path_factory.mktemp("stopped")

    def stopped(step: int) -> RewardTrainerConfig:
        parts, kept = config.replace(output_dir=place / "parts"), place / f"after {step}"
        shutil.rmtree(place / "parts", ignore_errors=True)
        if not kept.exists():
            with pytest.MonkeyPatch.context() as patched:
                stop_after(patched, step)
                with pytest.raises(RunInterrupted):
                    train(parts)
            (place / "parts").rename(kept)
        shutil.copytree(kept, place / "parts")
        return parts

    return stopped


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "missing", [pytest.param("best", marks=pytest.mark.slow), "step_4", "metrics.csv", "reward_distributions.json"]
)
def test_what_was_still_to_be_written_after_the_checkpoint_is_written(missing, whole_run, stopped_run):
    """As after a kill between a checkpoint and what follows it."""
    config, best_step = whole_run
    parts = stopped_run(4 if missing == "step_4" else best_step)
    path = parts.run.output_dir / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    train(parts.replace(resume="auto"))
    require_same_runs(config.run.output_dir, parts.run.output_dir)


@pytest.mark.slow
def test_a_finished_run_is_judged_again_and_stays_as_it_was(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=4)
    train(config)
    before = history_of(tmp_path / "run"), weights_of(tmp_path / "run/step_4")
    train(config.replace(resume="auto"))
    after = history_of(tmp_path / "run"), weights_of(tmp_path / "run/step_4")
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])


@pytest.mark.slow
def test_a_run_that_stopped_early_stays_stopped(base_model, pairs_file, tmp_path, log):
    config = config_for(base_model, pairs_file, tmp_path / "run", lr=1e-9, early_stopping_patience=1, eval_every=1)
    train(config)
    stopped = len(rows_of(tmp_path / "run"))
    assert stopped < 9
    log.clear()
    train(config.replace(resume="auto"))
    assert len(rows_of(tmp_path / "run")) == stopped
    assert "STOP" in log.text


@pytest.mark.slow
def test_auto_begins_where_there_is_nothing_yet(base_model, pairs_file, tmp_path, log):
    train(config_for(base_model, pairs_file, tmp_path / "run", steps=2, resume="auto"))
    assert "no run in" in log.text
    assert (tmp_path / "run/step_2").exists()


@pytest.mark.slow
def test_auto_begins_again_a_run_that_was_killed_before_its_first_checkpoint(
    base_model, pairs_file, tmp_path, monkeypatch, log
):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, step=1, save_every=None, eval_every=8)
    shutil.rmtree(tmp_path / "run/checkpoints")
    train(config)
    assert "has no checkpoint yet; it begins again" in log.text


@pytest.mark.slow
def test_auto_does_not_replace_a_run_that_has_models_but_no_checkpoints(base_model, pairs_file, tmp_path):
    config = config_for(base_model, pairs_file, tmp_path / "run", steps=2, checkpoints=False)
    train(config)
    assert not (tmp_path / "run/checkpoints").exists()
    with pytest.raises(ConfigError, match="a run without checkpoints, so it cannot be resumed"):
        train(config.replace(resume="auto"))
    (tmp_path / "run/config.json").unlink()
    with pytest.raises(ConfigError, match="already holds a run"):
        train(config.replace(resume="auto"))
    assert load(tmp_path / "run/step_2")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["run", "run/checkpoints/step_4"])
def test_a_named_run_brings_its_settings(where, base_model, pairs_file, tmp_path, monkeypatch):
    interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    config = parse_train(["--resume", str(tmp_path / where), "--log-every", "1"])
    assert (config.run.batch_size, config.run.log_every, config.run.output_dir) == (8, 1, tmp_path / "run")
    train(config)
    assert (tmp_path / "run/step_8").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": "auto", "overwrite": True}, "--resume goes on with a run and --overwrite replaces it"),
        ({"reschedule": True}, "--reschedule is for resuming a run"),
        ({"resume": ""}, "--resume: the name is empty"),
        ({"max_hours": 0}, "--max-hours 0.0: must be above 0"),
        ({"checkpoint_limit": 0}, "--checkpoint-limit 0: must be at least 1"),
    ],
)
def test_settings_that_make_no_sense(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        RewardTrainerConfig.of(model="m", dataset=("d",), **changes)


def test_a_name_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="no run found there. Give the folder of a run"):
        parse_train(["--resume", str(tmp_path)])


def test_a_model_in_place_of_its_run_is_told_as_one(tmp_path):
    (tmp_path / "run/best").mkdir(parents=True)
    for name in ("config.json", SPEC_FILE):
        write_text(tmp_path / "run/best" / name, "{}")
    with pytest.raises(ConfigError, match=r"best: a model, not a run. Give its run's folder, .* --model .*best"):
        parse_train(["--resume", str(tmp_path / "run/best")])


def test_a_checkpoint_that_is_not_there_is_not_called_damaged(tmp_path):
    write_text(tmp_path / "config.json", "{}")
    with pytest.raises(ConfigError, match="step_8: no such checkpoint. There is none in .*checkpoints"):
        run_of(str(tmp_path / "checkpoints/step_8"))
    for step in (12, 4):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
    with pytest.raises(ConfigError, match="step_8: no such checkpoint. There is step_4, step_12 in .*checkpoints"):
        parse_train(["--resume", str(tmp_path / "checkpoints/step_8")])
    assert run_of(str(tmp_path / "checkpoints/step_4")) == tmp_path


@pytest.mark.parametrize("words", [["--resume", "None"], ["--resume=None"]])
def test_resuming_can_be_unset(words):
    assert parse_train(["--model", "m", "--dataset", "d", *words]).run.resume is None


def test_a_run_goes_on_in_its_own_folder(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    with pytest.raises(ConfigError, match="a run goes on in its own folder, .*run, not in --output-dir"):
        train(config.replace(resume=str(tmp_path / "run"), output_dir=tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "constant_with_warmup", "cosine_with_min_lr"])
def test_a_rate_is_a_function_of_the_step(name):
    config = RewardTrainerConfig.of(model="m", dataset=("d",), lr_scheduler=name)

    def fresh():
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1 * (n + 1)} for n, p in enumerate(parameters)])
        return optimizer, build_schedule(optimizer, config.schedule, 20)

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


class Counting(torch.optim.AdamW):
    """Counts its steps in a plain number, as bitsandbytes does, and moves the weights by it."""

    def step(self, closure=None):
        super().step(closure)
        for parameter, state in self.state.items():
            state["count"] = state.get("count", 0) + 1
            parameter.data.mul_(1 + 1e-3 * state["count"])


@pytest.mark.slow
def test_a_resumed_run_counts_on_in_plain_numbers(base_model, pairs_file, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizers, "_make", lambda _name, groups, lr: Counting(groups, lr=lr))
    config = config_for(base_model, pairs_file, tmp_path / "whole", **KINDS["full"])
    train(config)
    run_in_parts(config.replace(output_dir=tmp_path / "parts"), [3], monkeypatch)
    require_same_runs(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_no_warning_goes_unseen(base_model, pairs_file, tmp_path, monkeypatch, caplog):
    config = interrupted(base_model, write_pairs(tmp_path / "other.jsonl", 40), tmp_path / "run", monkeypatch)
    caplog.set_level(logging.WARNING, "rewardlab")
    caplog.clear()
    train(config)
    assert [record.message for record in caplog.records if "RESUME" in record.message] == []
