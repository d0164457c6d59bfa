"""Law 3 for every kernel: what computes does not change what is computed, in its own precision, at most and on average.

The kernels of CUDA are stood in for by a slow, obvious one, so that what is handed to them is tested anywhere; they
themselves are tested in tests/gpu.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from common import arithmetic, make_groups, make_model, set_layout
from rewardlab.batch import pack
from rewardlab.core.errors import ConfigError
from rewardlab.model import applying, attention_backends, compute
from rewardlab.model.applying import (
    apply_compute,
    checkpoint_activations,
    compile_layers,
    read_last_layer_only_where_scored,
)
from rewardlab.model.attention_backends import BACKENDS
from rewardlab.model.attention_formula import Formula
from rewardlab.model.compute import choose_compute
from rewardlab.model.config import ComputeConfig, TrainComputeConfig
from rewardlab.model.linear import use_onednn
from rewardlab.model.prompt_layout import PromptLayout, Ragged
from rewardlab.training.loop.losses import preference_loss, total_weight
from rewardlab.training.monitoring.progress import compiled_programs
from rewardlab.training.settings.config import LossConfig
from test_layout import one_by_one

FAMILIES = ["llama", "qwen3", "gpt_neox"]
EVERYWHERE = ["segments", "mask", "varlen", "flash"]
IN_HALF = [*EVERYWHERE, "products"]
LOSS = LossConfig(regularization_lambda=0.1)
CPU = torch.device("cpu")


def attend_obviously(query, key, value, ragged: Ragged, formula: Formula):
    """What varlen and flash attention promise: each query sees the keys up to its own, counted from the end. Both want
    heads of one width."""
    assert query.shape[2] == key.shape[2] == value.shape[2]
    grouped = query.shape[1] // key.shape[1]
    outputs = []
    for n in range(len(ragged.query_starts) - 1):
        q = query[ragged.query_starts[n] : ragged.query_starts[n + 1]].transpose(0, 1)
        stretch = slice(ragged.key_starts[n], ragged.key_starts[n + 1])
        k, v = (x[stretch].repeat_interleave(grouped, 1).transpose(0, 1) for x in (key, value))
        q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
        logits = q @ k.transpose(1, 2) * (formula.scale or q.shape[-1] ** -0.5)
        if formula.softcap is not None:
            logits = torch.tanh(logits / formula.softcap) * formula.softcap
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        if formula.window is not None:
            seen = seen.triu(k.shape[1] - q.shape[1] - formula.window + 1)
        assert q.shape[1] <= ragged.longest_query
        assert k.shape[1] <= ragged.longest_key
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1).to(value.dtype))
    return torch.cat(outputs)


def stand_in_for_cuda(monkeypatch):
    """Give the kernels of CUDA what computes the same here."""
    monkeypatch.setattr(attention_backends, "varlen_kernel", attend_obviously)
    monkeypatch.setattr(attention_backends, "flash_kernel", attend_obviously)
    monkeypatch.setattr(attention_backends, "_compiled_flex", lambda device_type: flex_attention)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    stand_in_for_cuda(monkeypatch)


def gradient_of(model, batch):
    model.zero_grad()
    (preference_loss(model(batch), batch, LOSS) / total_weight(batch)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("given", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", ["varlen", "flash"])
def test_ragged_kernels_are_given_the_precision_of_the_pass_whatever_layers_gave(backend, given, monkeypatch):
    taken = []
    monkeypatch.setattr(
        attention_backends,
        f"{backend}_kernel",
        lambda q, k, v, *_: taken.extend(tensor.dtype for tensor in (q, k, v)) or q,
    )
    layout = PromptLayout(((3, (2, 4)),), backend)
    parts = [torch.randn(1, 2, layout.num_tokens, 8).to(given) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert BACKENDS[backend](*parts, layout, Formula()).dtype is torch.bfloat16, (
            "as PyTorch's own attention gives it"
        )
    assert taken == [torch.bfloat16] * 3


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_every_backend_gives_the_scores_and_gradients_of_conversations_alone(backend, family, dtype, tolerance):
    if (backend, family) == ("varlen", "gemma2"):
        reason = attention_backends.unavailable(
            "varlen", device=torch.device("cuda"), dtype=torch.bfloat16, formula=Formula(softcap=2.0), train=True
        )
        assert "soft-capped logits" in reason
        return
    groups = make_groups(5, replies=4)
    model = make_model(family, dtype=dtype)
    with arithmetic(dtype):
        reference = one_by_one(model, groups)
        set_layout(model, "padded")
        true_gradient = gradient_of(model, pack(groups))
        set_layout(model, "shared")
        model.attention_backend = backend
        batch = pack(groups)
        scores = model(batch).detach()
        gradient = gradient_of(model, batch)
    assert (scores - reference).abs().max() <= tolerance * max(1, reference.abs().max())
    assert (gradient - true_gradient).norm() <= tolerance * true_gradient.norm()


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=pytest.mark.slow if one == "llama" else ()) for one in (*FAMILIES, "gemma2")]
)
def test_flex_attention_scores_as_conversations_alone(family):
    groups = make_groups(5, replies=4)
    model = make_model(family)
    reference = one_by_one(model, groups)
    set_layout(model, "shared")
    model.attention_backend = "flex"
    with torch.no_grad():
        scores = model(pack(groups))
    assert (scores - reference).abs().max() <= 1e-5 * max(1, reference.abs().max())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", IN_HALF)
def test_in_half_precision_no_backend_errs_more_than_twice_as_much_as_the_padded_path(backend, dtype):
    groups = make_groups(24, replies=3, seed=3)
    model = make_model("llama")
    batch = pack(groups)
    exact_scores = one_by_one(model, groups)
    set_layout(model, "padded")
    exact_gradient = gradient_of(model, batch)
    model.compute_dtype = dtype
    errors = {}
    for name, layout in (("padded", "padded"), (backend, "shared")):
        set_layout(model, layout)
        model.attention_backend = backend
        with torch.no_grad():
            errors[name] = [(model(batch) - exact_scores).abs()]
        errors[name].append((gradient_of(model, batch) - exact_gradient).abs())
    for found, padded in zip(errors[backend], errors["padded"], strict=True):
        assert padded.mean() > 0
        assert found.mean() <= 2 * padded.mean()
        assert found.max() <= 2 * padded.max()


def test_gradients_of_shared_keys_are_added_in_float32():
    """A prompt of many replies sums their gradients; in bf16 the small ones would be lost."""
    source = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = attention_backends._Gather.apply(source, torch.zeros(513, dtype=torch.long))
    weights = torch.full((513, 1, 1), 2.0**-9)
    weights[0] = 1.0
    gathered.backward(weights.bfloat16())
    assert source.grad.item() == 2.0


def test_a_loop_over_replies_adds_their_gradients_in_float32_as_well():
    """The last reply's gradient comes first, and is 512 times that of each of the 64 others."""
    layout = PromptLayout([(1, (1,) * 65)])
    query = torch.zeros(1, 1, layout.num_tokens, 4, dtype=torch.bfloat16)  # each reply attends to both tokens evenly
    value = torch.zeros_like(query).requires_grad_()
    output = attention_backends.segments(query, torch.zeros_like(query), value, layout, Formula())
    weights = torch.full_like(output, 2.0**-5)
    weights[:, :, 0], weights[:, :, -1] = 0.0, 16.0
    (gradient,) = torch.autograd.grad(output, value, weights)
    assert gradient[0, 0, 0].tolist() == [8.0 + 64 * 2.0**-6] * 4


