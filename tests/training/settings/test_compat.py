"""TRL's conventions: what they fill in, how a run keeps to them, and that they are TRL's."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from common import CHATML, make_tokenizer, write_base_model, write_pairs
from rewardlab.artifact.load import load
from rewardlab.cli import main
from rewardlab.commands.training import parse_train
from rewardlab.core.config import from_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.training.run import train
from rewardlab.training.settings import trl_keys
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.conventions import NOT_MATCHED, OURS, TRL, settle_reading
from runs import values_of

TEXTS = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
MESSAGES = {
    "prompt": [{"role": "user", "content": "Hi"}],
    "chosen": [{"role": "assistant", "content": "yes"}],
    "rejected": [{"role": "assistant", "content": "no"}],
}


# --- what they fill in ---------------------------------------------------------------------------------------


def test_conventions_fill_in_what_was_not_said_and_print_it(log):
    config = parse_train(["--model", "m", "--dataset", "d", "--compat", "trl", "--lr", "1e-5"])
    assert (config.optimizer.lr, config.run.batch_size, config.run.epochs, config.run.seed) == (1e-5, 8, 3.0, 42)
    assert (config.loss.label_smoothing, config.optimizer.weight_decay, config.data.rendering.truncation) == (
        0.0,
        0.0,
        "drop",
    )
    (line,) = [record.getMessage() for record in log.records if "(not " in record.getMessage()]
    assert line.startswith("compat trl: --max-seq-len 1024 (not auto), --truncation drop (not prompt-left), ")
    assert "--lr " not in line
    assert "--lr-scheduler linear (not cosine), --warmup-ratio 0 (not " in line
    assert "--lora-rank" not in line, "without --lora there are no adapters to speak of"
    assert [text for text in NOT_MATCHED.values() if text not in log.text] == []


def test_without_the_flag_nothing_changes(log):
    config = parse_train(["--model", "m", "--dataset", "d"])
    assert config == RewardTrainerConfig.of(model="m", dataset=("d",))
    assert log.records == []


@pytest.mark.parametrize(
    ("rows", "changes", "decided"),
    [
        ([TEXTS], {}, {"chat_template": "concat"}),
        ([MESSAGES, MESSAGES], {}, {"chat_template": "template"}),
        ([MESSAGES], {"chat_template": "plain"}, {"chat_template": "plain"}),
        ([TEXTS | {"margin": 1}], {}, {"chat_template": "concat", "margin_column": "margin"}),
        ([TEXTS | {"margin": 1}], {"margin_column": "votes"}, {"margin_column": "votes"}),
        ([TEXTS | {"margin": 1}, TEXTS], {}, {"margin_column": None}),
        ([TEXTS | {"margin": 1}], {"strength_as": "margin"}, {"margin_column": None}),
        ([TEXTS], {"chat_template": "{{ messages }}"}, {"chat_template": "{{ messages }}"}),
        ([], {}, {"chat_template": "auto"}),
        ([TEXTS], {"compat": "none"}, {"chat_template": "auto"}),
    ],
)
def test_the_rows_decide_template_and_margin_as_in_trl(rows, changes, decided):
    given = {"model": "m", "dataset": "d", "compat": "trl", **changes}
    config = from_mapping(RewardTrainerConfig, given, where="the test")
    settled = settle_reading(config, [(f"d{number}", row) for number, row in enumerate(rows)])
    assert values_of(settled, decided) == decided
    assert settled.replace(**values_of(config, decided)) == config or rows


def test_texts_beside_messages_are_refused():
    config = from_mapping(RewardTrainerConfig, {"model": "m", "dataset": "d", "compat": "trl"}, where="the test")
    with pytest.raises(ConfigError, match="a.jsonl holds texts and b.jsonl messages"):
        settle_reading(config, [("a.jsonl", TEXTS), ("b.jsonl", MESSAGES)])


def test_texts_that_trl_would_not_render_by_the_template_are_told_of(log):
    given = {"model": "m", "dataset": "d", "compat": "trl", "chat_template": "{{ messages }}"}
    config = from_mapping(RewardTrainerConfig, given, where="the test")
    settle_reading(config, [("b.jsonl", MESSAGES)])
    assert log.records == []
    settle_reading(config, [("b.jsonl", MESSAGES), ("a.jsonl", TEXTS)])
    assert "a.jsonl holds texts, which TRL renders without any template" in log.text


# --- runs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_a_model_trained_on_bare_texts_has_one_score_everywhere(tmp_path, capsys):
    """Training, `rewardlab score`, `load` and plain transformers give the same tokens."""
    from transformers import AutoTokenizer

    base = write_base_model(tmp_path / "base", template=None)
    make_tokenizer(None, pad="<|unused|>").save_pretrained(str(base))
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    with pairs.open("a", encoding="utf-8") as file:
        file.write(json.dumps(TEXTS | {"prompt": "no " * 200}) + "\n")
    config = tmp_path / "trl.yaml"
    keys = {"model_name_or_path": str(base), "dataset_name": str(pairs), "max_steps": 2, "max_length": 128}
    config.write_text(yaml.safe_dump(keys | {"eval_strategy": "no", "output_dir": str(tmp_path / "run")}))
    main(["train", "--config", str(config), "--precision", "fp32"])
    printed = capsys.readouterr().out
    assert "compat trl: by the rows: --chat-template concat" in printed
    assert "left out: overlong 1" in printed
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert (saved["chat_template"], saved["compat"], saved["truncation"], saved["lr"]) == (
        "concat",
        "trl",
        "drop",
        1e-4,
    )
    folder = tmp_path / "run/step_2"
    row = json.loads(pairs.read_text().splitlines()[0])
    messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert tokenizer.decode(plain) == row["prompt"] + row["chosen"] + "<|im_end|>"
    scorer = load(folder)
    rendered = scorer.renderer.render(*_split(messages)).token_ids.tolist()
    assert rendered == plain == tokenizer(row["prompt"] + row["chosen"] + "<|im_end|>")["input_ids"]
    replies = tmp_path / "replies.jsonl"
    replies.write_text(json.dumps({"prompt": row["prompt"], "response": row["chosen"]}) + "\n")
    main(["score", "--model", str(folder), "--input", str(replies), "--output", str(tmp_path / "scored.jsonl")])
    assert json.loads((tmp_path / "scored.jsonl").read_text())["score"] == pytest.approx(
        scorer.score([messages])[0], abs=1e-6
    )
    main(["eval", "--model", str(folder), "--dataset", str(pairs), "--output-dir", str(tmp_path / "eval")])
    first = json.loads((tmp_path / "eval/eval.scores.jsonl").read_text().splitlines()[0])
    assert first["score"] == pytest.approx(scorer.score([messages])[0], abs=1e-5)


def _split(messages: list[dict[str, str]]) -> tuple[Any, Any]:
    from rewardlab.data.chat import to_messages

    turns = to_messages(messages)
    return turns[:-1], turns[-1:]


@pytest.mark.slow
@pytest.mark.usefixtures("verified_here")
def test_transcripts_are_read_alike_in_training_and_evaluation(tmp_path):
    base = write_base_model(tmp_path / "base", template=None)
    make_tokenizer(None, pad="<|unused|>").save_pretrained(str(base))
    path = tmp_path / "hh.jsonl"
    rows = [
        {
            "chosen": f"\n\nHuman: Is {n} light?\n\nAssistant: yes",
            "rejected": f"\n\nHuman: Is {n} light?\n\nAssistant: no",
        }
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--compat", "trl", "--steps", "1", "--eval-fraction", "0", "--max-seq-len", "128", "--precision", "fp32"]
    named = ["--model", str(base), "--dataset", str(path), "--output-dir", str(tmp_path / "run"), "--lora"]
    folder = train(parse_train([*flags, *named])).last
    settings = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (16, ["q_proj", "v_proj"]), "PEFT's choice for Llama"
    main(["eval", "--model", str(folder), "--dataset", str(path), "--output-dir", str(tmp_path / "eval")])
    scored = json.loads((tmp_path / "eval/eval.scores.jsonl").read_text().splitlines()[0])
    scorer = load(folder)
    text = rows[0]["chosen"] + "<|im_end|>"
    assert scored["num_tokens"] == len(scorer.renderer.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_reading_conventions_needs_no_torch():
    program = (
        "import sys, rewardlab.training.settings.conventions; "
        "print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# --- TRL itself ----------------------------------------------------------------------------------------------


def defaults_of_trl() -> dict[str, Any]:
    """Every key of its four dataclasses, with its default."""
    trl = pytest.importorskip("trl", reason='TRL is not installed (pip install "rewardlab[bench]")')
    from trl.scripts.utils import DatasetMixtureConfig

    parts = (trl.ScriptArguments, DatasetMixtureConfig, trl.ModelConfig, trl.RewardConfig)
    return {field.name: field.default for part in parts for field in dataclasses.fields(part)}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_no_key_of_trl_is_missing():
    assert sorted(set(defaults_of_trl()) - trl_keys.KEYS) == []


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_conventions_are_the_defaults_of_trl():
    theirs = defaults_of_trl()
    names = {ours: key for key, ours in trl_keys.RENAMED.items()} | {
        "max_seq_len": "max_length",
        "batch_size": "per_device_train_batch_size",
        "log_every": "logging_steps",
        "max_grad_norm": "max_grad_norm",
    }
    assert {name: theirs[names[name]] for name in TRL if name in names} == {
        name: value for name, value in TRL.items() if name in names
    }
    assert set(TRL) - set(names) == {
        *("truncation", "lora_dropout", "lora_target_modules", "label_smoothing", "lr_scheduler", "warmup_ratio"),
        "half_rounding",  # what autocast does
        "special_tokens_in_text",  # what tokenizers do with a rendered text
    }
    assert theirs["lora_target_modules"] is None
    assert theirs["disable_dropout"] is True
    assert theirs["lr_scheduler_type"] == TRL["lr_scheduler"] == "linear"
    assert theirs["warmup_steps"] == TRL["warmup_ratio"] == 0
    assert theirs["eval_strategy"] == "no"
    assert set(TRL) <= set(OURS)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("disable_dropout", "rate"), [(True, 0.0), (False, 0.05)])
def test_trl_switches_the_dropout_of_adapters_off_unless_told_otherwise(tmp_path, disable_dropout, rate):
    trl = pytest.importorskip("trl", reason='TRL is not installed (pip install "rewardlab[bench]")')
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForSequenceClassification

    base = write_base_model(tmp_path / "base", template=CHATML)
    trainer = trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(base, num_labels=1),
        args=trl.RewardConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, disable_dropout=disable_dropout),
        train_dataset=Dataset.from_list([TEXTS]),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(task_type="SEQ_CLS", lora_dropout=0.05),
    )
    assert {module.p for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout)} == {rate}
