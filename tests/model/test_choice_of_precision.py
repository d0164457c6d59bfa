"""`--precision auto`: bf16 on a CPU only where a trial finds it faster."""

from __future__ import annotations

import pytest
import torch

from common import CONFIGS
from rewardlab.model import precision
from rewardlab.model.config import ComputeConfig
from rewardlab.model.disk_class import disk_class_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def choose(wanted="auto", *, device=CPU, family="llama", layout="shared", train=True):
    config, lines = CONFIGS[family](), []
    chosen = precision.choose_precision(
        wanted,
        config,
        disk_class_of(config),
        ComputeConfig(),
        layout=layout,
        device=device,
        train=train,
        log=lines.append,
    )
    return chosen, lines


@pytest.fixture
def native(monkeypatch):
    """A processor that has bf16, whatever this one has."""
    monkeypatch.setattr(precision, "resolve_precision", lambda wanted, device: "bf16" if wanted == "auto" else wanted)


@pytest.mark.parametrize(("ratio", "chosen"), [(1.29, "fp32"), (1.31, "bf16")])
def test_bf16_must_be_faster_by_three_tenths(monkeypatch, native, ratio, chosen):
    monkeypatch.setattr(precision, "half_speed", lambda *given, **options: ratio)
    found = f"precision: {chosen}, since bf16 is {ratio} times as fast as fp32 in the model's shape"
    found += "" if chosen == "bf16" else "; it is worth its rounding from 1.3 times on"
    assert choose() == (chosen, ["precision: timing bf16 and fp32 in the model's shape", found])


def test_what_was_named_a_gpu_and_a_processor_without_bf16_need_no_trial(monkeypatch, native):
    monkeypatch.setattr(precision, "half_speed", lambda *given, **options: pytest.fail("tried"))
    assert choose("bf16") == ("bf16", [])
    assert choose("fp32") == ("fp32", [])
    assert choose(device=CUDA) == ("bf16", [])
    monkeypatch.setattr(precision, "resolve_precision", lambda wanted, device: "fp32")
    assert choose() == ("fp32", [])


LAYOUTS = ["shared", "unshared", "padded"]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("family", "layout", "train"),
    [
        # By default each family in each layout, in turn for training and for scoring: all pairs of two settings.
        pytest.param(
            family,
            layout,
            train,
            id=f"{family}-{layout}-{'training' if train else 'scoring'}",
            marks=[pytest.mark.slow] if (row + column + train) % 2 else [],
        )
        for row, family in enumerate(sorted(CONFIGS))
        for column, layout in enumerate(LAYOUTS)
        for train in (True, False)
    ],
)
def test_every_family_can_be_tried_in_every_layout(native, family, layout, train):
    state = torch.random.get_rng_state()
    chosen, (_, line) = choose(family=family, layout=layout, train=train)
    assert "times as fast" in line
    assert chosen in line
    assert torch.equal(torch.random.get_rng_state(), state), "the run's own draws do not move"


def test_a_class_that_cannot_be_tried_takes_what_the_processor_has(monkeypatch, native):
    def fails(*given, **options):
        raise RuntimeError("no such layer")

    monkeypatch.setattr(precision, "half_speed", fails)
    chosen, (_, line) = choose()
    assert chosen == "bf16"
    assert "no such layer" in line


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("named", "tried"),
    [("auto", ("auto", "auto")), ("segments", ("segments",) * 2), ("products", ("auto", "products"))],
)
def test_each_precision_is_tried_with_the_kernels_that_a_run_would_take(monkeypatch, named, tried):
    """A kernel for half precision alone is not float32's."""
    wanted = []
    real = precision.choose_compute

    def seen(settings, *given, **options):
        wanted.append((settings.attention_backend, settings.linear_backend))
        return real(settings, *given, **options)

    monkeypatch.setattr(precision, "choose_compute", seen)
    config = CONFIGS["llama"]()
    compute = ComputeConfig(attention_backend=named, linear_backend="torch")
    assert precision.half_speed(config, disk_class_of(config), compute, layout="shared", train=True) > 0
    assert wanted == [(tried[0], "torch"), (tried[1], "auto")]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("rounds", "ratio", "counted"),
    [
        pytest.param([(0.4, 0.32)] * 4 + [(0.4, 0.25)] * 12, 1.6, 5, id="noise in each of the first four rounds"),
        pytest.param([(0.26, 0.2)] * 16, 1.3, 16, id="near the limit to the end"),
        pytest.param([(3.0, 1.0)] * 16, 3.0, 3, id="clear"),
        pytest.param([(0.9, 1.0)] * 16, 0.9, 3, id="clearly slower"),
        pytest.param([(2.6, 2.0)] * 16, 1.3, 3, id="near the limit, and too long"),
    ],
)
def test_a_ratio_near_the_limit_is_measured_for_longer(monkeypatch, rounds, ratio, counted):
    seconds = [time for one in rounds for time in one]
    monkeypatch.setattr(precision, "_seconds_of_step", lambda *given, **options: seconds.pop(0))
    config = CONFIGS["llama"]()
    compute = ComputeConfig(attention_backend="segments", linear_backend="torch")
    measured = precision.half_speed(config, disk_class_of(config), compute, layout="shared", train=True)
    assert measured == ratio
    assert len(seconds) == 2 * (16 - counted)
