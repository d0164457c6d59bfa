"""Law 3 for latent attention (DeepSeek), whose values are narrower than its queries and keys, and the widths with which
kernels are tried for a model.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MiniCPM3Config

from common import CONFIGS, arithmetic, make_groups, make_model, set_layout
from harness.tiny import SIZES
from rewardlab.batch import pack
from rewardlab.model import attention_backends
from rewardlab.model.attention_formula import Formula
from rewardlab.model.compute import heads_of, trial
from test_backends import CPU, EVERYWHERE, gradient_of, stand_in_for_cuda
from test_layout import one_by_one
from test_windows import WINDOWED

WIDTHS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 8}
NAMED = SIZES | WIDTHS | {"num_key_value_heads": SIZES["num_attention_heads"]}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT = {
    "deepseek_v2": lambda: DeepseekV2Config(**NAMED, **EXPERTS, first_k_dense_replace=2),
    "deepseek_v3": lambda: DeepseekV3Config(**NAMED, **EXPERTS, first_k_dense_replace=1),
    "minicpm3": lambda: MiniCPM3Config(**NAMED),
}
ALL = CONFIGS | WINDOWED | LATENT


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    stand_in_for_cuda(monkeypatch)


def latent(family, dtype):
    config = LATENT[family]()
    config._experts_implementation = "eager"  # joined experts do not compute in float64
    return make_model(config=config, dtype=dtype)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("family", [*LATENT, *(name for name in ALL if name not in LATENT)])
def test_kernels_are_tried_with_the_widths_that_layers_hand_over(family, monkeypatch):
    handed = set()

    def noted(query, key, value, layout, formula):
        handed.add((query.shape[1], key.shape[1], query.shape[3], value.shape[3]))
        return attention_backends.segments(query, key, value, layout, formula)

    monkeypatch.setitem(attention_backends.BACKENDS, "noted", noted)
    model = make_model(config=ALL[family]())
    model.attention_backend = "noted"
    with torch.no_grad():
        model(pack(make_groups(2, replies=2)))
    assert handed == set(heads_of(model.config))
    handed.clear()
    assert trial("noted", model.config, device=CPU, dtype=torch.float32, train=False) == ""
    assert handed == set(heads_of(model.config))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("backend", ["varlen", "flash", *(name for name in EVERYWHERE if name in ("segments", "mask"))])
@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_may_be_narrower_than_keys(backend, family, dtype, tolerance):
    groups = make_groups(5, replies=4)
    model = latent(family, dtype)
    with arithmetic(dtype):
        reference = one_by_one(model, groups)
        true_gradient = gradient_of(set_layout(model, "padded"), pack(groups))
        set_layout(model, "shared").attention_backend = backend
        scores = model(pack(groups)).detach()
        gradient = gradient_of(model, pack(groups))
    assert (scores - reference).abs().max() <= tolerance * max(1, reference.abs().max())
    assert (gradient - true_gradient).norm() <= tolerance * true_gradient.norm()


@pytest.mark.parametrize("backend", ["varlen", "flash", "mask", "products"])
def test_a_right_kernel_passes_its_trial_with_narrower_values(backend):
    config = LATENT["minicpm3"]()
    assert trial(backend, config, device=CPU, dtype=torch.bfloat16, train=True) == ""


def test_no_kernel_gives_more_columns_than_the_values_have():
    layout = attention_backends.PromptLayout(((3, (2, 4)),))
    query, key, value = (torch.randn(1, 2, layout.num_tokens, width) for width in (12, 12, 8))
    for backend in EVERYWHERE:
        found = attention_backends.BACKENDS[backend](query, key, value, layout, Formula())
        assert found.shape == (1, 2, layout.num_tokens, 8), backend
