"""Which kernels of attention are asked for on a fake CUDA device, and what becomes of one that refuses."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from common import make_groups, make_model, set_layout
from fake_cuda import DEVICE, fake_cuda, run_backward
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError
from rewardlab.model import applying
from rewardlab.model.attention_backends import BACKENDS
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import ComputeConfig
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
    """The one that takes masks and float32 without that wants as many key heads as query heads. Flash attention, which
    takes neither, does not."""
    with fake_cuda() as device:
        model = model_with(backend, dtype)
        device.put(model)
        run_backward(model(pack(GROUPS).to(DEVICE)).sum())
        gradient = model.backbone.layers[0].self_attn.k_proj.weight.grad
        assert device.waits == []
    by_flash = {(4, 2, 2, True)} if (backend, dtype) == ("segments", torch.bfloat16) else set()
    assert asked == {(4, 4, 4, False)} | by_flash
    assert gradient.device == DEVICE


def test_on_a_cpu_they_are_left_as_they_are(asked):
    model_with("segments", torch.float32)(pack(GROUPS))
    assert asked == {(4, 2, 2, True)}


@pytest.mark.parametrize("broken", [False, True])
def test_a_named_kernel_that_refuses_the_model_is_told_before_the_run(broken, monkeypatch):
    def refuses(*_):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    if broken:
        monkeypatch.setitem(BACKENDS, "varlen", refuses)
    said = "--attention-backend varlen: it failed here, RuntimeError: FlashAttention only supports Ampere GPUs or newer"
    with fake_cuda(), pytest.raises(ConfigError, match=said) if broken else nullcontext():
        chosen = choose_compute(
            ComputeConfig(attention_backend="varlen"),
            make_model("qwen2").config,
            device=DEVICE,
            dtype=torch.bfloat16,
            log=lambda line: None,
            train=False,
        )
        assert chosen["attention_backend"] == "varlen"


def test_selective_checkpointing_keeps_what_flash_attn_computed(monkeypatch):
    library = torch.library.Library("flash_attn", "DEF")
    library.define("_flash_attn_varlen_forward(Tensor q) -> Tensor")
    kept: list[object] = []
    monkeypatch.setattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts", kept.extend)
    try:
        applying._keep_matmuls()
        assert torch.ops.flash_attn._flash_attn_varlen_forward.default in kept
    finally:
        library._destroy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_make_the_host_wait_for_nothing(dtype):
    with fake_cuda() as device:
        model = model_with("segments", dtype)
        set_layout(model, "padded")
        device.put(model)
        run_backward(model(pack(GROUPS).to(DEVICE)).sum())
        assert device.waits == []
