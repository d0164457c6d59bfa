"""Kernels of Triton, without a GPU: when they are taken, what they are given, and what happens where they are wrong.

A stand-in computes what the kernels do, from the same arguments. The kernels themselves run in tests/gpu.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import MambaConfig

from common import make_model
from rewardlab.artifact import base
from rewardlab.core.errors import ConfigError
from rewardlab.data.config import RenderingConfig
from rewardlab.model import compute, fused, gated, linear, rounding
from rewardlab.model.applying import apply_compute
from rewardlab.model.config import ComputeConfig, ModelConfig, TrainComputeConfig
from rewardlab.model.gated import SILU, GatedProduct
from rewardlab.model.rotary import Rotation
from rewardlab.model.rounding import Part, round_stochastically, round_together
from rewardlab.model.trials import times_as_fast

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HALVES = [torch.bfloat16, torch.float16]


class StandIn:
    """What model/triton_kernels.py has."""

    def __init__(self, *, off: float = 0.0) -> None:
        self.off = off
        """Added to what is computed."""
        self.calls: list[str] = []

    def round_all(self, table: Tensor, most: int, *, bf16: bool, wide: bool, aligned: bool) -> None:
        self.calls.append(f"round {len(table)} at most {most}{' wide' if wide else ''}{' aligned' if aligned else ''}")
        dtype = torch.bfloat16 if bf16 else torch.float16
        for source, target, count, key, start in table[table[:, 2] > 0].tolist():
            values, written = (
                torch.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(place), dtype=kind)
                for place, kind in ((source, torch.float32), (target, torch.float32 if wide else dtype))
            )
            rounding._round_into(written, values.clone(), rounding._draws(start, count, key, CPU), dtype)
            written += self.off

    def multiply(self, gate: Tensor, up: Tensor, output: Tensor, *, silu: bool) -> None:
        self.calls.append("multiply")
        output.copy_(fused.gated_by_operations(gate, up, up, silu=silu)[0] + self.off)

    def multiply_backward(
        self, gate: Tensor, up: Tensor, gradient: Tensor, d_gate: Tensor, d_up: Tensor, *, silu: bool
    ) -> None:
        self.calls.append("backward")
        for place, found in zip(
            (d_gate, d_up), fused.gated_by_operations(gate, up, gradient, silu=silu)[1:], strict=True
        ):
            place.copy_(found)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, output: Tensor, *, forward: bool) -> None:
        self.calls.append("turn")
        output.copy_(fused._turned(x.float(), cos.float(), sin.float(), forward=forward))

    def add_product(self, wide: Tensor, inner: Tensor, second: Tensor, bias: Tensor | None, output: Tensor) -> None:
        self.calls.append("add")
        total = wide + inner.float() @ second.float().t()
        output.copy_(total if bias is None else total + bias.to(output.dtype).float())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, in a process that believes the CPU to be a GPU that Triton serves."""
    return stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch, **changes: float) -> StandIn:
    found = StandIn(**changes)
    monkeypatch.setattr(fused, "load_kernels", lambda: found)
    monkeypatch.setattr(fused, "can_read", lambda *tensors: all(tensor.is_contiguous() for tensor in tensors))
    rounding._agrees.cache_clear()
    monkeypatch.setattr(rounding, "_agrees", rounding._agrees.__wrapped__)
    return found


def parts_of(sizes: list[int], starts: list[int], dtype: torch.dtype) -> list[Part]:
    draw = torch.Generator().manual_seed(0)
    return [
        Part(torch.randn(size, generator=draw), (number, 7), torch.full((size,), math.nan, dtype=dtype), start)
        for number, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["narrow", "wide"])
def test_tensors_are_rounded_in_one_launch_to_the_bits_of_each_alone(kernels, monkeypatch, dtype, kind):
    parts = parts_of([4000, 7, 64, 0], [0, 3, 8, 0], torch.float32 if kind == "wide" else dtype)
    monkeypatch.setattr(rounding, "_agrees", lambda *given: True)
    round_together(parts, dtype)
    assert kernels.calls == [f"round 4 at most 4000{' wide' if kind == 'wide' else ''}"]
    for part in parts:
        alone = torch.empty_like(part.out)
        rounding._round_alone(part._replace(out=alone), dtype)
        assert torch.equal(part.out, alone)


