"""Rotary embeddings in fewer operations: the bits of transformers in float32, smaller errors in half precision."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from common import make_groups, make_model
from rewardlab.batch import pack
from rewardlab.model import autograd, rotary
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import ComputeConfig, TrainComputeConfig
from rewardlab.model.rotary import Rotation, rotate, use_rotations
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

PLAIN = {"attention_backend": "segments", "linear_backend": "torch", "allocator": "system"}
LLAMA = importlib.import_module("transformers.models.llama.modeling_llama")


@pytest.fixture(autouse=True)
def _few_tokens_at_a_time(monkeypatch):
    """Two tokens of four heads of 8 for the one thread of tests, so that every tensor here is cut."""
    monkeypatch.setattr(autograd, "PLACES", 2 * 4 * 8)


def drawn(dtype=torch.float32, *, batch=1):
    q, k = (torch.randn(batch, 7, heads, 8).transpose(1, 2).to(dtype).requires_grad_() for heads in (4, 2))
    angles = torch.randn(1, 7, 4).repeat(1, 1, 2)
    return q, k, angles.cos(), angles.sin()


def ours_of(q, k, cos, sin):
    def never(*given):
        raise AssertionError

    return rotate(never, q, k, cos, sin)


def with_gradients(function, q, k, cos, sin):
    outputs = function(q, k, cos, sin)
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(output.shape, generator=draw).to(output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (q, k), gradients)]


@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_and_gradients_have_the_bits_of_transformers_in_float32(batch):
    given = drawn(batch=batch)
    for a, b in zip(
        with_gradients(LLAMA.apply_rotary_pos_emb, *given),
        with_gradients(ours_of, *given),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_in_half_precision_outputs_are_the_same_and_gradients_err_less():
    q, k, cos, sin = drawn(torch.bfloat16)
    plain = with_gradients(LLAMA.apply_rotary_pos_emb, q, k, cos, sin)
    ours = with_gradients(ours_of, q, k, cos, sin)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k)]
    exact = with_gradients(LLAMA.apply_rotary_pos_emb, *wide, cos.double(), sin.double())
    assert [tensor.dtype for tensor in ours] == [tensor.dtype for tensor in plain]
    for a, b in zip(plain[:2], ours[:2], strict=True):
        assert torch.equal(a, b)
    for a, b, truth in zip(plain[2:], ours[2:], exact[2:], strict=True):
        assert (b - truth).norm() < (a - truth).norm()


def test_gradients_are_those_of_differences():
    x, cos, sin = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 5, 4), (1, 5, 4), (1, 5, 4)))
    assert torch.autograd.gradcheck(lambda rows: Rotation.apply(rows, cos, sin, False), (x.requires_grad_(),))


def gradients_of(model, batch):
    model.zero_grad()
    rewards = model(batch)
    preference_loss(rewards, batch, LossConfig()).backward()
    return [rewards.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_a_model_keeps_every_bit_of_its_scores_and_gradients(family, layout):
    batch = pack(make_groups(6, replies=3))
    plain, ours = (make_model(family, layout=layout).train() for _ in range(2))
    assert use_rotations(ours.backbone) == 2
    # Norms of queries and keys add up their weights' gradients in another order, that of the tensors in memory.
    allowed = 1e-6 if family == "qwen3" else 0
    for a, b in zip(gradients_of(plain, batch), gradients_of(ours, batch), strict=True):
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)
    with torch.no_grad():
        assert torch.equal(plain(batch), ours(batch))


def test_a_model_that_rotates_a_part_of_each_head_keeps_its_numbers():
    model, batch = make_model("gpt_neox"), pack(make_groups(3))
    wanted = model(batch)
    use_rotations(model.backbone)
    assert torch.equal(model(batch), wanted)


def test_the_module_of_transformers_stays_as_it_is():
    function, forward = LLAMA.apply_rotary_pos_emb, LLAMA.LlamaAttention.forward
    model = make_model()
    use_rotations(model.backbone)
    assert LLAMA.apply_rotary_pos_emb is function
    assert LLAMA.LlamaAttention.forward is forward
    assert isinstance(model.backbone.layers[0].self_attn, LLAMA.LlamaAttention)


def layer_with(function, *, wrapped=False):
    namespace = {"apply_rotary_pos_emb": function, "__name__": "somewhere"}
    exec("def forward(self, q, k, cos, sin):\n    return apply_rotary_pos_emb(q, k, cos, sin)", namespace)
    forward = namespace["forward"]
    if wrapped:

        def around(*given):
            return forward(*given)

        around.__wrapped__ = forward
        forward = around
    return type("Attention", (nn.Module,), {"forward": forward})()


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    def turn(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


def rounded_at_the_end(q, k, cos, sin):
    return tuple(given.to(q.dtype) for given in LLAMA.apply_rotary_pos_emb(q, k, cos, sin))


def computed_in_float32(q, k, cos, sin):
    return rounded_at_the_end(q, k, cos.float(), sin.float())


def of_another_device(q, k, cos, sin):
    raise AssertionError("a kernel's own error")


@pytest.mark.parametrize(
    ("layer", "count"),
    [
        (lambda: layer_with(LLAMA.apply_rotary_pos_emb), 1),
        (lambda: layer_with(interleaved), 0),
        (lambda: layer_with(lambda q, cos, sin: q), 0),
        (lambda: layer_with(lambda q, k, cos, sin, unsqueeze_dim=1: (q[:, :1], k)), 0),
        (lambda: layer_with(LLAMA.apply_rotary_pos_emb, wrapped=True), 0),
        (lambda: layer_with(rounded_at_the_end), 0),
        (lambda: layer_with(computed_in_float32), 0),
        (lambda: layer_with(of_another_device), 0),
    ],
    ids=[
        "the same",
        "interleaved",
        "other arguments",
        "other shapes",
        "wrapped by someone",
        "OLMo's dtype",
        "wider",
        "another device",
    ],
)
def test_only_a_function_with_the_same_numbers_is_replaced(layer, count):
    made = layer()
    assert use_rotations(made) == count
    if count:
        given = drawn()
        for a, b in zip(made(*given), LLAMA.apply_rotary_pos_emb(*given), strict=True):
            assert torch.equal(a, b)
        assert use_rotations(made) == 0, "once is enough"


def test_other_shapes_are_left_to_the_original():
    asked = []

    def original(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        asked.append((cos.shape[-1], unsqueeze_dim))
        return q, k

    q, k, cos, sin = drawn()
    rotate(original, q, k, cos[..., :4], sin[..., :4])
    rotate(original, q, k, cos, sin, unsqueeze_dim=2)
    rotate(original, q, k, cos, sin, 3)
    rotate(original, q, cos=cos, sin=sin, unsqueeze_dim=4)
    rotate(original, q, k, cos, sin)
    assert asked == [(4, 1), (8, 2), (8, 3), (8, 4)]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (ComputeConfig(**PLAIN), 2),
        (TrainComputeConfig(**PLAIN, norm_backend="torch"), 2),
        (ComputeConfig(**PLAIN, compile=True), 0),
    ],
    ids=["scoring", "training", "compiled"],
)
def test_training_and_scoring_rotate_alike(config, count):
    model = make_model()
    apply_compute(model, config)
    assert sum(type(part).__name__.startswith("Rotating") for part in model.modules()) == count
    assert rotary._rotating(LLAMA.LlamaAttention) is not None
