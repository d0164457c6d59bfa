"""Linear layers over half-precision copies: the bits of autocast where rounding is to nearest, made once a step."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common import make_groups
from in_half import half_model
from rewardlab.batch import pack
from rewardlab.model import half, linear
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import TrainComputeConfig
from rewardlab.model.half import AS_SAVED, Cast, HalfConv1D, HalfLinear, HalfWeights, line_about_others
from rewardlab.model.layers import cut_off
from rewardlab.model.linear import use_onednn
from rewardlab.model.rounding import round_weights
from rewardlab.model.trainable import half_frozen
from rewardlab.training.loop.losses import preference_loss
from rewardlab.training.settings.config import LossConfig

PLAIN = TrainComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")


def step_of(model, num_micro_batches=3):
    """Scores and gradients of a step in several micro-batches."""
    model.zero_grad()
    scores = []
    for number in range(num_micro_batches):
        batch = pack(make_groups(4, seed=number, replies=3))
        rewards = model(batch)
        preference_loss(rewards, batch, LossConfig()).backward()
        scores.append(rewards.detach())
    return torch.cat(scores), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.quick_cases(8)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")  # PEFT says so of every Conv1D, and then sets it itself
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2"])  # the last three have biases
def test_copies_to_the_nearest_give_the_bits_of_casts_in_every_micro_batch(family, lora, dtype, monkeypatch):
    monkeypatch.setattr(linear, "WIDENED", ())  # autocast has PyTorch's products on every processor
    model = half_model(family, lora=lora, dtype=dtype)
    by_copies = copy.deepcopy(model)
    by_copies.half_weights = HalfWeights(by_copies.backbone, "backbone", dtype, "nearest")
    scores, gradients = step_of(model)
    found, found_gradients = step_of(by_copies)
    assert torch.equal(scores, found)
    assert gradients.keys() == found_gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype is torch.float32
        assert torch.equal(gradient, found_gradients[name]), name


def test_copies_are_made_once_a_step_and_again_when_a_weight_has_changed(monkeypatch):
    made, rounded = [], half.round_together
    monkeypatch.setattr(half, "round_together", lambda parts, dtype: made.extend(parts) or rounded(parts, dtype))
    model = half_model().train()
    apply_compute(model, PLAIN)
    count = sum(type(layer) is HalfLinear for layer in model.modules())
    model.step_draw = (0, 0)
    step_of(model)
    assert len(made) == count > 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    optimizer.step()
    model.step_draw = (0, 1)
    step_of(model)
    assert len(made) == 2 * count
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("q_proj.weight")).mul_(2.0)
    step_of(model)
    assert len(made) == 2 * count + 1, "only what has changed"


def test_copies_that_could_not_be_rounded_are_made_again(monkeypatch):
    model = half_model()
    apply_compute(model, PLAIN)
    model.half_weights.refresh((1,))
    right = [copied.layer.half_weight.clone() for copied in model.half_weights._layers]

    def out_of_memory(parts, dtype):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(half, "round_together", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            model.half_weights.refresh((2,))
    model.half_weights.refresh((2,))
    moved = [copied.layer.half_weight for copied in model.half_weights._layers]
    assert not any(torch.equal(one, other) for one, other in zip(moved, right, strict=True))


def test_copies_of_a_draw_that_ran_out_of_memory_are_not_taken_for_those_before(monkeypatch):
    model = half_model()
    apply_compute(model, PLAIN)
    model.half_weights.refresh(AS_SAVED)
    right = [copied.layer.half_weight.clone() for copied in model.half_weights._layers]
    rounded = half.round_together

    def half_done(parts, dtype):
        rounded(parts[: len(parts) // 2], dtype)
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(half, "round_together", half_done)
        with pytest.raises(torch.OutOfMemoryError):
            model.half_weights.refresh((2,))
    model.half_weights.refresh(AS_SAVED)
    again = [copied.layer.half_weight for copied in model.half_weights._layers]
    assert all(torch.equal(one, other) for one, other in zip(again, right, strict=True))


def test_layers_that_take_one_tensor_share_its_cast_until_it_is_written_to_or_gone():
    cast, given = Cast(), torch.randn(3, 4)
    first = cast.of(given, torch.bfloat16)
    assert torch.equal(first, given.bfloat16())
    assert cast.of(given, torch.bfloat16) is first
    assert cast.of(given, torch.float16).dtype is torch.float16
    first = cast.of(given, torch.bfloat16)
    assert cast.of(given.clone(), torch.bfloat16) is not first
    first = cast.of(given, torch.bfloat16)
    given.mul_(2)
    assert torch.equal(cast.of(given, torch.bfloat16), given.bfloat16())
    narrow = weakref.ref(cast.of(given, torch.bfloat16))
    del given
    assert narrow() is None, "the cast outlives its input"
    with torch.inference_mode():
        given = torch.randn(3, 4)
        cast.of(given, torch.bfloat16)
        given.mul_(2)
        assert torch.equal(cast.of(given, torch.bfloat16), given.bfloat16())


def test_query_key_and_value_keep_one_cast_between_them_for_the_backward_pass(monkeypatch):
    model = half_model().train()
    apply_compute(model, PLAIN)
    made, cast = [], Cast.of
    monkeypatch.setattr(Cast, "of", lambda self, input, dtype: made.append(cast(self, input, dtype)) or made[-1])
    step_of(model)
    passes, rest = divmod(len(made), 7)
    assert passes > 0
    assert rest == 0
    # Of a layer: one for query, key and value, one for gate and up, and those of the two output projections.
    assert len({id(narrow) for narrow in made}) == 4 * passes


def test_another_step_draws_other_copies_and_a_judged_model_has_those_it_is_saved_with():
    model = half_model()
    apply_compute(model, PLAIN)
    name, layer = next(
        (name, layer) for name, layer in model.named_modules() if type(layer) is HalfLinear and "q_proj" in name
    )
    batch = pack(make_groups(3))

    def copied(draw, *, training):
        model.step_draw = draw
        model.train(training)
        with torch.no_grad():
            model(batch)
        return layer.half_weight.clone()

    first = copied((7, 0), training=True)
    assert not torch.equal(first, copied((7, 1), training=True))
    assert torch.equal(first, copied((7, 0), training=True))
    judged = copied((7, 1), training=False)
    assert torch.equal(judged, round_weights(layer.weight.detach(), torch.bfloat16, f"{name}.weight"))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    ("backend", "family", "lora"),
    [("segments", "llama", False), ("products", "llama", False), ("segments", "qwen2", True)],  # qwen2 has biases
)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activations_computed_again_give_the_same_bits(mode, backend, family, lora):
    found = []
    for checkpointing in ("none", mode):
        model = half_model(family, lora=lora)
        apply_compute(model, replace(PLAIN, activation_checkpointing=checkpointing, attention_backend=backend))
        model.train()
        model.step_draw = (3,)
        found.append(step_of(model))
    (scores, gradients), (again, others) = found
    assert torch.equal(scores, again)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_has_its_bias_and_its_update_whatever_computes_it(dtype, widened, monkeypatch):
    """As layers with adapters have both. In whole numbers nothing is rounded."""
    monkeypatch.setattr(half, "is_widened", lambda weight: widened)
    input, weight, bias, update = (torch.randint(-3, 4, size).to(dtype) for size in ((5, 4), (6, 4), (6,), (5, 6)))
    for biased, updated in ((False, False), (True, False), (False, True), (True, True)):
        found = half.half_product(input, weight, bias if biased else None, update if updated else None)
        wanted = input.double() @ weight.double().t() + biased * bias.double() + updated * update.double()
        assert found.dtype is dtype
        assert torch.equal(found.double(), wanted)
    back = half.gradient_product(update.t(), input, torch.float32, widened=widened)
    assert torch.equal(back.double(), update.double().t() @ input.double())


def test_gradients_go_straight_through_the_rounding():
    """Of a weight far from any bf16 value: as if the copy were the weight."""
    layer = nn.Linear(3, 2, bias=True)
    with torch.no_grad():
        layer.weight.fill_(1.0 + 2.0**-9)
    weights = HalfWeights(nn.Sequential(layer), "", torch.bfloat16, "nearest")
    weights.refresh()
    input = torch.randn(4, 3, requires_grad=True)
    output = layer(input)
    assert output.dtype is torch.bfloat16
    output.float().sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert torch.allclose(layer.weight.grad, input.detach().bfloat16().float().sum(0).expand(2, 3), atol=2e-2)
    assert torch.allclose(input.grad, torch.full((4, 3), 2.0))
    assert torch.equal(layer.bias.grad, torch.full((2,), 4.0))


def test_layers_frozen_in_half_precision_are_their_own_copies():
    model = half_model(lora=True)
    apply_compute(model, PLAIN)
    model.half_weights.refresh()
    frozen = [layer for layer in model.modules() if type(layer) is HalfLinear and not layer.weight.requires_grad]
    assert frozen
    assert all(layer.half_weight.data_ptr() == layer.weight.data_ptr() for layer in frozen)
    held = [layer.half_weight for layer in frozen]
    model.half_weights.refresh((7,))
    assert all(layer.half_weight is one for layer, one in zip(frozen, held, strict=True)), "no draw is made for them"
    frozen[0].weight.data = frozen[0].weight.data.clone()
    model.half_weights.refresh((7,))
    assert frozen[0].half_weight.data_ptr() == frozen[0].weight.data_ptr()


def test_frozen_biases_are_cast_once_and_again_when_they_have_changed():
    model = half_model("qwen2").requires_grad_(False)
    apply_compute(model, PLAIN)
    model.half_weights.refresh((0,))
    biased = [layer for layer in model.modules() if type(layer) is HalfLinear and layer.bias is not None]
    held = [layer.half_bias for layer in biased]
    assert held
    model.half_weights.refresh((1,))
    assert all(layer.half_bias is one for layer, one in zip(biased, held, strict=True))
    with torch.no_grad():
        biased[0].bias.add_(1.0)
    model.half_weights.refresh((1,))
    assert [layer.half_bias is one for layer, one in zip(biased, held, strict=True)] == [False] + [True] * (
        len(biased) - 1
    )
    assert all(torch.equal(layer.half_bias, layer.bias.bfloat16()) for layer in biased)


def test_biases_that_a_fused_optimiser_has_changed_are_cast_again_in_the_next_step_and_when_evaluated():
    """It writes to weights behind autograd's counter of versions."""
    model = half_model("qwen2")
    apply_compute(model, PLAIN)
    biased = [layer for layer in model.modules() if type(layer) is HalfLinear and layer.bias is not None]
    optimizer = torch.optim.AdamW((layer.bias for layer in biased), lr=1.0, fused=True)
    for draw in ((0, 1), (0, 2), AS_SAVED):
        model.half_weights.refresh(draw)
        assert all(torch.equal(layer.half_bias, layer.bias.bfloat16()) for layer in biased)
        for layer in biased:
            layer.bias.grad = torch.ones_like(layer.bias)
        optimizer.step()