def test_without_sharing_nothing_is_copied():
    assert PromptLayout([(0, (3,)), (0, (4,))]).ragged(CPU).gather_U is None
    assert PromptLayout([(2, (3, 1))]).ragged(CPU).gather_U.tolist() == [0, 1, 2, 3, 4, 0, 1, 5]


@pytest.mark.parametrize("tokens", [1, 127, 129, 1000, 4097, 5000, 8192])
def test_row_lengths_come_in_few_buckets_and_filler_changes_no_score(tokens):
    model = make_model("llama")
    assert model.row_length(tokens) == tokens
    model.attention_backend = "flex"
    length = model.row_length(tokens)
    assert tokens <= length <= tokens + max(128, tokens / 8)
    assert len({model.row_length(n) for n in range(4097, 8193)}) == 8


def test_filler_reaches_no_score():
    groups = make_groups(3)
    model = make_model("llama", dtype=torch.float64)
    with torch.no_grad():
        expected = model(pack(groups))
        model.row_length = lambda num_tokens: num_tokens + 7
        assert torch.allclose(model(pack(groups)), expected, atol=1e-12)


def wide_model():
    """A tiny Llama whose linear layers are wide enough for oneDNN."""
    from transformers import LlamaConfig

    from common import SIZES

    return make_model(config=LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 96}))


