"""`diagnose --train --train-config FILE` trains as `rewardlab train --config FILE` does, and publishes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rewardlab.cli import main
from rewardlab.core.errors import ConfigError
from rewardlab.diagnosing import runs
from rewardlab.diagnosing.config import DiagnoseConfig
from rewardlab.diagnosing.run import _identity
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.presets import PRESETS


def configured(folder: Path, text: str) -> DiagnoseConfig:
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (folder / "run.yaml").write_text(text)
    data = (str(folder / "pairs.jsonl"),)
    return DiagnoseConfig.of(model="any", dataset=data, train=True, train_config=folder / "run.yaml")


def settings(folder: Path, text: str, control: str = "full") -> RewardTrainerConfig:
    made = runs._settings(configured(folder, text), control, 0, folder / "runs" / control / "seed_0", 1.0)
    assert made is not None
    return made


def test_a_preset_fills_in_its_settings(tmp_path):
    made = settings(tmp_path, "preset: proxy-rm\nlr: 0.001\n")
    assert (made.run.batch_size, made.learning_rate) == (PRESETS["proxy-rm"].settings["batch_size"], 0.001)


@pytest.mark.parametrize(
    "text", ["compat: trl\nper_device_train_batch_size: 4\n", "learning_rate: 1.0e-4\nper_device_train_batch_size: 4\n"]
)
def test_a_file_of_trl_is_read_with_its_conventions(text, tmp_path):
    made = settings(tmp_path, f"{text}dataset_name: theirs\nmodel_name_or_path: theirs\n")
    assert (made.run.compat, made.run.epochs, made.schedule.lr_scheduler) == ("trl", 3.0, "linear")
    assert (made.run.batch_size, made.learning_rate, made.data.rendering.truncation) == (4, 1e-4, "drop")
    assert (made.model.model, made.data.dataset) == ("any", (str(tmp_path / "pairs.jsonl"),))


def test_a_template_that_the_file_names_counts_by_its_content(tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}", encoding="utf-8")
    config = configured(tmp_path, f"chat_template: {template}\n")
    before = _identity(config)
    assert settings(tmp_path, f"chat_template: {template}\n").data.rendering.chat_template == "{{ messages }}"
    template.write_text("{{ messages[0] }}", encoding="utf-8")
    assert _identity(config) != before


def test_a_flag_that_gives_a_setting_its_default_wins_over_the_file(tmp_path, monkeypatch, capsys):
    text = "max_seq_len: 256\ntruncation: drop\nlr: 0.001\n"
    config, folder = configured(tmp_path, text), tmp_path / "runs"
    default = RewardTrainerConfig.of(model="any", output_dir=folder).data.rendering.max_seq_len
    of_file, of_flag = (runs._settings(config, "full", 0, folder, 1.0, given) for given in ((), ("max_seq_len", "lr")))
    assert (of_file.data.rendering.max_seq_len, of_flag.data.rendering.max_seq_len) == (256, default)
    assert (of_flag.data.rendering.truncation, of_flag.learning_rate) == ("drop", 0.001)
    assert _identity(config) == _identity(config, ("model", "dataset", "seeds", "eval_limit"))
    assert _identity(config) != _identity(config, ("max_seq_len",))
    words = f"--model any --dataset {tmp_path}/pairs.jsonl --train --train-config {tmp_path}/run.yaml"

    def told(config, given):
        raise ConfigError(" ".join(sorted(given)))

    monkeypatch.setattr("rewardlab.diagnosing.run.diagnose", told)
    with pytest.raises(SystemExit):
        main(["diagnose", *words.split(), "--max-seq-len", str(default)])
    assert capsys.readouterr().err == "error: dataset max_seq_len model train train_config\n"


def test_earlier_names_are_known(tmp_path):
    assert settings(tmp_path, "overlong: drop\n").data.rendering.truncation == "drop"


def test_the_model_itself_is_not_trained_as_a_control(tmp_path):
    with pytest.raises(ConfigError, match="diagnostic_mode: diagnose runs all controls"):
        settings(tmp_path, "diagnostic_mode: prompt_only\n")


def test_models_of_controls_go_to_no_server(tmp_path, log):
    made = settings(tmp_path, "steps: 3\npublish_to: http://127.0.0.1:9\npublish_every: end\n")
    assert made.publish.publish_to is None
    assert log.text.count("publish_to is left out") == 1


def test_runs_by_an_earlier_reading_of_a_preset_are_not_taken_for_those_of_today(tmp_path, monkeypatch):
    plain, named = (_identity(configured(tmp_path, text)) for text in ("steps: 3\n", "steps: 3\npreset: proxy-rm\n"))
    monkeypatch.setattr(runs, "Conventions", Blind)
    runs._as_train_reads.cache_clear()
    assert _identity(configured(tmp_path, "steps: 3\n")) == plain
    assert _identity(configured(tmp_path, "steps: 3\npreset: proxy-rm\n")) != named
    runs._as_train_reads.cache_clear()


class Blind:
    """Conventions that fill in nothing."""

    def translate(self, values, where):
        return dict(values)

    def complete(self, values):
        return values


def test_the_configuration_of_a_run_can_be_named(tmp_path):
    first = settings(tmp_path, "steps: 3\n")
    from rewardlab.core.config import to_mapping

    for given in (first, first.replace(resume=None, overwrite=True)):
        made = settings(tmp_path, json.dumps(to_mapping(given)))
        assert made == first


@pytest.mark.parametrize("own", [{"layers": ("1", "2")}, {"folds": 3}, {"kwise_weight": "comparison"}])
def test_settings_of_heads_are_refused_beside_training_runs(own):
    (name,) = own
    DiagnoseConfig.of(model="any", dataset=("x",), **own)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: is of heads"):
        DiagnoseConfig.of(model="any", dataset=("x",), train=True, **own)


def test_true_labels_choose_no_checkpoint_of_shuffled_ones(tmp_path):
    text = "steps: 200\neval_every: 10\nearly_stopping_patience: 2\n"
    asked = settings(tmp_path, text)
    assert (asked.run.interval(200), asked.run.early_stopping_patience) == (10, 2)
    shuffled = settings(tmp_path, text, "label_shuffle")
    assert shuffled.run.interval(200) > 200
    assert shuffled.run.early_stopping_patience is None