def test_a_thread_reads_four_values_at_once_only_where_all_begin_at_such_places(kernels, monkeypatch):
    monkeypatch.setattr(rounding, "_agrees", lambda *given: True)
    for sizes, starts, at_once in (([64, 8], [0, 4], True), ([64, 6], [0, 4], False), ([64, 8], [0, 2], False)):
        kernels.calls.clear()
        round_together(parts_of(sizes, starts, torch.bfloat16), torch.bfloat16)
        assert kernels.calls == [f"round 2 at most 64{' aligned' if at_once else ''}"]
    kernels.calls.clear()
    (part,) = parts_of([65], [0], torch.bfloat16)
    moved = part._replace(tensor=part.tensor[1:], out=part.out[1:])  # not at a multiple of 16 bytes
    round_together([moved], torch.bfloat16)
    assert kernels.calls == ["round 1 at most 64"]


def test_weights_are_rounded_also_where_another_device_is_the_default(kernels, monkeypatch):
    monkeypatch.setattr(rounding, "_agrees", lambda *given: True)
    (part,) = parts_of([64], [0], torch.bfloat16)
    alone = torch.empty_like(part.out)
    rounding._round_alone(part._replace(out=alone), torch.bfloat16)
    with torch.device("meta"):
        round_together([part], torch.bfloat16)
    assert torch.equal(part.out, alone)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_backward_pass_through_a_copy_that_was_rounded_again_raises_an_error(kernels, monkeypatch, by_kernel):
    monkeypatch.setattr(rounding, "_agrees", lambda *given: by_kernel)
    (part,) = parts_of([64], [0], torch.bfloat16)
    round_together([part], torch.bfloat16)
    leaf = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    loss = (leaf * part.out).sum()
    round_together([part], torch.bfloat16)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        round_together([part._replace(out=torch.empty_like(part.out))], torch.bfloat16)
    assert len(kernels.calls) == (3 if by_kernel else 0)


def test_what_the_kernel_cannot_read_is_rounded_by_operations(kernels, monkeypatch):
    monkeypatch.setattr(rounding, "_agrees", lambda *given: True)
    draw = torch.Generator().manual_seed(0)
    across, double = torch.randn(6, 8, generator=draw).t(), torch.randn(9, generator=draw).double()
    for tensor in (across, double):
        found = round_stochastically(tensor, torch.bfloat16, (1,))
        assert torch.equal(found, round_stochastically(tensor.float().contiguous(), torch.bfloat16, (1,)))
    assert len(kernels.calls) == 2, "of the contiguous float32 ones alone"


@pytest.mark.parametrize("fault", ["", "bits", "raises", "absent"])
def test_a_kernel_that_rounds_otherwise_is_left_out_and_told(monkeypatch, caplog, fault):
    kernels = stand_in(monkeypatch, off=0.25 if fault == "bits" else 0.0)
    if fault == "raises":
        kernels.round_all = lambda *given, **named: 1 / 0
    if fault == "absent":
        monkeypatch.setattr(fused, "load_kernels", raise_import_error)
    parts = parts_of([400, 8], [0, 0], torch.float16)
    wanted = [part._replace(out=torch.empty_like(part.out)) for part in parts]
    for part in wanted:
        rounding._round_alone(part, torch.float16)
    round_together(parts, torch.float16)
    assert all(torch.equal(a.out, b.out) for a, b in zip(parts, wanted, strict=True))
    told = {"bits": "it gives other bits here", "raises": "it failed here, ZeroDivisionError"}
    assert [record.getMessage().split("kernel: ")[1].split(":")[0] for record in caplog.records] == (
        [told[fault]] * len(parts) if fault in told else []
    )


