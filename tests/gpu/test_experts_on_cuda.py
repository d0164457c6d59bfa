"""The joined experts of a mixture in half precision on a GPU. Skipped where there is no CUDA device."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import MixtralConfig

from common import make_groups, make_model
from harness.tiny import GROUPED, SIZES
from rewardlab.batch import pack
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import TrainComputeConfig
from rewardlab.model.half_experts import HalfExperts
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_that_train_give_the_products_and_gradients_of_their_copies(dtype):
    """Within rounding those of the eager loop in float64 over the same rounded weights."""
    model = make_model(config=MixtralConfig(**SIZES, **GROUPED, num_local_experts=4)).train().to(CUDA)
    model.compute_dtype = dtype
    exact = copy.deepcopy(model.backbone.layers[0].mlp.experts).double()
    apply_compute(model, TrainComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system"))
    model.refresh_half_weights()
    layer = model.backbone.layers[0].mlp.experts
    assert isinstance(layer, HalfExperts)
    exact.config = copy.copy(exact.config)
    exact.config._experts_implementation = "eager"
    for own in ("gate_up_proj", "down_proj"):
        setattr(exact, own, torch.nn.Parameter(getattr(layer, f"half_{own}").double()))
    draw = torch.Generator(CUDA).manual_seed(0)
    states = torch.randn(200, SIZES["hidden_size"], generator=draw, device=CUDA)
    share, chosen = torch.randn(200, 4, generator=draw, device=CUDA).softmax(-1).topk(2)
    with torch.autocast("cuda", dtype):
        found = layer(states, chosen, share)
    found.square().sum().backward()
    right = exact(states.to(dtype).double(), chosen, share.double())
    right.square().sum().backward()
    assert found.dtype is torch.float32
    assert (found - right).norm() <= 0.02 * right.norm()
    for own in ("gate_up_proj", "down_proj"):
        gradient, wanted = getattr(layer, own).grad, getattr(exact, own).grad
        assert gradient.dtype is torch.float32
        assert (gradient - wanted).norm() <= 0.02 * wanted.norm(), own


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_step_of_a_mixture_leaves_gradients_that_are_numbers(checkpointing):
    model = make_model(config=MixtralConfig(**SIZES, **GROUPED, num_local_experts=4)).train().to(CUDA)
    model.compute_dtype = torch.bfloat16
    compute = TrainComputeConfig(
        attention_backend="segments",
        linear_backend="torch",
        allocator="system",
        activation_checkpointing=checkpointing,
    )
    apply_compute(model, compute)
    batch = pack(make_groups(6)).to(CUDA)
    preference_loss(model(batch), batch, LossConfig()).backward()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
