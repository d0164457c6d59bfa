"""Rates of a run: counted against an obvious count, and added up like sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig

from common import CONFIGS, GROUPED, SIZES, make_groups, make_model
from rewardlab.batch import pack
from rewardlab.model.applying import read_last_layer_only_where_scored
from rewardlab.model.config import ModelConfig
from rewardlab.model.linear import widened_product
from rewardlab.model.lora import add_adapters
from rewardlab.model.trainable import choose_trainable
from rewardlab.training.cost import peak_flops as peak_module
from rewardlab.training.cost.flops import idle_layers, linear_shapes, shape_of, work_of, work_of_head
from rewardlab.training.cost.peak_flops import measure, peak_flops_of
from rewardlab.training.cost.throughput import (
    ModelShape,
    PeakFlops,
    Throughput,
    Work,
    attended_pairs,
    closing_line,
    known_peak_flops,
    short,
    speed_line,
)


def pairs_by_hand(shared: int, replies: tuple[int, ...], window: int) -> int:
    """Who sees whom, one token at a time."""
    seen = [min(place + 1, window) for place in range(shared)]
    return sum(seen) + sum(min(shared + place + 1, window) for own in replies for place in range(own))


@pytest.mark.parametrize("window", [1, 3, 7, 8, 50])
@pytest.mark.parametrize(("shared", "replies"), [(0, (1,)), (5, (3, 4)), (1, (2,)), (7, (1, 9, 2))])
def test_attended_pairs_are_those_of_a_count_by_hand(shared, replies, window):
    assert attended_pairs(shared, replies, window) == pairs_by_hand(shared, replies, window)
    assert attended_pairs(shared, replies) == pairs_by_hand(shared, replies, 10**6)


@pytest.mark.parametrize("layout", ["shared", "unshared"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_the_flops_of_a_step_are_those_that_torch_counts(family, layout):
    """Of the linear layers; attention is counted by hand above, since torch counts what its kernels mask too."""
    model = make_model(family, layout=layout).train()
    groups = make_groups(4)
    batch = pack(groups, share=layout == "shared", indices=range(4))
    shape = shape_of(model)
    work = work_of(batch, shape, layout=layout)
    linear = shape.flops(batch.groups) - 12 * shape.attention_width * shape.full_layers * sum(
        attended_pairs(*group) for group in batch.groups
    )
    tokens = sum(shared + sum(own) for shared, own in batch.groups)
    weights = sum(m.weight.numel() for m in model.backbone.modules() if isinstance(m, nn.Linear))
    assert linear == 6 * tokens * weights + 6 * batch.num_replies * model.head.weight.numel()
    assert work.model_flops > linear
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    products = {"aten.mm", "aten.addmm"}
    found = sum(n for name, n in counter.get_flop_counts()["Global"].items() if str(name) in products)
    rotary = found - linear
    assert 0 <= rotary <= 0.01 * linear, "the tables of rotary positions are products too"


def test_frozen_weights_cost_two_thirds_and_embeddings_nothing():
    model = make_model("llama")
    whole = shape_of(model)
    embeddings = model.backbone.embed_tokens.weight.numel()
    norms = sum(p.numel() for p in model.backbone.parameters() if p.ndim < 2)
    assert whole.trained_weights + embeddings + norms == sum(p.numel() for p in model.backbone.parameters())
    assert (whole.frozen_weights, whole.full_layers, whole.attention_width) == (0, 2, 32)
    add_adapters(model.backbone, ModelConfig(lora=True, lora_rank=2))
    adapted = shape_of(model)
    added = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    assert (adapted.frozen_weights, adapted.trained_weights) == (whole.trained_weights, added)
    groups = [(4, (3, 5))]
    assert adapted.flops(groups) == whole.flops(groups) - 12 * whole.trained_weights * 2 + 12 * added * 6


@pytest.mark.parametrize("everywhere", [False, True])
def test_below_the_first_layer_that_trains_nothing_is_backward(everywhere):
    """A frozen layer costs a third of one that trains, attention included; embeddings cost nothing anyway."""
    model = make_model()
    if everywhere:
        read_last_layer_only_where_scored(model)
    whole, groups = shape_of(model), [(4, (3, 5))]
    of_a_layer = whole.trained_weights // 2
    attended = whole.attention_width * sum(attended_pairs(*group) for group in groups)
    choose_trainable(model, ModelConfig(freeze_layers=1), seed=0)
    lower = shape_of(model)
    assert (lower.idle_weights, lower.frozen_weights, lower.idle_full_layers) == (of_a_layer, of_a_layer, 1)
    assert whole.flops(groups) - lower.flops(groups) == 4 * 12 * of_a_layer + 8 * attended
    choose_trainable(model, ModelConfig(train_head_only=True), seed=0)
    alone = shape_of(model)
    forward = 2 * (12 * whole.trained_weights - 10 * (whole.last_trained if everywhere else 0))
    assert alone.flops(groups) == forward + 2 * 4 * attended + 6 * 2 * model.head.weight.numel()


def test_a_layer_with_adapters_or_above_trained_embeddings_is_not_idle():
    model = make_model()
    choose_trainable(model, ModelConfig(lora=True, lora_target_modules=("layers.1.self_attn.q_proj",)), seed=0)
    assert idle_layers(model.backbone) == [model.backbone.layers[0]]
    model.backbone.embed_tokens.requires_grad_(True)
    assert idle_layers(model.backbone) == []


def test_windows_and_experts_are_counted_for_what_a_token_sees():
    config = CONFIGS["gemma3"]()
    config.sliding_window = 4
    config.layer_types = ["sliding_attention", "full_attention"]
    shape = shape_of(make_model("gemma3", config=config, layout="padded"))
    assert (shape.full_layers, shape.windowed_layers, shape.window) == (1, 1, 4)
    whole, windowed = attended_pairs(0, (9,)), attended_pairs(0, (9,), 4)
    without = ModelShape(**{**vars(shape), "full_layers": 0, "windowed_layers": 0})
    cost = 12 * shape.attention_width * (whole + windowed)
    assert shape.flops([(0, (9,))]) - without.flops([(0, (9,))]) == cost
    mixture = make_model(config=MixtralConfig(**SIZES, **GROUPED, num_local_experts=4, num_experts_per_tok=1))
    experts = sum(p.numel() for name, p in mixture.backbone.named_parameters() if ".experts." in name)
    others = sum(
        p.numel()
        for name, p in mixture.backbone.named_parameters()
        if ".experts." not in name and p.ndim >= 2 and "embed" not in name
    )
    assert experts > 0
    assert shape_of(mixture).trained_weights == others + experts // 4


def test_padding_and_sharing_of_the_three_layouts():
    groups = make_groups(5, replies=3)
    shape = shape_of(make_model())
    unshared = sum(group.num_unshared_tokens for group in groups)
    shared = work_of(pack(groups, indices=range(5)), shape, layout="shared")
    assert (shared.padding_share, shared.computed_tokens) == (0, sum(group.num_tokens for group in groups))
    assert shared.sharing_ratio == unshared / shared.computed_tokens > 1
    apart = work_of(pack(groups, share=False, indices=range(5)), shape, layout="unshared")
    assert (apart.padding_share, apart.sharing_ratio) == (0, 1)
    padded = work_of(pack(groups, indices=range(5)), shape, layout="padded")
    lengths = [length for group in groups for length in group.lengths]
    assert padded.computed_tokens == max(lengths) * len(lengths)
    assert padded.padding_share == 1 - sum(lengths) / padded.computed_tokens
    assert padded.model_flops == apart.model_flops > shared.model_flops
    dummy = work_of(pack([]), shape, layout="shared")
    assert dummy == Work(computed_tokens=1, padding_tokens=1)
    assert (shared + dummy).padding_share == 1 / (shared.computed_tokens + 1)


def test_rates_are_quotients_of_sums():
    parts = [
        Throughput(
            work=Work(computed_tokens=10 * n, padding_tokens=n, unshared_tokens=15 * n, model_flops=10**9 * n),
            comparisons=n,
            seconds=0.5 * n * n,
            steps=1,
        )
        for n in (1, 3)
    ]
    total = sum(parts, Throughput())
    peak = PeakFlops(flops=2e9, source="x")
    values = total.values(peak, 3 * 2**30)
    assert values == {
        "tokens": 40,
        "seconds": 5.0,
        "tokens_per_second": 8.0,
        "pairs_per_second": 0.8,
        "padding_share": 0.1,
        "sharing_ratio": 1.5,
        "model_tflops_per_second": pytest.approx(0.8e-3),
        "mfu": pytest.approx(0.4),
        "peak_memory_gib": 3.0,
    }
    assert math.isnan(total.values(None, 0)["mfu"])
    assert speed_line(values, unit="pairs") == "8.0 tok/s  0.80 pairs/s  padding 10 %  sharing 1.50x  MFU 40 %  3.0 GiB"
    assert closing_line(total, peak, 2**30, unit="pairs") == (
        "Speed: 0.80 pairs/s, 8.0 tokens/s over 2 steps of 2.50 s, padding 10.0 %, sharing 1.50x, "
        "MFU 40.0 % of 0.002 TFLOP/s (x), peak memory 1.00 GiB."
    )
    slowed = closing_line(total, PeakFlops(flops=0.5e9, source="2 x measured, bf16"), 2**30, unit="pairs")
    assert slowed.endswith(" MFU is above 100 %: something probably slowed the device while its peak was measured.")
    assert closing_line(total, PeakFlops(flops=0.5e9, source="x"), 2**30, unit="pairs").endswith("1.00 GiB.")
    assert "MFU" not in closing_line(total, None, 0, unit="pairs")
    assert closing_line(Throughput(), peak, 0, unit="pairs") == "Speed: no step was trained."


def test_a_step_whose_states_are_known_computes_no_token_and_the_head_alone():
    batch = pack(make_groups(3, replies=3))
    shape = shape_of(make_model())
    work = work_of_head(batch, shape)
    assert work == Work(model_flops=6 * batch.num_replies * 32)
    total = Throughput(work=work, comparisons=40, seconds=2.0, steps=4)
    values = total.values(PeakFlops(flops=2e9, source="x"), 2**30)
    assert (values["tokens"], values["tokens_per_second"]) == (0, 0)
    assert math.isnan(values["padding_share"])
    assert math.isnan(values["sharing_ratio"])
    assert speed_line(values, unit="pairs") == "20.0 pairs/s  states looked up, no tokens computed  1.0 GiB"
    assert closing_line(total, None, 2**30, unit="pairs") == (
        "Speed: 20.0 pairs/s over 4 steps of 0.500 s, states looked up, no tokens computed, peak memory 1.00 GiB."
    )


def test_the_speed_line_of_a_long_run_on_a_large_machine_fits_the_log():
    huge = Throughput(
        work=Work(computed_tokens=10**8, padding_tokens=10**8, unshared_tokens=10**8 * 64, model_flops=10**18),
        comparisons=10**6 - 1,
        seconds=100.0,
        steps=1,
    )
    line = speed_line(huge.values(PeakFlops(flops=1e16, source="x"), 1400 * 2**30), unit="pairs")
    assert line == "1000k tok/s  10.0k pairs/s  padding 100 %  sharing 64x  MFU 100 %  1400 GiB"
    assert len(f"step 10000/10000  SPEED  {line}") <= 100
    assert [short(n) for n in (0.123, 4.12, 99.96, 812.4, 9999.4, 47_060, 99_960, 1_234_567)] == [
        *("0.12", "4.1", "100", "812", "9999", "47.1k", "100k", "1235k"),
    ]


@pytest.mark.parametrize(
    ("name", "arithmetic", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA L4", "fp32", 30.3),
        # Near in name, other chips or parts of one: measured.
        ("NVIDIA A10", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla T4", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H20", "bf16", None),
    ],
)
def test_a_known_gpu_has_its_makers_peak_and_a_relative_of_it_none(name, arithmetic, tflops):
    found = known_peak_flops(name, arithmetic)
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_the_measured_peak_is_at_the_models_shapes_and_draws_no_random_number():
    shapes = linear_shapes(make_model())
    assert set(shapes) == {(32, 32), (16, 32), (48, 32), (32, 48)}
    state = torch.get_rng_state()
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        flops, (_, outputs, inputs) = measure(torch.device("cpu"), dtype, shapes)
        assert flops > 1e6
        assert (outputs, inputs) in {(48, 32), (32, 48)}, "the largest two"
        line = peak_flops_of(torch.device("cpu"), dtype, shapes).line()
        assert f"measured, {name} matmul of " in line
    assert torch.equal(torch.get_rng_state(), state)


class Machine:
    """In place of the clock and of every product: the first kernel does `rate` FLOP/s, the second twice as much."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: float, *, kernels: int = 2) -> None:
        self.now = 0.0
        self.measured: list[tuple[int, int]] = []
        self.waits = 0

        def product(kernel, rows, outputs, inputs, *_):
            def call() -> None:
                self.measured.append((kernel, rows))
                self.now += 2 * rows * outputs * inputs / (rate * (kernel + 1))

            return call

        def wait(_: torch.device) -> None:
            self.waits += 1
            self.now += 1e-9

        monkeypatch.setattr(peak_module, "_linears", lambda *_: list(range(kernels)))
        monkeypatch.setattr(peak_module, "_product", product)
        monkeypatch.setattr(peak_module, "wait_for", wait)
        monkeypatch.setattr(peak_module.time, "perf_counter", lambda: self.now)