def raise_import_error() -> None:
    raise ImportError("Triton is not installed")


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gated_product_by_kernels_has_the_numbers_of_operations(kernels, dtype):
    draw = torch.Generator().manual_seed(0)
    gate, up, gradient = (torch.randn(3, 5, 16, generator=draw).to(dtype) for _ in range(3))
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    product = GatedProduct.apply(*leaves, SILU, True)
    found = [product.detach(), *torch.autograd.grad(product, leaves, gradient)]
    assert kernels.calls == ["multiply", "backward"]
    for tensor, expected in zip(found, fused.gated_by_operations(gate, up, gradient, silu=True), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", HALVES)
def test_rotations_by_kernels_err_no_more_than_by_operations(kernels, dtype, batch, wide):
    draw = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(2, 7, 3, 8, generator=draw).transpose(1, 2).to(dtype) for _ in range(2))
    cos, sin = (torch.randn(batch, 7, 8, generator=draw).to(torch.float32 if wide else dtype) for _ in range(2))
    found = {}
    for name, given, by_kernels in (
        ("exact", (x.double(), cos.double(), sin.double()), False),
        ("plain", (x, cos, sin), False),
        ("ours", (x, cos, sin), True),
    ):
        leaf = given[0].clone(memory_format=torch.preserve_format).requires_grad_()
        output = Rotation.apply(leaf, *given[1:], by_kernels)
        found[name] = [output.detach(), *torch.autograd.grad(output, leaf, gradient.to(output.dtype))]
    assert kernels.calls == ["turn"] * 2
    for truth, plain, ours in zip(*found.values(), strict=True):
        assert ours.dtype is plain.dtype
        assert (ours - truth).norm() <= 1.1 * (plain - truth).norm() + 1e-6 * truth.norm()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_trial_lets_right_kernels_pass_and_names_what_is_wrong(monkeypatch, dtype):
    kernels = stand_in(monkeypatch)
    trial = partial(fused.trial, CPU, dtype, rank=4)
    assert trial() == ""
    assert kernels.calls == ["add"] * 2 + ["multiply", "backward"] * 2 + ["turn"] * 4
    kernels.off = 0.5
    assert "its product is off by" in trial()
    kernels.off, kernels.add_product = 0.0, lambda wide, inner, second, bias, output: output.copy_(wide)
    assert "its sum is off by" in trial()
    assert trial(rank=0) == ""
    del kernels.add_product
    kernels.turn = lambda x, cos, sin, output, forward: output.copy_(x)
    assert "its rotation is off by" in trial()
    assert trial(joined=True) == ""
    kernels.multiply = lambda *given, **named: 1 / 0
    assert trial() == "it failed here, ZeroDivisionError: division by zero"
    monkeypatch.setattr(fused, "load_kernels", raise_import_error)
    assert trial() == "Triton is not installed"


def test_a_trial_is_in_the_shape_of_the_model_for_which_kernels_are_compiled(monkeypatch):
    kernels = stand_in(monkeypatch)
    shapes: list[tuple[int, ...]] = []
    add, turn = kernels.add_product, kernels.turn
    kernels.add_product = lambda wide, inner, *more: shapes.append(inner.shape) or add(wide, inner, *more)
    kernels.turn = lambda x, *more, forward: shapes.append(x.shape[2:]) or turn(x, *more, forward=forward)
    assert fused.trial(CPU, torch.bfloat16, rank=96, heads=(14, 48)) == ""
    assert shapes == [(70, 96)] * 2 + [(14, 48)] * 4


def test_kernels_are_left_alone_on_a_gpu_that_triton_is_not_made_for(monkeypatch, caplog):
    """There its compiler takes minutes for a product."""
    kernels = stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda which: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (7, 5))
    said = "Triton serves GPUs from compute capability 8.0 on, and this one has 7.5"
    assert chosen("auto", dtype=torch.float16) == ("torch", f"; element-wise parts torch (not triton: {said})")
    assert rounding._agrees(CUDA, torch.float16, torch.float16) is False
    assert kernels.calls == []
    assert caplog.records == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (12, 0))
    assert fused.unsupported(CUDA) == ""


