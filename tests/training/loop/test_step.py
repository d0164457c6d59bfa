"""One step of the trainer: it stops before a bad update (law 8) and decays what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from common import make_groups, make_model
from rewardlab.core.errors import ModelError, NonFiniteError
from rewardlab.data.groups import Datasets
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import ModelConfig, TrainComputeConfig
from rewardlab.model.trainable import choose_trainable, half_frozen
from rewardlab.training.loop.optimizer import build_optimizer
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import OptimizerConfig, RewardTrainerConfig


def trainer_on(groups, tmp_path, model=None, **changes):
    config = RewardTrainerConfig.of(model="x", dataset=("y",), batch_size=4, lr=1e-3, micro_token_budget=40, **changes)
    model = make_model("llama").train() if model is None else model
    return reward_trainer(
        config, model, Datasets(train=groups), num_steps=3, records=Records(tmp_path), save=lambda folder, step: None
    )


def test_a_non_finite_loss_stops_before_the_update_and_names_the_examples(tmp_path):
    groups = make_groups(4)
    bad = replace(groups[2], comparisons=(replace(groups[2].comparisons[0], weight=float("inf")),))
    trainer = trainer_on([*groups[:2], bad, groups[3]], tmp_path)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=r"step 1: .*rank 0: .*row 2"):
        trainer.fit()
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_a_non_finite_gradient_stops_before_the_update(tmp_path):
    trainer = trainer_on(make_groups(4), tmp_path)
    trainer.model.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteError, match=r"gradient norm nan.*otherwise lower --lr; in bf16, use --precision fp32"):
        trainer.train_step(trainer.steps.plan(0, trainer.token_budget))


def test_the_modules_of_a_model_are_not_walked_in_every_step(tmp_path, monkeypatch):
    """The processor's own work for a step is what a small model on a GPU waits for."""
    model = make_model("llama").train()
    model.compute_dtype = torch.bfloat16
    choose_trainable(model, ModelConfig(model="x", lora=True), seed=0)
    half_frozen(model.backbone, torch.bfloat16)
    plain = TrainComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")
    apply_compute(model, plain, half_rounding="stochastic")
    trainer = trainer_on(make_groups(12), tmp_path, model)
    trainer.train_step(trainer.steps.plan(0, trainer.token_budget))
    walked, set_here = [], []
    walk, set_attribute = nn.Module.named_modules, nn.Module.__setattr__
    monkeypatch.setattr(nn.Module, "named_modules", lambda self, *a, **k: walked.append(self) or walk(self, *a, **k))
    monkeypatch.setattr(
        nn.Module, "__setattr__", lambda self, name, value: set_here.append(name) or set_attribute(self, name, value)
    )
    trainer.train_step(trainer.steps.plan(1, trainer.token_budget))
    assert {type(module) for module in walked} <= {type(model.head)}
    assert set(set_here) <= {"step_draw"}


def test_no_weight_at_all_is_an_error(tmp_path):
    group = make_groups(1)[0]
    nothing = replace(group, comparisons=(replace(group.comparisons[0], weight=0.0),))
    with pytest.raises(NonFiniteError, match=r"add up to 0.0. Examples: row 0. Leave out rows of weight 0"):
        trainer_on([nothing], tmp_path).fit()


def test_weight_decay_leaves_norms_biases_and_narrow_weights_are_refused():
    model = make_model("gpt_neox")
    exempt = set(model.decay_exempt())
    assert all("norm" in name or name.endswith("bias") for name in exempt)
    assert {name for name, p in model.named_parameters() if p.ndim > 1}.isdisjoint(exempt)
    config = OptimizerConfig(weight_decay=0.1)
    optimizer = build_optimizer(model, config, lr=1e-3, head=["head.weight"], decay_exempt=exempt)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if decays[id(p)] == 0.0} == exempt
    with pytest.raises(ModelError, match="must be float32"):
        build_optimizer(model.to(torch.bfloat16), config, lr=1e-3, head=["head.weight"], decay_exempt=exempt)
