"""act(gate) · up: the bits of transformers, forward and backward, with less kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Gemma3nTextConfig
from transformers.activations import ACT2FN
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from common import CONFIGS, make_groups, make_model
from harness.storages import Storages
from rewardlab.batch import pack
from rewardlab.model import autograd, gated
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import TrainComputeConfig
from rewardlab.model.gated import ACTIVATIONS, GatedProduct, use_gated_products
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

PLAIN = {"attention_backend": "segments", "linear_backend": "torch", "allocator": "system"}


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch):
    """Four rows of width 64 for the one thread of tests, so that every tensor here is cut."""
    monkeypatch.setattr(autograd, "PLACES", 4 * 64)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_have_the_bits_of_pytorch(name, dtype):
    activation = ACT2FN[name]
    gate, up = ((3 * torch.randn(2, 5, 64)).to(dtype).requires_grad_() for _ in range(2))
    gradient = torch.randn(2, 5, 64).to(dtype)
    outputs = activation(gate) * up, GatedProduct.apply(gate, up, ACTIVATIONS[type(activation)], False)
    plain, ours = ((output, *torch.autograd.grad(output, (gate, up), gradient)) for output in outputs)
    for a, b in zip(plain, ours, strict=True):
        assert a.dtype is b.dtype is dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gradients_are_those_of_differences(name):
    kind = ACTIVATIONS[type(ACT2FN[name])]
    given = [torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda gate, up: GatedProduct.apply(gate, up, kind, False), given)


def model_of(family="llama"):
    """One whose feed-forward parts are as wide as what PyTorch computes at a time."""
    config = CONFIGS[family]()
    config.intermediate_size = 64
    return make_model(config=config)


def gradients_of(model, batch):
    model.zero_grad()
    rewards = model(batch)
    preference_loss(rewards, batch, LossConfig()).backward()
    return [rewards.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_model_keeps_every_bit_of_its_scores_and_gradients(family, checkpointing):
    batch = pack(make_groups(6, replies=3))
    plain, ours = model_of(family).train(), model_of(family).train()
    apply_compute(ours, TrainComputeConfig(**PLAIN, norm_backend="torch", activation_checkpointing=checkpointing))
    assert sum(isinstance(part, gated._Gated) for part in ours.modules()) == 2
    for a, b in zip(gradients_of(plain, batch), gradients_of(ours, batch), strict=True):
        # Qwen3's norms of queries and keys add up in the order of what rotated them (test_rotary.py).
        allowed = 1e-6 if family == "qwen3" else 0
        torch.testing.assert_close(a, b, rtol=allowed, atol=allowed)


def test_parts_of_another_width_are_off_by_rounding_alone():
    part = make_model().backbone.layers[0].mlp
    assert part.gate_proj.out_features == 48
    x = torch.randn(1, 9, 32)
    wanted = part(x)
    assert use_gated_products(part) == 1
    torch.testing.assert_close(part(x), wanted, rtol=1e-6, atol=1e-7)


def feed_forward():
    return model_of().backbone.layers[0].mlp


def kept_of(part, x):
    """How many tensors of its inner width a part keeps."""
    made = Storages()
    with made:
        output = part(x)
    return sum(size == 4 * 7 * 64 for size in made.alive().values()) if output.requires_grad else 0


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("keep_product", "count"), [(False, 2), (True, 3)])
def test_two_of_four_tensors_are_kept_or_three(keep_product, count, lora):
    part, x = feed_forward(), torch.randn(1, 7, 32, requires_grad=True)
    if lora:
        part = get_peft_model(part, LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"]))
        part = part.base_model.model
    assert kept_of(part, x) == 4
    assert use_gated_products(part, keep_product=keep_product) == 1
    assert kept_of(part, x) == count


@pytest.mark.parametrize("how", ["no gradient", "half precision on the CPU"])
def test_where_nothing_is_saved_the_parts_own_operations_compute(monkeypatch, how):
    part = feed_forward()
    wanted = part(torch.ones(1, 3, 32))
    assert use_gated_products(part) == 1
    monkeypatch.setattr(gated, "GatedProduct", None)
    if how == "no gradient":
        with torch.no_grad():
            assert torch.equal(part(torch.ones(1, 3, 32)), wanted)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert part(torch.ones(1, 3, 32)).dtype is torch.bfloat16


def in_float32(self, x):
    gate, up = self.gate_proj(x), self.up_proj(x)
    return self.down_proj((self.act_fn(gate.float()) * up.float()).to(gate.dtype))


def changed(forward, **more):
    kind = type("OtherMLP", (type(feed_forward()),), {"forward": forward})
    part = feed_forward()
    part.__class__ = kind
    for name, value in more.items():
        setattr(part, name, value)
    return part


@pytest.mark.parametrize(
    "part",
    [
        lambda: changed(lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))),
        lambda: changed(lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7) * self.up_proj(x))),
        lambda: changed(lambda self, x: 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))),
        lambda: changed(lambda self, x: self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))),
        lambda: changed(type(feed_forward()).forward, dropout=nn.Dropout(0.5)),
        lambda: changed(type(feed_forward()).forward, act_fn=nn.Tanh()),
        lambda: changed(type(feed_forward()).forward, own=nn.Parameter(torch.ones(1))),
        lambda: changed(in_float32),
        lambda: changed(lambda self, x, scale: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))),
        lambda: changed(lambda self, x: (self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)),)),
    ],
    ids=[
        "turned round",
        "clamped",
        "scaled",
        "another activation",
        "another child",
        "unknown",
        "a weight of its own",
        "widened",
        "more arguments",
        "a tuple",
    ],
)
def test_parts_that_compute_something_else_are_left_alone(part):
    made = part()
    kind = type(made)
    assert use_gated_products(made) == 0
    assert type(made) is kind


@pytest.mark.parametrize("sparse", [0, 2])
def test_a_layer_that_sets_small_gates_to_zero_is_left_alone_beside_others(sparse):
    pattern = [0.95 if number == sparse else 0.0 for number in range(3)]
    config = Gemma3nTextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, activation_sparsity_pattern=pattern
    )
    layers = nn.ModuleList(Gemma3nTextMLP(config, number) for number in range(3))
    x = torch.randn(2, 5, 32)
    wanted = [layer(x) for layer in layers]
    assert use_gated_products(layers) == 2
    for layer, output in zip(layers, wanted, strict=True):
        assert torch.equal(layer(x), output)


def test_random_numbers_are_as_they_would_have_been_and_inference_mode_does_not_matter():
    part, state = feed_forward(), torch.get_rng_state()
    with torch.inference_mode():
        assert use_gated_products(part) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert use_gated_products(copy.deepcopy(part)) == 0, "once is enough"


def test_parts_are_known_before_their_weights_are_read():
    assert use_gated_products(model_of().to("meta").backbone) == 2