@pytest.mark.parametrize("device", [torch.device("cuda", 1), CPU])
def test_kernels_are_tried_and_timed_on_the_device_that_they_are_for(monkeypatch, device):
    """Triton starts them on the current one, which in a process with LOCAL_RANK and no torchrun is another."""
    entered: list[object] = []
    monkeypatch.setattr(torch.cuda, "device", lambda which: entered.append(which) or nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda which: None)
    stand_in(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (9, 0))
    found = []
    for name in ("_gated_reason", "_sum_reason", "_rotation_reason"):
        monkeypatch.setattr(fused, name, lambda kernels, on, dtype, *shape: found.append(list(entered)) or "")
    assert fused.trial(device, torch.bfloat16, rank=8) == ""
    times_as_fast(lambda: found.append(list(entered)), lambda: None, device, repeats=0, calls=fused.CALLS)
    inside = [device] if device.type == "cuda" else []
    assert found == [inside] * 3 + [inside * 2] * 4


def test_a_bias_that_a_kernel_cannot_read_is_added_by_operations(kernels, monkeypatch):
    product = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda left, right, out_dtype=None: product(left, right).to(out_dtype or left.dtype)
    )
    draw = torch.Generator().manual_seed(0)
    left, right, inner, second, bias = (
        torch.randn(shape, generator=draw).bfloat16() for shape in ((5, 8), (8, 6), (5, 4), (6, 4), (6, 2))
    )
    for own_bias, calls in ((bias[:, 0].contiguous(), ["add"]), (bias[:, 0], [])):
        kernels.calls.clear()
        output = linear._adapted_on_cuda(left, right, inner, second, own_bias, True)
        assert kernels.calls == calls
        exact = left.float() @ right.float() + inner.float() @ second.float().t() + own_bias.float()
        assert (output.float() - exact).norm() < 0.01 * exact.norm()


def chosen(
    wanted: str, device: torch.device = CUDA, dtype: torch.dtype = torch.bfloat16, *, rank: int = 8, **more: bool
) -> tuple[str, str]:
    config = TrainComputeConfig(elementwise_backend=wanted, **more)
    return compute._choose_elementwise(config, make_model().config, device, dtype, rank)


@pytest.mark.parametrize(("speeds", "expected"), [((2.0, 1.5), "triton"), ((1.1, 1.2), "torch"), ((4.0, 0.9), "torch")])
def test_kernels_are_taken_where_they_are_faster(monkeypatch, speeds, expected):
    with_speeds(monkeypatch, *speeds)
    measured = f"{speeds[0]:.2f} times as fast in gated products, {speeds[1]:.2f} times as fast in sums of adapters"
    said = f"; element-wise parts {expected} (triton is {measured})"
    assert chosen("auto") == (expected, said)


def with_speeds(monkeypatch: pytest.MonkeyPatch, products: float, sums: float) -> None:
    monkeypatch.setattr(fused, "trial", lambda device, dtype, **shape: "")
    monkeypatch.setattr(gated, "kernel_speed", lambda width, device, dtype: products)
    monkeypatch.setattr(linear, "kernel_speed", lambda width, rank, device, dtype: sums)


def test_what_a_run_does_not_compute_by_kernels_does_not_choose_them(monkeypatch):
    """Adapters of a run of all weights, or of a rank that no kernel takes; gated products that a compiler joins."""
    with_speeds(monkeypatch, 2.0, 0.9)
    for rank in (0, linear.MOST_RANK + 1):
        said = "; element-wise parts triton (triton is 2.00 times as fast in gated products)"
        assert chosen("auto", rank=rank) == ("triton", said)
    with_speeds(monkeypatch, 0.9, 2.0)
    for joined in ({"compile": True}, {"liger": True}):
        said = "; element-wise parts triton (triton is 2.00 times as fast in sums of adapters)"
        assert chosen("auto", **joined) == ("triton", said)
        monkeypatch.setattr(fused, "trial", None)
        assert chosen("auto", rank=0, **joined) == ("torch", "")
        monkeypatch.setattr(fused, "trial", lambda device, dtype, **shape: "")


