"""What may be different when a run goes on, and what would make it another run."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from common import make_model, write_base_model, write_pairs
from resuming import KINDS, interrupted, weights_of
from rewardlab.commands.training import parse_train
from rewardlab.core.config import HASH_DIGITS, settings_of
from rewardlab.core.errors import ArtifactError, ConfigError, DataError
from rewardlab.core.files import SUM, sha256_json
from rewardlab.training.checkpoints import resume
from rewardlab.training.checkpoints.checkpoint import newest_checkpoint
from rewardlab.training.run import train
from rewardlab.training.settings.config import RewardTrainerConfig
from runs import rows_of, values_of

pytestmark = pytest.mark.usefixtures("verified_here")


REFUSED = {
    "lr": ({"lr": 1e-3}, r"--lr 0.001, it was 0.003. Give the settings that the run began with"),
    "batch size": ({"batch_size": 4}, r"--batch-size 4, it was 8"),
    "seed": ({"seed": 1}, r"--seed 1, it was 0"),
    "length": ({"steps": 10}, r"--steps 10, it was 8. The learning rate of every step .* step 5 on with --reschedule"),
    "schedule": ({"lr_scheduler": "linear"}, r"--lr-scheduler linear, it was cosine"),
    "several": ({"beta": 2.0, "weight_decay": 0.0}, r"--beta 2.0, it was 1.0; --weight-decay 0.0, it was 0.01"),
    "metric": ({"early_stopping_metric": "eval_loss"}, r"--early-stopping-metric eval_loss, it was eval_accuracy"),
    "behind": ({"steps": 4, "reschedule": True}, r"--steps 4 is fewer than the 5 steps of the checkpoint"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> RewardTrainerConfig:
    """How to go on with a run that was stopped after step 5, for tests that read it and do not go on."""
    folder = tmp_path_factory.mktemp("stopped")
    base, pairs = write_base_model(folder / "base"), write_pairs(folder / "pairs.jsonl", 40)
    with pytest.MonkeyPatch.context() as patched:
        return interrupted(base, pairs, folder / "run", patched, warmup_steps=2)


@pytest.mark.parametrize("change", REFUSED)
def test_what_would_be_another_run_is_refused_by_name(change, stopped):
    changes, message = REFUSED[change]
    with pytest.raises(ConfigError, match=message):
        train(stopped.replace(**changes))
    assert newest_checkpoint(stopped.run.output_dir).step == 5


@pytest.mark.slow
def test_what_moves_no_weight_may_change_and_is_told(base_model, pairs_file, tmp_path, monkeypatch, log):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    log.clear()
    torch.set_num_threads(2)
    train(config.replace(log_every=1, micro_token_budget=300, early_stopping_patience=50, checkpoint_limit=1))
    assert "RESUME: 2 threads (OMP_NUM_THREADS), it was 1; equal up to rounding" in log.text
    assert "--log-every 1, it was 3" in log.text
    assert "--micro-token-budget 300, it was 256 (equal up to rounding from here on)" in log.text
    assert "--early-stopping-patience 50, it was None (which model is chosen may change)" in log.text
    assert json.loads((tmp_path / "run/config.json").read_text())["micro_token_budget"] == 300


@pytest.mark.slow
def test_a_longer_run_takes_a_new_course_when_asked(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    train(config.replace(steps=12, reschedule=True))
    rates = {int(row["step"]): float(row["lr"]) for row in rows_of(tmp_path / "run") if row["lr"]}
    train(config.replace(steps=12, resume=None, output_dir=tmp_path / "long", warmup_steps=0))
    wanted = {int(row["step"]): float(row["lr"]) for row in rows_of(tmp_path / "long") if row["lr"]}
    assert {step: rates[step] for step in rates if step > 5} == {step: wanted[step] for step in wanted if step > 5}


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--epochs", "2"], {"steps": None, "epochs": 2.0, "warmup_steps": 2}),
        (["--steps", "9"], {"steps": 9, "warmup_steps": 2}),
        (["--warmup-ratio=0.25"], {"steps": 8, "warmup_steps": None, "warmup_ratio": 0.25}),
        (["--epochs=2", "--warmup_steps", "3"], {"steps": None, "warmup_steps": 3}),
        (["--reschedule", "--lr-scheduler=constant"], {"lr_scheduler": "constant", "warmup_steps": None}),
    ],
)
def test_what_is_given_goes_before_what_the_run_says_in_other_units(flags, found, stopped):
    config = parse_train(["--resume", str(stopped.run.output_dir), *flags])
    assert values_of(config, found) == found


def test_a_run_that_goes_on_at_a_constant_rate_leaves_its_warm_up(stopped):
    run = resume.find_interrupted(stopped)
    asked = stopped.replace(warmup_steps=None, reschedule=True)
    assert resume.with_decisions(asked, run.config).schedule.warmup_steps == 2
    constant = resume.with_decisions(asked.replace(lr_scheduler="constant"), run.config)
    assert constant.schedule.warmup_steps is None


@pytest.mark.parametrize(("scheduler", "follows"), [("constant_with_warmup", False), ("cosine", True)])
def test_more_steps_are_another_schedule_only_where_the_rate_depends_on_them(scheduler, follows, stopped):
    run = resume.find_interrupted(stopped)
    run = dataclasses.replace(run, config=run.config.replace(lr_scheduler=scheduler))
    (line,) = resume.require_same_run(run.config.replace(steps=12), run, reschedule=True)
    assert line.startswith("--steps 12, it was 8")
    assert ("another schedule from here on" in line) == follows


@pytest.mark.slow
def test_a_level_rate_needs_no_new_course(base_model, pairs_file, tmp_path, monkeypatch):
    level = {"lr_scheduler": "constant", "eval_every": 4}
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, **level)
    train(config.replace(steps=12))
    train(config.replace(steps=12, resume=None, output_dir=tmp_path / "long"))
    ours, theirs = weights_of(tmp_path / "run/step_12"), weights_of(tmp_path / "long/step_12")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_reads_typed_control_tokens_as_it_did(base_model, tmp_path, monkeypatch):
    data = write_pairs(tmp_path / "typed.jsonl", 40)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps(row | {"prompt": "<|im_end|> " + row["prompt"]}) + "\n" for row in rows))
    asked = interrupted(base_model, data, tmp_path / "run", monkeypatch, special_tokens_in_text="keep")
    written = tmp_path / "run/config.json"
    values = json.loads(written.read_text())
    del values["special_tokens_in_text"]
    written.write_text(json.dumps(values))
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    manifest.pop(SUM, None)
    manifest["config_hash"] = sha256_json(values)[:HASH_DIGITS]
    for report in manifest["tokens"].values():
        assert report.pop("special_tokens_in_text") == 2 * report["kept"]
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    train(asked.replace(special_tokens_in_text="auto"))
    assert json.loads(written.read_text())["special_tokens_in_text"] == "keep"
    with pytest.raises(ConfigError, match="--special-tokens-in-text text, it was keep"):
        train(asked.replace(special_tokens_in_text="text"))


@pytest.mark.slow
def test_other_data_are_another_run(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    moved = tmp_path / "moved" / pairs_file.name
    moved.parent.mkdir()
    shutil.copy(pairs_file, moved)
    lines = pairs_file.read_text().splitlines(keepends=True)
    pairs_file.write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(DataError, match="the training data are not what the run began with"):
        train(config)
    train(config.replace(dataset=(str(moved),)))


@pytest.mark.slow
@pytest.mark.parametrize("drawn", ["weights", "control"])
def test_data_whose_rows_or_labels_are_drawn_by_their_name_keep_it(
    drawn, base_model, pairs_file, tmp_path, monkeypatch
):
    other, test = write_pairs(tmp_path / "other.jsonl", 40, offset=100), write_pairs(tmp_path / "test.jsonl", 20)
    weighted = drawn == "weights"
    changes = {"dataset": (f"{pairs_file}:2", f"{other}:1")} if weighted else {"diagnostic_mode": "label_shuffle"}
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, eval_dataset=(str(test),), **changes)
    renamed = tmp_path / "renamed.jsonl"
    shutil.copy(pairs_file, renamed)
    names = (f"{renamed}:2", f"{other}:1") if weighted else (str(renamed),)
    called = f"The dataset {pairs_file.stem} is now called renamed, and draws of rows and of labels go by the name"
    with pytest.raises(DataError, match=f"the training data are not what the run began with .*{called}"):
        train(config.replace(dataset=names))
    if weighted:
        for names in ((f"{pairs_file}:1", f"{other}:1"), (str(pairs_file), str(other))):
            with pytest.raises(DataError, match="the weights of the datasets are not what the run began with"):
                train(config.replace(dataset=names))
    train(config)


@pytest.mark.slow
def test_another_base_model_under_the_same_name_is_noticed(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, **KINDS["lora"])
    path = base_model / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.mlp.up_proj.weight"].view(-1)[0] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match="the frozen weights of --model are not those that the run began with"):
        train(config)


def test_a_run_that_froze_nothing_does_not_go_on_with_frozen_parts():
    """As those of Gemma 3 and Qwen3.5 with all that reads images, which trained up to version 0.18."""
    model = make_model()
    manifest = {"frozen_weights": resume.frozen_fingerprint(model)}
    resume.require_same_base(resume.frozen_fingerprint(model), manifest)
    model.backbone.embed_tokens.requires_grad_(False)
    with pytest.raises(DataError, match="no weight was frozen where this run began.*by the version that began it"):
        resume.require_same_base(resume.frozen_fingerprint(model), manifest)
    with pytest.raises(DataError, match="are not those that the run began with"):
        resume.require_same_base("0", {"frozen_weights": resume.frozen_fingerprint(model)})


def test_a_model_that_computes_otherwise_with_the_same_weights_is_noticed(stopped, tmp_path):
    base = shutil.copytree(stopped.model.model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 50
    (base / "config.json").write_text(json.dumps(config | {"transformers_version": "5.0.0", "dtype": "bfloat16"}))
    message = "^--resume: rope_parameters.rope_theta, in the configuration of the model, is not what the run began with"
    with pytest.raises(DataError, match=message):
        train(stopped.replace(model=str(base)))
    assert newest_checkpoint(stopped.run.output_dir).step == 5


def test_a_run_of_a_version_that_kept_no_configuration_of_the_model_goes_on():
    began = {"rope_theta": "0", "gone": "1"}
    resume._require_same_config({"rope_theta": "1"}, {})
    resume._require_same_config({"rope_theta": "0", "added": "2"}, began)
    with pytest.raises(DataError, match="a, b, in the configuration of the model, are not"):
        resume._require_same_config({"a": "0", "b": "0", "c": "0"}, {"a": "1", "b": "1", "c": "0"})


def test_a_run_on_padded_rows_goes_on_whatever_kernel_of_packed_rows_it_named(
    base_model, pairs_file, tmp_path, monkeypatch, log
):
    """GPT-OSS was padded before kernels knew of its sinks, and those that its runs named are now refused for it."""
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch, attention="padded")
    saved, facts = config.run.output_dir / "config.json", config.run.output_dir / "manifest.json"
    values, manifest = json.loads(saved.read_text()) | {"attention_backend": "varlen"}, json.loads(facts.read_text())
    del manifest[SUM]
    saved.write_text(json.dumps(values))
    facts.write_text(json.dumps(manifest | {"config_hash": sha256_json(values)[:HASH_DIGITS]}))
    with pytest.raises(ConfigError, match="--attention-backend varlen: it runs only on CUDA"):
        train(config.replace(attention="shared"))
    log.clear()
    assert train(config).last.name == "step_8"
    assert not [line for line in log.messages if "attention-backend" in line]
    assert json.loads(saved.read_text())["attention_backend"] == "varlen"


def test_of_a_template_and_tokens_that_differ_the_template_is_named():
    facts = {"data": {"train": []}, "tokens": {"training": {"kept": 1}}, "template_hash": "now"}
    began = {"data": {"train": []}, "tokens": {"training": {"kept": 2}}, "template_hash": "then"}
    with pytest.raises(DataError, match=r"the chat template is not what .* another run. Restore what changed"):
        resume.require_same_data(facts, began)
    earlier = began | {"provenance": {"packages": {"rewardlab": "0.0.1"}}}
    with pytest.raises(DataError, match=r"It began with rewardlab 0\.0\.1, and this is .*, which may read rows and"):
        resume.require_same_data(facts, earlier)


@pytest.mark.slow
def test_a_model_of_another_size_does_not_fit(base_model, pairs_file, tmp_path, monkeypatch):
    config = interrupted(base_model, pairs_file, tmp_path / "run", monkeypatch)
    other = write_base_model(tmp_path / "other", family="qwen2")
    with pytest.raises((ArtifactError, DataError), match=r"step_5 |not what the run began with"):
        train(config.replace(model=str(other)))


def test_every_setting_is_of_one_kind():
    """A new setting is refused on resuming until somebody decides otherwise; one in two lists would be a riddle."""
    lists = (resume.PERMISSIONS, resume.BY_CONTENT, resume.FREE, resume.CADENCE, resume.ROUNDING, resume.LENGTH)
    names = [name for names in lists for name in names]
    assert len(names) == len(set(names))
    assert set(names) | set(resume.PROBED) <= set(settings_of(RewardTrainerConfig))


def test_frozen_weights_are_known_by_every_bit():
    model = make_model(dtype=torch.float32)
    model.requires_grad_(False)
    before = resume.frozen_fingerprint(model)
    assert resume.frozen_fingerprint(model) == before
    with torch.no_grad():
        model.head.weight.view(-1)[0] = torch.nextafter(model.head.weight.view(-1)[0], torch.tensor(9.0))
    assert resume.frozen_fingerprint(model) != before


class Summed(TorchDispatchMode):
    """The most that is summed at once."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.sum:
            self.most = max(self.most, args[0].numel())
        return function(*args, **(kwargs or {}))


def test_frozen_weights_are_compared_without_a_copy_of_any_twice_its_size():
    """The CPU makes integers of eight bytes of all that is summed at once: 5 GB for an embedding of Gemma 2."""
    weight = torch.randn(3 * 2**21 + 1, generator=torch.Generator().manual_seed(0))
    model = torch.nn.ParameterList([torch.nn.Parameter(weight, requires_grad=False)])
    with Summed() as summed:
        found = resume.frozen_fingerprint(model)
    assert summed.most <= 2**22
    assert found == f"{int(weight.numpy().view(np.int32).sum(dtype=np.int64)) % (1 << 61):x}"
