"""The command line: every flag resolves to what it says, and every mistake ends in one line that says what to do."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import make_model, make_tokenizer, write_pairs
from rewardlab import cli
from rewardlab.artifact import save as save_module
from rewardlab.artifact.load import load
from rewardlab.artifact.save import save_reward_model
from rewardlab.cli import COMMANDS, ROOMS, main, parse_train
from rewardlab.core import files
from rewardlab.core.config import to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import sha256_file, write_json
from rewardlab.core.types import Message
from rewardlab.data.chat import build_renderer
from rewardlab.data.config import DataConfig
from rewardlab.training.compat import TRL
from rewardlab.training.config import EvalConfig, RewardTrainerConfig

BASE = ["--model", "base", "--dataset", "pairs.jsonl"]
DEFAULTS = RewardTrainerConfig(model="base", dataset=("pairs.jsonl",))
ROW = {"prompt": "How do I keep basil?", "chosen": "Water it.", "rejected": "No."}

FLAGS: list[tuple[str, dict[str, object]]] = [
    ("--compat trl", {"compat": "trl"} | {n: value for n, value in TRL.items() if value != getattr(DEFAULTS, n)}),
    ("--model other", {"model": "other"}),
    ("--dataset a.jsonl", {"dataset": ("a.jsonl",)}),
    ("--dataset a.jsonl b.jsonl", {"dataset": ("a.jsonl", "b.jsonl")}),
    ("--dataset a,b.jsonl", {"dataset": ("a,b.jsonl",)}),  # a file may be called that
    ("--dataset a.jsonl --seed 7 --dataset b.jsonl", {"dataset": ("a.jsonl", "b.jsonl"), "seed": 7}),
    ("--hf-dataset a.jsonl b.jsonl", {"dataset": ("a.jsonl", "b.jsonl")}),
    ("--hf-dataset=a.jsonl", {"dataset": ("a.jsonl",)}),
    ("--hf-dataset=a.jsonl b.jsonl --hf-dataset c.jsonl", {"dataset": ("a.jsonl", "b.jsonl", "c.jsonl")}),
    ("--hf-split dev", {"hf_split": "dev"}),
    ("--eval-dataset a.jsonl b.jsonl", {"eval_dataset": ("a.jsonl", "b.jsonl")}),
    ("--eval-split validation", {"eval_split": "validation"}),
    ("--eval-fraction 0", {"eval_fraction": 0.0}),
    ("--test-dataset a.jsonl b.jsonl", {"test_dataset": ("a.jsonl", "b.jsonl")}),
    ("--test-split test", {"test_split": "test"}),
    ("--limit 100", {"limit": 100}),
    ("--eval-limit 50", {"eval_limit": 50}),
    ("--no-baselines", {"baselines": False}),
    ("--train-eval-limit 20", {"train_eval_limit": 20}),
    ("--max-drop-fraction 0.5", {"max_drop_fraction": 0.5}),
    ("--incomplete-pairs error", {"incomplete_pairs": "error"}),
    ("--ties half", {"ties": "half"}),
    ("--max-replies 4", {"max_replies": 4}),
    ("--margin-column votes", {"margin_column": "votes"}),
    ("--strength-as soft", {"strength_as": "soft"}),
    ("--max-seq-len 512", {"max_seq_len": 512}),
    ("--use-chat-template", {"chat_template": "template"}),
    ("--no-chat-template", {"chat_template": "plain"}),
    ("--chat-template plain", {"chat_template": "plain"}),
    ("--chat-template concat", {"chat_template": "concat"}),
    ("--overlong drop", {"overlong": "drop"}),
    ("--num-workers 3", {"num_workers": 3}),
    ("--cache-dir none", {"cache_dir": "none"}),
    ("--system-prompt 'Be kind.'", {"system_prompt": "Be kind."}),
    ("--system-prompt=-x", {"system_prompt": "-x"}),
    ("--system-prompt ''", {"system_prompt": ""}),
    ("--system-prompt=", {"system_prompt": ""}),
    ("--attention padded", {"attention": "padded"}),
    ("--precision bf16", {"precision": "bf16"}),
    ("--new-head", {"new_head": True}),
    ("--trust-remote-code", {"trust_remote_code": True}),
    ("--lora", {"lora": True}),
    ("--lora-rank 16", {"lora_rank": 16}),
    ("--lora-alpha 64", {"lora_alpha": 64.0}),
    ("--lora-dropout 0.1", {"lora_dropout": 0.1}),
    ("--lora-target-modules q_proj", {"lora_target_modules": ("q_proj",)}),
    ("--lora-target-modules q_proj k_proj", {"lora_target_modules": ("q_proj", "k_proj")}),
    ("--lora-target-modules q_proj,k_proj", {"lora_target_modules": ("q_proj", "k_proj")}),
    ("--lora-target-modules q_proj, k_proj,", {"lora_target_modules": ("q_proj", "k_proj")}),
    ("--rslora", {"rslora": True}),
    ("--lora --lora-rank 8 --rslora", {"lora": True, "lora_rank": 8, "rslora": True}),
    ("--beta 0.5", {"beta": 0.5}),
    ("--label-smoothing 0", {"label_smoothing": 0.0}),
    ("--regularization-lambda 0.01", {"regularization_lambda": 0.01}),
    ("--regularization-type l1", {"regularization_type": "l1"}),
    ("--score-regularization-lambda 1e-3", {"score_regularization_lambda": 1e-3}),
    ("--center-lambda 0.02", {"center_lambda": 0.02}),
    ("--kwise-loss plackett-luce", {"kwise_loss": "plackett-luce"}),
    ("--kwise-weight comparison", {"kwise_weight": "comparison"}),
    ("--output-dir runs/x", {"output_dir": Path("runs/x")}),
    ("--overwrite", {"overwrite": True}),
    ("--steps 30", {"steps": 30}),
    ("--steps 30 --steps 40", {"steps": 40}),
    ("--steps --steps 40", {"steps": 40}),
    ("--epochs 2", {"epochs": 2.0}),
    ("--batch-size 32", {"batch_size": 32}),
    ("--micro-token-budget 4096", {"micro_token_budget": 4096}),
    ("--lr 5e-6", {"lr": 5e-6}),
    ("--weight-decay 0.1", {"weight_decay": 0.1}),
    ("--max-grad-norm 0.5", {"max_grad_norm": 0.5}),
    ("--seed 7", {"seed": 7}),
    ("--log-every 1", {"log_every": 1}),
    ("--eval-every 5", {"eval_every": 5}),
    ("--save-every 15", {"save_every": 15}),
    ("--log-samples 0", {"log_samples": 0}),
    ("--save-dtype bfloat16", {"save_dtype": "bfloat16"}),
    ("--best-metric eval_loss", {"best_metric": "eval_loss"}),
]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What the user reads when a command is refused: one message after `error: `, exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    assert stopped.value.code == 2
    return only_message(capsys.readouterr().err)


def only_message(stderr: str) -> str:
    """The one error message in what was written to stderr."""
    assert "Traceback" not in stderr
    _, *messages = re.split(r"^error: ", stderr, flags=re.MULTILINE)
    assert len(messages) == 1, stderr
    return messages[0]


def in_process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """`python -m rewardlab` as a shell would run it."""
    command = [sys.executable, "-m", "rewardlab", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


def write_rows(path: Path, *rows: object) -> Path:
    """JSONL; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


