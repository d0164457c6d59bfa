"""`rewardlab gold train`, and the files of `gold build` in TRL and here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import labelled
from rewardlab.cli import main
from rewardlab.commands.training import parse_train
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError, DataError
from rewardlab.gold.building.config import BuildConfig
from rewardlab.gold.building.run import build
from rewardlab.gold.files.inputs import InputConfig
from rewardlab.gold.training import next_step, train_arguments
from rewardlab.training.run import train


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder of `gold build` with both sides."""
    source = labelled.write(tmp_path / "labels.jsonl", labelled.rows(48))
    config = BuildConfig(
        inputs=InputConfig(input=(source,)), output_dir=tmp_path / "built", test_fraction=0.25, near="none"
    )
    return build(config).folder


def parsed(built: Path, *words: str) -> dict[str, Any]:
    """The settings of a run of `gold train`."""
    arguments = ["--data", str(built), "--model", "m", "--output-dir", "run", *words]
    return to_mapping(parse_train(train_arguments(arguments)))


def test_the_preset_is_that_of_the_pipeline(built):
    config = parsed(built)
    wanted = {"preset": "proxy-rm", "batch_size": 64, "epochs": 1.0, "lr": 5e-6, "lr_scheduler": "cosine"}
    wanted |= {"warmup_ratio": 0.05, "lora": False}
    wanted |= {"dataset": [str(built / "train.jsonl")], "test_dataset": [str(built / "test.jsonl")]}
    assert {name: config[name] for name in wanted} == wanted


def test_every_flag_wins_over_preset_and_data(built, tmp_path):
    config = parsed(built, "--lr", "5e-5", "--epochs=2", "--batch-size", "16", "--test-dataset", "other.jsonl")
    assert (config["lr"], config["epochs"], config["batch_size"]) == (5e-5, 2.0, 16)
    assert config["warmup_ratio"] == 0.05, "the rest is the preset's"
    assert config["test_dataset"] == ["other.jsonl"]
    assert parsed(built, "--preset", "plain")["preset"] == "plain"
    settings = tmp_path / "settings.yaml"
    settings.write_text("preset: plain\nbatch_size: 4\n")
    config = parsed(built, "--config", str(settings))
    assert (config["preset"], config["batch_size"]) == ("plain", 4)
    settings.write_text("batch_size: 4\n")
    config = parsed(built, f"--config={settings}")
    assert (config["preset"], config["batch_size"]) == ("proxy-rm", 4)
    assert train_arguments(["--resume", "runs/one", "--steps", "9"]) == ["--resume", "runs/one", "--steps", "9"]


