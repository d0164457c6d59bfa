"""Training in float16: gradients that would be zero or infinite are scaled, and no step is left out for it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch

from common import make_groups, make_model, make_tokenizer, set_layout
from rewardlab.core.errors import ModelError, NonFiniteError
from rewardlab.data.config import RenderingConfig
from rewardlab.data.groups import Datasets
from rewardlab.data.templates import build_renderer
from rewardlab.evaluation.precision import require_range
from rewardlab.model.half import HalfWeights
from rewardlab.model.load import require_sound_layout
from rewardlab.training.loop.loss_scale import FIRST, LEAST, STEPS_TO_GROW, LossScale
from rewardlab.training.loop.reward_trainer import reward_trainer
from rewardlab.training.monitoring.records import Records
from rewardlab.training.settings.config import RewardTrainerConfig


def trainer_in(dtype, folder, *, groups=None, seed=0):
    model = make_model("llama").train()
    model.compute_dtype = dtype
    if dtype is not torch.float32:
        model.half_weights = HalfWeights(model.backbone, "backbone", dtype, "stochastic")
    config = RewardTrainerConfig.of(
        model="x",
        dataset=("y",),
        batch_size=8,
        lr=1e-3,
        micro_token_budget=60,
        seed=seed,
        max_grad_norm=1e6,
        lr_scheduler="constant",
    )
    return reward_trainer(
        config,
        model,
        Datasets(train=groups or make_groups(8)),
        num_steps=4,
        records=Records(folder),
        save=lambda folder, step: None,
    )


def taken(trainer, steps=4):
    """(loss of each step, gradients of the first, weights after the last)."""
    losses, gradients = [], {}
    update = trainer._update

    def keep():
        if not gradients:
            gradients.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
        return update()

    trainer._update = keep
    for _ in range(steps):
        losses.append(trainer.train_step(trainer._planned(trainer.step)).sums.mean_loss)
        trainer.step += 1
    return losses, gradients, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def distance(one, other):
    return math.sqrt(sum(float((one[name] - other[name]).norm() ** 2) for name in one)) / math.sqrt(
        sum(float(other[name].norm() ** 2) for name in one)
    )


@pytest.mark.slow
def test_float16_trains_as_float32_does(tmp_path):
    """Three bits finer than bf16, so some eight times as near to float32."""
    exact, exact_gradients, exact_weights = taken(trainer_in(torch.float32, tmp_path / "exact"))
    off = {}
    for dtype in (torch.bfloat16, torch.float16):
        losses, gradients, weights = taken(trainer_in(dtype, tmp_path / str(dtype)))
        off[dtype] = distance(gradients, exact_gradients)
    assert losses == pytest.approx(exact, rel=2e-3)
    assert off[torch.float16] < off[torch.bfloat16] / 4 < 0.02
    assert distance(weights, exact_weights) < 1e-3


def test_without_a_scale_small_gradients_would_vanish(tmp_path):
    found = {}
    for name, dtype, scale in (
        ("exact", torch.float32, 1.0),
        ("scaled", torch.float16, FIRST),
        ("bare", torch.float16, 1.0),
    ):
        trainer = trainer_in(dtype, tmp_path / name)
        with torch.no_grad():
            trainer.model.head.weight.mul_(1e-5)  # what the backbone is sent is as small
        trainer.loss_scale.value = scale
        _, found[name], _ = taken(trainer, steps=1)
    inside = [name for name in found["exact"] if name.startswith("backbone.layers")]
    exact, scaled, bare = ({name: found[arm][name] for name in inside} for arm in found)
    assert distance(scaled, exact) < 0.02
    assert distance(bare, exact) > 0.5


@pytest.mark.slow
def test_a_step_whose_gradients_are_infinite_is_computed_again_until_they_are_not(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rewardlab")
    usual = taken(trainer_in(torch.float16, tmp_path / "usual"))
    trainer = trainer_in(torch.float16, tmp_path / "large")
    trainer.loss_scale.value = trainer.loss_scale.goal = 2.0**40
    losses, gradients, weights = taken(trainer)
    assert losses == pytest.approx(usual[0], rel=1e-4)
    assert distance(gradients, usual[1]) < 1e-3
    assert distance(weights, usual[2]) < 1e-3
    tried = [text for record in caplog.records if "LOSS SCALE" in (text := record.getMessage())]
    assert tried[0].startswith("step 1/4  LOSS SCALE  gradients beyond float16's range; computed again with")
    assert len(tried) >= 2
    # The next steps go up again, to half of what was too much at first, if that is not too much for them.
    assert trainer.loss_scale.value > FIRST


def test_a_loss_that_is_not_finite_is_no_matter_of_scale(tmp_path):
    groups = make_groups(8)
    groups[2] = replace(groups[2], comparisons=(replace(groups[2].comparisons[0], weight=float("inf")),))
    trainer = trainer_in(torch.float16, tmp_path, groups=groups)
    with pytest.raises(NonFiniteError, match="use --precision fp32 or bf16"):
        trainer.fit()
    assert trainer.loss_scale.value == FIRST


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("place", "scale"), [("backbone.layers.0.mlp.down_proj.weight", LEAST), ("head.weight", FIRST)]
)
def test_gradients_that_no_scale_mends_end_the_run_before_the_update(tmp_path, place, scale):
    """Those of the head are float32, so there no scale is tried."""
    trainer = trainer_in(torch.float16, tmp_path)
    trainer.model.get_parameter(place).register_hook(lambda gradient: gradient * float("nan"))
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    with pytest.raises(NonFiniteError, match=f"gradient norm nan with a loss scale of {scale:g}; stopped before"):
        trainer.train_step(trainer._planned(0))
    assert trainer.loss_scale.value == scale
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


@pytest.mark.slow
def test_memory_that_runs_out_in_a_retry_halves_the_budget(tmp_path, monkeypatch):
    trainer = trainer_in(torch.float16, tmp_path)
    trainer.loss_scale.value = trainer.loss_scale.goal = 2.0**40
    budgets, forward = [], trainer.steps.forward

    def scarce(batch, step):
        budgets.append(trainer.token_budget)
        if trainer.loss_scale.value < 2.0**40 and trainer.token_budget == 60:
            raise torch.OutOfMemoryError("none left")
        return forward(batch, step)

    monkeypatch.setattr(trainer.steps, "forward", scarce)
    losses, _, _ = taken(trainer, steps=2)
    assert all(map(math.isfinite, losses))
    assert budgets[0] == 60 > trainer.token_budget


def test_the_scale_grows_after_many_steps_and_a_retry_starts_the_count_again():
    scale = LossScale.of(in_float16=True)
    for _ in range(STEPS_TO_GROW - 1):
        scale.count_step()
    assert scale.value == FIRST
    scale.count_step()
    assert (scale.value, scale.goal, scale.steps) == (2 * FIRST, 2 * FIRST, 0)
    scale.count_step()
    assert scale.halve()
    scale.count_step()
    assert (scale.value, scale.goal, scale.steps) == (FIRST, FIRST, 0)
    other = LossScale.of(in_float16=True)
    scale.count_step()
    other.restore(scale.state())
    assert other == scale


def test_one_unusual_step_does_not_lower_the_scale_of_those_after_it():
    scale = LossScale.of(in_float16=True)
    for _ in range(10):
        assert scale.halve()
    assert scale.value == FIRST / 2**10
    seen = []
    for _ in range(12):
        scale.count_step()
        seen.append(scale.value)
    assert seen[:3] == [FIRST / 2**10, FIRST / 2**9, FIRST / 2**8]
    assert seen[-2:] == [FIRST / 2, FIRST / 2]


def test_a_model_that_always_needs_a_small_scale_finds_it_and_stays_there():
    scale, retries = LossScale.of(in_float16=True), []
    for _ in range(20):
        tries = 0
        while scale.value > 2.0**8:
            assert scale.halve()
            tries += 1
        retries.append(tries)
        scale.count_step()
    assert retries == [8, 0, 1] + [0] * 17


def test_other_arithmetic_has_no_scale():
    scale = LossScale.of(in_float16=False)
    for _ in range(STEPS_TO_GROW + 1):
        scale.count_step()
    assert scale == LossScale.of(in_float16=False)
    assert not scale.halve()


def test_a_model_beyond_float16s_range_is_refused_at_the_start():
    model = make_model("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.mul_(1e4)
    model.compute_dtype = torch.float16
    with pytest.raises(ModelError, match=r"no finite scores in float16, .* Use --precision bf16 or fp32"):
        require_sound_layout(model, lambda line: None)
    renderer = build_renderer(make_tokenizer(), RenderingConfig(max_seq_len=128))
    for layout in ("shared", "padded"):
        with pytest.raises(ModelError, match=r"no finite scores in float16, .* Use --precision bf16 or fp32"):
            require_range(set_layout(model, layout), renderer)
    model.compute_dtype = torch.float32
    require_range(model, renderer)
