"""What an adapter adds is seen in half precision, however little it is, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from common import make_model
from rewardlab.model import linear, lora
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import ModelConfig, TrainComputeConfig
from rewardlab.model.half import HalfWeights
from rewardlab.model.lora_sums import SummedLora, sum_before_rounding

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")  # PEFT says so of every Conv1D

WIDTH, TOKENS = 64, 400


def adapted(kind: str = "linear", *, size: float = 1e-3, **settings: object) -> nn.Module:
    """One layer with an adapter that adds about `size` to outputs of about 1, its own weight on bfloat16's grid."""
    torch.manual_seed(0)
    base: nn.Module = Conv1D(WIDTH, WIDTH) if kind == "conv1d" else nn.Linear(WIDTH, WIDTH, bias=kind == "biased")
    assert isinstance(base.weight, nn.Parameter)
    base.weight.data = (torch.randn(WIDTH, WIDTH) / WIDTH**0.5).bfloat16().float()
    module = nn.Sequential(base)
    config = ModelConfig(**{"model": "m", "lora": True, "lora_rank": 4, "lora_target_modules": ("0",)} | settings)
    lora.add_adapters(with_prefix(module), config)
    layer = module[0]
    assert type(layer) is LoraLinear
    layer.lora_B["default"].weight.data.normal_(std=size)
    return module


def with_prefix(module: nn.Module) -> nn.Module:
    """The word that PEFT's names need."""
    module.base_model_prefix = "model"
    return module


def inputs() -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def computed(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return module(inputs())


def part_seen(module: nn.Module, dtype: torch.dtype) -> float:
    """How much of what the adapter adds is in the output: the slope of the change on the addition, 1 for all of it."""
    halves = inputs().to(dtype).double()
    layer = module[0]
    base = layer.base_layer
    weight_IO = base.weight.double() if isinstance(base, Conv1D) else base.weight.double().t()
    without = halves @ weight_IO + (0 if base.bias is None else base.bias.double())
    added = layer.scaling["default"] * (halves @ layer.lora_A["default"].weight.double().t())
    added = added @ layer.lora_B["default"].weight.double().t()
    change = computed(module, dtype).double() - without
    return float((change * added).sum() / added.square().sum())


@pytest.mark.parametrize("kind", ["linear", "biased", "conv1d"])
@torch.no_grad()
@pytest.mark.parametrize("with_copies", [True, False], ids=["copies", "autocast"])
def test_an_addition_of_less_than_half_a_step_is_seen(kind: str, with_copies: bool) -> None:
    module = adapted(kind, size=3e-5)
    assert part_seen(module, torch.bfloat16) < 0.6, "PEFT's order loses most of it, or this test shows nothing"
    sum_before_rounding(module)
    if with_copies:
        HalfWeights(module, "backbone", torch.bfloat16, "nearest").refresh()
    assert part_seen(module, torch.bfloat16) == pytest.approx(1, abs=0.1)


@torch.no_grad()
def test_an_addition_is_seen_in_float16() -> None:
    module = adapted(size=4e-6)
    assert part_seen(module, torch.float16) < 0.6
    sum_before_rounding(module)
    HalfWeights(module, "backbone", torch.float16, "nearest").refresh()
    assert part_seen(module, torch.float16) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("kind", ["linear", "biased", "conv1d"])
def test_gradients_are_those_of_pefts_order_to_the_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        linear, "WIDENED", ()
    )  # products of gradients are rounded; what is widened is not rounded on its way
    found = {}
    for name in ("peft", "summed", "summed by copies"):
        module = adapted(kind)
        if name != "peft":
            sum_before_rounding(module)
        if name.endswith("copies"):
            HalfWeights(module, "backbone", torch.bfloat16, "nearest").refresh()
        given = inputs().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(given * 1)  # not a leaf, as in a model: autocast would keep a cast of a leaf
        output.backward(torch.ones_like(output))
        found[name] = {"input": given.grad} | {
            name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad
        }
        assert len(found[name]) == 3
    for other in ("summed", "summed by copies"):
        for name, gradient in found["peft"].items():
            assert gradient is not None
            assert torch.equal(gradient, found[other][name]), (other, name)


