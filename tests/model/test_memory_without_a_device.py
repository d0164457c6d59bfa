"""What docs/scaling.md says of a step's memory, against what a forward pass keeps on a device that is not there."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, Qwen2Config

from common import make_model
from fake_cuda import DEVICE, fake_cuda
from harness.gpu_runs import MODELS
from harness.memory_formula import predict
from harness.storages import Storages
from harness.workload import random_group
from rewardlab.batch import pack
from rewardlab.model import attention_backends, norm
from rewardlab.model.applying import apply_compute
from rewardlab.model.attention_backends import Ragged
from rewardlab.model.attention_formula import Formula
from rewardlab.model.config import ModelConfig, TrainComputeConfig
from rewardlab.model.trainable import choose_trainable, half_frozen
from rewardlab.training.cost.activations import layer_bytes_a_token
from rewardlab.training.default_budget import FAMILIES
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

SCALING = " ".join((Path(__file__).resolve().parents[2] / "docs/scaling.md").read_text(encoding="utf-8").split())
RANK = 4
FEW, MANY = 2, 4
"""Pairs."""


def shape(layers: int, family: str = "qwen2", **widths: int) -> Any:
    """A quarter of Qwen2.5-3B's widths, but for those given; GPT-NeoX has as many heads of keys as of queries."""
    sizes = {"hidden_size": 512, "intermediate_size": 2752, "num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "gpt_neox":
        del sizes["num_key_value_heads"]
    fixed = {"vocab_size": 512, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
    return CONFIG_MAPPING[family](**sizes | widths, **fixed, num_hidden_layers=layers, pad_token_id=None)


@dataclass(frozen=True, kw_only=True)
class Kept:
    bytes: int
    tokens: int
    keys: float


class FusedNorm(torch.autograd.Function):
    """What PyTorch's kernel for CUDA makes and keeps; a build without CUDA has only its operations."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, rows.new_empty(*rows.shape[:-1], 1))
        return torch.empty_like(rows)


def flash_in_shapes(q, k, v, q_starts, k_starts, longest_q, longest_k, *, softmax_scale, softcap, **_windowed):
    """flash-attn, whose package is not here, keeps what PyTorch's kernel keeps: a soft cap is computed again."""
    ragged = Ragged(
        query_starts=q_starts, key_starts=k_starts, longest_query=longest_q, longest_key=longest_k, gather_U=None
    )
    return attention_backends.varlen_kernel(q, k, v, ragged, Formula(scale=softmax_scale))


def kept(
    config: Any, pairs: int, *, lora: bool, checkpointing: str, norms: str = "torch", backend: str = "varlen"
) -> Kept:
    """Bytes that the forward pass of a step keeps for its backward pass, parameters left out."""
    model = make_model(config=config).train()
    model.compute_dtype = torch.bfloat16
    choose_trainable(model, ModelConfig(model="x", lora=lora, lora_rank=RANK), seed=0)
    half_frozen(model.backbone, torch.bfloat16)
    groups = [random_group(114, (40, 46), vocabulary=500, seed=number) for number in range(pairs)]
    with fake_cuda() as device:
        device.put(model)
        compute = TrainComputeConfig(
            attention_backend=backend,
            linear_backend="torch",
            allocator="system",
            activation_checkpointing=checkpointing,
            norm_backend=norms,
        )
        apply_compute(model, compute)
        batch = pack(groups).to(DEVICE)
        made = Storages()
        with made:
            loss = preference_loss(model(batch), batch, LossConfig())
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        left = sum(size for number, size in made.alive().items() if number not in own)
        assert loss.requires_grad
    return Kept(
        bytes=left,
        tokens=batch.num_tokens,
        keys=sum(sum(group.lengths) for group in groups) / batch.num_tokens,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lora", "checkpointing", "norms"),
    [
        *((lora, checkpointing, "torch") for lora in (False, True) for checkpointing in ("none", "full")),
        *((lora, "none", "fused") for lora in (False, True)),
    ],
)
def test_a_layer_keeps_what_the_formula_says(lora, checkpointing, norms, monkeypatch):
    """By the differences of three and four layers, and of few and many tokens."""
    fused = norms == "fused"
    if fused:
        function: Any = FusedNorm
        monkeypatch.setitem(norm.COMPUTE, "fused", lambda rows, weight, epsilon: function.apply(rows, weight))
        monkeypatch.setattr(norm, "_agrees", lambda layer, name: True)
    found = {
        (layers, pairs): kept(shape(layers), pairs, lora=lora, checkpointing=checkpointing, norms=norms)
        for layers in (3, 4)
        for pairs in (FEW, MANY)
    }
    few, many = (found[4, pairs].bytes - found[3, pairs].bytes for pairs in (FEW, MANY))
    tokens = found[4, MANY].tokens - found[4, FEW].tokens
    a_token = (many - few) / tokens
    config = shape(4)
    weights = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 2752
    terms = predict(
        config,
        trained=0,
        frozen=0,
        multiplied=0 if lora else 4 * weights,
        tokens=1,
        keys=found[4, FEW].keys,
        lora_rank=RANK if lora else 0,
        checkpointing=checkpointing,
        fused_norms=fused,
    )
    layer = layer_bytes_a_token(
        config,
        lora=lora,
        lora_rank=RANK,
        keys=found[4, FEW].keys,
        checkpointed=checkpointing == "full",
        fused_norms=fused,
    )
    if checkpointing == "none":
        assert a_token == pytest.approx(layer, rel=1e-6)
        assert terms["activations"] == pytest.approx(4 * layer)
        copies = few - a_token * found[4, FEW].tokens
        assert copies == pytest.approx(0 if lora else terms["copies"] / 4, abs=0.03 * weights)
    else:
        assert a_token == pytest.approx((terms["activations"] - layer) / 4, rel=1e-6)


OF_0_6B = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 16, "num_key_value_heads": 8}
OLMO = {"intermediate_size": 1376, "num_key_value_heads": 4}
OTHERS: list[tuple[str, dict[str, int]]] = [
    *((family, {}) for family in ("llama", "mistral", "smollm3", "phi3")),
    ("arcee", {"hidden_size": 320, "intermediate_size": 2304, "num_attention_heads": 5, "num_key_value_heads": 1}),
    ("exaone4", {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 1}),
    *((family, {"intermediate_size": 1712, "head_dim": 128}) for family in ("glm", "glm4")),
    ("helium", {"hidden_size": 512, "intermediate_size": 1408, "num_key_value_heads": 4, "head_dim": 128}),
    ("hunyuan_v1_dense", {"hidden_size": 256, "intermediate_size": 896, "head_dim": 128}),
    ("ministral", {"intermediate_size": 1536, "num_key_value_heads": 1, "head_dim": 128}),
    ("ministral3", {"hidden_size": 384, "intermediate_size": 1152, "num_key_value_heads": 1, "head_dim": 128}),
    ("starcoder2", {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 3, "num_key_value_heads": 1}),
    ("qwen3", OF_0_6B | {"head_dim": 32}),
    ("gemma", {"hidden_size": 384, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 32}),
    *((family, OLMO) for family in ("olmo", "olmo2", "olmo3")),
    ("gemma2", {"hidden_size": 896, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 4}),
    ("gpt_neox", {"intermediate_size": 2048, "use_parallel_residual": False}),
    ("phi", {"intermediate_size": 2048, "num_key_value_heads": 4}),
    ("gemma3_text", {"hidden_size": 320, "intermediate_size": 1024, "num_key_value_heads": 1, "head_dim": 128}),
]
"""With widths in proportions of real models that keep most for what the formula says."""


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("family", "widths"), OTHERS, ids=[family for family, _ in OTHERS])
def test_layers_of_other_families_keep_at_most_so_many_times_as_much(family, widths, lora, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_in_shapes))
    # Soft caps are for flash-attn alone of the kernels for which the formulas hold.
    backend = "flash" if family == "gemma2" else "varlen"
    found = {
        (layers, pairs): kept(shape(layers, family, **widths), pairs, lora=lora, checkpointing="none", backend=backend)
        for layers in (3, 4)
        for pairs in (FEW, MANY)
    }
    few, many = (found[4, pairs].bytes - found[3, pairs].bytes for pairs in (FEW, MANY))
    a_token = (many - few) / (found[4, MANY].tokens - found[4, FEW].tokens)
    layer = layer_bytes_a_token(
        shape(4, family, **widths), lora=lora, lora_rank=RANK if lora else 0, keys=found[4, FEW].keys
    )
    assert a_token <= 1.000001 * FAMILIES[family] * layer
    assert FAMILIES.keys() == {"qwen2", *(name for name, _ in OTHERS)}


def test_the_numbers_of_the_page_are_those_of_the_formula():
    config = Qwen2Config(**{name: value for name, value in MODELS["3b"].items() if name != "model_type"})
    for lora, fused, text in ((False, False, "3.4 MB"), (True, False, "2.8 MB"), (False, True, "2.8 MB")):
        layer = layer_bytes_a_token(config, lora=lora, lora_rank=4 if lora else 0, keys=1.57, fused_norms=fused)
        assert f"{36 * layer / 1e6:.1f} MB" == text
        assert text in SCALING
        assert f"{8192 * 36 * layer / 1e9:.0f} GB" in SCALING