def test_the_help_is_of_this_command_and_says_what_data_is(capsys):
    with pytest.raises(SystemExit):
        main(["gold", "train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: rewardlab gold train")
    assert "--data FOLDER names what `rewardlab gold build` wrote" in text
    assert "The preset is proxy-rm unless another is named" in text
    assert "--lora" in text


def test_nothing_held_out_means_no_test_data(tmp_path):
    source = labelled.write(tmp_path / "labels.jsonl", labelled.rows(20))
    folder = build(
        BuildConfig(inputs=InputConfig(input=(source,)), output_dir=tmp_path / "b", test_fraction=0.0)
    ).folder
    assert "--test-dataset" not in train_arguments(["--data", str(folder)])


def test_data_that_are_not_those_that_were_built_are_refused(built, tmp_path):
    with pytest.raises(ConfigError, match=r"--data is missing: .*gold build"):
        train_arguments(["--model", "m"])
    with pytest.raises(ConfigError, match="--data is missing, and there is no --data-path: name the folder"):
        train_arguments(["--data-path", "a", "--model", "m"])
    with pytest.raises(ConfigError, match="--data: name one folder"):
        train_arguments(["--data", "a", "--data=b"])
    with pytest.raises(ConfigError, match="--data: name one folder"):
        train_arguments(["--data", "--model", "m"])
    with pytest.raises(ConfigError, match="--dataset: --data .* names the training data"):
        parsed(built, "--dataset", "x.jsonl")
    with pytest.raises(ConfigError, match="not a folder that `rewardlab gold build` wrote"):
        train_arguments(["--data", str(tmp_path)])
    train = built / "train.jsonl"
    train.write_text("".join(train.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DataError, match=r"train\.jsonl: is not the file .*rewardlab train --preset proxy-rm"):
        train_arguments(["--data", str(built)])


def pairs_of(built: Path) -> list[tuple[Any, Any]]:
    """What both of the files for TRL are to hold."""
    pairs = []
    for row in labelled.lines(built / "labels.train.jsonl"):
        better = row["gold"].index(max(row["gold"]))
        chosen, rejected = (
            [*row["prompt"], {"role": "assistant", "content": row["responses"][number]}]
            for number in (better, 1 - better)
        )
        pairs.append((chosen, rejected))
    return pairs


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("form", ["lines", "columns"])
def test_trl_trains_on_the_files_as_they_are(built, base_model, tmp_path, form):
    pytest.importorskip("trl", reason='TRL is not installed (pip install "rewardlab[bench]")')
    from datasets import Dataset, load_dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    if form == "lines":
        lines = str(built / "train.trl.jsonl")
        data = load_dataset("json", data_files=lines, split="train", cache_dir=str(tmp_path / "cache"))
    else:
        data = Dataset.from_dict(json.loads((built / "train.columns.json").read_text()))
    assert data.column_names == ["chosen", "rejected"]
    assert [(row["chosen"], row["rejected"]) for row in data] == pairs_of(built)
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(base_model, num_labels=1),
        processing_class=tokenizer,
        train_dataset=data,
        args=RewardConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=2,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
    )
    assert len(trainer.train_dataset) == len(pairs_of(built)), "TRL leaves none out"
    rendered = [tokenizer.decode(row[side]) for row in trainer.train_dataset for side in ("chosen_ids", "rejected_ids")]
    wanted = [tokenizer.apply_chat_template(side, tokenize=False) for pair in pairs_of(built) for side in pair]
    assert [text.rstrip() for text in rendered] == [text.rstrip() for text in wanted]
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert math.isfinite(trainer.train().training_loss)
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_the_next_step_is_to_match_the_proxy_on_what_was_held_out(built, tmp_path):
    words = ["--data", str(built), "--model", "m"]
    run = tmp_path / "a run"
    assert next_step([*words, f"--output-dir={run}"]) == (
        f"next: rewardlab gold match --input {built}/labels.test.jsonl --train-input {built}/labels.train.jsonl "
        f"--proxies '{run}'"
    )
    assert next_step(words) is None
    assert next_step(["--resume", str(run)]) is None
    assert next_step([*words, "--output-dir", str(run), "--dry-run"]) is None
    (built / "labels.test.jsonl").unlink()
    assert next_step([*words, "--output-dir", str(run)]) is None


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_a_proxy_is_trained_from_the_folder(built, base_model, tmp_path):
    words = ["--data", str(built), "--model", str(base_model), "--output-dir", str(tmp_path / "run")]
    words += ["--precision", "fp32", "--max-seq-len", "128", "--batch-size", "8", "--no-baselines"]
    result = train(parse_train(train_arguments(words)))
    assert result.step == 5, "one pass over what is left of 38 pairs in batches of 8"
    assert (tmp_path / "run" / "evals").is_dir()


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("verified_here")
@pytest.mark.parametrize("name", ["train.trl.jsonl", "train.columns.json", "rm_implicit.jsonl", "pretty.jsonl"])
def test_files_in_trls_form_train_here(built, base_model, tmp_path, name):
    path = built / name
    columns = json.loads((built / "train.columns.json").read_text())
    if name == "rm_implicit.jsonl":
        path.write_text(json.dumps(columns))
    if name == "pretty.jsonl":
        path.write_text(json.dumps(columns, indent=4))
    read = [
        tuple([turn.as_dict() for turn in (*one.prompt, *reply)] for reply in one.replies)
        for one in labelled.preferences(path)
    ]
    assert read == pairs_of(built)
    words = ["--model", str(base_model), "--dataset", str(path), "--output-dir", str(tmp_path / "run"), "--steps", "1"]
    words += ["--precision", "fp32", "--max-seq-len", "128", "--batch-size", "8", "--no-baselines"]
    assert train(parse_train([*words, "--eval-fraction", "0"])).step == 1
