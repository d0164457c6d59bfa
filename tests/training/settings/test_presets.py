"""Presets: what they set and what they leave, that flag, file and Python agree, and that they hold what was run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from common import write_pairs
from rewardlab.commands.training import parse_train
from rewardlab.core.config import settings_of, to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_json
from rewardlab.data.config import TrainingDataConfig
from rewardlab.training.loop.losses import smooth
from rewardlab.training.loop.schedule import build_schedule, warmup_steps
from rewardlab.training.run import train
from rewardlab.training.settings.config import FULL_LR, LORA_LR, LossConfig, PresetName, RewardTrainerConfig
from rewardlab.training.settings.presets import PRESETS, fill, rate_notice
from runs import values_of

NAMED = {"model": "m", "dataset": ("d.jsonl",)}
LINE = ["--model", "m", "--dataset", "d.jsonl"]


def parsed(*words: str) -> RewardTrainerConfig:
    return parse_train([*LINE, *words])


def given(**settings: object) -> RewardTrainerConfig:
    return RewardTrainerConfig.of(**NAMED, **settings)


def said(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records]


# --- the presets themselves ----------------------------------------------------------------------------------


def test_the_names_are_those_that_the_setting_takes():
    assert get_args(PresetName) == ("none", *PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_holds_settings_that_can_be_used_as_they_stand(name):
    preset = PRESETS[name]
    config = given(preset=name)
    assert values_of(config, preset.settings) == dict(preset.settings)
    assert all(type(values_of(config, [setting])[setting]) is type(value) for setting, value in preset.settings.items())
    assert config == given().replace(preset=name, **preset.settings)
    assert preset.purpose
    assert preset.source


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_a_preset_says_nothing_of_model_data_and_folders_and_no_rate_without_its_kind_of_training(preset):
    about_data = set(settings_of(TrainingDataConfig)) - {"max_seq_len"}
    assert not about_data & set(preset.settings)
    assert not {"model", "output_dir", "overwrite", "seed", "precision", "preset", "compat"} & set(preset.settings)
    assert ("lr" in preset.settings) == ("lora" in preset.settings)


def test_the_best_run_of_the_study_is_what_it_was():
    config = given(preset="3b-lora-shp")
    assert (config.model.lora, config.model.lora_rank, config.model.lora_alpha, config.model.rslora) == (
        True,
        4,
        32.0,
        False,
    )
    assert (config.learning_rate, config.optimizer.weight_decay, config.run.batch_size, config.run.steps) == (
        5e-5,
        0.01,
        16,
        1000,
    )
    assert (config.schedule.lr_scheduler, warmup_steps(config.schedule, 1000)) == ("cosine", 50)
    assert (config.data.rendering.length_limit, config.loss.score_regularization_lambda, config.loss.beta) == (
        1024,
        0.1,
        1.0,
    )
    labels = torch.tensor([1.0, 0.0, 0.5, 0.8], dtype=torch.float64)
    theirs = labels * 0.95 + (1 - labels) * 0.05
    torch.testing.assert_close(smooth(labels, config.loss.label_smoothing), theirs, rtol=0, atol=1e-12)


def test_a_7b_model_gets_what_the_study_advises_and_otherwise_the_settings_of_the_3b_one():
    small, large = given(preset="3b-lora-shp"), given(preset="7b-lora-shp")
    advice = {"lr": 1e-5, "lora_rank": 16, "weight_decay": 0.05, "early_stopping_patience": 3}
    assert large == small.replace(preset="7b-lora-shp", **advice)


def test_the_proxy_has_the_settings_of_its_pipeline_in_trl():
    config = given(preset="proxy-rm")
    assert (config.model.lora, config.learning_rate, config.run.batch_size, config.run.epochs) == (False, 5e-6, 64, 1.0)
    assert (config.schedule.lr_scheduler, warmup_steps(config.schedule, 300)) == ("cosine", 15)
    assert (config.loss.label_smoothing, config.optimizer.weight_decay) == (0.0, 0.0)
    assert "--lr 5e-5 --epochs 2" in PRESETS["proxy-rm"].advice


def test_plain_is_bradley_terry_alone_at_a_constant_rate():
    config = given(preset="plain")
    bare = LossConfig(label_smoothing=0.0)
    assert config.loss == bare
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, config.schedule, 5)
    rates = []
    for _ in range(5):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == [1.0] * 5
    assert (config.run.early_stopping_patience, config.data.selection.baselines, config.model.lora) == (
        None,
        True,
        False,
    )


# --- what wins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_flag_file_and_python_say_the_same(name, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"preset: {name}\n")
    assert parsed("--preset", name) == parsed("--config", str(path)) == given(preset=name)


def test_flags_win_over_the_file_the_file_over_the_preset_and_the_preset_over_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: 3b-lora-shp\nlr: 2e-5\nlora_rank: 8\n")
    config = parsed("--config", str(path), "--lr", "1e-5")
    assert (
        config.optimizer.lr,
        config.model.lora_rank,
        config.loss.score_regularization_lambda,
        config.run.log_every,
    ) == (1e-5, 8, 0.1, 10)
    other = parsed("--config", str(path), "--preset", "7b-lora-shp")
    assert (other.run.preset, other.optimizer.lr, other.model.lora_rank, other.optimizer.weight_decay) == (
        "7b-lora-shp",
        2e-5,
        8,
        0.05,
    )
    with pytest.raises(ConfigError, match="--lora-rank 8: it needs adapters"):
        parsed("--config", str(path), "--preset", "none")
    assert parsed("--config", str(path), "--preset", "none", "--no-lora").model.lora is False


def test_a_default_that_is_given_stays():
    assert given().loss.label_smoothing != PRESETS["plain"].settings["label_smoothing"]
    assert parsed("--preset", "plain", "--label-smoothing", "0.05").loss.label_smoothing == 0.05
    assert given(preset="plain", label_smoothing=0.05).loss.label_smoothing == 0.05
    assert parsed("--preset", "7b-lora-shp", "--early-stopping-patience", "None").run.early_stopping_patience is None


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("3b-lora-shp --epochs 2", {"epochs": 2.0, "steps": None}),
        ("3b-lora-shp --steps None --epochs 2", {"epochs": 2.0, "steps": None}),
        ("3b-lora-shp --steps 10", {"steps": 10}),
        ("3b-lora-shp --warmup-steps 7", {"warmup_steps": 7, "warmup_ratio": None}),
        ("3b-lora-shp --lr-scheduler constant", {"lr_scheduler": "constant", "warmup_ratio": None}),
        ("3b-lora-shp --lr-scheduler linear", {"lr_scheduler": "linear"}),
        ("3b-lora-shp --no-lora", {"lora": False, "lr": None}),
        ("3b-lora-shp --no-lora --lr 1e-5", {"lora": False, "lr": 1e-5}),
        ("3b-lora-shp --lora", {}),
        ("full-finetuning --lora", {"lora": True, "lr": None}),
        ("full-finetuning --steps 10", {"steps": 10}),
        ("plain --lora", {"lora": True}),
        ("plain --lr-scheduler cosine --warmup-steps 50", {"lr_scheduler": "cosine", "warmup_steps": 50}),
    ],
)
def test_what_is_said_in_other_words_counts_as_given(line, changes):
    name, *words = line.split()
    assert parsed("--preset", name, *words) == given(preset=name).replace(**changes)


def test_the_rate_of_the_other_kind_of_training_is_its_default():
    assert parsed("--preset", "3b-lora-shp", "--no-lora").learning_rate == FULL_LR
    assert parsed("--preset", "full-finetuning", "--lora").learning_rate == LORA_LR


@pytest.mark.parametrize(("settings", "filled"), [({}, {}), ({"preset": "none"}, {}), ({"preset": ["plain"]}, {})])
def test_without_a_preset_nothing_is_filled_in(settings, filled):
    assert fill(settings) == filled


# --- refusals ------------------------------------------------------------------------------------------------


def test_a_preset_beside_other_conventions_is_refused_wherever_they_are_said(tmp_path):
    wanted = "--preset plain and --compat trl both say what holds .* Keep one"
    theirs, ours = tmp_path / "trl.yaml", tmp_path / "ours.yaml"
    theirs.write_text("model_name_or_path: m\ndataset_name: d\n")
    ours.write_text("preset: plain\ncompat: trl\n")
    for words in (["--compat", "trl", "--preset", "plain"], ["--config", str(ours)]):
        with pytest.raises(ConfigError, match=wanted):
            parsed(*words)
    with pytest.raises(ConfigError, match=wanted):
        parse_train(["--config", str(theirs), "--preset", "plain"])
    with pytest.raises(ConfigError, match=wanted):
        given(compat="trl", preset="plain")
    ours_again = parse_train(["--config", str(theirs), "--preset", "plain", "--compat", "none"])
    assert (ours_again.model.model, ours_again.schedule.lr_scheduler) == ("m", "constant")


def test_an_unknown_preset_is_refused_with_the_nearest(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("preset: proxy\n")
    with pytest.raises(ConfigError, match=r"--preset 7b-lora: must be one of .*Did you mean '7b-lora-shp'\?"):
        parsed("--preset", "7b-lora")
    with pytest.raises(ConfigError, match=r"run\.yaml: preset: 'proxy' is not one of .*Did you mean 'proxy-rm'\?"):
        parsed("--config", str(path))


def test_stopping_by_patience_needs_evaluation_data():
    with pytest.raises(ConfigError, match="--early-stopping-patience 3: without evaluation data"):
        parsed("--preset", "7b-lora-shp", "--eval-fraction", "0")
    assert (
        parsed("--preset", "7b-lora-shp", "--eval-fraction", "0", "--eval-split", "test").data.selection.eval_fraction
        == 0
    )


# --- what is said and kept -----------------------------------------------------------------------------------


def test_what_came_from_the_preset_and_what_was_given_instead_is_printed(log):
    parsed("--preset", "7b-lora-shp", "--lr", "2e-5", "--epochs", "2", "--no-rslora")
    what, sets, yours, advice = said(log)
    assert what == f"preset 7b-lora-shp: {PRESETS['7b-lora-shp'].purpose}"
    assert sets.startswith("preset 7b-lora-shp: sets --lora, --lora-target-modules all-linear, --lr-scheduler cosine")
    assert "--lora-rank 16" in sets
    assert "--lr " not in sets
    assert "--steps" not in sets
    assert yours.startswith("preset 7b-lora-shp: yours instead: ")
    assert "--lr 2e-05 (not --lr 1e-05)" in yours
    assert "--steps None (not --steps 1000)" in yours
    assert "--lora-rank" not in yours
    assert advice == f"preset 7b-lora-shp: {PRESETS['7b-lora-shp'].advice}"


def test_values_are_compared_as_they_are_meant_and_what_has_no_effect_is_not_listed(log, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 5e-5\nlora_target_modules: all-linear\nbatch_size: 16\n")  # YAML reads this rate as text
    parsed("--preset", "3b-lora-shp", "--config", str(path))
    assert not [line for line in said(log) if "yours instead" in line]
    log.clear()
    parsed("--preset", "3b-lora-shp", "--no-lora")
    assert "--lora-rank" not in " ".join(said(log))
    assert "yours instead: --no-lora (not --lora), --lr None (not --lr 5e-05)" in " ".join(said(log))


def test_without_a_preset_nothing_is_said(log):
    parsed()
    assert said(log) == []


@pytest.mark.parametrize("name", PRESETS)
def test_a_saved_configuration_gives_itself_and_nothing_is_filled_in_twice(name, tmp_path, log):
    first = parsed("--preset", name).replace(warmup_steps=50, warmup_ratio=None, lr_scheduler="linear", lr=3e-4)
    path = tmp_path / "config.json"
    write_json(path, to_mapping(first))
    log.clear()
    assert parse_train(["--config", str(path)]) == first
    assert said(log) == [f"preset {name}: fills in nothing, since everything is given"]
    assert parse_train(["--config", str(path), "--preset", "none"]) == first.replace(preset="none")
    other = next(preset for preset in PRESETS if preset != name)
    with pytest.raises(ConfigError, match=f"--preset {other} would change nothing: all its settings are given"):
        parse_train(["--config", str(path), "--preset", other])


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_a_run_keeps_the_name_of_its_preset_beside_settings_that_repeat_it(base_model, tmp_path):
    data = write_pairs(tmp_path / "pairs.jsonl", 40)
    flags = "--steps 2 --batch-size 4 --max-seq-len 128 --lr 1e-3 --precision fp32 --no-baselines"
    line = ["--preset", "0.5b-trial", "--model", str(base_model), "--dataset", str(data), *flags.split()]
    train(parse_train([*line, "--output-dir", str(tmp_path / "first")]))
    saved = json.loads((tmp_path / "first/config.json").read_text())
    settings = ("preset", "lora_rank", "early_stopping_patience", "steps", "warmup_steps", "lr", "label_smoothing")
    assert [saved[name] for name in settings] == ["0.5b-trial", 8, 5, 2, 0, 1e-3, 0.05]
    again = parse_train(["--config", str(tmp_path / "first/config.json"), "--output-dir", str(tmp_path / "second")])
    train(again)
    scores = [(tmp_path / name / "reward_distributions.json").read_text() for name in ("first", "second")]
    assert scores[0] == scores[1]
    second = json.loads((tmp_path / "second/config.json").read_text())
    assert second | {"output_dir": ""} == saved | {"output_dir": ""}


def test_a_copy_of_a_configuration_is_the_configuration():
    import copy
    import pickle

    config = given(preset="plain", lr=1e-4)
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.replace()):
        assert other == config
        assert vars(other) == vars(config)


def test_the_bounds_of_a_difference_under_score_regularisation_are_those_of_the_study():
    """With scores ±d/2 and λ the minimum is where σ(−d) = λd."""
    page = (Path(__file__).resolve().parents[3] / "docs/study.md").read_text(encoding="utf-8")
    for strength, difference in ((0.1, 1.63), (0.01, 3.36)):
        slopes = [1 / (1 + math.exp(d)) - strength * d for d in (difference - 0.005, difference + 0.005)]
        assert slopes[0] > 0 > slopes[1]
        assert f"{difference}" in page
    assert f"{1 / (1 + math.exp(-1.63)):.2f}" == "0.84"


def test_the_preset_for_7b_models_has_a_rate_of_which_nothing_is_said():
    own = PRESETS["7b-lora-shp"].settings
    assert not rate_notice(weights=7.6e9, lora=True, lr=own["lr"])
    assert "7.62 billion weights" in (said := rate_notice(weights=7.62e9, lora=True, lr=5e-5))
    assert f"--lr {own['lr']:g}" in said
    for other in ({"weights": 3.1e9}, {"lora": False}, {"lr": 2e-5}):
        assert not rate_notice(**{"weights": 7.62e9, "lora": True, "lr": 5e-5} | other)
