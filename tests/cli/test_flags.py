"""Every flag resolves to what it says, or is refused in one line that says what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from command_line import BASE, DEFAULTS, refusal
from rewardlab import flags
from rewardlab.arguments import ReportArguments
from rewardlab.cli import main
from rewardlab.commands.training import parse_train
from rewardlab.core.config import settings_of, to_mapping
from rewardlab.core.errors import ConfigError
from rewardlab.core.files import write_json
from rewardlab.flags import parse
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.settings.conventions import TRL
from rewardlab.training.settings.presets import PRESETS
from runs import values_of


def not_default(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings that differ from the defaults."""
    return {name: value for name, value in settings.items() if values_of(DEFAULTS, [name]) != {name: value}}


FLAGS: list[tuple[str, dict[str, object]]] = [
    ("--compat trl", {"compat": "trl"} | not_default(TRL)),
    *((f"--preset {name}", {"preset": name} | not_default(preset.settings)) for name, preset in PRESETS.items()),
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
    ("--diagnostic-mode response_only", {"diagnostic_mode": "response_only"}),
    (
        "--diagnostic-mode label_shuffle --diagnostic-splits train test",
        {"diagnostic_mode": "label_shuffle", "diagnostic_splits": ("train", "test")},
    ),
    ("--diagnostic-shuffle-rate 0.25", {"diagnostic_shuffle_rate": 0.25}),
    ("--diagnostic-length-threshold 20", {"diagnostic_length_threshold": 20}),
    ("--diagnostic-seed 7", {"diagnostic_seed": 7}),
    ("--margin-column votes", {"margin_column": "votes"}),
    ("--strength-as soft", {"strength_as": "soft"}),
    ("--shp kwise", {"shp": "kwise"}),
    ("--max-per-post 5", {"max_per_post": 5}),
    ("--min-score-ratio 2", {"min_score_ratio": 2.0}),
    ("--attributes helpfulness=1 coherence=0.5", {"attributes": ("helpfulness=1", "coherence=0.5")}),
    ("--prompt-column question", {"prompt_column": "question"}),
    ("--chosen-column good", {"chosen_column": "good"}),
    ("--rejected-column bad", {"rejected_column": "bad"}),
    ("--label-column winner", {"label_column": "winner"}),
    ("--response-column completion", {"response_column": "completion"}),
    ("--responses-column answers", {"responses_column": "answers"}),
    ("--scores-column ratings", {"scores_column": "ratings"}),
    ("--strength-column magnitude", {"strength_column": "magnitude"}),
    ("--map-label A=1 B=0 tie=0.5", {"map_label": ("A=1", "B=0", "tie=0.5")}),
    ("--streaming", {"streaming": True}),
    ("--shuffle-buffer 9", {"shuffle_buffer": 9}),
    ("--num-workers 2", {"num_workers": 2}),
    ("--cache-dir tokens", {"cache_dir": "tokens"}),
    ("--max-seq-len 512", {"max_seq_len": 512}),
    ("--use-chat-template", {"chat_template": "template"}),
    ("--no-chat-template", {"chat_template": "plain"}),
    ("--chat-template plain", {"chat_template": "plain"}),
    ("--chat-template concat", {"chat_template": "concat"}),
    ("--chat-template own.jinja", {"chat_template": "own.jinja"}),
    (
        "--template-arguments enable_thinking=false effort=high",
        {"template_arguments": ("enable_thinking=false", "effort=high")},
    ),
    ("--truncation reply-middle", {"truncation": "reply-middle"}),
    ("--system-prompt 'Be kind.'", {"system_prompt": "Be kind."}),
    ("--system-prompt=-x", {"system_prompt": "-x"}),
    ("--system-prompt ''", {"system_prompt": ""}),
    ("--system-prompt=", {"system_prompt": ""}),
    ("--attention padded", {"attention": "padded"}),
    ("--precision bf16", {"precision": "bf16"}),
    ("--new-head", {"new_head": True}),
    ("--trust-remote-code", {"trust_remote_code": True}),
    ("--attention-backend varlen", {"attention_backend": "varlen"}),
    ("--linear-backend onednn", {"linear_backend": "onednn"}),
    ("--norm-backend blockwise", {"norm_backend": "blockwise"}),
    ("--elementwise-backend torch", {"elementwise_backend": "torch"}),
    ("--allocator system", {"allocator": "system"}),
    ("--compile", {"compile": True}),
    ("--activation-checkpointing full", {"activation_checkpointing": "full"}),
    ("--liger", {"liger": True}),
    ("--lora", {"lora": True}),
    ("--lora --lora-rank 16", {"lora": True, "lora_rank": 16}),
    ("--lora --lora-alpha 64", {"lora": True, "lora_alpha": 64.0}),
    ("--lora --lora-dropout 0.1", {"lora": True, "lora_dropout": 0.1}),
    ("--lora --lora-target-modules q_proj", {"lora": True, "lora_target_modules": ("q_proj",)}),
    ("--lora --lora-target-modules q_proj k_proj", {"lora": True, "lora_target_modules": ("q_proj", "k_proj")}),
    ("--lora --lora-target-modules q_proj,k_proj", {"lora": True, "lora_target_modules": ("q_proj", "k_proj")}),
    ("--lora --lora-target-modules q_proj, k_proj,", {"lora": True, "lora_target_modules": ("q_proj", "k_proj")}),
    ("--lora --rslora", {"lora": True, "rslora": True}),
    ("--lora --lora-rank 8 --rslora", {"lora": True, "lora_rank": 8, "rslora": True}),
    ("--lora --dora", {"lora": True, "dora": True}),
    ("--lora --lora-modules-to-save norm", {"lora": True, "lora_modules_to_save": ("norm",)}),
    (
        "--lora --lora-modules-to-save norm,score input_layernorm",
        {"lora": True, "lora_modules_to_save": ("norm", "score", "input_layernorm")},
    ),
    ("--lora --quantization nf4", {"lora": True, "quantization": "nf4"}),
    ("--lora --quantization int8", {"lora": True, "quantization": "int8"}),
    ("--train-head-only", {"train_head_only": True}),
    ("--train-head-only --cache-states", {"train_head_only": True, "cache_states": True}),
    ("--freeze-layers 2", {"freeze_layers": 2}),
    ("--report-to tensorboard wandb", {"report_to": ("tensorboard", "wandb")}),
    ("--report-to none", {"report_to": ("none",)}),
    ("--publish-to http://127.0.0.1:8000", {"publish_to": "http://127.0.0.1:8000"}),
    ("--publish-every eval", {"publish_every": "eval"}),
    ("--publish-as mine", {"publish_as": "mine"}),
    ("--publish-token-env TOKEN", {"publish_token_env": "TOKEN"}),
    ("--publish-timeout-s 30", {"publish_timeout_s": 30.0}),
    ("--precision-card always", {"precision_card": "always"}),
    ("--profile-memory", {"profile_memory": True}),
    ("--track-gpu --gpu-sample-interval-ms 100", {"track_gpu": True, "gpu_sample_interval_ms": 100}),
    ("--profile --profile-steps 5", {"profile": True, "profile_steps": 5}),
    ("--thresholds 0 1.5", {"thresholds": (0.0, 1.5)}),
    ("--batch-timeout-s 7.5", {"batch_timeout_s": 7.5}),
    ("--rank-timeout-s 90", {"rank_timeout_s": 90.0}),
    ("--resume auto", {"resume": "auto"}),
    ("--resume auto --steps 9 --reschedule", {"resume": "auto", "steps": 9, "reschedule": True}),
    ("--no-checkpoints", {"checkpoints": False}),
    ("--checkpoint-minutes 5", {"checkpoint_minutes": 5.0}),
    ("--checkpoint-every 50", {"checkpoint_every": 50}),
    ("--checkpoint-limit 3", {"checkpoint_limit": 3}),
    ("--max-hours 3.5", {"max_hours": 3.5}),
    ("--sharding hybrid", {"sharding": "hybrid"}),
    ("--defer-gradient-sync", {"defer_gradient_sync": True}),
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
    ("--dry-run", {"dry_run": True}),
    ("--steps 30", {"steps": 30}),
    ("--steps 30 --steps 40", {"steps": 40}),
    ("--steps --steps 40", {"steps": 40}),
    ("--epochs 2", {"epochs": 2.0}),
    ("--batch-size 32", {"batch_size": 32}),
    ("--rows-per-prompt 4", {"rows_per_prompt": 4}),
    ("--micro-token-budget 4096", {"micro_token_budget": 4096}),
    ("--lr 5e-6", {"lr": 5e-6}),
    ("--optimizer adamw8bit", {"optimizer": "adamw8bit"}),
    ("--optimizer sgd --lr 0.1", {"optimizer": "sgd", "lr": 0.1}),
    ("--optimizer adafactor --lr 1e-3", {"optimizer": "adafactor", "lr": 1e-3}),
    ("--differential-lr", {"differential_lr": True}),
    ("--differential-lr --backbone-lr-mult 0.5", {"differential_lr": True, "backbone_lr_mult": 0.5}),
    ("--head-only-weight-decay", {"head_only_weight_decay": True}),
    ("--weight-decay 0.1", {"weight_decay": 0.1}),
    ("--max-grad-norm 0.5", {"max_grad_norm": 0.5}),
    ("--seed 7", {"seed": 7}),
    ("--log-every 1", {"log_every": 1}),
    ("--eval-every 5", {"eval_every": 5}),
    ("--save-every 15", {"save_every": 15}),
    ("--log-samples 0", {"log_samples": 0}),
    ("--save-dtype bfloat16", {"save_dtype": "bfloat16"}),
    ("--early-stopping-metric eval_loss", {"early_stopping_metric": "eval_loss"}),
    ("--early-stopping-metric train_loss", {"early_stopping_metric": "train_loss"}),
    (
        "--early-stopping-metric gap_accuracy --early-stopping-mode min",
        {"early_stopping_metric": "gap_accuracy", "early_stopping_mode": "min"},
    ),
    ("--early-stopping-patience 3", {"early_stopping_patience": 3}),
    ("--early-stopping-min-delta 0.01", {"early_stopping_min_delta": 0.01}),
    ("--save-total-limit 2", {"save_total_limit": 2}),
    ("--lr-scheduler linear", {"lr_scheduler": "linear"}),
    ("--lr-scheduler constant", {"lr_scheduler": "constant"}),
    ("--lr-scheduler constant_with_warmup", {"lr_scheduler": "constant_with_warmup"}),
    (
        "--lr-scheduler cosine_with_min_lr --min-lr-ratio 0.2",
        {"lr_scheduler": "cosine_with_min_lr", "min_lr_ratio": 0.2},
    ),
    ("--warmup-steps 50", {"warmup_steps": 50}),
    ("--warmup-ratio 0.1", {"warmup_ratio": 0.1}),
]