def test_onednn_changes_neither_scores_nor_gradients():
    groups = make_groups(6, replies=3)
    model = wide_model()
    reference = one_by_one(model, groups)
    true_gradient = gradient_of(model, pack(groups))
    set_layout(model, "shared")
    assert use_onednn(model.backbone) == 14
    with torch.no_grad():
        scores = model(pack(groups))
    assert (scores - reference).abs().max() <= 1e-5 * max(1, reference.abs().max())
    assert (gradient_of(model, pack(groups)) - true_gradient).norm() <= 1e-5 * true_gradient.norm()


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gemma3"])
def test_the_last_layer_computed_only_where_it_is_read_changes_nothing(family):
    groups = make_groups(6, replies=3)
    model = make_model(family, dtype=torch.float64)
    with arithmetic(torch.float64):
        expected, true_gradient = model(pack(groups)).detach(), gradient_of(model, pack(groups))
        read_last_layer_only_where_scored(model)
        seen = []
        module = dict(model.named_modules())["backbone.layers.1.mlp"]
        next(m for m in module.modules() if isinstance(m, torch.nn.Linear)).register_forward_hook(
            lambda _module, inputs, _output: seen.append(inputs[0].shape[1])
        )
        scores, gradient = model(pack(groups)).detach(), gradient_of(model, pack(groups))
        assert set(seen) == {len(expected)}
        assert torch.allclose(scores, expected, atol=1e-12)
        assert torch.allclose(gradient, true_gradient, rtol=1e-10, atol=1e-13)
        set_layout(model, "padded")
        assert torch.allclose(model(pack(groups)), expected, atol=1e-10)


def test_experts_are_left_as_they_are():
    mixture = torch.nn.Module()
    mixture.gate = torch.nn.Linear(4, 2)
    mixture.experts = torch.nn.Parameter(torch.zeros(2, 4, 4))
    assert not applying._is_plain(mixture)
    assert applying._is_plain(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4)))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("onednn", [False, True])
def test_checkpointed_activations_change_no_gradient_and_are_computed_again(mode, onednn, monkeypatch):
    groups = make_groups(6, replies=3)
    model = wide_model()
    read_last_layer_only_where_scored(model)
    if onednn:
        use_onednn(model.backbone)
    true_gradient = gradient_of(model.train(), pack(groups))
    checkpoint_activations(model, mode)
    norm = dict(model.named_modules())["backbone.layers.0.input_layernorm"]
    norms = []
    norm.register_forward_hook(lambda *_: norms.append(1))
    assert torch.equal(gradient_of(model, pack(groups)), true_gradient)
    assert len(norms) == 2, "once forward, once again backward"


def test_a_row_that_is_computed_again_reads_where_it_did_whatever_ran_in_between():
    first, second = pack(make_groups(3, replies=3, seed=1)), pack(make_groups(4, replies=3, seed=2))
    gradients = []
    for mode in ("none", "full"):
        model = wide_model().train()
        read_last_layer_only_where_scored(model)
        checkpoint_activations(model, mode)
        rewards = model(first), model(second)
        (rewards[0].square().sum() + rewards[1].square().sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])  # its C++ is slow