# --- flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "changes"), FLAGS, ids=[line for line, _ in FLAGS])
def test_a_flag_sets_its_setting_and_no_other(line, changes):
    wanted = replace(DEFAULTS, **changes)
    assert all(getattr(wanted, name) != getattr(DEFAULTS, name) for name in changes)
    # Datasets add up, so the one of BASE is left out where a line names its own.
    assert parse_train([*(BASE[:2] if "dataset" in changes else BASE), *shlex.split(line)]) == wanted


def test_a_run_without_flags_has_the_defaults_of_the_configuration():
    assert parse_train(BASE) == DEFAULTS


def test_every_setting_has_a_flag_in_the_table():
    settings = {field.name for field in dataclasses.fields(RewardTrainerConfig)}
    assert {name for _, changes in FLAGS for name in changes} == settings


@pytest.mark.parametrize("style", ["--{name}={value}", "--{name} {value}", "--{under_name} {value}"])
def test_flags_may_be_written_with_equals_signs_and_with_underscores(style):
    pairs = {line.split()[0][2:]: line.split()[1] for line, _ in FLAGS if re.fullmatch(r"--[a-z-]+ [\w./-]+", line)}
    del pairs["kwise-loss"]  # plackett-luce goes with neither soft labels nor margins
    assert len(pairs) > 35
    words = [
        word
        for name, value in pairs.items()
        for word in style.format(name=name, under_name=name.replace("-", "_"), value=value).split()
    ]
    config = to_mapping(parse_train(words))
    for name, value in pairs.items():
        got = config[name.replace("-", "_")]
        assert got in ([value], value) or float(got) == float(value), name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--model is missing: name a hub model"),
        ("--model base", "--dataset is missing: name a file"),
        ("--model base --dataset", "--dataset is missing: name a file"),
        ("--model", "--model: the value is missing. Write one that begins with a dash as --model=VALUE"),
        ("--model --steps 3", "--model: the value is missing"),
        ("--model a b", "--model a b: takes one value. Put a value with spaces in quotes"),
        ("--limit 0", "--limit 0: must be at least 1; leave it out to use every row"),
        ("--limit 1e3", "--limit 1e3: must be a whole number"),
        ("--limit 2.0", "--limit 2.0: must be a whole number"),
        ("--lr fast", "--lr fast: must be a finite number"),
        ("--lr nan", "--lr nan: must be a finite number"),
        ("--lr inf", "--lr inf: must be a finite number"),
        ("--lr -1e-5", "--lr -1e-05: must be above 0"),
        ("--steps none", "--steps none: must be a whole number"),
        ("--output-dir ''", "--output-dir '': must be a path"),
        ("--precision fp8", "--precision fp8: must be one of auto, fp32, bf16"),
        ("--strength-as weigth", "must be one of none, weight, margin, soft. Did you mean 'weight'?"),
        ("--lora yes", "unexpected 'yes': values follow their flag; a switch such as --lora takes none"),
        ("--lora=false", "unexpected 'false': values follow their flag"),
        ("--use-chat-template=false", "--chat-template template false: takes one value"),
        ("--model m --dataset d --lora-target-modules ,", "--lora-target-modules: name at least one layer"),
        ("--max-sequence-len 8", "unknown flag '--max-sequence-len'. Did you mean '--max-seq-len'?"),
        ("--hf-datset=a", "unknown flag '--hf-datset'. Did you mean '--hf-dataset'?"),
        ("--no-rlora", "unknown flag '--no-rlora'. Did you mean '--no-rslora'?"),
        ("--conf a.yaml", "unknown flag '--conf'. Did you mean '--config'?"),
        ("--zzz", "unknown flag '--zzz'. `rewardlab train --help` lists the flags"),
        ("--system-prompt '-x y'", "unknown flag '-x y'"),
        ("--max-seq-len 8", "--max-seq-len 8: must be at least 16"),
        ("--micro-token-budget 8", "--micro-token-budget 8: must be at least 16"),
        ("--label-smoothing 0.5", "--label-smoothing 0.5: must be at least 0 and below 0.5"),
        ("--max-replies 1", "--max-replies 1: must be at least 2"),
        ("--margin-column m --strength-as margin", "--margin-column and --strength-as margin both set the margin"),
        ("--config", "--config : takes the name of one YAML or TOML file"),
        ("--config a.yaml --config=b.yaml", "--config a.yaml b.yaml: takes the name of one"),
    ],
)
def test_a_flag_that_does_not_resolve_is_refused_in_one_plain_line(line, message, capsys):
    said = refusal(capsys, "train", *shlex.split(line))
    assert said.startswith(message) or message in said
    assert said.count("\n") == 1


