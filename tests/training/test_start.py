"""What a run says of its settings before it begins, and the names that it looks for on this machine alone."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from common import make_groups
from reward_models import save_tiny
from rewardlab.artifact.base import open_base
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.data.groups import Datasets
from rewardlab.distributed.ranks import ALONE, Ranks
from rewardlab.model import builtin, hub
from rewardlab.model.builtin import resolve_model_name
from rewardlab.model.config import looks_local
from rewardlab.model.load import read_config
from rewardlab.training.notices import continued_notices, idle_notices, unjudged_notices
from rewardlab.training.run import train
from rewardlab.training.settings import presets
from rewardlab.training.settings.config import RewardTrainerConfig
from rewardlab.training.start import _agreed, configuration_block


def shown(width=100, **changes):
    config = RewardTrainerConfig.of(model="m", dataset=("d",), **changes)
    return configuration_block(config, width=width)


class Beside(Ranks):
    """This rank, the first, beside one whose choice of kernels is another."""

    other = "torch"

    def gather(self, own):
        return [own, self.other]


@pytest.mark.parametrize("own", ["torch", "triton"])
def test_kernels_that_one_rank_does_not_have_are_taken_by_none(own):
    config = RewardTrainerConfig.of(model="m", dataset=("d",), elementwise_backend=own, seed=7)
    assert _agreed(ALONE, config) == config
    agreed = _agreed(Beside(), config)
    assert agreed.compute.elementwise_backend == "torch"
    assert agreed.run.seed == 7


def test_zeros_and_switches_that_differ_from_the_default_are_listed():
    usual = " ".join(shown().split())
    assert "label_smoothing=0.05" in usual
    for absent in ("lora_dropout", "baselines=False", "freeze_layers", " limit=", "overwrite"):
        assert absent not in usual
    for idle in ("diagnostic_", "lora_", "publish_", "profile_steps", "shuffle_buffer"):
        assert idle not in usual
    assert "lora_rank=4" in " ".join(shown(lora=True).split())
    assert "profile_steps=9" in " ".join(shown(profile_steps=9).split())
    changed = " ".join(shown(label_smoothing=0, weight_decay=0.0, baselines=False, log_samples=0).split())
    for there in ("label_smoothing=0.0", "weight_decay=0.0", "baselines=False", "log_samples=0"):
        assert there in changed


@pytest.mark.parametrize("width", [1, 2, 3, 40, 80])
def test_the_block_fits_the_terminal(width):
    lines = shown(width).splitlines()
    assert all(len(line) <= max(width, 20) or " " not in line.strip() for line in lines)
    assert len(lines) > 5


@pytest.mark.parametrize(("steps", "every"), [(1, 5), (5, 5), (20, 5), (50, 5), (51, 5), (1000, 100)])
def test_a_short_trial_does_not_evaluate_at_every_step(steps, every):
    assert RewardTrainerConfig.of(model="m", dataset=("d",)).run.interval(steps) == every
    assert RewardTrainerConfig.of(model="m", dataset=("d",), eval_every=1).run.interval(steps) == 1


@pytest.mark.parametrize(
    ("given", "switch", "said"),
    [
        (
            {"lora_rank": 16, "lora_dropout": 0.1},
            {"lora": True},
            "--lora-rank 16 --lora-dropout 0.1 do nothing without",
        ),
        ({"checkpoint_every": 5}, {"checkpoints": True}, "--checkpoint-every 5 does nothing without --checkpoints."),
        (
            {"regularization_type": "l1"},
            {"regularization_lambda": 0.1},
            "--regularization-type l1 does nothing without",
        ),
        ({"profile_steps": 9}, {"profile": True}, "--profile-steps 9 does nothing without --profile. Add it, or leave"),
        ({"publish_as": "b"}, {"publish_to": "http://a"}, "--publish-as b does nothing without --publish-to."),
        ({"shuffle_buffer": 9}, {"streaming": True}, "--shuffle-buffer 9 does nothing without --streaming."),
    ],
)
def test_settings_of_a_feature_that_is_off_are_told(given, switch, said):
    off = {"checkpoints": False} if "checkpoints" in switch else {}
    config = RewardTrainerConfig.of(model="m", dataset=("d",), **given, **off)
    (line,) = idle_notices(config)
    assert said in line
    assert not idle_notices(config.replace(**switch))
    assert not idle_notices(RewardTrainerConfig.of(model="m", dataset=("d",), profile_memory=True))


def test_settings_that_are_about_missing_evaluation_data_say_what_to_do():
    own = {"train_eval_limit": 9, "early_stopping_metric": "eval_loss", "precision_card": "always"}
    config = RewardTrainerConfig.of(model="m", dataset=("d",), eval_fraction=0.0, **own)
    groups = make_groups(2)
    none, some = (Datasets(train=groups, eval=part, train_eval=()) for part in ((), groups))
    said = unjudged_notices(config, none, ())
    flags = ["--train-eval-limit 9", "--early-stopping-metric eval_loss", "--precision-card always"]
    assert [line.partition(": ")[0] for line in said] == flags
    assert all("there are none. Name some with --eval-dataset" in line for line in said)
    assert [line.partition(": ")[0] for line in unjudged_notices(config, none, groups)] == flags[:2]
    assert not unjudged_notices(config, some, ())
    assert not unjudged_notices(RewardTrainerConfig.of(model="m", dataset=("d",), eval_fraction=0.0), none, ())


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"elementwise_backend": "triton"}, "--elementwise-backend triton"),
        ({"norm_backend": "fused"}, "--norm-backend fused"),
        ({"liger": True}, "--liger"),
    ],
)
def test_kernels_of_cuda_are_refused_before_data_are_read_where_there_is_none(asked, flag, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = RewardTrainerConfig.of(model="not read", dataset="not read", output_dir=str(tmp_path / "run"), **asked)
    with pytest.raises(ConfigError, match=f"{flag}: it needs a CUDA device, and there is none here"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_name_that_looks_local_is_not_sought_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("sought"))
    for name in ("./model", "../model", "/nosuch/model", "~/model", "runs/mine/best", "model/"):
        assert looks_local(name)
        with pytest.raises(ModelError, match=rf"no model at '{name}': there is no such folder\. Give a hub name"):
            read_config(name)


def test_a_misspelt_name_of_the_built_in_model_is_not_sought_on_the_hub(pairs_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("sought"))
    with pytest.raises(ModelError, match="no model at 'smollm2-135m': .* Did you mean 'smollm2-135m-instruct'"):
        train(RewardTrainerConfig.of(model="smollm2-135m", dataset=str(pairs_file), output_dir="run"))
    assert not (tmp_path / "run").exists()


def test_names_of_a_hub_are_sought_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B", "owner/name"):
        assert not looks_local(name)


def test_it_is_said_once_that_a_model_is_looked_for_on_the_hub(log, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub.say_sought.cache_clear()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(builtin, "is_complete", lambda _: True)
    for name in ("owner/name", "owner/name", "here", "./there", "smollm2-135m-instruct"):
        resolve_model_name(name, log.messages.append)
    (line,) = [line for line in log.messages if "hub" in line]
    assert line.startswith(
        "model owner/name: there is no such folder here, so it is looked for on the Hugging Face hub"
    )


@pytest.mark.slow
def test_a_run_says_that_its_rate_is_one_for_smaller_models(base_model, pairs_file, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(presets, "LARGE", 1_000)
    caplog.set_level("WARNING", logger="rewardlab")
    config = RewardTrainerConfig.of(
        model=str(base_model),
        dataset=(str(pairs_file),),
        output_dir=tmp_path / "run",
        lora=True,
        steps=1,
        eval_fraction=0.0,
        max_seq_len=128,
        precision="fp32",
    )
    train(config)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("rate: ")]
    assert "adapters with --lr 5e-05, which is a rate for 3 billion" in line


def test_a_reward_model_that_goes_on_with_other_settings_than_its_own_is_told(tmp_path):
    # The template in its tokenizer holds the system prompt, so that alone stays if nothing is said.
    folder = save_tiny(tmp_path / "rm", system_prompt="Be brief.")

    def told(**changes):
        usual = {"max_seq_len": 256, "model": str(folder), "dataset": ("d",)}
        config = RewardTrainerConfig.of(**usual | changes)
        return continued_notices(config, open_base(config.model, config.data.rendering))

    assert told() == told(system_prompt="Be brief.") == []
    (line,) = told(beta=2.0, max_seq_len=200, truncation="drop")
    assert line == (
        f"{folder} goes on with other settings than it was trained with: --max-seq-len was 256, now 200; --truncation "
        f"was prompt-left, now drop; --beta was 1, now 2."
    )
    others = {"chat_template": "plain"}, {"system_prompt": "Be long."}
    for other in others:
        assert "conversations become other tokens (--chat-template, --system-prompt)" in told(**other)[0]
    assert not told(beta=2.0, new_head=True), "nothing is left that was trained for them"
