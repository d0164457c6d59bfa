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
from rewardlab.model import autograd, compute, norm
from rewardlab.model.applying import apply_compute
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import ComputeConfig, TrainComputeConfig
from rewardlab.model.norm import BlockwiseNorm, norm_speed, use_norms
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

CPU = torch.device("cpu")
PLAIN = {"attention_backend": "segments", "linear_backend": "torch", "allocator": "system"}


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch):
    """Four rows of width 32 for the one thread of tests, so that every tensor here is cut."""
    monkeypatch.setattr(autograd, "PLACES", 4 * 32)


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
    assert use_norms(make_model(family).backbone, "blockwise") == 0


def test_norms_are_known_before_their_weights_are_read():
    assert use_norms(make_model().to("meta").backbone, "blockwise") == 5


class OddRMSNorm(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.weight, self.variance_epsilon, self.change = nn.Parameter(torch.ones(32)), 1e-6, change

    def forward(self, rows):
        scaled = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.change == "tuple":
            return self.weight * scaled, rows
        return (self.weight.abs() if self.change == "positive" else self.weight) * scaled


@pytest.mark.parametrize("name", ["blockwise", "fused"])
@pytest.mark.parametrize(
    ("changes", "count"), [(["positive"], 0), (["tuple"], 0), (["positive", ""], 1), (["", "positive"], 1)]
)
def test_a_norm_that_only_looks_like_it_is_left_alone(name, changes, count):
    norms = nn.ModuleList(map(OddRMSNorm, changes))
    assert use_norms(norms, name) == count
    assert all(type(layer) is not OddRMSNorm for layer in norms if not layer.change)


def test_without_gradients_the_layers_own_class_computes(monkeypatch):
    model = make_model()
    assert use_norms(model.backbone, "blockwise") == 5
    monkeypatch.setattr(norm, "BlockwiseNorm", None)
    with torch.no_grad():
        model(pack(make_groups(2)))


@pytest.mark.parametrize(("speed", "expected"), [(2.0, "blockwise"), (1.1, "torch")])
def test_the_faster_norm_is_taken_and_said(monkeypatch, speed, expected):
    monkeypatch.setattr(norm, "norm_speed", lambda name, width, device: speed)
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
    assert norm_speed.__wrapped__("blockwise", 32, CPU, repeats=1) > 0


# One kernel for each pass, on a GPU; on the CPU PyTorch computes the same function by operations.


def test_a_model_with_fused_norms_has_its_scores_and_gradients(monkeypatch):
    batch = pack(make_groups(8, replies=3))
    plain, fused = make_model("qwen3").train(), make_model("qwen3").train()
    for model in (plain, fused):
        with torch.no_grad():
            for number, (name, weight) in enumerate(model.named_parameters()):
                if "norm" in name:
                    weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    assert use_norms(fused.backbone, "fused") == 9
    found = []
    kernel = norm.F.rms_norm
    monkeypatch.setattr(norm.F, "rms_norm", lambda *given: found.append(given[0].shape) or kernel(*given))
    torch.testing.assert_close(fused(batch), plain(batch), rtol=1e-5, atol=1e-6)
    assert len(found) == 9
    torch.testing.assert_close(gradient_of(fused, batch), gradient_of(plain, batch), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        fused(batch)
    assert len(found) == 3 * 9, "evaluation in a run computes as its training"


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox"])
def test_norms_of_another_formula_are_not_fused(family):
    assert use_norms(make_model(family).backbone, "fused") == 0


def test_a_fused_norm_that_is_right_passes_its_trial():
    assert norm.trial("fused", 32, CPU) == ""


def failing(*given):
    raise RuntimeError("no kernel image is available\nfor this device")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda rows, shape, weight, epsilon: 1.001 * rows * weight, "its output is off by"),
        (lambda rows, shape, weight, epsilon: float("nan") * rows * weight, "its output is off by nan"),
        (
            lambda rows, shape, weight, epsilon: norm._by_operations(rows, weight.detach(), epsilon) + 0 * weight,
            "its dw is off by",
        ),
        (failing, "it failed here, RuntimeError: no kernel image is available"),
    ],
    ids=["output", "nan", "gradient", "error"],
)
def test_a_fused_norm_that_is_wrong_is_passed_over_and_told(monkeypatch, kernel, reason):
    monkeypatch.setattr(norm.F, "rms_norm", kernel)
    monkeypatch.setattr(norm, "BESIDE_TORCH", {"cpu": "fused"})
    monkeypatch.setattr(norm, "MIN_WIDTH", 32)
    name, said = compute._choose_norm(TrainComputeConfig(), make_model().config, CPU)
    assert name == "torch"
    assert f"; norms torch (not fused: {reason}" in said


def test_fused_norms_are_for_cuda_alone():
    with pytest.raises(ConfigError, match="--norm-backend fused: they are for CUDA"):
        compute._choose_norm(TrainComputeConfig(norm_backend="fused"), make_model().config, CPU)
