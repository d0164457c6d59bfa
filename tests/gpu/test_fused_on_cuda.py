"""Kernels of Triton on a real device, beside PyTorch's operations. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from common import make_groups, make_model
from rewardlab.batch import pack
from rewardlab.model import fused, rounding
from rewardlab.model.applying import apply_compute
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import TrainComputeConfig
from rewardlab.model.linear import MOST_RANK
from rewardlab.model.lora import add_adapters
from rewardlab.model.rounding import Part, round_together
from rewardlab.training.loop.losses import preference_loss, total_weight
from rewardlab.training.settings.config import LossConfig, ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="needs Triton, which PyTorch for CUDA brings along")


@pytest.mark.parametrize(("rank", "heads"), [(4, (3, 16)), (64, (14, 64)), (MOST_RANK, (32, 128)), (8, (128, 192))])
@pytest.mark.parametrize("dtype", HALVES)
def test_kernels_pass_their_trials(dtype, rank, heads):
    assert fused.trial(CUDA, dtype, rank=rank, heads=heads) == ""
    assert all(rounding._agrees(CUDA, dtype, kind) for kind in (dtype, torch.float32))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_weights_are_rounded_to_the_bits_of_operations_on_the_cpu(dtype, wide):
    draw = torch.Generator().manual_seed(0)
    sizes, starts = [1 << 22, 4096, 5001, 3], [0, 8, 0, 5]
    values = [torch.randn(size, generator=draw) * torch.randn(size, generator=draw).exp() for size in sizes]
    kind = torch.float32 if wide else dtype
    on_gpu, on_cpu = (
        [
            Part(value.to(device), (number, 3), torch.zeros(size, dtype=kind, device=device), start)
            for number, (value, size, start) in enumerate(zip(values, sizes, starts, strict=True))
        ]
        for device in (CUDA, torch.device("cpu"))
    )
    for count in (2, 4):  # the first two can be read four values at a time
        round_together(on_gpu[:count], dtype)
    round_together(on_cpu, dtype)
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(ours.out.cpu(), expected.out)


def model_with(backend: str, dtype: torch.dtype, *, lora: bool, checkpointing: str, activation: str):
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=520,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        hidden_act=activation,
        pad_token_id=None,
    )
    model = make_model(config=config)
    if lora:
        torch.manual_seed(0)
        add_adapters(model.backbone, ModelConfig(model="x", lora=True))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    model = model.to(CUDA).train()
    model.compute_dtype = dtype
    apply_compute(
        model,
        TrainComputeConfig(
            attention_backend="segments",
            linear_backend="torch",
            norm_backend="torch",
            allocator="system",
            elementwise_backend=backend,
            activation_checkpointing=checkpointing,
        ),
    )
    return model


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_step_by_kernels_errs_no_more_than_one_by_operations(dtype, lora, activation, checkpointing):
    groups = make_groups(24, replies=4, seed=3)
    chosen = {"lora": lora, "checkpointing": checkpointing, "activation": activation}
    found = {}
    for name, backend, precision in (
        ("exact", "torch", torch.float32),
        ("torch", "torch", dtype),
        ("triton", "triton", dtype),
    ):
        model = model_with(backend, precision, **chosen)
        batch = pack(groups).to(CUDA)
        rewards = model(batch)
        (preference_loss(rewards, batch, LossConfig()) / total_weight(batch)).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found[name] = (rewards.detach().double(), gradient.double())
    for number in range(2):
        truth = found["exact"][number]
        plain, ours = ((found[name][number] - truth).norm() / truth.norm() for name in ("torch", "triton"))
        assert ours <= 1.5 * plain + 1e-6


def test_the_start_of_a_run_measures_them():
    lines: list[str] = []
    config = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=8)
    chosen = choose_compute(TrainComputeConfig(), config, device=CUDA, dtype=torch.bfloat16, log=lines.append)
    assert chosen["elementwise_backend"] in ("torch", "triton")
    assert "times as fast in gated products" in lines[0].split("element-wise parts")[1]