def test_a_model_that_is_moved_or_cast_makes_its_copies_again_and_dropping_them_leaves_plain_layers():
    model = half_model()
    apply_compute(model, PLAIN)
    batch = pack(make_groups(3))
    with torch.no_grad():
        before = model(batch)
        model.to(torch.float32)
        assert all(layer.half_weight is None for layer in model.modules() if type(layer) is HalfLinear)
        assert torch.equal(model(batch), before)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(batch), before)
        model.half_weights.drop()
        assert not any(type(layer) is HalfLinear for layer in model.modules())
        model.half_weights = None
        by_autocast = half_model()(batch)
        assert torch.equal(model(batch), by_autocast)
        assert not torch.equal(by_autocast, before)


def test_a_trained_model_keeps_its_update_in_stochastic_copies_and_loses_it_in_the_nearest_ones():
    """An update that raises all scores and moves no weight by half a step of bf16."""
    model = half_model()
    matrices = [layer.weight for layer in model.backbone.modules() if type(layer) is nn.Linear]
    batch, scores = pack(make_groups(12, replies=4)), {}
    with torch.no_grad():
        for weight in matrices:
            weight.copy_(weight.bfloat16())
    model.compute_dtype = torch.float32
    gradients = torch.autograd.grad(model(batch).sum(), matrices)
    with torch.no_grad():
        scores["before"] = model(batch).mean()
        for weight, gradient in zip(matrices, gradients, strict=True):
            weight.add_(2.0**-10 * weight.abs() * gradient.sign())
        scores["after"] = model(batch).mean()
        for rounding in ("nearest", "stochastic"):
            rounded = copy.deepcopy(model)
            rounded.half_weights = HalfWeights(rounded.backbone, "backbone", torch.bfloat16, rounding)
            rounded.half_weights.refresh(AS_SAVED)
            for layer in rounded.modules():  # the rounding alone, without half-precision arithmetic
                if type(layer) is HalfLinear:
                    layer.weight.copy_(layer.half_weight)
            rounded.half_weights.drop()
            rounded.half_weights = None
            scores[rounding] = rounded(batch).mean()
    risen = scores["after"] - scores["before"]
    assert risen > 0
    assert scores["nearest"] == scores["before"]
    assert 0.7 * risen < scores["stochastic"] - scores["before"] < 1.3 * risen