@pytest.mark.parametrize(("line", "changes"), FLAGS, ids=[line for line, _ in FLAGS])
def test_a_flag_sets_its_setting_and_no_other(line, changes):
    wanted = DEFAULTS.replace(**changes)
    assert all(values_of(wanted, [name]) != values_of(DEFAULTS, [name]) for name in changes)
    # Datasets add up, so the one of BASE is left out where a line names its own.
    assert parse_train([*(BASE[:2] if "dataset" in changes else BASE), *shlex.split(line)]) == wanted


def test_a_run_without_flags_has_the_defaults_of_the_configuration():
    assert parse_train(BASE) == DEFAULTS


def test_every_setting_has_a_flag_in_the_table():
    settings = set(settings_of(RewardTrainerConfig))
    assert {name for _, changes in FLAGS for name in changes} == settings


@pytest.mark.parametrize("style", ["--{name}={value}", "--{name} {value}", "--{under_name} {value}"])
def test_flags_may_be_written_with_equals_signs_and_with_underscores(style):
    pairs = {
        line.split()[0][2:]: line.split()[1] for line, _ in FLAGS if re.fullmatch(r"--[a-z-]+ [\w.][\w./-]*", line)
    }
    del pairs["kwise-loss"]  # plackett-luce goes with neither soft labels nor margins
    del pairs["warmup-ratio"]  # or in steps
    del pairs["preset"]  # or TRL's conventions
    del pairs["freeze-layers"]  # or adapters
    del pairs["rows-per-prompt"]  # or the padded layout
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
        ("--lora-rank 8", "--lora-rank 8: it needs adapters. Add --lora, or leave it out"),
        ("--rslora", "--rslora: it needs adapters"),
        ("--lora-rank 4", "--lora-rank 4: it needs adapters"),
        ("--lora yes", "unexpected 'yes': values follow their flag; a switch such as --lora takes no value"),
        ("--lora=false", "unexpected 'false': values follow their flag"),
        ("--use-chat-template=false", "--chat-template template false: takes one value"),
        ("--model m --dataset d --lora --lora-target-modules ,", "--lora-target-modules: name at least one layer"),
        ("--learning-rate 1e-5", "unknown flag '--learning-rate'. Did you mean '--lr'?"),
        ("--use-peft", "unknown flag '--use-peft'. Did you mean '--lora'?"),
        ("--model_name m", "unknown flag '--model_name'. Did you mean '--model'?"),
        ("--logging_steps 5", "unknown flag '--logging_steps'. Did you mean '--log-every'?"),
        ("--eval-steps 5", "unknown flag '--eval-steps'. Did you mean '--eval-every'?"),
        ("--save-steps=5", "unknown flag '--save-steps'. Did you mean '--save-every'?"),
        ("--lora-r 4", "unknown flag '--lora-r'. Did you mean '--lora-rank'?"),
        ("--max-sequence-len 8", "unknown flag '--max-sequence-len'. Did you mean '--max-seq-len'?"),
        ("--hf-datset=a", "unknown flag '--hf-datset'. Did you mean '--hf-dataset'?"),
        ("--trainable-norms", "unknown flag '--trainable-norms'. Did you mean '--lora-modules-to-save'?"),
        ("--no-rlora", "unknown flag '--no-rlora'. Did you mean '--no-rslora'?"),
        ("--conf a.yaml", "unknown flag '--conf'. Did you mean '--config'?"),
        ("--patience 5", "unknown flag '--patience'. Did you mean '--early-stopping-patience'?"),
        ("--min-delta 0.01", "unknown flag '--min-delta'. Did you mean '--early-stopping-min-delta'?"),
        ("--threshold 0", "unknown flag '--threshold'. Did you mean '--thresholds'?"),
        ("--use-lora", "unknown flag '--use-lora'. Did you mean '--lora'?"),
        ("--out runs", "unknown flag '--out'. Did you mean '--output-dir'?"),
        ("--validation-file a", "unknown flag '--validation-file'. Did you mean '--eval-dataset'?"),
        ("--grad-accum 8", "Did you mean '--batch-size'? It counts the rows of a whole step"),
        ("--gradient_accumulation_steps 8", "Did you mean '--batch-size'? It counts the rows of a whole step"),
        ("--max_samples 8", "unknown flag '--max_samples'. Did you mean '--limit'?"),
        ("--subset a", "is written behind its name, as NAME:CONFIGURATION. `rewardlab train"),
        ("--run-name a", "unknown flag '--run-name'. `rewardlab train --help` lists the flags"),
        ("--l3 0.1", "unknown flag '--l3'. `rewardlab train --help` lists the flags"),
        ("--lr-scheduler none", "cosine_with_min_lr. Did you mean 'constant'?"),
        ("--lr-scheduler None", "cosine_with_min_lr. Did you mean 'constant'?"),
        (
            "--preset 3b-lora-sph",
            "must be one of none, 0.5b-trial, 3b-lora-shp, 7b-lora-shp, full-finetuning, proxy-rm, ",
        ),
        ("--preset 3b-lora-sph", "Did you mean '3b-lora-shp'?"),
        ("--preset", "--preset: the value is missing"),
        ("--preset plain --compat trl", "--preset plain and --compat trl both say what holds where nothing is given"),
        (
            "--model m --dataset d --early-stopping-patience 3 --eval-fraction 0",
            "--early-stopping-patience 3: without evaluation data nothing stops the run. Name some",
        ),
        ("--zzz", "unknown flag '--zzz'. `rewardlab train --help` lists the flags"),
        ("--system-prompt '-x y'", "unknown flag '-x y'"),
        ("--dora", "--dora: it needs adapters. Add --lora, or leave it out."),
        ("--lora --quantization nf5", "--quantization nf5: must be one of none, nf4, int8. Did you mean 'nf4'?"),
        (
            "--optimizer adam",
            "--optimizer adam: must be one of adamw, sgd, adafactor, adamw8bit. Did you mean 'adamw'?",
        ),
        ("--optimizer sgd", "--optimizer sgd: the default learning rates are those of AdamW. Give one with --lr"),
        ("--backbone-lr-mult 0.5", "--backbone-lr-mult 0.5: without --differential-lr there is one rate"),
        ("--lora --freeze-layers 1", "--freeze-layers 1: with --lora every layer is frozen"),
        ("--lora --train-head-only", "--train-head-only: with --lora adapters train too"),
        ("--cache-states", "--cache-states: the states stay the same only if the backbone does. Add --train-head-only"),
        ("--max-seq-len 8", "--max-seq-len 8: must be at least 16"),
        ("--chat-template plian", "--chat-template plian: neither one of auto, template, plain, concat nor a file"),
        ("--chat-template plian", "Did you mean 'plain'?"),
        ("--chat-template ''", "--chat-template '': neither one of auto"),
        ("--template-arguments thinking", "--template-arguments thinking: wanted NAME=VALUE, such as enable_thinking"),
        ("--no-chat-template --template-arguments a=1", "--template-arguments: --chat-template plain takes none"),
        ("--micro-token-budget 8", "--micro-token-budget 8: must be at least 16"),
        ("--label-smoothing 0.5", "--label-smoothing 0.5: must be at least 0 and below 0.5"),
        ("--max-replies 1", "--max-replies 1: must be at least 2"),
        ("--max-per-post 0", "--max-per-post 0: must be at least 1"),
        ("--min-score-ratio 0.5", "--min-score-ratio 0.5: must be at least 1"),
        (
            "--attributes helpfulness",
            "--attributes helpfulness: wanted NAME=NUMBER, such as --attributes helpfulness=1",
        ),
        ("--map-label A=2", "--map-label A=2: the number must be from 0 to 1"),
        ("--prompt-column a --chosen-column a", "the column 'a' is named twice"),
        ("--margin-column m --strength-as margin", "--margin-column and --strength-as margin both set the margin"),
        ("--config", "--config : takes the name of one YAML or TOML file"),
        ("--config a.yaml --config=b.yaml", "--config a.yaml b.yaml: takes the name of one"),
    ],
)
def test_a_flag_that_does_not_resolve_is_refused_in_one_plain_line(line, message, capsys):
    said = refusal(capsys, "train", *shlex.split(line))
    assert said.startswith(message) or message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve --model runs/a", "'--model'. MODELS is given without a flag."),
        ("plan run --study=a", "'--study'. STUDY is given without a flag."),
        ("eval --data a", "Did you mean '--dataset'?"),
        ("diagnose --steps 8", "'--steps'. It is a setting of training runs: give --train, and write it into the file"),
        ("eval --eval-dataset a", "'--eval-dataset'. It is a setting of training. Did you mean '--dataset'?"),
        ("eval --csv", "'--csv'. `rewardlab eval --help`"),
        ("gold sample --base-url u", "Did you mean '--url'?"),
    ],
)
def test_a_hint_is_a_setting_that_the_name_could_mean(words, said, capsys) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert said in capsys.readouterr().err


