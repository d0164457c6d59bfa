"""RMSNorm a few rows at a time: the bits of transformers' own forward, and gradients as exact as its."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from common import make_groups, make_model
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError
from rewardlab.model import compute, norm
from rewardlab.model.applying import apply_compute
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import ComputeConfig, TrainComputeConfig
from rewardlab.model.norm import BlockwiseNorm, norm_speed, use_blockwise_norms
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

CPU = torch.device("cpu")
PLAIN = {"attention_backend": "segments", "linear_backend": "torch", "allocator": "system"}


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch):
    """Four rows of width 32 for the one thread of tests, so that every tensor here is cut."""
    monkeypatch.setattr(norm, "PLACES", 4 * 32)


@pytest.mark.slow
def test_gradients_are_those_of_differences():
    rows = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *given: BlockwiseNorm.apply(*given, 1e-5), (rows, weight))
    frozen = torch.randn(32, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda given: BlockwiseNorm.apply(given, frozen, 1e-5), (rows,))


def gradient_of(model, batch):
    model.zero_grad()
    preference_loss(model(batch), batch, LossConfig()).backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # qwen3 has norms of queries and keys too
def test_a_model_keeps_the_bits_of_its_scores_and_errs_no_more_in_its_gradients(family, dtype):
    batch = pack(make_groups(8, replies=3))
    plain = make_model(family).train()
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape))
    truth = gradient_of(copy.deepcopy(plain).double(), batch)
    plain.compute_dtype = dtype
    apply_compute(plain, TrainComputeConfig(**PLAIN, norm_backend="torch"))
    blockwise = make_model(family).train()
    blockwise.load_state_dict(plain.state_dict())
    blockwise.compute_dtype = dtype
    apply_compute(blockwise, TrainComputeConfig(**PLAIN, norm_backend="blockwise"))
    swapped = [layer for layer in blockwise.modules() if type(layer).__name__.startswith("Blockwise")]
    assert len(swapped) == {"llama": 5, "qwen3": 9}[family]
    assert torch.equal(blockwise(batch), plain(batch))
    errors = [(gradient_of(model, batch) - truth).abs() for model in (blockwise, plain)]
    assert errors[0].mean() <= 2 * errors[1].mean()
    assert errors[0].max() <= 2 * errors[1].max()
    assert errors[1].mean() > 0


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_neox"])
def test_norms_of_another_formula_are_left_alone(family):
    assert use_blockwise_norms(make_model(family).backbone) == 0


def test_norms_are_known_before_their_weights_are_read():
    assert use_blockwise_norms(make_model().to("meta").backbone) == 5


def test_a_norm_that_only_looks_like_it_is_left_alone():
    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, rows):
            return self.weight.abs() * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    assert use_blockwise_norms(OddRMSNorm()) == 0


def test_without_gradients_the_layers_own_class_computes(monkeypatch):
    model = make_model()
    assert use_blockwise_norms(model.backbone) == 5
    monkeypatch.setattr(norm, "BlockwiseNorm", None)
    with torch.no_grad():
        model(pack(make_groups(2)))


@pytest.mark.parametrize(("speed", "expected"), [(2.0, "blockwise"), (1.1, "torch")])
def test_the_faster_norm_is_taken_and_said(monkeypatch, speed, expected):
    monkeypatch.setattr(norm, "norm_speed", lambda width: speed)
    monkeypatch.setattr(norm, "MIN_WIDTH", 32)
    config, lines = make_model().config, []
    chosen = choose_compute(TrainComputeConfig(), config, device=CPU, dtype=torch.float32, log=lines.append)
    assert chosen["norm_backend"] == expected
    assert f"; norms {expected} (blockwise is {speed:.2f} times as fast)" in lines[0]
    scoring = choose_compute(ComputeConfig(), config, device=CPU, dtype=torch.float32, log=lines.append, train=False)
    assert "norm_backend" not in scoring


def test_narrow_models_measure_nothing_and_other_devices_refuse_it(monkeypatch):
    monkeypatch.setattr(norm, "norm_speed", None)
    config = make_model().config
    assert compute._choose_norm(TrainComputeConfig(), config, CPU) == ("torch", "")
    asked = TrainComputeConfig(norm_backend="blockwise")
    with pytest.raises(ConfigError, match="--norm-backend blockwise: they are for the CPU"):
        compute._choose_norm(asked, config, torch.device("cuda"))
    with pytest.raises(ConfigError, match="--norm-backend blockwise: --compile makes norms of its own"):
        compute._choose_norm(replace(asked, compile=True), config, CPU)
    monkeypatch.setattr(norm, "MIN_WIDTH", 32)
    assert compute._choose_norm(TrainComputeConfig(compile=True), config, CPU) == ("torch", "")


def test_both_norms_are_timed_on_the_same_rows(monkeypatch):
    monkeypatch.setattr(norm, "SPEED_ROWS", 8)
    assert norm_speed.__wrapped__(32, repeats=1) > 0
