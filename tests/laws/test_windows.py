"""Law 3 for sliding windows and attention sinks: packed rows score as conversations alone, by every kernel.

The rows are longer than the windows, so that what a window hides matters.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from common import arithmetic, make_groups, make_model, set_layout
from harness.tiny import GROUPED, SIZES
from rewardlab.batch import pack
from rewardlab.core.errors import ModelError
from rewardlab.model import attention_backends
from rewardlab.model.attention_formula import Formula, formulas_of
from rewardlab.model.compute import trial
from rewardlab.model.config import ModelConfig
from rewardlab.model.disk_class import disk_class_of
from rewardlab.model.load import choose_layout
from rewardlab.model.prompt_layout import PromptLayout
from rewardlab.model.selftest import EXACT, layout_error
from rewardlab.training.cost.throughput import attended_pairs
from test_backends import CPU, EVERYWHERE, gradient_of, stand_in_for_cuda
from test_layout import one_by_one

WINDOW = 6
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
NAMED = SIZES | GROUPED | {"sliding_window": WINDOW}
WINDOWED = {
    "gemma3": lambda: Gemma3TextConfig(**NAMED, head_dim=8, layer_types=["sliding_attention", "full_attention"]),
    "gemma2": lambda: Gemma2Config(**NAMED, head_dim=8, attn_logit_softcapping=2.0),
    "mistral": lambda: MistralConfig(**NAMED),
    "phi3": lambda: Phi3Config(**NAMED),
    "olmo3": lambda: Olmo3Config(**NAMED, layer_types=["sliding_attention", "full_attention"]),
    "exaone4": lambda: Exaone4Config(**NAMED, layer_types=["sliding_attention", "full_attention"]),
    "qwen3": lambda: Qwen3Config(**NAMED, head_dim=8, use_sliding_window=True, max_window_layers=1),
    "gpt_oss": lambda: GptOssConfig(
        **NAMED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=dict(PLAIN)
    ),
}
UNABLE = {("varlen", "gemma2"), ("varlen", "gpt_oss"), ("flash", "gpt_oss")}
"""Kernels without soft caps or without sinks, as `unavailable` says."""
CASES = [(k, f) for k in [*EVERYWHERE, "segments in blocks"] for f in WINDOWED if (k, f) not in UNABLE]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    stand_in_for_cuda(monkeypatch)


def windowed(family, dtype):
    config = WINDOWED[family]()
    config._experts_implementation = "eager"  # joined experts do not compute in float64
    model = make_model(config=config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # drawn as small as weights, they would take hardly any attention
            torch.nn.init.normal_(parameter, std=2.0, generator=torch.Generator().manual_seed(2))
    return model


def use(model, backend, monkeypatch):
    """Take this kernel, whose blocks may be so short that these rows have several."""
    set_layout(model, "shared")
    model.attention_backend, _, in_blocks = backend.partition(" ")
    if in_blocks:
        monkeypatch.setattr(attention_backends, "LEAST_BLOCK", 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("backend", "family"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_every_kernel_keeps_to_the_window(backend, family, dtype, tolerance, monkeypatch):
    groups = make_groups(5, replies=4)
    model = windowed(family, dtype)
    with arithmetic(dtype):
        reference = one_by_one(model, groups)
        true_gradient = gradient_of(set_layout(model, "padded"), pack(groups))
        use(model, backend, monkeypatch)
        scores = model(pack(groups)).detach()
        gradient = gradient_of(model, pack(groups))
    assert (scores - reference).abs().max() <= tolerance * max(1, reference.abs().max())
    assert (gradient - true_gradient).norm() <= tolerance * true_gradient.norm()
    model.config.sliding_window = None
    for module in model.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = None
    with arithmetic(dtype):
        assert (model(pack(groups)) - reference).abs().max() > 1e-3, "the window hides something in these rows"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_flex_attention_keeps_to_the_window_and_gives_sinks_their_share(family):
    groups = make_groups(5, replies=4)
    model = windowed(family, torch.float32)
    reference = one_by_one(model, groups)
    set_layout(model, "shared").attention_backend = "flex"
    with torch.no_grad():
        scores = model(pack(groups))
    assert (scores - reference).abs().max() <= 1e-5 * max(1, reference.abs().max())


@pytest.mark.parametrize("window", [1, 5, 16, 40, 200])
def test_blocks_leave_out_only_what_no_token_of_them_sees(window, monkeypatch):
    monkeypatch.setattr(attention_backends, "LEAST_BLOCK", 8)
    groups = [(37, (11, 50, 5)), (0, (29,)), (64, (30, 1))]
    layout = PromptLayout(groups)
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, count, layout.num_tokens, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for count in (4, 2, 2)
    ]
    formula = Formula(window=window)
    found, exact = (
        BACKEND(*inputs, layout, formula) for BACKEND in (attention_backends.segments, attention_backends.mask)
    )
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(exact, inputs, weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("formula", "most"), [(Formula(), 400), (Formula(softcap=2.0), 1600)], ids=["plain", "soft cap"]
)
def test_long_replies_are_computed_in_blocks_of_bounded_masks_and_logits(formula, most, monkeypatch):
    groups = [(3, (37, 50, 5)), (0, (29,)), (64, (30, 1))]
    layout = PromptLayout(groups)
    draw = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, count, layout.num_tokens, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for count in (4, 2, 2)
    ]
    whole = attention_backends.segments(*inputs, layout, formula)
    monkeypatch.setattr(attention_backends, "LEAST_BLOCK", 1)
    monkeypatch.setattr(attention_backends, "MOST_WRITTEN", most)
    sizes = []
    attend = attention_backends._attend

    def watched(query, key, value, mask, formula):
        if mask is not None:
            sizes.append(mask.numel() * (1 if formula.is_plain else query.shape[1]))
        return attend(query, key, value, mask, formula)

    monkeypatch.setattr(attention_backends, "_attend", watched)
    found = attention_backends.segments(*inputs, PromptLayout(groups), formula)
    assert max(sizes) <= most
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(whole, inputs, weights), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_in_half_precision_a_small_change_of_a_sink_is_seen():
    """Its steps are of the size of the learning rate, far below the half-precision numbers next to it."""
    draw = torch.Generator().manual_seed(0)
    row = torch.randn(1, 4, 60, 8, generator=draw).bfloat16()
    layout = PromptLayout([(20, (30, 10))])
    before, after = (
        attention_backends.segments(row, row, row, layout, Formula(sinks=torch.full((4,), sink)))
        for sink in (2.0, 2.001)
    )
    assert (before != after).any()
    torch.testing.assert_close(before, after, rtol=0.02, atol=0.01)


def test_blocks_compute_hardly_more_than_the_window_shows(monkeypatch):
    computed = []

    def counted(query, key, value, mask, formula):
        length, seen = query.shape[2], key.shape[2]
        computed.append(length * (length + 1) // 2 if mask is None else length * seen)
        return query

    monkeypatch.setattr(attention_backends, "_attend", counted)
    row = torch.zeros(1, 1, 4000, 1)
    attention_backends.segments(row, row, row, PromptLayout([(0, (4000,))]), Formula(window=1024))
    assert attended_pairs(0, [4000], 1024) <= sum(computed) <= 1.3 * attended_pairs(0, [4000], 1024)


def chosen(config, max_length, *, attention="auto"):
    said = []
    settings = ModelConfig(attention=attention)
    layout = choose_layout(config, disk_class_of(config), settings, max_length=max_length, share=True, log=said.append)
    return layout, said


@pytest.mark.parametrize("family", WINDOWED)
def test_models_with_short_windows_share_prompts(family):
    config = WINDOWED[family]()
    assert chosen(config, 512) == ("shared", [])
    assert layout_error(config, disk_class_of(config), window=8) <= EXACT


LONGER = NAMED | {"sliding_window": 100, "num_experts_per_tok": 2}
DEAF = {
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **LONGER,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        use_sliding_window=True,
        max_window_layers=1,
    ),
    "phimoe": lambda: PhimoeConfig(**LONGER, num_local_experts=4),
}


@pytest.mark.parametrize("family", DEAF)
def test_a_class_that_hands_no_window_to_attention_is_padded_with_the_reason(family):
    layout, (line,) = chosen(DEAF[family](), 512)
    assert layout == "padded"
    assert "its sliding window of 100 tokens is shorter than --max-seq-len 512, and its layers do not hand it" in line
    with pytest.raises(ModelError, match="--attention shared is not exact for .*: its sliding window of 100 tokens"):
        chosen(DEAF[family](), 512, attention="shared")
    assert chosen(DEAF[family](), 100) == ("shared", [])


def test_a_window_is_asked_for_only_where_it_hides_something(monkeypatch):
    """In shorter rows no kernel needs one, so that a plain causal call serves."""
    asked = []

    def noted(query, key, value, layout, formula):
        asked.append(formula.window)
        return attention_backends.segments(query, key, value, layout, formula)

    monkeypatch.setitem(attention_backends.BACKENDS, "noted", noted)
    model = windowed("gemma3", torch.float32)
    model.attention_backend = "noted"
    for length, window in ((2, None), (9, WINDOW)):
        asked.clear()
        with torch.no_grad():
            model(pack([group for group in make_groups(40, replies=2) if max(group.lengths) <= length][:3]))
        assert asked == [window, None]


@pytest.mark.parametrize("name", ["mask", "products"])
def test_a_kernel_that_forgets_windows_or_sinks_fails_its_trial(name, monkeypatch):
    right = attention_backends.BACKENDS[name]
    config = WINDOWED["mistral"]()
    settings = {"device": CPU, "dtype": torch.bfloat16, "train": True}
    assert trial(name, config, **settings) == ""
    monkeypatch.setitem(attention_backends.BACKENDS, name, lambda *parts: right(*parts[:-1], Formula()))
    assert "with a sliding window" in trial(name, config, **settings)
    if name == "mask":
        assert trial(name, WINDOWED["gpt_oss"](), **settings) != ""


@pytest.mark.parametrize("name", ["varlen", "flash", "products", "flex"])
def test_kernels_without_sinks_say_so(name):
    device = torch.device("cuda" if name in ("varlen", "flash") else "cpu")
    settings = {"device": device, "dtype": torch.bfloat16, "formula": Formula(sinks=torch.zeros(4)), "train": False}
    assert "sinks" in attention_backends.unavailable(name, **settings)


def test_a_model_without_windows_or_sinks_is_tried_with_none():
    (formula,) = formulas_of(make_model("llama").config)
    assert formula.is_plain
    assert formula.window is None
    assert [formula.window for formula in formulas_of(WINDOWED["gpt_oss"]())] == [None, WINDOW]