@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_compiled_layers_score_the_same_and_share_programs(checkpointing, backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    groups = make_groups(8, replies=3)
    model = make_model("llama").train()
    checkpoint_activations(model, checkpointing)
    read_last_layer_only_where_scored(model)
    expected, true_gradient = model(pack(groups)).detach(), gradient_of(model, pack(groups))
    before = compiled_programs()
    compile_layers(model)
    scores, gradient = model(pack(groups)).detach(), gradient_of(model, pack(groups))
    made = compiled_programs() - before
    assert made > 0
    for count in (3, 5, 6):
        gradient_of(model, pack(groups[:count]))
    assert compiled_programs() - before == made, "another length must not make another program"
    assert (scores - expected).abs().max() <= 1e-5 * max(1, expected.abs().max())
    assert (gradient - true_gradient).norm() <= 1e-5 * true_gradient.norm()


def choose(config=None, *, text_config=None, dtype=torch.float32, train=True):
    lines = []
    text_config = text_config if text_config is not None else make_model("llama").config
    chosen = choose_compute(
        config or ComputeConfig(), text_config, device=CPU, dtype=dtype, train=train, log=lines.append
    )
    return chosen, lines


def test_a_kernel_is_judged_by_all_rows_together_unless_it_loses_on_one():
    assert compute.overall_speed([2.0, 2.0, 2.0]) == pytest.approx(2.0)
    assert compute.overall_speed([2.3, 1.96, 1.18]) == pytest.approx(1.746, abs=1e-3)
    assert compute.overall_speed([3.0, 3.0, 0.8]) == 0.8


@pytest.mark.parametrize(("speed", "expected"), [(2.0, "onednn"), (1.1, "torch"), (0.5, "torch")])
def test_the_faster_linear_layer_is_taken_and_said(monkeypatch, speed, expected):
    monkeypatch.setattr(compute, "onednn_speed", lambda *_: speed)
    chosen, (line,) = choose(text_config=wide_model().config)
    assert chosen["linear_backend"] == expected
    assert f"{speed:.2f} times" in line


def test_the_speed_of_linear_layers_is_measured_once_a_shape(monkeypatch):
    made = []

    class Watched(torch.nn.Linear):
        def __init__(self, *shape, **named):
            super().__init__(*shape, **named)
            made.append(shape)

    monkeypatch.setattr(compute, "OneDnnLinear", Watched)
    monkeypatch.setattr(compute, "onednn_available", lambda: True)
    compute.onednn_speed.cache_clear()
    try:
        first, second = (choose(text_config=wide_model().config) for _ in range(2))
    finally:
        compute.onednn_speed.cache_clear()
    assert first == second
    assert len(made) == 1


def test_a_configuration_that_names_its_kernels_measures_nothing(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(compute, "onednn_speed", refuse)
    monkeypatch.setattr(compute, "trial", refuse)
    named = ComputeConfig(attention_backend="mask", linear_backend="onednn", allocator="system")
    assert choose(named, text_config=wide_model().config)[0] == {
        "attention_backend": "mask",
        "linear_backend": "onednn",
        "allocator": "system",
    }


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (ComputeConfig(attention_backend="varlen"), "--attention-backend varlen"),
        (ComputeConfig(attention_backend="flash"), "--attention-backend flash"),
        (ComputeConfig(attention_backend="flex"), "--attention-backend flex"),
    ],
)
def test_a_named_kernel_that_cannot_run_here_is_an_error(config, flag):
    with pytest.raises(ConfigError, match=flag):
        choose(config)


def test_onednn_in_bf16_and_liger_on_the_cpu_are_errors():
    with pytest.raises(ConfigError, match="--linear-backend onednn"):
        choose(ComputeConfig(linear_backend="onednn"), dtype=torch.bfloat16)
    settings = TrainComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system", liger=True)
    with pytest.raises(ConfigError, match="--liger"):
        apply_compute(make_model("llama"), settings)
    with pytest.raises(ConfigError, match="selective"):
        TrainComputeConfig(compile=True, activation_checkpointing="selective")


def test_liger_takes_the_layers_and_leaves_the_loss_alone(monkeypatch):
    """The backbone has no language-model head, which Liger's own defaults would call."""
    told = {}
    patches = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None})
    package = SimpleNamespace(_apply_liger_kernel_to_instance=lambda **options: told.update(options))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patches)
    model = make_model("llama")
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    applying._use_liger(model)
    assert told == {"model": model.backbone, "fused_linear_cross_entropy": False, "cross_entropy": False}
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN.clear()
    with pytest.raises(ConfigError, match="--liger: Liger has no kernels for model type 'llama'"):
        applying._use_liger(model)


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_kernel_that_fails_or_is_wrong_is_passed_over_with_the_reason(monkeypatch, fault):
    def broken(query, key, value, layout, formula):
        if fault == "raises":
            raise RuntimeError("no kernel image")
        layout = PromptLayout([(0, (layout.num_tokens,))])  # everything sees everything before it
        return attention_backends.segments(query, key, value, layout, formula)

    monkeypatch.setitem(attention_backends.BACKENDS, "mask", broken)
    monkeypatch.setattr(compute, "PREFERRED", {("cpu", False): ("mask", "segments")})
    chosen, (line,) = choose()
    assert chosen["attention_backend"] == "segments"
    assert ("no kernel image" if fault == "raises" else "is off by") in line


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [*itertools.product(EVERYWHERE[1:], [torch.float32, torch.bfloat16]), ("products", torch.bfloat16)],
)
def test_a_right_kernel_passes_its_trial(backend, dtype):
    assert compute.trial(backend, make_model("llama").config, device=CPU, dtype=dtype, train=True) == ""