@pytest.mark.parametrize("rank", [3, 4])
def test_of_any_scale_gradients_and_outputs_err_as_in_pefts_order(rank: int) -> None:
    """But for one rounding: where a processor rounds its products, what is scaled was rounded before."""
    found = {}
    for name in ("exact", "peft", "ours"):
        module = adapted(size=0.1, lora_rank=rank)
        for number, layer in enumerate((module[0].lora_A["default"], module[0].lora_B["default"])):
            drawn = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(number))
            layer.weight.data = (0.1 * drawn).bfloat16().float()
        if name == "ours":
            sum_before_rounding(module)
            HalfWeights(module, "backbone", torch.bfloat16, "nearest").refresh()
        given = inputs().bfloat16().to(torch.float64 if name == "exact" else torch.float32).requires_grad_()
        module = module.double() if name == "exact" else module
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name != "exact"):
            output = module(given * 1)
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        output.backward(gradient.to(output.dtype))
        trained = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
        found[name] = [output.detach(), given.grad, *trained]
    for truth, peft, ours in zip(found["exact"], found["peft"], found["ours"], strict=True):
        assert (ours - truth).norm() <= 2**0.5 * (peft - truth).norm()


def test_both_ways_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WIDENED", ())  # autocast has PyTorch's products on every processor
    by_autocast, by_copies = adapted("biased"), adapted("biased")
    for module in (by_autocast, by_copies):
        sum_before_rounding(module)
    HalfWeights(by_copies, "backbone", torch.bfloat16, "nearest").refresh()
    assert torch.equal(computed(by_autocast), computed(by_copies))


def test_all_else_is_as_peft_computes_it() -> None:
    plain, summed, dora = adapted(), adapted(), adapted(dora=True)
    wanted_of_dora = computed(dora)
    for module in (summed, dora):
        sum_before_rounding(module)
    assert torch.equal(plain(inputs()), summed(inputs())), "in float32"
    assert torch.equal(computed(dora), wanted_of_dora)
    for module in (plain, summed):
        module[0].enable_adapters(False)
    assert torch.equal(computed(plain), computed(summed)), "without its adapter"


@pytest.mark.parametrize(("rounding", "kind"), [("stochastic", SummedLora), ("nearest", LoraLinear)])
def test_runs_sum_before_rounding_unless_they_round_as_others_do(rounding: str, kind: type[nn.Module]) -> None:
    model = make_model()
    lora.add_adapters(model.backbone, ModelConfig(model="m", lora=True))
    model.compute_dtype = torch.bfloat16
    config = TrainComputeConfig(attention_backend="segments", linear_backend="torch", allocator="system")
    apply_compute(model, config, half_rounding=rounding)
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    assert layers
    assert {type(layer) for layer in layers} == {kind}


def nodes(output: torch.Tensor) -> list[str]:
    """The names of all nodes of a graph."""
    found, left = set(), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [parent for parent, _ in node.next_functions]
    return [type(node).__name__ for node in found]


@pytest.mark.parametrize("kind", ["linear", "biased", "conv1d"])
def test_a_layer_and_its_adapter_are_one_node_of_the_graph(kind: str) -> None:
    module = adapted(kind)
    sum_before_rounding(module)
    HalfWeights(module, "backbone", torch.bfloat16, "nearest").refresh()
    products = [name for name in nodes(computed(module)) if "Product" in name]
    assert products == ["_AdaptedProductBackward"]


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_base_layer_that_trains_gets_its_gradient(part: str) -> None:
    module = adapted("biased")
    sum_before_rounding(module)
    HalfWeights(module, "backbone", torch.bfloat16, "nearest").refresh()
    parameter = getattr(module[0].base_layer, part).requires_grad_()
    computed(module).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.abs().sum() > 0


def test_with_dropout_the_adapter_sees_what_is_left_and_the_layer_sees_all() -> None:
    module = adapted()
    sum_before_rounding(module)
    HalfWeights(module, "backbone", torch.bfloat16, "nearest").refresh()
    module[0].lora_dropout["default"] = nn.Threshold(1e9, 0.0)  # leaves nothing
    without = inputs().bfloat16() @ module[0].base_layer.half_weight.t()
    assert torch.allclose(computed(module), without, rtol=2**-7, atol=2**-7)