def test_layers_that_compute_by_onednn_have_copies_too_and_are_themselves_again_afterwards(monkeypatch):
    monkeypatch.setattr(linear, "MIN_WIDTH", 16)
    plain, model = half_model(), half_model()
    assert use_onednn(model.backbone) == 14
    batch = pack(make_groups(3))
    for each in (plain, model):
        each.half_weights = HalfWeights(each.backbone, "backbone", torch.bfloat16, "stochastic")
    with torch.no_grad():
        assert torch.equal(plain(batch), model(batch))
    model.half_weights.drop()
    assert sum(type(layer) is linear.OneDnnLinear for layer in model.modules()) == 14


def test_frozen_weights_keep_what_was_learnt_before():
    """Such as a trained reward model under new adapters."""
    model = half_model()
    layer = model.backbone.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.weight.copy_(layer.weight.bfloat16())
        base = layer.weight.clone()
        layer.weight.add_(base.abs() * 2.0**-11)  # a quarter of a step, or less, all one way
    learnt = (layer.weight.detach() - base).mean()
    model.requires_grad_(False)
    assert half_frozen(model.backbone, torch.bfloat16)
    kept = (layer.weight.float() - base).mean()
    assert layer.weight.dtype is torch.bfloat16
    assert kept == pytest.approx(learnt, rel=0.25)
    assert not half_frozen(model.backbone, torch.bfloat16), "nothing is left to round"


