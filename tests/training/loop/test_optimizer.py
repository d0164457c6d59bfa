"""Each choice of what trains, and of how, moves just what it should; what is frozen stays bit for bit as it was."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

import runs
from common import make_groups, make_model
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError, ModelError
from rewardlab.data.groups import Datasets
from rewardlab.model.applying import checkpoint_activations
from rewardlab.model.config import ModelConfig
from rewardlab.model.reward import RewardModel
from rewardlab.model.trainable import choose_trainable, half_frozen, require_layers
from rewardlab.training.loop import optimizer as optimizer_module
from rewardlab.training.loop.optimizer import build_optimizer, state_bytes
from rewardlab.training.loop.reward_trainer import RewardTrainer, reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.run import train
from rewardlab.training.settings.config import FULL_LR, HEAD_LR, LORA_LR, OptimizerConfig, RewardTrainerConfig


def config_of(**settings) -> RewardTrainerConfig:
    """Batches of eight; the schedule is level, so that the first step has the full rate."""
    plain = {"model": "x", "dataset": ("y",), "batch_size": 8, "lr": 1e-2, "lr_scheduler": "constant"}
    return RewardTrainerConfig.of(**{**plain, **settings})


def trainer_for(config: RewardTrainerConfig, folder, model: RewardModel, num_groups: int = 8) -> RewardTrainer:
    return reward_trainer(
        config,
        model.train(),
        Datasets(train=make_groups(num_groups)),
        num_steps=100,
        records=Records(folder),
        save=lambda folder, step: None,
    )


def moved(config: RewardTrainerConfig, folder, *, steps: int = 2) -> dict[str, float]:
    """How far each tensor moves in some steps, as L2."""
    model = make_model()
    choose_trainable(model, config.model, seed=0)
    trainer = trainer_for(config, folder, model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(steps):
        trainer.train_step(trainer.steps.plan(step, trainer.token_budget))
    return {name: float((tensor - before[name]).norm()) for name, tensor in model.state_dict().items()}


def layer(number: int):
    return lambda name: name.startswith(f"backbone.layers.{number}.")


def is_head(name: str) -> bool:
    return name == "head.weight"


TRAINS = {
    "everything": ({}, lambda name: True),
    "sgd": ({"optimizer": "sgd"}, lambda name: True),
    "adafactor": ({"optimizer": "adafactor"}, lambda name: True),
    "head": ({"train_head_only": True}, is_head),
    "head by sgd": ({"train_head_only": True, "optimizer": "sgd"}, is_head),
    "upper layer": (
        {"freeze_layers": 1},
        lambda name: layer(1)(name) or name == "backbone.norm.weight" or is_head(name),
    ),
    "adapters": ({"lora": True}, lambda name: ".lora_" in name or is_head(name)),
    "dora": ({"lora": True, "dora": True}, lambda name: ".lora_" in name or is_head(name)),
    "adapters and norms": (
        {"lora": True, "lora_modules_to_save": ("norm",), "differential_lr": True},
        lambda name: ".lora_" in name or name == "backbone.norm.weight" or is_head(name),
    ),
}


@pytest.mark.parametrize("name", TRAINS)
def test_what_trains_moves_and_nothing_else_does(tmp_path, name):
    settings, trains = TRAINS[name]
    distances = moved(config_of(**settings), tmp_path)
    assert {key for key, distance in distances.items() if distance > 0} == {key for key in distances if trains(key)}


@pytest.mark.parametrize("checkpoints", ["none", "full"])
def test_nothing_is_computed_backward_for_what_is_frozen(checkpoints):
    model = make_model().train()
    choose_trainable(model, ModelConfig(train_head_only=True), seed=0)
    checkpoint_activations(model, checkpoints)
    batch = pack(make_groups(3))
    assert not model.final_states(batch).requires_grad
    assert model(batch).requires_grad
    half = make_model().train()
    choose_trainable(half, ModelConfig(freeze_layers=1), seed=0)
    checkpoint_activations(half, checkpoints)
    seen: list[bool] = []
    for part in half.backbone.layers:
        part.register_forward_hook(lambda _module, _inputs, output: seen.append(output.requires_grad))
    half(batch)
    assert seen == [False, True]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3"])
def test_embeddings_and_the_first_layers_are_frozen_and_their_matrices_held_in_the_dtype_of_the_arithmetic(family):
    model = make_model(family)
    choose_trainable(model, ModelConfig(freeze_layers=1), seed=0)
    half_frozen(model.backbone, torch.bfloat16)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    embeddings = {name for name in dict(model.named_parameters()) if "embed" in name}
    assert frozen == embeddings | {name for name in dict(model.named_parameters()) if layer(0)(name)}
    assert len(embeddings) == 1
    # Gemma's embedding multiplies its rows in the dtype in which it is held.
    wide = embeddings if family == "gemma3" else set()
    held = {name: p for name, p in model.named_parameters() if name in frozen}
    assert {p.dtype for name, p in held.items() if p.ndim == 2 and name not in wide} == {torch.bfloat16}
    assert {p.dtype for name, p in held.items() if p.ndim < 2 or name in wide} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if name not in frozen} == {torch.float32}


def test_freezing_every_layer_is_refused_with_the_number():
    text_config = make_model().config
    require_layers(ModelConfig(freeze_layers=1), text_config)
    with pytest.raises(ConfigError, match="--freeze-layers 2: the model has 2 layers, so at most 1 can be frozen"):
        require_layers(ModelConfig(freeze_layers=2), text_config)


def test_layers_that_cannot_be_found_are_not_frozen_by_guess():
    model = make_model()
    model.backbone.more = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    with pytest.raises(ModelError, match="--freeze-layers 1: the layers of LlamaModel are not in one list"):
        choose_trainable(model, ModelConfig(freeze_layers=1), seed=0)


# --- rates and decay ---------------------------------------------------------------------------------------------


def groups_of(settings: dict, *, lora: bool = False) -> dict[str, tuple[float, float]]:
    """Learning rate and decay of every parameter that trains, by name, at a rate of 1e-3."""
    model = make_model("gpt_neox")
    choose_trainable(model, ModelConfig(lora=lora), seed=0)
    optimizer = build_optimizer(
        model,
        OptimizerConfig(**{"lr": 1e-3, "weight_decay": 0.1, **settings}),
        lr=1e-3,
        head=["head.weight"],
        decay_exempt=frozenset(model.decay_exempt()),
    )
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert optimizer.param_groups[0]["params"][0] is model.head.weight, "the first rate is the one of the log"
    return {name: found[id(p)] for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    ("settings", "share", "backbone_decay"),
    [
        ({}, 1.0, 0.1),
        ({"differential_lr": True}, 0.1, 0.1),
        ({"differential_lr": True, "backbone_lr_mult": 0.5}, 0.5, 0.1),
        ({"differential_lr": True, "backbone_lr_mult": 3.0}, 3.0, 0.1),
        ({"head_only_weight_decay": True}, 1.0, 0.0),
        ({"head_only_weight_decay": True, "differential_lr": True}, 0.1, 0.0),
    ],
)
def test_every_weight_gets_its_rate_and_its_decay(optimizer, lora, settings, share, backbone_decay):
    found = groups_of(settings | {"optimizer": optimizer}, lora=lora)
    for name, (rate, decay) in found.items():
        bare = name.endswith(("bias", "norm.weight", "layernorm.weight")) and not lora
        wanted = (1e-3, 0.1) if is_head(name) else (1e-3 * share, 0.0 if bare else backbone_decay)
        assert (rate, decay) == pytest.approx(wanted), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_schedule_scales_every_rate_and_the_log_has_the_heads(tmp_path, optimizer):
    config = config_of(
        **{"optimizer": optimizer, "differential_lr": True, "backbone_lr_mult": 0.25, "lr": 4e-3},
        **{"lr_scheduler": "linear", "warmup_steps": 2},
    )
    trainer = trainer_for(config, tmp_path, make_model())
    rates = []
    for step in range(4):
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        assert trainer.train_step(trainer.steps.plan(step, trainer.token_budget)).lr == rates[-1][0]
    shares = [0, 0.5, 1, 97 / 98]
    assert [row[0] for row in rates] == pytest.approx([4e-3 * share for share in shares])
    assert all(row[1:] == pytest.approx([row[0] / 4] * len(row[1:])) for row in rates)


def test_a_tenth_of_the_rate_moves_the_backbone_a_tenth_as_far_and_the_head_as_before(tmp_path):
    """One step of SGD, whose update is the rate times the gradient."""
    settings = {"optimizer": "sgd", "weight_decay": 0.0, "lr": 10.0}  # far above the rounding of the weights
    whole = moved(config_of(**settings), tmp_path, steps=1)
    part = moved(config_of(**settings, differential_lr=True), tmp_path, steps=1)
    for name, distance in whole.items():
        assert part[name] == pytest.approx(distance * (1.0 if is_head(name) else 0.1), rel=2e-3), name


@pytest.mark.slow
def test_the_backbones_share_is_written_down_and_the_record_has_the_heads_rate(
    base_model, pairs_file, tmp_path, verified_here
):
    config = runs.config_for(
        *(base_model, pairs_file, tmp_path / "run"),
        **{"steps": 2, "lr": 2e-3, "log_every": 1, "lr_scheduler": "constant", "differential_lr": True},
    )
    train(config)
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert (saved["differential_lr"], saved["backbone_lr_mult"], saved["optimizer"]) == (True, 0.1, "adamw")
    assert [float(row["lr"]) for row in runs.rows_of(tmp_path / "run") if row["lr"]] == [2e-3, 2e-3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backbone_lr_mult": 0.5}, "--backbone-lr-mult 0.5: without --differential-lr there is one rate"),
        ({"backbone_lr_mult": 0.0, "differential_lr": True}, "must be above 0; --train-head-only freezes"),
        ({"optimizer": "sgd"}, "--optimizer sgd: the default learning rates are those of AdamW. Give one with --lr"),
        ({"optimizer": "adafactor"}, "--optimizer adafactor: the default learning rates"),
        ({"differential_lr": True, "train_head_only": True}, "--differential-lr: with --train-head-only the backbone"),
    ],
)
def test_choices_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RewardTrainerConfig.of(model="m", dataset=("d",), **settings)


def test_the_default_rate_goes_by_what_trains():
    def rate(**settings) -> float:
        return RewardTrainerConfig.of(model="m", dataset=("d",), **settings).learning_rate

    assert (rate(), rate(lora=True), rate(train_head_only=True)) == (FULL_LR, LORA_LR, HEAD_LR)
    assert rate(train_head_only=True, lr=1e-4) == 1e-4


# --- state, and 8 bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_the_bytes_of_the_state_are_those_that_the_optimiser_keeps(tmp_path, name):
    config = config_of(optimizer=name, freeze_layers=1)
    model = make_model()
    choose_trainable(model, config.model, seed=0)
    trainer = trainer_for(config, tmp_path, model)
    trainer.train_step(trainer.steps.plan(0, trainer.token_budget))
    kept = sum(
        tensor.numel() * tensor.itemsize
        for state in trainer.optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.ndim > 0
    )
    assert state_bytes(model.parameters(), name) == kept
    assert state_bytes(model.parameters(), "adamw8bit") * 4 == state_bytes(model.parameters(), "adamw") > 0


def test_8_bits_need_cuda_and_the_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--optimizer adamw8bit: it needs a CUDA device, and there is none"):
        groups_of({"optimizer": "adamw8bit"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("rewardlab.model.quantization.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--optimizer adamw8bit needs the package bitsandbytes: pip install"):
        groups_of({"optimizer": "adamw8bit"})


def test_8_bits_get_the_same_groups_and_settings(monkeypatch):
    made: list[dict] = []

    def build(groups, **settings):
        made.append(settings)
        return torch.optim.AdamW(groups, lr=settings["lr"])

    monkeypatch.setattr(optimizer_module, "require_optimizer", lambda name: None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=SimpleNamespace(AdamW8bit=build)))
    found = groups_of({"optimizer": "adamw8bit", "differential_lr": True})
    assert made == [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}]
    assert found == groups_of({"differential_lr": True})


# --- float32 masters -------------------------------------------------------------------------------------------------


def update_of(folder, arithmetic: torch.dtype, *, masters: torch.dtype = torch.float32) -> torch.Tensor:
    """What 100 steps at 1e-5 add to all weights, which are held in `masters` between steps."""
    model = make_model()
    model.compute_dtype = arithmetic
    trainer = trainer_for(config_of(lr=1e-5, batch_size=16, weight_decay=0.0), folder, model, num_groups=16)
    _round(model, masters)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    for step in range(100):
        trainer.train_step(trainer.steps.plan(step, trainer.token_budget))
        _round(model, masters)
    return (torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - before).double()


@torch.no_grad()
def _round(model: RewardModel, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


@pytest.mark.slow
def test_100_steps_at_1e_5_move_the_weights_in_bf16_as_in_float32(tmp_path):
    exact, half = update_of(tmp_path, torch.float32), update_of(tmp_path, torch.bfloat16)
    assert torch.cosine_similarity(exact, half, dim=0) >= 0.99
    assert half.norm() / exact.norm() == pytest.approx(1.0, abs=0.01)
    rounded = update_of(tmp_path, torch.bfloat16, masters=torch.bfloat16)
    assert torch.cosine_similarity(exact, rounded, dim=0) < 0.9, "weights held in bf16 would be noticed"
