"""Joined experts over half-precision copies: their product, its rounding, its gradients, what is held of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

from common import make_groups, make_model
from fake_cuda import DEVICE, fake_cuda, run_backward
from harness.tiny import GROUPED, SIZES
from rewardlab.batch import pack
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import HalfRounding, TrainComputeConfig
from rewardlab.model.half import hold_half, line_about_others, weights_with_copies
from rewardlab.model.half_experts import HalfExperts, copy_name, weights_of_experts
from rewardlab.model.reward import RewardModel
from rewardlab.model.rounding import round_weights
from rewardlab.model.trainable import half_frozen
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

PLAIN = TrainComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")
CONFIGS: Final[dict[str, Callable[[], Any]]] = {
    "mixtral": lambda: MixtralConfig(**SIZES, **GROUPED, num_local_experts=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, **GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    # Its experts have biases, and matrices that are transposed.
    "gpt_oss": lambda: GptOssConfig(**SIZES, **GROUPED, head_dim=8, num_local_experts=4, rope_parameters=None),
}
WAYS = ("grouped_mm", "eager", "batched_mm")


def mixture(family: str, way: str = "grouped_mm", *, rounding: HalfRounding | None = "stochastic") -> RewardModel:
    """A tiny mixture; computed in bfloat16 unless `rounding` is None."""
    config = CONFIGS[family]()
    config._experts_implementation = way
    model = make_model(config=config).train()
    if rounding is not None:
        model.compute_dtype = torch.bfloat16
        apply_compute(model, PLAIN, half_rounding=rounding)
    return model


def experts_of(model: RewardModel) -> dict[str, Any]:
    return {name: layer for name, layer in model.named_modules() if weights_of_experts(layer)}


def inputs_for(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(24, SIZES["hidden_size"], generator=draw)
    share, chosen = torch.randn(24, layer.num_experts, generator=draw).softmax(-1).topk(2)
    return states, chosen, share


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", CONFIGS)
def test_experts_compute_in_half_precision_from_copies_drawn_by_the_weights_name(family, way):
    """The same bits as the layer of transformers gives that holds the rounded weights."""
    model = mixture(family, way).eval()
    plain = mixture(family, way, rounding=None)
    model.refresh_half_weights()
    for name, layer in experts_of(model).items():
        assert isinstance(layer, HalfExperts)
        other = experts_of(plain)[name]
        for own in weights_of_experts(layer):
            half = getattr(layer, copy_name(own))
            drawn = round_weights(getattr(layer, own).detach(), torch.bfloat16, f"{name}.{own}")
            assert half.dtype is torch.bfloat16
            assert torch.equal(half, drawn)
            setattr(other, own, torch.nn.Parameter(half.clone()))
        with torch.autocast("cpu", torch.bfloat16):
            found, right = (one(*inputs_for(layer)) for one in (layer, other))
        assert found.dtype is torch.float32, "the row that layers add to stays in float32"
        assert torch.equal(found, right)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_that_is_judged_takes_the_draw_of_a_saved_one(family):
    model = mixture(family).eval()
    with torch.no_grad():
        judged = model(pack(make_groups(3)))
    held = mixture(family, rounding=None).eval()
    hold_half(held.backbone, "backbone", torch.bfloat16)
    held.compute_dtype = torch.bfloat16
    apply_compute(held, PLAIN)
    with torch.no_grad():
        assert torch.equal(held(pack(make_groups(3))), judged)
    for layer in experts_of(held).values():
        assert not isinstance(layer, HalfExperts), "weights that are held in half precision need no copies"
        assert {getattr(layer, own).dtype for own in weights_of_experts(layer)} == {torch.bfloat16}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_float32_weights_get_the_gradients_of_the_copies(family, way):
    """Within rounding those of float64 experts with the rounded weights."""
    layer = next(iter(experts_of(model := mixture(family, way)).values()))
    model.refresh_half_weights()
    exact = copy.deepcopy(next(iter(experts_of(mixture(family, "eager", rounding=None)).values()))).double()
    for own in weights_of_experts(layer):
        setattr(exact, own, torch.nn.Parameter(getattr(layer, copy_name(own)).double()))
    states, chosen, share = inputs_for(layer)
    with torch.autocast("cpu", torch.bfloat16):
        layer(states, chosen, share).square().sum().backward()
    exact(states.bfloat16().double(), chosen, share.double()).square().sum().backward()
    for name, parameter in layer.named_parameters():
        right = dict(exact.named_parameters())[name].grad
        assert parameter.grad.dtype is torch.float32
        assert (parameter.grad - right).norm() <= 0.02 * right.norm(), name


def test_experts_see_small_updates_as_linear_layers_do():
    """By the mean over draws; rounding to the nearest hides them."""
    moved = {}
    for rounding in ("stochastic", "nearest"):
        model = mixture("mixtral", rounding=rounding)
        weight = model.backbone.layers[0].mlp.experts.down_proj
        with torch.no_grad():
            weight.copy_(weight.bfloat16())
            weight.mul_(1 + 1e-4)
        drawn = []
        for step in range(50):
            model.step_draw = (0, step)
            model.refresh_half_weights()
            drawn.append(model.backbone.layers[0].mlp.experts.half_down_proj.double())
        old = weight.detach().double() / (1 + 1e-4)
        moved[rounding] = float(((torch.stack(drawn).mean(0) - old) * old).sum() / (1e-4 * old.square()).sum())
    assert moved["stochastic"] == pytest.approx(1, rel=0.25)
    assert moved["nearest"] == pytest.approx(0, abs=1e-3)


def test_frozen_experts_are_held_in_half_precision_and_have_no_copies():
    model = mixture("mixtral", rounding=None).requires_grad_(False)
    model.compute_dtype = torch.bfloat16
    half_frozen(model.backbone, torch.bfloat16)
    apply_compute(model, PLAIN)
    assert not any(isinstance(layer, HalfExperts) for layer in experts_of(model).values())
    assert torch.isfinite(model(pack(make_groups(2)))).all()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_and_pickled_ones_compute_alike(again):
    model = mixture("mixtral").eval()
    batch = pack(make_groups(3))
    with torch.no_grad():
        right = model(batch)
        other = again(model)
        assert torch.equal(other(batch), right)
        other.backbone.layers[0].mlp.experts.down_proj.mul_(2)
        assert not torch.equal(other(batch), right)
        assert torch.equal(model(batch), right)


@pytest.mark.parametrize("way", WAYS)
def test_experts_of_widths_that_half_precision_cannot_multiply_are_multiplied_in_float32(way):
    config = MixtralConfig(**SIZES | {"intermediate_size": 36}, **GROUPED, num_local_experts=4)
    config._experts_implementation = way
    model = make_model(config=config).train()
    model.compute_dtype = torch.bfloat16
    apply_compute(model, PLAIN)
    assert not any(isinstance(layer, HalfExperts) for layer in model.modules())
    batch = pack(make_groups(3))
    preference_loss(model(batch), batch, LossConfig()).backward()
    assert model.backbone.layers[0].mlp.experts.down_proj.grad.any()


def test_dropped_copies_leave_the_layers_as_they_were():
    model = mixture("gpt_oss")
    model.refresh_half_weights()
    model.half_weights.drop()
    kinds = {type(layer).__name__ for layer in experts_of(model).values()}
    assert kinds == {"GptOssExperts"}
    assert not any(getattr(layer, "half_down_proj", None) is not None for layer in model.modules())


def test_only_what_has_no_copy_is_told():
    """The router's matrix: transformers holds it in a class of its own."""
    model = mixture("mixtral", rounding=None)
    line = line_about_others(model.backbone)
    assert line.startswith("half precision: less than 1% of the weights are in layers of other kinds than nn.Linear.")
    named = {name for name, _, _ in weights_with_copies(model.backbone, "backbone")}
    assert "backbone.layers.1.mlp.experts.gate_up_proj" in named
    router = model.backbone.layers[0].mlp.gate.weight
    assert f"{router.numel() * 2 / sum(p.numel() for p in model.backbone.parameters()):.3f}" < "0.01"


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_leaves_gradients_of_every_expert_weight(family):
    model = mixture(family)
    batch = pack(make_groups(4))
    preference_loss(model(batch), batch, LossConfig()).backward()
    for name, layer in experts_of(model).items():
        for own in weights_of_experts(layer):
            assert torch.isfinite(getattr(layer, own).grad).all(), name
            assert getattr(layer, own).grad.any(), name