def test_a_model_cut_off_lets_go_of_the_copies_of_its_later_layers():
    model = half_model()
    apply_compute(model, PLAIN)
    later = weakref.ref(model.backbone.layers[1])
    cut_off(model, 1)
    gc.collect()
    assert later() is None


def test_matrices_that_have_no_copies_are_counted_and_told():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 10, 10))

    assert line_about_others(nn.Sequential(nn.Linear(10, 10), nn.Embedding(5, 10), nn.LayerNorm(10))) == ""
    line = line_about_others(nn.Sequential(nn.Linear(10, 10, bias=False), Experts()))
    assert line.startswith("half precision: 75% of the weights are in layers of other kinds than nn.Linear.")


def test_the_layers_of_gpt2_have_copies_that_see_small_updates():
    model = half_model("gpt2")
    assert line_about_others(model.backbone) == ""
    apply_compute(model, PLAIN)
    model.half_weights.refresh()
    layers = {name: layer for name, layer in model.named_modules() if type(layer) is HalfConv1D}
    assert len(layers) == 8, "two of attention and two of the perceptron a layer"
    for name, layer in layers.items():
        assert torch.equal(layer.half_weight, round_weights(layer.weight.detach(), torch.bfloat16, f"{name}.weight"))
    model.half_weights.drop()
    assert sum(type(layer) is Conv1D for layer in model.modules()) == 8


def test_weights_made_in_inference_mode_are_rounded_as_they_are_each_time():
    plain = half_model()
    apply_compute(plain, PLAIN)
    batch = pack(make_groups(3))
    with torch.inference_mode():
        model = half_model()
        apply_compute(model, PLAIN)
        assert torch.equal(model(batch), plain(batch))
        model.backbone.layers[0].mlp.up_proj.weight.mul_(2)
        assert not torch.equal(model(batch), plain(batch))