def test_a_saved_configuration_gives_itself(tmp_path):
    changes = {name: value for _, settings in FLAGS for name, value in settings.items()}
    together = {"strength_as": "none", "kwise_loss": "pairs", "warmup_ratio": None, "compat": "none"}
    together |= {"train_head_only": False, "cache_states": False, "freeze_layers": 0}  # which go with no adapters
    together |= {"resume": None, "reschedule": False}  # which go with no --overwrite
    together |= {"rows_per_prompt": 1}  # several go with no dropout
    config = DEFAULTS.replace(**changes | together)
    write_json(tmp_path / "config.json", to_mapping(config))
    assert parse_train(["--config", str(tmp_path / "config.json")]) == config


def test_words_that_may_be_left_out_are_shown_in_the_help(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["gold", "run", "--help"])
    assert "--until {sample,label,build,train,match,curve,check}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["gold", "label", "--help"])
    assert "of earlier scripts also --target_path, --model_name" in " ".join(capsys.readouterr().out.split())


WORDS = shlex.split(
    "a.jsonl 7 -7 -x -- '' -h=1 --lr --lr=1 --no-lr --lrr --seed=7 --lora --no_lora --eval_fraction --dataset "
    "--no-chat-template --mistakes --mistakes=7 --no-texts --output_dir"
)


@pytest.mark.slow
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=8),
    asked=st.sampled_from([("train", *BASE), ("report",), ("report", "run")]),
)
@tried(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_line_gives_the_same_as_when_the_parser_is_told_of_every_flag(words, asked, monkeypatch, capsys) -> None:
    command, *before = asked

    def found() -> object:
        try:
            return parse(RewardTrainerConfig if command == "train" else ReportArguments, [*before, *words], command, "")
        except ConfigError as error:
            return str(error)
        except SystemExit as ended:
            return ended.code, capsys.readouterr()

    fewer = found()
    with monkeypatch.context() as patch:
        patch.setattr(flags, "_asks_for_all", lambda words: True)
        assert found() == fewer