# --- configuration files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "model: base\ndataset: [a.jsonl, b.jsonl]\nmax_seq_len: 99\nlora: true\nlr: 5e-6\n"),
        ("run.yml", "model: base\ndataset:\n- a.jsonl\n- b.jsonl\nmax-seq-len: 99\nlora: true\nlr: 5.0e-6\n"),
        ("run.toml", 'model = "base"\ndataset = ["a.jsonl", "b.jsonl"]\nmax_seq_len = 99\nlora = true\nlr = 5e-6\n'),
        ("dash.toml", 'model = "base"\ndataset = ["a.jsonl", "b.jsonl"]\nmax-seq-len = 99\nlora = true\nlr = 5e-6\n'),
        (
            "run.json",
            '{"model": "base", "dataset": ["a.jsonl", "b.jsonl"], "max-seq-len": 99, "lora": true, "lr": 5e-06}',
        ),
    ],
)
def test_a_file_says_what_flags_would(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8")
    wanted = parse_train(shlex.split("--model base --dataset a.jsonl b.jsonl --max-seq-len 99 --lora --lr 5e-6"))
    assert parse_train(["--config", str(tmp_path / name)]) == wanted
    assert parse_train([f"--config={tmp_path / name}"]) == wanted


def test_flags_override_the_file_wherever_they_stand(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: base\ndataset: a.jsonl\nsteps: 5\nsystem_prompt: Be kind.\nlora_target_modules: q_proj,k_proj"
    )
    config = parse_train(["--config", str(path)])
    assert (config.dataset, config.lora_target_modules) == (("a.jsonl",), ("q_proj", "k_proj"))
    flags = ["--steps", "6", "--dataset", "b.jsonl", "--system-prompt", ""]
    wanted = replace(config, steps=6, dataset=("b.jsonl",), system_prompt="")
    assert parse_train([*flags, "--config", str(path)]) == wanted
    assert parse_train(["--config", str(path), *flags]) == wanted


@pytest.mark.parametrize(
    ("in_file", "flags", "wanted"),
    [
        ("true", [], True),
        ("true", ["--lora"], True),
        ("true", ["--no-lora"], False),
        ("false", [], False),
        ("false", ["--lora"], True),
        ("false", ["--no-lora"], False),
        ("false", ["--lora", "--no-lora"], False),
        ("true", ["--no-lora", "--lora"], True),
    ],
)
def test_a_switch_in_the_file_can_be_turned_both_ways(tmp_path, in_file, flags, wanted):
    path = tmp_path / "run.toml"
    path.write_text(f"lora = {in_file}\n")
    assert parse_train([*BASE, "--config", str(path), *flags]).lora is wanted


def test_the_value_none_unsets_what_the_file_says(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 5\nlr: 1e-3\nsystem_prompt: Be kind.\neval_dataset: [a.jsonl]\n")
    flags = ["--steps", "None", "--lr=None", "--system-prompt", "None", "--eval-dataset"]
    assert parse_train([*BASE, "--config", str(path), *flags]) == parse_train(BASE)


def test_a_value_that_a_flag_overrides_is_not_judged(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("limit: 0\nlora: perhaps\nmax_seq_len: many\n")
    config = parse_train([*BASE, "--config", str(path), "--limit", "3", "--lora", "--max-seq-len", "64"])
    assert (config.limit, config.lora, config.max_seq_len) == (3, True, 64)


def test_a_saved_configuration_gives_itself(tmp_path):
    changes = {name: value for _, settings in FLAGS for name, value in settings.items()}
    config = replace(DEFAULTS, **changes | {"strength_as": "none", "kwise_loss": "pairs"})
    write_json(tmp_path / "config.json", to_mapping(config))
    assert parse_train(["--config", str(tmp_path / "config.json")]) == config


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text("# later\n")
    assert parse_train([*BASE, "--config", str(tmp_path / "run.yaml")]) == parse_train(BASE)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.yaml", "lerning_rate: 1\nlabel_smothing: 0.1\n", r"unknown setting 'lerning_rate'"),
        ("run.yaml", "label-smothing: 0.1\n", r"unknown setting 'label_smothing'\. Did you mean 'label_smoothing'\?"),
        ("run.toml", "[data]\nlimit = 3\n", r"unknown setting 'data'"),
        ("run.yaml", "steps: many\n", r"steps: expected int, got 'many'"),
        ("run.yaml", "steps: '16'\n", r"steps: expected int, got '16'"),
        ("run.yaml", "limit: true\n", r"limit: expected int, got True"),
        ("run.yaml", "lora: 1\n", r"lora: expected bool, got 1"),
        ("run.toml", 'lora = "yes"\n', r"lora: expected bool, got 'yes'"),
        ("run.yaml", "lr: fast\n", r"lr: expected float, got 'fast'"),
        ("run.yaml", "lr: .nan\n", r"lr: expected float, got nan"),
        ("run.yaml", "eval_split: no\n", r"eval_split: expected str, got False"),
        ("run.yaml", "eval-dataset: [1]\n", r"eval_dataset: expected str, got 1"),
        ("run.yaml", "precision: fp8\n", r"precision: 'fp8' is not one of 'auto', 'fp32', 'bf16'"),
        ("run.yaml", "max-seq-len: 64\nmax_seq_len: 32\n", r"max_seq_len is there twice"),
        ("run.yaml", "- a\n- b\n", r"expected `name: value` lines, got a list"),
        ("run.yaml", "just text\n", r"expected `name: value` lines, got a str"),
        ("run.yaml", "a: [1\n", r"not valid YAML"),
        ("run.toml", "steps = \n", r"not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_key_and_value(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"--config {tmp_path / name}: ") + message):
        parse_train([*BASE, "--config", str(tmp_path / name)])


@pytest.mark.parametrize("name", ["nosuch.yaml", "."])
def test_a_file_that_is_not_there_is_named(tmp_path, name, capsys):
    path = tmp_path / name
    said = refusal(capsys, "train", *BASE, "--config", path)
    assert said == f"--config {path}: no such file. Give a YAML or TOML file with the names of the flags.\n"


def test_other_commands_read_files_too(tmp_path, capsys):
    path = tmp_path / "eval.yaml"
    path.write_text("model: nosuch\nhf-splits: test\n")
    assert "unknown setting 'hf_splits'. Did you mean 'hf_split'?" in refusal(capsys, "eval", "--config", path)
    path.write_text(f"folder: {tmp_path}\n")
    assert refusal(capsys, "verify", "--config", path).startswith(f"{tmp_path}: no reward_spec.json")
    assert refusal(capsys, "verify", "--config", path, "nosuch").startswith("nosuch: no reward_spec.json")


# --- help and dispatch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(arguments, capsys):
    main(arguments)
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_that_of_the_package(flag, capsys):
    from importlib.metadata import version

    main([flag])
    assert capsys.readouterr().out == f"rewardlab {version('rewardlab')}\n"


@pytest.mark.parametrize(
    ("command", "near"), [("trian", " Did you mean 'train'?"), ("evl", " Did you mean 'eval'?"), ("7", "")]
)
def test_an_unknown_command_is_refused_with_the_nearest(command, near, capsys):
    assert refusal(capsys, command) == f"unknown command {command!r}.{near} Commands: {', '.join(COMMANDS)}.\n"


def help_text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `--help` prints."""
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100])
def test_the_help_of_train_lists_every_flag_in_its_room_and_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_text(capsys, "train")
    assert max(map(len, text.splitlines())) <= 100
    titles = [f" {room} options" for room in ROOMS]
    _, *sections = re.split("|".join(titles), text)
    assert re.findall("|".join(titles), text) == titles
    for section, part in zip(sections, ROOMS.values(), strict=True):
        listed = re.findall(r"^  --([a-z][a-z-]*)", section, re.MULTILINE)
        assert listed == [field.name.replace("_", "-") for field in dataclasses.fields(part)]


def test_the_help_says_type_meaning_and_default_of_a_flag(capsys, tmp_path):
    text = " ".join(help_text(capsys, "train").split())
    assert "--max-seq-len INT Tokens a conversation may have; `--overlong` says what happens to" in text
    assert "to longer ones. (default: 1024)" in text
    assert "--lr FLOAT Learning rate; by default 5e-6 for full fine-tuning and 5e-5 for LoRA. --weight-decay" in text
    assert re.search(r"--kwise-loss \{pairs,plackett-luce\} For K > 2: [^()]* \(default: pairs\)", text)
    assert "--center-lambda FLOAT c of the centring regulariser" in text
    assert re.search(r"--label-smoothing FLOAT [^()]* \(default: 0\.05\)", text)
    assert re.search(r"--train-eval-limit INT [^()]* \(default: 0\)", text)
    assert "--dataset STR ... Training data" in text
    assert "--lora, --no-lora Train low-rank adapters and the head instead of every weight. --lora-rank" in text


def test_the_help_shows_what_the_file_says_as_defaults(capsys, tmp_path):
    (tmp_path / "run.yaml").write_text("max-seq-len: 77\nlora: true\ndataset: [a.jsonl, b.jsonl]\n")
    text = " ".join(help_text(capsys, "train", "--config", str(tmp_path / "run.yaml")).split())
    assert "to longer ones. (default: 77)" in text
    assert "--lora, --no-lora Train low-rank adapters and the head instead of every weight. (default: True)" in text
    assert "(also `--hf-dataset`). (default: a.jsonl b.jsonl)" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text(capsys, command)
    assert text.startswith(f"usage: rewardlab {command} [-h]")
    assert COMMANDS[command][1] in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("arguments", [[], ["--version"], *([command, "--help"] for command in COMMANDS), ["train"]])
def test_help_and_bad_flags_need_neither_torch_nor_transformers(arguments):
    program = (
        "import sys\nfrom rewardlab.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert answer.stdout.splitlines()[-1] == "[]"
    assert answer.returncode == (2 if arguments == ["train"] else 0)


def test_a_reader_that_leaves_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "rewardlab", "train", "--help"], stdout=writing, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writing)
    assert (answer.returncode, answer.stderr) == (141, b"")


def test_a_terminal_that_lacks_a_letter_loses_the_letter_and_not_the_text():
    answer = in_process("train", "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "--beta FLOAT            ?(beta ? score difference)" in answer.stdout


def test_the_log_goes_to_the_output_of_each_call_and_leaves_the_logger_as_it_was(monkeypatch, capsys):
    logger = logging.getLogger("rewardlab")
    before = (list(logger.handlers), logger.level)
    monkeypatch.setitem(cli.COMMANDS, "say", (lambda arguments: logger.info("hello %s", *arguments), "says hello"))
    for name in ("you", "again"):
        main(["say", name])
        assert capsys.readouterr().out == f"hello {name}\n"
    assert (list(logger.handlers), logger.level) == before


def test_an_interrupt_ends_with_the_status_of_one(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "wait", (interrupted, "waits"))
    with pytest.raises(SystemExit) as stopped:
        main(["wait"])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == ""


# --- what a user can get wrong with data and folders ---------------------------------------------------------


@pytest.fixture
def flags(base_model: Path, tmp_path: Path) -> list[object]:
    """A short run on the tiny model; the dataset is still to be named."""
    settings = "--steps 2 --batch-size 4 --max-seq-len 128 --eval-every 2 --lr 1e-3"
    return ["train", "--model", base_model, "--output-dir", tmp_path / "run", *settings.split()]


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
OTHER_PROMPT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}]


TWO_PROMPTS = {"chosen": MESSAGES, "rejected": OTHER_PROMPT}
LONG = {"prompt": "a", "chosen": "yes " * 90, "rejected": "no " * 90}
ALL = "--eval-fraction 0 "


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"ask": "a", "good": "b"}], "", r"data\.jsonl:1: the columns 'ask', 'good' are no known layout.*Rename them"),
        ([], "", r"data\.jsonl: no rows"),
        ([ROW | {"chosen": ""}] * 3, "", r"none of the 3 rows can be used:\n  empty_reply: 3 .*data\.jsonl:1"),
        ([TWO_PROMPTS], "", r"prompt_differs: 1 .*data\.jsonl:1: the sides part at turn 1"),
        ([ROW, ROW | {"rejected": " Water it."}], "", r"1 of 2 rows .*identical_replies: 1 .*data\.jsonl:2"),
        ([ROW, ROW | {"rejected": " Water it."}], "", r"allow it with --max-drop-fraction 0\.5"),
        ([ROW, ROW | {"rejected": 7}], "", r"reply_not_text: 1 .*data\.jsonl:2: got 7, wanted text"),
        ([ROW, '{"prompt": "a", "cho', ROW], "", r"/data\.jsonl:2: not valid JSON: .*Fix or remove this line"),
        ([ROW, "[1]"], "", r"/data\.jsonl:2: expected a JSON object, got list"),
        ([ROW] * 2, "", r"holding out 1 of 1 different prompts leaves nothing to train on"),
        ([ROW], ALL + "--max-seq-len 16", r"--max-seq-len 16 is too small .*Raise it"),
        (
            [LONG],
            ALL + "--max-seq-len 64",
            r"1 of 1 preferences cannot be used with --max-seq-len 64 .*Raise --max-seq",
        ),
        ([ROW], ALL + "--micro-token-budget 16", r"above --micro-token-budget 16\. Raise the budget to at least"),
        ([ROW], ALL + "--eval-dataset nosuch.jsonl", r"dataset 'nosuch\.jsonl', split 'test': no such file"),
        ([ROW], ALL + "--strength-as weight", r"missing_strength: 1 .*--strength-as asks for a strength"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_with_place_and_remedy(flags, tmp_path, capsys, rows, more, message):
    data = write_rows(tmp_path / "data.jsonl", *rows)
    assert re.search(message, refusal(capsys, *flags, "--dataset", data, *more.split()), re.DOTALL)
    assert not (tmp_path / "run/config.json").exists()


def test_a_dataset_that_is_not_there_is_named_with_what_is(flags, tmp_path, capsys):
    write_pairs(tmp_path / "pairs.jsonl", 4)
    said = refusal(capsys, *flags, "--dataset", tmp_path / "pair.jsonl")
    assert said.startswith(f"dataset '{tmp_path / 'pair.jsonl'}', split 'train': no such file")
    assert str(tmp_path / "pairs.jsonl") in said


def test_a_model_that_is_not_there_is_named(flags, pairs_file, tmp_path, capsys):
    said = refusal(capsys, *flags, "--dataset", pairs_file, "--model", tmp_path / "nosuch")
    assert said.startswith(f"no model at '{tmp_path / 'nosuch'}'")


def test_a_folder_that_already_holds_a_run_is_kept(flags, pairs_file, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    said = refusal(capsys, *flags, "--dataset", pairs_file)
    assert said == (
        f"{tmp_path / 'run'} already holds a run. Choose another --output-dir, or replace it with --overwrite.\n"
    )
    assert (tmp_path / "run/config.json").read_text() == "{}"


@pytest.mark.parametrize("command", ["train", "eval", "score"])
def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(
    command, flags, pairs_file, tmp_path, monkeypatch, capsys
):
    def denied(path, text):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "write_text", denied)  # root may write anywhere, so the system is played here
    place = tmp_path / "place"
    arguments = {
        "train": [*flags, "--dataset", pairs_file, "--output-dir", place],
        "eval": ["eval", "--model", tmp_path, "--dataset", pairs_file, "--output-dir", place],
        "score": ["score", "--model", tmp_path, "--input", pairs_file, "--output", place / "scored.jsonl"],
    }[command]
    said = refusal(capsys, *arguments)
    flag = "--output" if command == "score" else "--output-dir"
    assert said == (
        f"cannot write to {place} (Permission denied). Choose another place with {flag}, or make this one writable.\n"
    )


def test_a_folder_below_a_file_is_refused(flags, pairs_file, capsys):
    said = refusal(capsys, *flags, "--dataset", pairs_file, "--output-dir", pairs_file / "run")
    assert said.startswith(f"cannot write to {pairs_file / 'run'} (Not a directory)")


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(flags, pairs_file, tmp_path, monkeypatch, capsys):
    write = save_module.save_file

    def full_at_the_second_step(tensors, filename, metadata=None):
        if "step_2" in str(filename):
            raise OSError(errno.ENOSPC, "No space left on device", str(filename))
        write(tensors, filename, metadata=metadata)

    monkeypatch.setattr(save_module, "save_file", full_at_the_second_step)
    more = ["--dataset", pairs_file, "--save-every", "1", "--eval-fraction", "0"]
    said = refusal(capsys, *flags, *more)
    assert "No space left on device" in said
    assert said.endswith("What was saved before is still there.\n")
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["step_1"]
    assert load(tmp_path / "run/step_1")


def test_the_script_itself_exits_with_2_and_no_traceback(tmp_path):
    answer = in_process("train", *BASE[:2], "--dataset", tmp_path / "nosuch.jsonl", "--output-dir", tmp_path / "run")
    assert answer.returncode == 2
    assert only_message(answer.stderr).startswith(f"dataset '{tmp_path / 'nosuch.jsonl'}', split 'train': no such file")
    answer = in_process("train", "--limit", "0", cwd=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "error: --limit 0: must be at least 1; leave it out to use every row.\n"


# --- commands ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny reward model."""
    folder = tmp_path_factory.mktemp("cli") / "reward"
    renderer = build_renderer(make_tokenizer(), DataConfig(max_seq_len=256))
    save_reward_model(folder, make_model(), renderer, beta=1.0, save_dtype=torch.float32, provenance={})
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_what_train_saves_can_be_judged_scored_and_verified(flags, pairs_file, tmp_path, capsys):
    test_data = write_pairs(tmp_path / "held-out.jsonl", 12, offset=100)
    main([str(flag) for flag in [*flags, "--dataset", pairs_file, "--test-dataset", test_data]])
    printed = capsys.readouterr().out
    folder = re.search(r"^Reward model: (.*)$", printed, re.MULTILINE)[1]
    judged_on_test = printed.split("Test data (they chose nothing)")[1]
    assert re.search(r"^before +\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", judged_on_test, re.MULTILINE)
    assert "step 2/2" in printed

    main(["verify", folder])
    assert capsys.readouterr().out.startswith(f"{folder}: verified. ")

    out = tmp_path / "judged"
    main(["eval", "--model", folder, "--dataset", str(test_data), "--output-dir", str(out)])
    printed = capsys.readouterr().out
    assert re.match(r"held-out\[.+\]: 12 rows read, 12 kept, dropped none\n", printed)
    judged = json.loads((tmp_path / "run/evals/test.metrics.json").read_text())
    metrics = json.loads((out / "eval.metrics.json").read_text())
    assert metrics["all"]["sums"] == pytest.approx(judged["all"]["sums"])
    accuracy = metrics["all"]["estimates"]["eval_accuracy"]
    interval = f"{accuracy['value']:.3f} [{accuracy['low']:.3f}, {accuracy['high']:.3f}]"
    assert re.search(rf"^held-out +{re.escape(interval)} ", printed, re.MULTILINE)
    assert "95% intervals: " in printed
    assert len((out / "eval.scores.jsonl").read_text().splitlines()) == 24


def test_eval_takes_a_seeded_limit_and_says_where_the_numbers_are(saved, pairs_file, tmp_path, capsys):
    main(["eval", "--model", str(saved), "--dataset", str(pairs_file), "--limit", "5", "--output-dir", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"scores and metrics: {tmp_path}"
    rows = [json.loads(line) for line in (tmp_path / "eval.scores.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert all(isinstance(row["score"], float) for row in rows)
    assert json.loads((tmp_path / "manifest.json").read_text())["data"][0]["unused_by_limit"] == 35


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("eval", "--model is missing: name a reward-model folder"),
        ("eval --model m", "--dataset is missing"),
        ("eval --limit 0", "--limit 0: must be at least 1"),
        ("eval --model nosuch --dataset nosuch.jsonl", "dataset 'nosuch.jsonl', split 'test': no such file"),
        ("score --input a --output b", "--model is missing; see `rewardlab score --help`"),
        ("score --model m --output b", "--input is missing"),
        ("score --model m --input a", "--output is missing"),
        ("score --model m --input a --output b --precision fp64", "--precision fp64: must be one of fp32, bf16"),
        ("score --model m --input a --output b --micro-token-budget 0", "--micro-token-budget 0: must be at least 16"),
        ("score --model m --input a --output .", "--output .: is a folder. Name the file to write"),
        ("score --model m --input nosuch.jsonl --output b", "nosuch.jsonl: no such file"),
        ("verify", "FOLDER is missing; see `rewardlab verify --help`"),
        ("verify a b", "FOLDER a b: takes one value"),
        ("verify nosuch", "nosuch: no reward_spec.json, so this is not a rewardlab reward model"),
        ("quickstart --steps 0", "--steps 0: must be at least 1"),
        ("quickstart --test-pairs -1", "--test-pairs -1: must be at least 1"),
    ],
)
def test_other_commands_refuse_in_the_same_words(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *line.split()).startswith(message)


def test_eval_has_the_flags_of_its_configuration():
    line = (
        "--model m --hf-dataset=a.jsonl b.jsonl --hf-split dev --limit 3 --output-dir out --precision bf16 "
        "--attention padded --micro-token-budget 64 --max-drop-fraction 0.5 --incomplete-pairs error --ties half "
        "--max-replies 3 --margin-column gap --strength-as soft --seed 7"
    )
    wanted = EvalConfig(
        model="m",
        dataset=("a.jsonl", "b.jsonl"),
        hf_split="dev",
        limit=3,
        output_dir=Path("out"),
        precision="bf16",
        attention="padded",
        micro_token_budget=64,
        max_drop_fraction=0.5,
        incomplete_pairs="error",
        ties="half",
        max_replies=3,
        margin_column="gap",
        strength_as="soft",
        seed=7,
    )
    unset = [field.name for field in dataclasses.fields(EvalConfig) if getattr(wanted, field.name) == field.default]
    assert unset == []
    assert cli._parse(EvalConfig, line.split(), "eval") == wanted


def test_eval_uses_strengths_and_margins_as_training_does(saved, tmp_path, capsys):
    rows = [
        {"prompt": f"How {n}?", "chosen": "So.", "rejected": "no", "strength": strength, "gap": 0.5}
        for n, strength in enumerate([0.6, 0.7, 0.9])
    ]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    line = ["eval", "--model", str(saved), "--dataset", str(data), "--output-dir", str(tmp_path / "out")]
    main([*line, "--strength-as", "soft", "--margin-column", "gap"])
    judged = [json.loads(row) for row in (tmp_path / "out/eval.scores.jsonl").read_text().splitlines()]
    found = [comparison for row in judged for comparison in row["comparisons"]]
    assert [comparison["label"] for comparison in found] == [0.6, 0.7, 0.9]
    assert [comparison["margin"] for comparison in found] == [0.5, 0.5, 0.5]
    assert "no 'nosuch', which --margin-column names" in refusal(capsys, *line, "--margin-column", "nosuch")


def test_score_adds_scores_and_keeps_the_rows(saved, tmp_path, capsys):
    prompt = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}]
    rows = [
        {"id": 7, "prompt": "How?", "response": "So.", "note": {"a": [1, "ü"]}},
        {"prompt": "How?", "responses": ["So.", "Not at all.", "So."]},
        {"prompt": prompt, "response": "Because."},
        {"messages": [*prompt, {"role": "assistant", "content": "Because."}], "id": None},
    ]
    out = tmp_path / "new/scored.jsonl"
    data = write_rows(tmp_path / "rows.jsonl", rows[0], "", *rows[1:])
    main(["score", "--model", str(saved), "--input", str(data), "--output", str(out), "--micro-token-budget", "64"])
    assert capsys.readouterr().out == f"6 replies scored: {out}\n"
    how, why = [Message("user", "How?")], [Message(**turn) for turn in prompt]
    ends = [(how, "So."), (how, "Not at all."), (why, "Because.")]
    so, not_at_all, because = load(saved).score([[*turns, Message("assistant", reply)] for turns, reply in ends])
    scored = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [list(row) for row in scored] == [[*row, "scores" if "responses" in row else "score"] for row in rows]
    assert [{name: row[name] for name in given} for row, given in zip(scored, rows, strict=True)] == rows
    assert scored[1]["scores"] == pytest.approx([so, not_at_all, so], abs=1e-5)
    assert [scored[n]["score"] for n in (0, 2, 3)] == pytest.approx([so, because, because], abs=1e-5)
    assert len({round(score, 3) for score in (so, not_at_all, because)}) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"response": "So."}, r"rows\.jsonl:2: cannot be scored .*Wanted `messages`, or `prompt` and `response`"),
        ({"prompt": "How?"}, r"rows\.jsonl:2: cannot be scored"),
        ({"prompt": "How?", "response": 3}, r"rows\.jsonl:2: cannot be scored \(a response is not text\)"),
        ({"prompt": "How?", "responses": []}, r"rows\.jsonl:2: cannot be scored"),
        ('{"prompt": ', r"rows\.jsonl:2: not valid JSON"),
        ({"messages": [{"role": "user", "content": "How?"}]}, r"must end with an assistant turn"),
        ({"prompt": "How?", "response": "So. " * 300}, r"above the limit of 256"),
        ({"prompt": [{"role": "robot", "content": "a"}], "response": "b"}, r"rows\.jsonl:2: .*unknown role 'robot'"),
        (
            {"prompt": [{"role": "user", "content": "a", "tool_calls": [{"id": 1}]}], "response": "b"},
            r"rows\.jsonl:2: .*a message has tool_calls",
        ),
        ({"prompt": "Human: a\n\nHuman: b\n\nAssistant:", "response": 3}, r"a response is not text"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named_and_nothing_is_written(saved, tmp_path, capsys, row, message):
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."}, row)
    out = tmp_path / "scored.jsonl"
    assert re.search(message, refusal(capsys, "score", "--model", saved, "--input", data, "--output", out))
    assert not out.exists()


def test_a_transcript_in_a_prompt_is_scored_as_its_turns(saved, tmp_path):
    turns = [
        {"role": role, "content": text} for role, text in [("user", "Hi"), ("assistant", "Yes?"), ("user", "How?")]
    ]
    prompts = ["\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: How?\n\nAssistant:", turns]
    replies = [" So.", "So."]
    rows = [{"prompt": prompt, "response": reply} for prompt, reply in zip(prompts, replies, strict=True)]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    main(["score", "--model", str(saved), "--input", str(data), "--output", str(tmp_path / "out.jsonl")])
    first, second = [json.loads(line)["score"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert first == pytest.approx(second, abs=1e-6)


def test_eval_does_not_name_a_flag_that_it_lacks(saved, tmp_path, capsys):
    rows = [{"prompt": "How?", "chosen": "So. " * 300, "rejected": "no"}] + [
        {"prompt": f"How {n}?", "chosen": "So.", "rejected": "no"} for n in range(6)
    ]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    line = ["eval", "--model", str(saved), "--dataset", str(data), "--output-dir", str(tmp_path / "out")]
    said = refusal(capsys, *line)
    assert "1 of 7 preferences cannot be used with the model's limit of 256 tokens (reply_too_long: 1 " in said
    assert "Leave them out, or train with more --max-seq-len, or allow it with --max-drop-fraction 0.143." in said
    main([*line, "--max-drop-fraction", "0.143"])


def test_verify_says_what_it_checked(saved, capsys):
    main(["verify", str(saved)])
    said = capsys.readouterr().out
    assert re.match(rf"{re.escape(str(saved))}: verified\. \d+ files unchanged, 6 canaries give their scores", said)


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_head(folder: Path) -> None:
    """A head of zeros that nothing but the scores gives away."""
    path, spec = folder / "model.safetensors", folder / "reward_spec.json"
    weights = load_file(path)
    weights["score.weight"].zero_()
    save_file(weights, path, metadata={"format": "pt"})
    values = json.loads(spec.read_text())
    values["files"]["model.safetensors"] = sha256_file(path)
    spec.write_text(json.dumps(values))


def damage_problem_type(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"regression"', '"single_label_classification"'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_weights, "model.safetensors was changed after the model was saved. Restore the folder"),
        (damage_head, "What fits: a head that is zero or was never loaded (zero_head). Restore the folder"),
        (damage_problem_type, "engines would return a probability instead of the score"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "reward_spec.json").unlink(), "no reward_spec.json"),
    ],
)
def test_verify_names_the_damage(copy, capsys, damage, message):
    damage(copy)
    said = refusal(capsys, "verify", copy)
    assert str(copy) in said
    assert message in said


def test_a_damaged_model_neither_evaluates_nor_scores(copy, pairs_file, tmp_path, capsys):
    damage_weights(copy)
    data = write_rows(tmp_path / "rows.jsonl", {"prompt": "How?", "response": "So."})
    said = refusal(capsys, "score", "--model", copy, "--input", data, "--output", tmp_path / "scored.jsonl")
    assert "model.safetensors was changed" in said
    said = refusal(capsys, "eval", "--model", copy, "--dataset", pairs_file, "--output-dir", tmp_path / "out")
    assert "model.safetensors was changed" in said
    assert not (tmp_path / "scored.jsonl").exists()
    assert not (tmp_path / "out/eval.metrics.json").exists()


def test_quickstart_hands_its_flags_on(monkeypatch, tmp_path, capsys):
    def run(folder, **settings):
        return f"{folder} {settings}"

    monkeypatch.setattr("rewardlab.quickstart.run_quickstart", run)
    main(["quickstart"])
    assert capsys.readouterr().out == "runs/quickstart {'num_steps': None, 'num_test': 300, 'seed': 0}\n"
    main(["quickstart", "--output-dir", str(tmp_path), "--steps", "3", "--test-pairs=40", "--seed", "1"])
    assert capsys.readouterr().out == f"{tmp_path} {{'num_steps': 3, 'num_test': 40, 'seed': 1}}\n"
