"""Half-precision products of a processor without instructions for them: those of float32, rounded once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from rewardlab.model import half as half_module
from rewardlab.model import linear
from rewardlab.model.applying import _keep_matmuls
from rewardlab.model.half import HalfWeights


@pytest.mark.parametrize("layer_class", [nn.Linear, Conv1D])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_a_processor_has_no_instructions_for_are_those_of_float32_rounded_once(
    monkeypatch, layer_class, dtype
):
    sizes = (96, 128) if layer_class is nn.Linear else (128, 96)
    layer = nn.Sequential(layer_class(*sizes))
    nn.init.normal_(layer[0].bias)
    monkeypatch.setattr(linear, "WIDENED", {dtype})
    HalfWeights(layer, "", dtype, "nearest").refresh()
    half = layer[0].half_weight.double() if layer_class is Conv1D else layer[0].half_weight.double().t()
    input = torch.randn(3, 5, 96).to(dtype).requires_grad_()
    update = torch.randn(3, 5, 128).to(dtype).requires_grad_()
    gradient = torch.randn(3, 5, 128).to(dtype)

    for added in (None, update):
        with torch.autocast("cpu", dtype=dtype):
            output = layer[0].by_copy(input, added)
        output.backward(gradient)

        exact = input.double() @ half + layer[0].bias.to(dtype).double() + (0 if added is None else added.double())
        rounding = torch.finfo(dtype).eps / 2
        assert output.dtype is dtype
        assert ((output - exact).abs() <= 1.01 * rounding * exact.abs() + 1e-6).all(), "rounded once, at the end"
        wanted = gradient.double() @ half.t()
        assert ((input.grad - wanted).abs() <= 1.01 * rounding * wanted.abs() + 1e-6).all()
        wanted = input.double().flatten(0, 1).t() @ gradient.double().flatten(0, 1)
        found = layer[0].weight.grad if layer_class is Conv1D else layer[0].weight.grad.t()
        assert found.dtype is torch.float32
        assert ((found - wanted).abs() <= 1e-5).all(), "the gradient of a float32 weight is not rounded on its way"
        layer.zero_grad()
        input.grad = None
    assert torch.equal(update.grad, gradient)


@pytest.mark.parametrize(
    ("maker", "amx", "fp16", "fast"),
    [
        ("GenuineIntel", False, True, False),
        ("GenuineIntel", True, True, True),
        ("GenuineIntel", False, False, True),
        ("AuthenticAMD", False, True, True),
        (None, False, True, True),
    ],
    ids=["AMX hidden", "AMX", "before AMX", "AMD", "not known"],
)
def test_bf16_of_an_intel_without_its_amx_is_slow(monkeypatch, tmp_path, maker, amx, fp16, fast):
    if maker is not None:
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {maker}\n")
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: fp16, raising=False)
    assert linear._has_fast_products("bf16") == fast
    assert linear._has_fast_products("fp16") == fp16


def test_who_computes_a_product_does_not_depend_on_how_many_rows_it_has(monkeypatch):
    monkeypatch.setattr(linear, "WIDENED", {torch.bfloat16})
    layer = nn.Sequential(nn.Linear(96, 128))
    HalfWeights(layer, "", torch.bfloat16, "nearest").refresh()
    rows = torch.randn(40, 96)
    alone = torch.cat([layer(row[None]) for row in rows])
    assert (layer(rows) - alone).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * alone.abs().max()
    calls = []
    monkeypatch.setattr(half_module, "widened_product", lambda *given: calls.append(given) or given[0] @ given[1])
    layer(rows[:1]), layer(rows)
    assert len(calls) == 2


def test_selective_checkpointing_keeps_widened_products(monkeypatch):
    monkeypatch.setattr(linear, "WIDENED", {torch.bfloat16})
    layer = nn.Sequential(nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 96))
    HalfWeights(layer, "", torch.bfloat16, "nearest").refresh()
    counted = Counting()

    def gradient(**how):
        input = torch.ones(4, 96).requires_grad_()
        output = torch.utils.checkpoint.checkpoint(layer, input, use_reentrant=False, **how)
        with counted:
            output.sum().backward()
        products, counted.products = counted.products, 0
        return input.grad, products

    whole, again = gradient()
    kept, fewer = gradient(context_fn=_keep_matmuls)
    assert torch.equal(whole, kept)
    assert (again, fewer) == (2, 0), "two forward again, or none"


COMPILED = """
import torch
from torch import nn
from rewardlab.model import linear
from rewardlab.model.half import HalfWeights
linear.WIDENED = {torch.bfloat16}
torch.manual_seed(0)
layer = nn.Sequential(nn.Linear(96, 128))
HalfWeights(layer, "", torch.bfloat16, "nearest").refresh()
found = []
for one in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
    input = torch.randn(4, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = one(input)
    output.sum().backward()
    found.append((output, input.grad, layer[0].weight.grad))
    layer.zero_grad()
assert all(map(torch.equal, *found))
"""


@pytest.mark.slow
def test_a_compiled_layer_has_widened_products_too():
    """In a process of its own, since the compiler cannot look through the checks of types here."""
    answer = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


class Counting(TorchDispatchMode):
    """Counts widened products."""

    products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += function is torch.ops.rewardlab.widened_product.default
        return function(*args, **(kwargs or {}))
