"""Settings by their names: unknown ones are refused with the nearest, also where Python builds a configuration."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

import rewardlab
from rewardlab.commands.training import parse_train
from rewardlab.core.config import from_mapping, read_settings, settings_of, to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.other_names import ALSO_CALLED, SETTLED
from rewardlab.data.config import RenderingConfig, TrainingDataConfig
from rewardlab.evaluation.config import EvalConfig
from rewardlab.gold.sampling.config import SampleConfig
from rewardlab.probing.config import ProbeConfig
from rewardlab.training.settings.config import RewardTrainerConfig, RunConfig


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("learning_rate", "lr"),
        ("use_peft", "lora"),
        ("max_length", "max_seq_len"),
        ("rm_eval_thresholds", "thresholds"),
        ("profile_gpu", "profile_memory"),
        ("load_best_model_at_end", "early_stopping_metric"),
        ("dataset_num_proc", "num_workers"),
        ("label_smothing", "label_smoothing"),
        ("tokenizer_chat_template", "chat_template"),
        ("l2", "weight_decay"),
    ],
)
def test_an_unknown_keyword_names_the_nearest_setting(name, near):
    message = rf"RewardTrainerConfig: unknown setting '{name}'\. Did you mean '{near}'\?"
    with pytest.raises(ConfigError, match=message):
        RewardTrainerConfig.of(model="m", dataset=("d",), **{name: 1})
    with pytest.raises(ConfigError, match=rf"run\.yaml: unknown setting '{name}'\. Did you mean '{near}'\?"):
        from_mapping(RewardTrainerConfig, {name: 1}, where="run.yaml")


@pytest.mark.parametrize("kind", [EvalConfig, ProbeConfig])
def test_other_configurations_suggest_only_what_they_have(kind):
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__}: unknown setting 'dataset_name'\. Did you mean 'dataset'\?"
    ):
        kind.of(dataset_name="x")
    with pytest.raises(ConfigError) as error:
        kind.of(learning_rate=1)
    assert "'lr'" not in str(error.value)


def test_every_other_name_is_one_of_a_setting_and_not_itself_one():
    known = {*settings_of(RewardTrainerConfig), *settings_of(SampleConfig)}
    assert set(ALSO_CALLED.values()) <= known
    assert not known & set(ALSO_CALLED)


@pytest.mark.parametrize("name", SETTLED)
def test_a_setting_of_another_trainer_that_is_none_here_is_answered_with_what_holds(name):
    with pytest.raises(ConfigError) as error:
        RewardTrainerConfig.of(model="m", dataset=("d",), **{name: 1})
    assert str(error.value) == f"RewardTrainerConfig: unknown setting '{name}'. {SETTLED[name]}"
    with pytest.raises(ConfigError, match=r"unknown flag '--.*'\. [A-Z`]"):
        parse_train([f"--{name.replace('_', '-')}"])


@pytest.mark.parametrize("value", [None, "none"])
def test_no_schedule_is_a_constant_rate(value):
    with pytest.raises(ConfigError, match=r"lr_scheduler: .* Did you mean 'constant'\?"):
        RewardTrainerConfig.of(model="m", dataset=("d",), lr_scheduler=value)


def test_the_settings_that_these_answers_name_exist():
    known = {f"--{name.replace('_', '-')}" for name in settings_of(RewardTrainerConfig)}
    assert set(re.findall(r"--[a-z-]+", " ".join(SETTLED.values()))) <= known
    assert not known & {f"--{name.replace('_', '-')}" for name in SETTLED}


def test_a_configuration_is_made_by_flat_names_and_changed_by_them():
    config = RewardTrainerConfig.of(model="m", dataset=("d",))
    assert config.replace(lr=1e-3).optimizer.lr == 1e-3
    assert pickle.loads(pickle.dumps(config)) == config
    assert "label_smoothing" in inspect.signature(RewardTrainerConfig.of).parameters


def test_settings_of_names_and_values_may_be_mappings(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "map-label: {A: 1, 2: 0, true: 0.5, tie: '5e-1'}\nattributes: {helpfulness: 1, coherence: 0.5}\n"
        "template_arguments: {enable_thinking: false, version: '3'}\n"
    )
    made = from_mapping(
        RewardTrainerConfig, {"model": "m", "dataset": "d"} | read_settings(tmp_path / "run.yaml"), where=""
    )
    said = to_mapping(made)
    assert said["map_label"] == ["A=1", "2=0", "true=0.5", "tie=5e-1"]
    assert said["attributes"] == ["helpfulness=1", "coherence=0.5"]
    assert said["template_arguments"] == ["enable_thinking=false", 'version="3"']
    with pytest.raises(ConfigError, match="--map-label A=null: wanted NAME=NUMBER"):
        RewardTrainerConfig.of(model="m", dataset=("d",), map_label={"A": None})
    with pytest.raises(ConfigError, match="dataset: expected str, got"):
        RewardTrainerConfig.of(model="m", dataset={"d": 1})


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (rewardlab.train, RewardTrainerConfig),
        (rewardlab.probe, ProbeConfig),
        (rewardlab.evaluate_folder, EvalConfig),
    ],
)
def test_settings_in_a_dict_are_refused_with_what_makes_a_configuration_of_them(function, kind):
    # Unwrapped, since the tests check types at run time, which users do not.
    function = inspect.unwrap(function)
    name = kind.__name__
    with pytest.raises(ConfigError, match=rf"got \{{'model': 'x'\}}, a dict; wanted a {name}\. Pass {name}\.of\(\*\*"):
        function({"model": "x"})
    other = ProbeConfig.of(model="x") if kind is RewardTrainerConfig else RewardTrainerConfig.of(model="x")
    with pytest.raises(ConfigError, match=rf"a {type(other).__name__}; wanted a {name}"):
        function(other)


def test_paths_and_numbers_of_numpy_are_taken_as_python_code_has_them():
    numbers = {"steps": np.int64(3), "lr": np.float64(1e-3), "lora": np.bool_(True)}
    config = RewardTrainerConfig.of(model=Path("models/mine"), dataset=Path("a.jsonl"), **numbers)

    assert config == RewardTrainerConfig.of(model="models/mine", dataset="a.jsonl", steps=3, lr=1e-3, lora=True)
    assert [type(value) for value in (config.model.model, config.run.steps, config.model.lora)] == [str, int, bool]
    for wrong in ({"steps": np.float64(3)}, {"steps": np.bool_(True)}, {"lr": np.float64("nan")}):
        with pytest.raises(ConfigError, match=f"RewardTrainerConfig: {next(iter(wrong))}: expected"):
            RewardTrainerConfig.of(model="m", dataset="d", **wrong)


def test_a_value_in_other_letters_is_the_one_that_was_meant():
    with pytest.raises(ConfigError, match=r"'Cosine' is not one of .* Did you mean 'cosine'\?"):
        RewardTrainerConfig.of(model="m", dataset="d", lr_scheduler="Cosine")


def holding(section, name, value):
    """A section with a value of any type, as users can build one: the tests check types at run time."""
    object.__setattr__(section, name, value)
    return section


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        (TrainingDataConfig(), "hf_split", 3, "TrainingDataConfig: hf_split: expected str, got 3"),
        (RenderingConfig(), "truncation", "left", "RenderingConfig: truncation: 'left' is not one of"),
        *[
            (RenderingConfig(), "max_seq_len", value, "RenderingConfig: max_seq_len: expected int or 'auto' or 'model'")
            for value in ("512", "long", 512.5, None, True)
        ],
    ],
)
def test_a_section_refuses_a_value_of_another_type_by_its_setting(section, name, value, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        holding(section, name, value).__post_init__()


def test_a_section_converts_what_python_code_has():
    data, run = TrainingDataConfig(), RunConfig()
    for section, name, value in (
        (data, "dataset", Path("a.jsonl")),
        (data, "limit", np.int64(3)),
        (run, "output_dir", "~/a"),
    ):
        holding(section, name, value).__post_init__()
    assert (data.dataset, data.limit, type(data.limit)) == (("a.jsonl",), 3, int)
    assert run.output_dir == Path.home() / "a"