class _Products(TorchDispatchMode):
    """Notes the dtypes of both factors and the devices of products of joined experts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            self.seen.append((*(factor.dtype for factor in args[:2]), args[0].device))
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_the_products_of_experts_and_full_computes_them_again():
    counts = {}
    for mode in ("none", "selective", "full"):
        model = mixture("mixtral", rounding=None)
        model.compute_dtype = torch.bfloat16
        apply_compute(model, replace(PLAIN, activation_checkpointing=mode))
        batch = pack(make_groups(4))
        with _Products() as products:
            preference_loss(model(batch), batch, LossConfig()).backward()
        counts[mode] = len(products.seen)
    assert counts == {"none": 12, "selective": 12, "full": 16}, "two a layer and two gradients of each"


def test_on_a_gpu_experts_that_train_multiply_in_half_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))  # transformers asks it
    model = mixture("mixtral", rounding=None)
    model.compute_dtype = torch.bfloat16
    with fake_cuda() as device:
        device.put(model)
        apply_compute(model, replace(PLAIN, attention_backend="varlen"))
        batch = pack(make_groups(3)).to(DEVICE)
        with _Products() as products:
            run_backward(preference_loss(model(batch), batch, LossConfig()))
        assert products.seen == [(torch.bfloat16, torch.bfloat16, DEVICE)] * 12
        assert device.waits == []
    for layer in experts_of(model).values():
        for own in weights_of_experts(layer):
            assert getattr(layer, own).grad.dtype is torch.float32
