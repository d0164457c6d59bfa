"""Attention of models with fewer key heads than query heads on a fake CUDA device: which kernel PyTorch could take.

On CUDA the kernel that takes masks and float32 without writing out all logits wants as many key heads as query heads.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from common import make_groups, make_model
from fake_cuda import DEVICE, fake_cuda, run_backward
from rewardlab.batch import pack
from rewardlab.model.reward import RewardModel

GROUPS = make_groups(3, replies=3, seed=3)


@pytest.fixture
def asked(monkeypatch):
    """(query heads, key heads, value heads, whether fewer are announced) of every call."""
    found: set[tuple[int, int, int, bool]] = set()
    plain = F.scaled_dot_product_attention

    def noted(query, key, value, *more, enable_gqa=False, **named):
        found.add((query.shape[1], key.shape[1], value.shape[1], enable_gqa))
        return plain(query, key, value, *more, enable_gqa=enable_gqa, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return found


def model_with(backend: str, dtype: torch.dtype) -> RewardModel:
    model = make_model("qwen2").train()
    model.compute_dtype, model.attention_backend = dtype, backend
    return model


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["segments", "mask"])
def test_on_cuda_key_heads_are_repeated_so_that_no_kernel_writes_out_all_logits(backend, dtype, asked):
    with fake_cuda() as device:
        model = model_with(backend, dtype)
        device.put(model)
        run_backward(model(pack(GROUPS).to(DEVICE)).sum())
        gradient = model.backbone.layers[0].self_attn.k_proj.weight.grad
        assert device.waits == []
    assert asked == {(4, 4, 4, False)}
    assert gradient.device == DEVICE


def test_on_a_cpu_they_are_left_as_they_are(asked):
    model_with("segments", torch.float32)(pack(GROUPS))
    assert asked == {(4, 2, 2, True)}
