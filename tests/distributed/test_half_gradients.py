"""Gradients in half precision beside those in float64, of the same rounded weights, on ranks and in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from common import Exact, set_layout
from many_ranks import trainer_for
from rewardlab.batch import pack
from rewardlab.distributed.ranks import ALONE, Parallel
from rewardlab.training.loop.losses import preference_loss, total_weight
from rewardlab.training.loop.reward_trainer import RewardTrainer

BF16: dict[str, Any] = {"dtype": "float32", "half": "bfloat16", "stochastic": True}
FP16: dict[str, Any] = BF16 | {"half": "float16", "loss_scale": 2.0**16}
DORA: dict[str, Any] = {"lora": True, "dora": True}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt_neox, fp16": (2, FP16 | {"family": "gpt_neox", "budget": 400}),
    "gpt_neox, fp16, small micro-batches, whole models": (3, FP16 | {"family": "gpt_neox", "sharding": "none"}),
    "gpt_neox, fp16, dora": (2, FP16 | DORA | {"family": "gpt_neox"}),
    "gpt2, fp16": (2, FP16 | {"family": "gpt2", "layout": "padded", "budget": 400}),
    "llama, fp16, dora": (3, FP16 | DORA),
    "gpt2, bf16": (2, BF16 | {"family": "gpt2", "layout": "padded"}),
    "gemma2, fp16, dora": (2, FP16 | DORA | {"family": "gemma2", "budget": 400}),
    "gemma2, bf16, four in two nodes": (4, BF16 | {"family": "gemma2", "sharding": "hybrid", "per_node": 2}),
    "qwen2, fp16, deferred": (2, FP16 | {"family": "qwen2", "defer_sync": True}),
    "qwen2, bf16, lora": (2, BF16 | {"family": "qwen2", "lora": True}),
    "llama, bf16": (2, BF16 | {"budget": 400}),
}
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The largest relative error of one rounding."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_near_to_float64_on_ranks_as_in_one_process(case, tmp_path, on_ranks):
    size, how = CASES[case]
    ends, said, _ = on_ranks("one_step", size, tmp_path, name="many", **how)
    assert set(ends.values()) == {0}, said[-3000:]
    many = torch.load(tmp_path / "many.pt", weights_only=True)["gradients"]
    trainer = trainer_for(tmp_path, {**how, "ranks": ALONE}, Parallel())
    alone, true = gradients_of(trainer)
    assert many.keys() == alone.keys() == true.keys()
    total = float(torch.stack([gradient.norm() for gradient in true.values()]).norm())
    rounding = ROUNDING[how["half"]]
    for found in (alone, many):
        along = sum(float((found[name] * gradient).sum()) for name, gradient in true.items()) / total**2
        assert along == pytest.approx(1, abs=16 * rounding), "too large or too small as a whole"
    for name, gradient in true.items():
        # A small gradient is a sum of terms that cancel (that of the last bias is 0, as only differences of scores
        # matter): its error is a share of those, and not of itself.
        size_of = max(float(gradient.norm()), total / 10)
        errors = [float((other[name] - gradient).norm()) / size_of for other in (alone, many)]
        assert max(errors) <= 24 * rounding, (name, errors)
        assert errors[1] <= 2 * errors[0] + rounding, (name, errors)


def gradients_of(trainer: RewardTrainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those of the first step, and those of a copy of the model in float64, row by row and without autocast."""
    found: list[dict[str, torch.Tensor]] = []
    update = trainer._update

    def keep() -> bool:
        found.append({name: p.grad.double() for name, p in trainer.model.named_parameters() if p.grad is not None})
        found.append(in_float64(trainer))
        return update()

    trainer._update = keep
    trainer.train_step(trainer._planned(0))
    return found[0], found[1]


def in_float64(trainer: RewardTrainer) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(trainer.model)
    for layer in model.modules():
        for part in ("weight", "bias"):
            if (rounded := getattr(layer, f"half_{part}", None)) is not None:
                getattr(layer, part).data = rounded.clone()
    model.half_weights.drop()
    model.half_weights, model.compute_dtype = None, torch.float64
    model.double().zero_grad()
    set_layout(model, "padded")
    batches = [pack([group], share=False) for group in trainer.steps.train]
    weight = sum(map(total_weight, batches))
    with Exact():
        losses = [preference_loss(model(batch), batch, trainer.steps.config.loss) for batch in batches]
        torch.autograd.backward(torch.stack(losses).sum() / weight)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