@pytest.mark.parametrize(
    ("settings", "rank"),
    [
        ({"lora": True, "lora_rank": 16}, 16),
        ({}, 0),
        ({"lora": True, "dora": True}, 0),
        ({"lora": True, "lora_dropout": 0.1}, 0),
        ({"lora": True, "quantization": "nf4"}, 0),
        ({"lora": True, "half_rounding": "nearest"}, 0),
    ],
)
def test_adapters_that_are_not_summed_have_no_rank_to_try(settings, rank):
    assert ModelConfig(model="x", **settings).summed_rank == rank


@pytest.mark.parametrize(("divided", "rank"), [(False, 16), (True, 0)])
def test_sums_of_adapters_are_not_tried_where_ranks_hold_parts_of_the_model(divided, rank, base_model, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(base, "choose_compute", lambda *_, **how: asked.append(how["rank"]) or {})
    model = ModelConfig(model=str(base_model), precision="fp32", lora=True, lora_rank=16)
    opened = base.open_base(model, RenderingConfig(max_seq_len=128))
    settings = {"layout": "shared", "device": CPU, "train": True, "divided": divided}
    base.decide_computing(opened, model, TrainComputeConfig(), **settings)
    assert asked == [rank]


def test_where_they_cannot_be_taken_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(gated, "kernel_speed", None)
    monkeypatch.setattr(fused, "trial", lambda device, dtype, **shape: "it failed here, RuntimeError: no compiler")
    assert chosen("auto", CPU) == ("torch", "")
    assert chosen("auto", dtype=torch.float32) == ("torch", "")
    assert chosen("torch") == ("torch", "")
    said = "; element-wise parts torch (not triton: it failed here, RuntimeError: no compiler)"
    assert chosen("auto") == ("torch", said)
    with pytest.raises(ConfigError, match=r"triton: it failed here, RuntimeError: no compiler. Use torch, or auto in"):
        chosen("triton")
    with pytest.raises(ConfigError, match="--elementwise-backend triton: it is for half precision on CUDA"):
        chosen("triton", CPU)
    assert "elementwise_backend" not in compute.choose_compute(
        ComputeConfig(), make_model().config, device=CPU, dtype=torch.float32, log=print, train=False
    )


def test_speeds_are_measured_of_the_two_ways_in_turn(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for measure, shape, named in (
        (gated.kernel_speed, (64,), {"multiply", "backward"}),
        (linear.kernel_speed, (64, 8), {"add"}),
    ):
        kernels.calls.clear()
        assert measure.__wrapped__(*shape, CPU, torch.bfloat16) > 0
        assert set(kernels.calls) == named


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_is_told_which_to_use(backend):
    model = make_model()
    model.compute_dtype = torch.bfloat16
    config = TrainComputeConfig(
        attention_backend="segments",
        linear_backend="torch",
        norm_backend="torch",
        allocator="system",
        elementwise_backend=backend,
    )
    apply_compute(model, config)
    parts = [module for module in model.backbone.modules() if type(module).__name__.startswith("Gated")]
    assert len(parts) == model.config.num_hidden_layers
    assert all(part.by_kernels is (backend == "triton") for part in parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_for_a_model_without_attention_there_is_no_kernel_of_it_to_choose(dtype):
    config, chosen = MambaConfig(hidden_size=32, num_hidden_layers=1, state_size=4), TrainComputeConfig()
    found = compute.choose_compute(chosen, config, device=torch.device("cpu"), dtype=dtype, log=lambda _line: None)
    assert found["attention_backend"] == "segments"
    on_cuda = compute._choose_elementwise(chosen, config, torch.device("cuda"), torch.bfloat16, 0)
    assert on_cuda == ("torch", "; element-wise parts torch (not triton: this model has no attention)")