SHAPES = [(2048, 512), (512, 2048), (512, 512)]


@pytest.mark.parametrize(
    ("rate", "rows", "longest"), [(1e9, 1024, 3.2), (7e9, 2048, 1.1), (50e9, 4096, 1.1), (1e13, 4096, 0.1)]
)
def test_the_fastest_kernel_is_measured_with_many_rows_whatever_the_machine(monkeypatch, rate, rows, longest):
    machine = Machine(monkeypatch, rate)
    flops, (_, *shape) = measure(torch.device("cpu"), torch.float32, SHAPES)
    assert flops == pytest.approx(2 * rate, rel=1e-3)
    assert sorted(shape) == [512, 2048]
    assert max(machine.measured) == (1, rows)
    assert machine.now <= longest
    few = [rows for _, rows in machine.measured if rows < peak_module.MIN_ROWS]
    assert set(few) == {peak_module.TRIAL_ROWS}
    assert len(few) <= 8


def test_many_products_share_a_look_at_the_clock_of_a_gpu(monkeypatch):
    machine = Machine(monkeypatch, 1e13, kernels=1)
    measure(torch.device("cuda"), torch.bfloat16, SHAPES)
    assert len(machine.measured) == 10 * machine.waits / 2
    assert max(rows for _, rows in machine.measured) == 8192


def test_the_best_of_the_times_counts(monkeypatch):
    times = iter([2e-3, 3e-3, 1e-3, 5e-3, 4e-3])
    machine = Machine(monkeypatch, 1e9)

    def product() -> None:
        machine.now += next(times)

    found = peak_module._seconds(product, torch.device("cpu"), repeats=4, deadline=1.0)
    assert found == pytest.approx(1e-3, rel=1e-3)
    assert machine.waits == 8
    assert peak_module._seconds(product, torch.device("cpu"), repeats=4, deadline=0.0) == pytest.approx(4e-3, rel=1e-3)


def test_half_precision_that_layers_widen_is_measured_as_they_compute_it(monkeypatch):
    monkeypatch.setattr(peak_module, "WIDENED", {torch.bfloat16})
    x, weight = torch.randn(8, 96).bfloat16(), torch.randn(128, 96).bfloat16()
    (half,) = peak_module._linears(torch.device("cpu"), torch.bfloat16)
    assert torch.equal(half(x, weight), widened_product(x, weight.t()))
    assert torch.nn.functional.linear in peak_module._linears(torch.device("cpu"), torch.float16)
    assert torch.nn.functional.linear in peak_module._linears(torch.device("cuda"), torch.bfloat16)
