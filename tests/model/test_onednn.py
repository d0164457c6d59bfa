"""The linear layer that computes through oneDNN: nn.Linear's numbers, and nothing that nobody needs."""

from __future__ import annotations

import pytest
import torch

from rewardlab.model import linear
from rewardlab.model.linear import OneDnnLinear, onednn_linear, use_onednn


@pytest.mark.parametrize("bias", [False, True])
def test_the_onednn_layer_is_the_linear_layer(bias):
    layer = torch.nn.Linear(96, 80, bias=bias)
    layer.weight.data *= 10
    other = torch.nn.Linear(96, 80, bias=bias)
    other.load_state_dict(layer.state_dict())
    assert use_onednn(torch.nn.Sequential(other)) == 1
    assert isinstance(other, OneDnnLinear)
    outputs, gradients = [], []
    for module in (layer, other):
        input = torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
        output = module(input)
        output.square().sum().backward()
        outputs.append(output.detach())
        gradients.append([input.grad, *[parameter.grad for parameter in module.parameters()]])
    assert torch.allclose(*outputs, rtol=1e-5, atol=1e-5)
    for one, two in zip(*gradients, strict=True):
        assert (one - two).norm() <= 1e-6 * one.norm()
    assert other.state_dict().keys() == layer.state_dict().keys()


def test_the_onednn_layer_computes_nothing_for_what_is_frozen(monkeypatch):
    calls = []
    original = torch.ops.mkldnn._linear_pointwise

    class Counting:
        @staticmethod
        def _linear_pointwise(*arguments):
            calls.append(tuple(arguments[0].shape))
            return original(*arguments)

    monkeypatch.setattr(linear.torch, "ops", type("Ops", (), {"mkldnn": Counting, "rewardlab": torch.ops.rewardlab}))
    input = torch.randn(5, 96, requires_grad=True)
    weight = torch.randn(80, 96)
    onednn_linear(input, weight, None).sum().backward()
    assert calls == [(5, 96), (5, 80)], "one product forward, one for the input's gradient"
    calls.clear()
    onednn_linear(input.detach(), weight.requires_grad_(), None).sum().backward()
    assert calls == [(5, 96), (80, 5)], "one product forward, one for the weight's gradient"
